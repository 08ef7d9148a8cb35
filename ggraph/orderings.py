"""Schedule -> Schedule: further orderings as commands, and what a schedule's order costs.

The allocator names orderings that would save bytes; here each becomes a record and a wait, or a
wait of the host where it is the host, or a device that has no queue of its own, that must wait.
Nothing is decided here: which orderings to buy is the pipeline's choice.

Legend: an edge (i, j) lets command j begin only after command i, both indices of the schedule.
"""

from collections.abc import Sequence
from dataclasses import replace

from ggraph.errors import PlanError
from ggraph.plan import HOST_ACTOR, Command, Do, Schedule

Edge = tuple[int, int]


def with_orderings(schedule: Schedule, edges: Sequence[Edge]) -> Schedule:
    """`schedule` with a record after the first command of each edge, a wait before the second.

    Raises PlanError for an edge that does not point down the list: the host enqueues in list
    order, so a wait for a later record would wait for nothing.
    """
    count = len(schedule.commands)
    for i, j in edges:
        if not 0 <= i < j < count:
            raise PlanError(f"ordering ({i}, {j}) does not point down a list of {count} commands")
    visible = {d.name for d in schedule.splits.placement.devices if d.host_visible}
    marked = {i: f"fit:{i}:{schedule.commands[i].label}" for i, _ in edges}
    found: list[Command] = []
    for k, c in enumerate(schedule.commands):
        by_host = c.actor == HOST_ACTOR or c.actor.device in visible
        found += [_wait(c, marked[i], by_host) for i, j in dict.fromkeys(edges) if j == k]
        found.append(c)
        if k in marked:
            found.append(Command(Do.RECORD, c.actor, f"record:{marked[k]}", event=marked[k]))
    return replace(schedule, commands=tuple(found))


def _wait(c: Command, event: str, by_host: bool) -> Command:
    if by_host:
        return Command(Do.HOST_SYNC, HOST_ACTOR, f"sync:{event}", event=event)
    return Command(Do.WAIT, c.actor, f"wait:{event}", event=event)


def wait_count(schedule: Schedule) -> int:
    """Commands that wait: of streams for events, and of the host for anything."""
    return sum(c.do in (Do.WAIT, Do.HOST_SYNC) for c in schedule)
