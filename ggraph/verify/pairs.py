"""All races of a plan, pair by pair. For reports and for tests of the proof.

The proof looks at neighbours in each byte's history and stops at the first fault. Here all
accesses that meet are held against the clocks: slower, and complete however broken the plan is.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ggraph.door import checked
from ggraph.errors import printable
from ggraph.plan import Access, Plan
from ggraph.verify.clocks import Clocks, clocks
from ggraph.verify.report import CounterExample, Rejected, Site
from ggraph.verify.static import period, static_faults

Use = tuple[int, int, int, bool, str]  # first byte, past the last, command, writes, value
MOST_RACES = 1 << 18  # of n commands there may be n * n
MOST_LOOKS = 1 << 24  # pairs of places that are compared


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
        where = printable(f"bytes [{self.start}, {self.stop}) of {self.buffer}")
        return f"{where}: {self.first} ({one}) and {self.second} ({two})"


@checked
def races(plan: Plan) -> tuple[Race, ...]:
    """Every race in steady state, each pair of accesses once, in enqueue order.

    Raises Rejected, as `examine` would say, for a plan that names what it does not have, and for
    one with more races, or more overlapping ranges, than can be listed in time.
    """
    commands, runs = plan.schedule.commands, 2 * period(plan)
    found: dict[tuple[int, int, str, str], tuple[Use, Use, str]] = {}
    order = clocks(commands, runs)
    try:
        by_buffer = _uses(plan, runs)
    except (KeyError, IndexError):
        raise Rejected(next(static_faults(plan))) from None
    for buffer, uses in by_buffer.items():
        for one, two in _meeting(sorted(uses), order):
            first, second = (one, two) if one[2] < two[2] else (two, one)
            key = (first[2] % len(commands), second[2] % len(commands), first[4], second[4])
            if key not in found or _when(first, second) < _when(*found[key][:2]):
                found[key] = (first, second, buffer)
                if len(found) > MOST_RACES:
                    raise _too_many(f"more than {MOST_RACES} races")
    return tuple(
        _race(plan, buffer, first, second)
        for first, second, buffer in sorted(found.values(), key=lambda f: _when(*f[:2]))
    )


def _when(first: Use, second: Use) -> tuple[int, int, Use, Use]:
    return second[2], first[2], first, second


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
                        span = _span(region.start(run), a)
                        use = (*span, run * count + i, writes, a.value)
                        found.setdefault(region.buffer, []).append(use)
    return found


def _span(offset: int, a: Access) -> tuple[int, int]:
    return offset + a.start, offset + a.stop


def _meeting(uses: Sequence[Use], order: Clocks) -> Iterator[tuple[Use, Use]]:
    """Overlapping uses, one of them a write, that are not ordered; `uses` sorted by first byte."""
    active: list[_Place] = []
    looks = 0
    for span, same in groupby(uses, key=lambda use: use[:2]):
        here = _Place(span, order, same)
        active = [*(p for p in active if p.span[1] > span[0]), here]
        looks += len(active)
        if looks > MOST_LOOKS:
            raise _too_many(f"more than {MOST_LOOKS} overlapping ranges")
        for there in active:
            yield from here.unordered(there)


def _too_many(what: str) -> Rejected:
    return Rejected(CounterExample("capacity", f"{what}: too many to list"))


class _Place:
    """The uses of just these bytes, by actor and in enqueue order."""

    def __init__(self, span: tuple[int, int], order: Clocks, uses: Iterable[Use]) -> None:
        self.span, self.order = span, order
        self.by: dict[tuple[int, bool], list[Use]] = {}
        for use in uses:
            self.by.setdefault((order.actor[use[2]], use[3]), []).append(use)

    def unordered(self, there: "_Place") -> Iterator[tuple[Use, Use]]:
        """Pairs that nothing orders; each once where both are one place.

        Of another actor's uses some come before a use and some behind it: those between have no
        order with it, and binary search finds where they begin and end.
        """
        for (mine, writes), uses in self.by.items():
            for (other, rewrites), others in there.by.items():
                if other == mine or not (writes or rewrites):
                    continue
                if there is self and (other, rewrites) < (mine, writes):
                    continue
                for use in uses:
                    yield from ((o, use) for o in self._between(use, others, mine, other))

    def _between(self, use: Use, others: list[Use], mine: int, other: int) -> list[Use]:
        place, known = self.order.place, self.order.others
        first = bisect_right(others, known[use[2]][other], key=lambda o: place[o[2]])
        last = bisect_left(others, place[use[2]], first, key=lambda o: known[o[2]][mine])
        return others[first:last]


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
