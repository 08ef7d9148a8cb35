"""What the judge says when it refuses: two commands, their bytes, the missing edge, the repair."""

from collections.abc import Sequence
from dataclasses import dataclass

from ggraph.errors import PlanError
from ggraph.plan import Command, Do

CONTEXT = 2  # commands printed on each side of a culprit


@dataclass(frozen=True)
class Site:
    """One command of the unrolled plan: its place in the schedule, and in which run."""

    index: int
    iteration: int
    text: str

    def __str__(self) -> str:
        return f"run {self.iteration}, command {self.index}: {self.text.strip()}"


@dataclass(frozen=True)
class Repair:
    """A change that would make the plan sound, with its price.

    `waits` counts added record-wait pairs or host waits, `seconds` the estimated delay, `nbytes`
    the memory that a longer lifetime costs.
    """

    action: str
    waits: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def __str__(self) -> str:
        price = f"{self.nbytes} bytes" if self.nbytes else f"{self.waits} wait"
        late = f", about {self.seconds * 1e6:.1f} us" if self.seconds else ""
        return f"{self.action} ({price}{late})"


@dataclass(frozen=True)
class CounterExample:
    """Why a plan is refused.

    `kind` is one of race, stale, unwritten, alias, bounds, alignment, capacity, declaration,
    order. For races and wrong values `first` and `second` are the commands in enqueue order and
    [start, stop) the bytes of `buffer`; `edge` is the ordering that is missing.
    """

    kind: str
    message: str
    first: Site | None = None
    second: Site | None = None
    buffer: str = ""
    start: int = 0
    stop: int = 0
    values: tuple[str, ...] = ()
    edge: str = ""
    repairs: tuple[Repair, ...] = ()
    nearby: str = ""

    @property
    def cheapest(self) -> Repair | None:
        """The first of `repairs`, which are listed cheapest first."""
        return self.repairs[0] if self.repairs else None

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}"]
        lines += [f"  {site}" for site in (self.first, self.second) if site is not None]
        if self.stop > self.start:
            lines.append(f"  bytes [{self.start}, {self.stop}) of {self.buffer}")
        if self.edge:
            lines.append(f"  missing: {self.edge}")
        lines += [f"  repair: {r}" for r in self.repairs]
        if self.nearby:
            lines += ["  nearby:", self.nearby]
        return "\n".join(lines)


class Rejected(PlanError):
    """A plan that `verify` refused; `counter_example` says why."""

    def __init__(self, counter_example: CounterExample) -> None:
        super().__init__(str(counter_example))
        self.counter_example = counter_example


def neighbourhood(commands: Sequence[Command], *indices: int) -> str:
    """The commands around the culprits, which are marked."""
    shown = sorted(
        {
            j
            for i in indices
            for j in range(max(0, i - CONTEXT), min(len(commands), i + CONTEXT + 1))
        }
    )
    return "\n".join(f"  {'>' if i in indices else ' '} {i:>5} {commands[i]}" for i in shown)


def repairs(first: Command, second: Command, sharing: int) -> tuple[Repair, ...]:
    """An ordering edge, or bytes of one's own; cheapest first, by estimated time, then bytes.

    `sharing` is the size of the smaller tenant if the two commands meet because values share
    bytes, 0 when they fight over one and the same value (then only an edge helps).
    """
    on_host = second.do in (Do.HOST_READ, Do.HOST_WRITE, Do.HOST_FREE, Do.HOST_SYNC)
    how = (
        f"host_sync on {first.actor} before {second.label!r}"
        if on_host
        else f"record after {first.label!r} on {first.actor}, wait before {second.label!r} on "
        f"{second.actor}"
    )
    edge = Repair(how, waits=1, seconds=first.seconds)
    if not sharing:
        return (edge,)
    apart = Repair("keep the earlier tenant's bytes until both are done", nbytes=sharing)
    return (edge, apart) if first.seconds * 1e10 < sharing else (apart, edge)
