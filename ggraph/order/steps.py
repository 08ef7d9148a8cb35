"""What the parts of `order` share, and the list of steps that they write."""

from dataclasses import dataclass, field

from ggraph.graph import Graph
from ggraph.order.streams import Streams
from ggraph.order.values import Beside
from ggraph.plan import Command, Splits
from ggraph.tensor import Tensor


@dataclass(eq=False)
class Ordering:
    """What the parts of `order` share; `staged` collects the host's staging values, `beside` what
    launches have beside their operands, `looked_at` the indices that the host has read for the
    copies that they choose."""

    splits: Splits
    streams: Streams
    n_copies: int
    overlap: bool
    marked: frozenset[str]
    staged: dict[str, int] = field(default_factory=dict)
    beside: Beside = field(default_factory=Beside)
    looked_at: set[str] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        """The placed graph, Copy nodes included."""
        return self.splits.placement.graph

    def device(self, t: Tensor) -> str:
        """The device whose memory holds `t`."""
        return self.splits.placement.of[t.root.name].device

    def host_visible(self, t: Tensor) -> bool:
        """Whether the host can read and write `t` in place."""
        return self.streams.spec(self.device(t)).host_visible


@dataclass(frozen=True)
class Step:
    """A command, and the indices of the steps whose completion it needs."""

    command: Command
    after: tuple[int, ...] = ()


@dataclass(eq=False)
class Steps:
    """Steps with the dependencies that their accesses demand."""

    steps: list[Step] = field(default_factory=list)
    producer: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)

    def add(self, c: Command, overwritten: str | None = None, also: tuple[int, ...] = ()) -> None:
        """Append `c`, which needs the producers of what it reads, and, where it overwrites a
        value, all that value's readers so far."""
        mine = len(self.steps)
        needed = {self.producer[a.value]: None for a in c.reads if a.value in self.producer}
        if overwritten is not None:
            needed.update(dict.fromkeys(self.readers.get(overwritten, ())))
        needed.update(dict.fromkeys(also))
        self.steps.append(Step(c, tuple(needed)))
        for a in c.reads:
            self.readers.setdefault(a.value, []).append(mine)
        for a in c.writes:
            self.producer[a.value] = mine
