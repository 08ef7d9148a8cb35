"""Why a value lies where it lies, in lines of text. Decides nothing.

A *tenant* of a range of bytes is a value that lies on them. For each tenant before the value asked
about, the chain of commands is shown that orders its last use before the new first use.
"""

from collections.abc import Iterable, Iterator

from ggraph.alloc.precedence import Precedence, accesses, precedence
from ggraph.plan import MemoryMap, Region, Schedule


def tenants(schedule: Schedule, memory: MemoryMap, value: str) -> tuple[str, ...]:
    """One line per value that held these bytes directly before or after `value`, which is known to
    the map: the commands that order the one's last use before the other's first. Command numbers
    are places in `schedule.commands`; `(next)` marks a command of the run after."""
    teller = _Teller(schedule, memory, precedence(schedule), accesses(schedule))
    return tuple(teller.tenants(value))


def overlap(a: Region, b: Region) -> bool:
    """Whether two regions share a byte in any slot."""
    if a.buffer != b.buffer or not (a.nbytes and b.nbytes):
        return False
    return any(x < y + b.nbytes and y < x + a.nbytes for x in a.offsets for y in b.offsets)


class _Teller:
    """Holds what all lines of one explanation need."""

    def __init__(
        self, schedule: Schedule, memory: MemoryMap, order: Precedence, used: dict[str, list[int]]
    ) -> None:
        self.schedule, self.memory, self.order, self.used = schedule, memory, order, used

    def tenants(self, value: str) -> Iterator[str]:
        """One line per direct predecessor on the value's bytes, and per unordered tenant."""
        mine = self.memory.regions[value]
        shared = [
            v
            for v, r in self.memory.regions.items()
            if v != value and self.used[v] and overlap(r, mine)
        ]
        if not shared or not self.used[value]:
            yield "these bytes have no other tenant"
            return
        earlier = [v for v in shared if self._precedes(v, value)]
        later = [v for v in shared if v not in earlier and self._precedes(value, v)]
        for v in self._latest(earlier):
            yield f"after %{v}: {self._proof(v, value)}"
        for v in shared:
            if v not in earlier and v not in later:
                yield f"UNORDERED with %{v}: {self._open_pair(v, value)}"
        for v in self._latest(later):
            yield f"then %{v}, and the next run's %{value}: {self._next_run(v, value)}"

    def _precedes(self, a: str, b: str) -> bool:
        """Whether all of a is over when b begins; one command may end a and begin b."""
        pairs = ((i, j) for i in self.used[a] for j in self.used[b])
        return all(i == j or self.order.before(i, j) for i, j in pairs)

    def _latest(self, values: list[str]) -> list[str]:
        """Those that no other one of `values` follows on the very same bytes."""
        regions = self.memory.regions
        return [
            v
            for v in values
            if not any(
                w != v
                and self._precedes(v, w)
                and not (self._precedes(w, v) and values.index(w) < values.index(v))
                and overlap(regions[v], regions[w])
                for w in values
            )
        ]

    def _proof(self, a: str, b: str) -> str:
        first = min(self.used[b])
        ends = [
            i
            for i in self.used[a]
            if not any(i != j and self.order.before(i, j) for j in self.used[a])
        ]
        return "; ".join(self._chain(i, first) for i in ends)

    def _next_run(self, a: str, b: str) -> str:
        i, j = max(self.used[a]), min(self.used[b]) + self.order.n
        return (
            self._chain(i, j) if self.order.before(i, j) else f"UNORDERED {i} and {self._name(j)}"
        )

    def _open_pair(self, a: str, b: str) -> str:
        pairs = [(i, j) for i in self.used[a] for j in self.used[b] if i != j]
        loose = (
            p for p in pairs if not self.order.before(*p) and not self.order.before(*reversed(p))
        )
        i, j = next(loose, pairs[0])
        return f"commands {self._name(i)} and {self._name(j)}"

    def _chain(self, i: int, j: int) -> str:
        if i == j:
            return f"command {i} reads the one and writes the other"
        return "commands " + _join(map(self._name, self.order.path(i, j)))

    def _name(self, i: int) -> str:
        n = self.order.n
        c = self.schedule.commands[i % n]
        return f"{i % n}{' (next)' if i >= n else ''} {c.do.value} {c.event or c.node or c.label}"


def _join(steps: Iterable[str]) -> str:
    return " -> ".join(steps)
