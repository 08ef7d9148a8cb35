"""All races of a plan, pair by pair. For reports and for tests of the proof.

The proof looks at neighbours in each byte's history and stops at the first fault. Here every two
accesses that meet are held against the clocks: slower, and complete however broken the plan is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ggraph.plan import Access, Plan
from ggraph.verify.clocks import Clocks, clocks
from ggraph.verify.report import Site
from ggraph.verify.static import period

Use = tuple[int, int, int, bool, str]  # first byte, past the last, command, writes, value


@dataclass(frozen=True)
class Race:
    """Two accesses to bytes [start, stop) of `buffer` that nothing orders, one of them a write.

    `values` are what `first` and `second` (in enqueue order) touch there, `writes` whether they
    write.
    """

    first: Site
    second: Site
    buffer: str
    start: int
    stop: int
    values: tuple[str, str]
    writes: tuple[bool, bool]

    def __str__(self) -> str:
        done = ["writes" if w else "reads" for w in self.writes]
        one, two = (f"{d} {v!r}" for d, v in zip(done, self.values, strict=True))
        where = f"bytes [{self.start}, {self.stop}) of {self.buffer}"
        return f"{where}: {self.first} ({one}) and {self.second} ({two})"


def races(plan: Plan) -> tuple[Race, ...]:
    """Every race in steady state, each pair of accesses once, in enqueue order.

    The plan must pass the checks that need no order (`examine` says so first); otherwise KeyError.
    """
    commands, runs = plan.schedule.commands, 2 * period(plan)
    found: dict[tuple[int, int, str, str], Race] = {}
    order = clocks(commands, runs)
    for buffer, uses in _uses(plan, runs).items():
        for one, two in _meeting(sorted(uses), order):
            first, second = (one, two) if one[2] < two[2] else (two, one)
            key = (first[2] % len(commands), second[2] % len(commands), first[4], second[4])
            if key not in found:
                found[key] = _race(plan, buffer, first, second)
    return tuple(
        sorted(
            found.values(),
            key=lambda r: (r.second.iteration, r.second.index, r.first.iteration, r.first.index),
        )
    )


def _uses(plan: Plan, runs: int) -> dict[str, list[Use]]:
    """Buffer -> accesses of all runs."""
    found: dict[str, list[Use]] = {}
    count = len(plan.schedule.commands)
    for run in range(runs):
        for i, c in enumerate(plan.schedule):
            for accesses, writes in ((c.reads, False), (c.writes, True)):
                for a in accesses:
                    if a.start < a.stop:
                        region = plan.memory.regions[a.value]
                        span = _span(region.offsets[run % len(region.offsets)], a)
                        use = (*span, run * count + i, writes, a.value)
                        found.setdefault(region.buffer, []).append(use)
    return found


def _span(offset: int, a: Access) -> tuple[int, int]:
    return offset + a.start, offset + a.stop


def _meeting(uses: Sequence[Use], order: Clocks) -> Iterator[tuple[Use, Use]]:
    """Overlapping uses, one of them a write, that are not ordered; `uses` sorted by first byte."""
    active: list[Use] = []
    for use in uses:
        active = [other for other in active if other[1] > use[0]]
        for other in active:
            u, v = sorted((use[2], other[2]))
            if (use[3] or other[3]) and u != v and not order.ordered(u, v):
                yield other, use
        active.append(use)


def _race(plan: Plan, buffer: str, first: Use, second: Use) -> Race:
    count = len(plan.schedule.commands)

    def site(u: int) -> Site:
        return Site(u % count, u // count, str(plan.schedule.commands[u % count]))

    return Race(
        site(first[2]),
        site(second[2]),
        buffer,
        max(first[0], second[0]),
        min(first[1], second[1]),
        (first[4], second[4]),
        (first[3], second[3]),
    )
