"""What the judge says when it refuses: two commands, their bytes, the missing edge, the repair.

Builds values and text only; what is wrong has been decided elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggraph.errors import PlanError, printable
from ggraph.plan import HOST_STEPS, Command, Plan, Value

CONTEXT = 2  # commands printed on each side of a culprit
# Rates at which repairs of different kinds are compared. A record-wait pair costs a few
# microseconds of two queues; a byte that is held costs about what it takes to touch it once.
SECONDS_PER_WAIT = 5e-6
SECONDS_PER_BYTE = 1e-10


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
    """A change that removes this fault, with its price (another may stand behind it).

    `waits` counts added record-wait pairs or host waits, `seconds` the estimated delay, `nbytes`
    the memory that it costs at most. As data: order command `after` before command `before`
    (indices of the schedule), or give value `apart` bytes that it shares with nobody.
    """

    action: str
    waits: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    after: int | None = None
    before: int | None = None
    apart: str | None = None

    @property
    def cost_s(self) -> float:
        """Price in seconds: the delay, and waits and bytes at their rates."""
        return self.seconds + self.waits * SECONDS_PER_WAIT + self.nbytes * SECONDS_PER_BYTE

    def __str__(self) -> str:
        waits = f"{self.waits} wait{'s' if self.waits != 1 else ''}"
        late = f", up to {self.seconds * 1e6:.1f} us later" if self.seconds else ""
        return f"{self.action} ({f'{self.nbytes} bytes' if self.nbytes else waits}{late})"


@dataclass(frozen=True)
class CounterExample:
    """Why a plan is refused.

    `kind` is one of race, stale, unwritten, alias, bounds, alignment, capacity, declaration. For
    races and wrong values `first` and `second` are the commands in enqueue order and [start, stop)
    the bytes of `buffer`; `edge` is the ordering that is missing.
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
        lines = [f"{self.kind}: {printable(self.message)}"]
        lines += [f"  {site}" for site in (self.first, self.second) if site is not None]
        if self.stop > self.start:
            lines.append(f"  bytes [{self.start}, {self.stop}) of {printable(self.buffer)}")
        if self.edge:
            lines.append(f"  missing: {self.edge}")
        lines += [f"  repair: {r}" for r in self.repairs]
        if self.nearby:
            lines += ["  nearby:", self.nearby]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; `commands` are the two sites, None where there is none."""
        sites = (self.first, self.second)
        return {
            "kind": self.kind,
            "message": self.message,
            "commands": [
                s and {"run": s.iteration, "index": s.index, "command": s.text.strip()}
                for s in sites
            ],
            "buffer": self.buffer,
            "bytes": [self.start, self.stop],
            "values": list(self.values),
            "missing": self.edge,
            "repairs": [str(r) for r in self.repairs],
        }


class Rejected(PlanError):
    """A plan that `verify` refused; `counter_example` says why."""

    def __init__(self, counter_example: CounterExample) -> None:
        super().__init__(str(counter_example))
        self.counter_example = counter_example


def at_command(plan: Plan, i: int, kind: str, message: str) -> CounterExample:
    """A fault that one command shows by itself."""
    commands = plan.schedule.commands
    site = Site(i, 0, str(commands[i]))
    return CounterExample(kind, message, site, nearby=neighbourhood(commands, i))


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


def race_repairs(
    first: Command, second: Command, at: tuple[int, int], smaller: Value | None
) -> tuple[Repair, ...]:
    """An ordering edge, or bytes of one's own, cheapest first.

    `at` are the commands' indices in the schedule. `smaller` is the smaller of two values that
    share the bytes, None where the commands clash over others as well: then only an edge helps.
    """
    how = (
        f"host_sync on {first.actor} before {second.label!r}"
        if second.do in HOST_STEPS
        else f"record after {first.label!r} on {first.actor}, wait before {second.label!r} on "
        f"{second.actor}"
    )
    edge = Repair(how, waits=1, seconds=first.seconds, after=at[0], before=at[1])
    if smaller is None:
        return (edge,)
    keep = f"give {smaller.name!r} bytes that nobody else uses"
    apart = Repair(keep, nbytes=smaller.nbytes, apart=smaller.name)
    return tuple(sorted((edge, apart), key=lambda r: r.cost_s))


def producer_repair(producer: Command, reader: Command, after: int, before: int) -> Repair:
    """Let the producer run first: it is enqueued too late, so a wait alone would not do."""
    how = f"enqueue {producer.label!r} before {reader.label!r}"
    if producer.actor == reader.actor:
        return Repair(how, after=after, before=before)
    return Repair(f"{how} and wait for it", 1, producer.seconds, after=after, before=before)


def tenant_repair(value: Value, tenant: Value) -> Repair:
    """A longer lifetime of `value`: its next tenant lies elsewhere."""
    how = f"keep {value.name!r} until its last reader is done: {tenant.name!r} elsewhere"
    return Repair(how, nbytes=tenant.nbytes, apart=tenant.name)
