"""Estimated times of a schedule: its critical path, and its speed-up over one stream."""

from ggraph.plan import Command, Schedule


def critical_path(schedule: Schedule) -> tuple[float, tuple[Command, ...]]:
    """Seconds of the longest chain of commands that must follow one another, and the chain."""
    edges = schedule.to_networkx()
    finish: list[float] = []
    via: list[int | None] = []
    for i, c in enumerate(schedule.commands):
        last = max(edges.predecessors(i), key=lambda j: finish[j], default=None)
        finish.append(c.seconds + (finish[last] if last is not None else 0.0))
        via.append(last)
    if not finish:
        return 0.0, ()
    at: int | None = max(range(len(finish)), key=lambda i: finish[i])
    total, chain = finish[at or 0], []
    while at is not None:
        chain.append(schedule.commands[at])
        at = via[at]
    return total, tuple(c for c in reversed(chain) if c.seconds > 0)


def speedup(schedule: Schedule) -> float:
    """Estimated time of the same commands one after another, over the critical path's."""
    total, _ = critical_path(schedule)
    return sum(c.seconds for c in schedule.commands) / total if total else 1.0


def estimate(schedule: Schedule) -> str:
    """`critical path 96.0 us, 1.21x of one stream`."""
    seconds, _ = critical_path(schedule)
    return f"critical path {seconds * 1e6:.1f} us, {speedup(schedule):.2f}x of one stream"
