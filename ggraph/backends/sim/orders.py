"""Who runs next: orders in which a simulated machine may execute what is enqueued.

An order is asked whenever the host is about to do something that memory can tell: which of the
ready entries runs now, or None to let the host go on (only where `may_stop`). Every answer is a
legal execution: the machine offers only entries whose stream and events allow them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ggraph.door import checked, fit
from ggraph.errors import InputError, shown

T = TypeVar("T")


class Runnable(Protocol):
    """What an order may know of an entry."""

    seq: int  # place in the enqueue order
    label: str
    earliest: float  # virtual time at which it could start


class Order(Protocol):
    """Chooses among ready entries."""

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """One of `ready` (never empty unless `may_stop`), or None: the host goes on."""
        ...

    def enqueued(self, label: str) -> None:
        """The host enqueued `label`."""
        ...

    def ran(self, label: str) -> None:
        """`label`, an entry or a host step, has run."""
        ...


class InOrder:
    """Everything in the order of the list, as if each command ran before the host went on."""

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """The one enqueued first."""
        return min(ready, key=lambda e: e.seq, default=None)

    def enqueued(self, label: str) -> None:
        """Nothing to remember."""

    def ran(self, label: str) -> None:
        """Nothing to remember."""


class Timed(InOrder):
    """What starts first by the virtual clock: the timeline of a device that keeps its rates."""

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """The one that can start first."""
        return min(ready, key=lambda e: (e.earliest, e.seq), default=None)


class Random(InOrder):
    """A seeded random legal order."""

    @checked
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """Any of them, or the host, with equal chance."""
        pick = self._random.randrange(len(ready) + may_stop)
        return ready[pick] if pick < len(ready) else None


@dataclass(eq=False)
class Adversarial:
    """Runs `then` before `first` if any legal order does, everything else in order.

    `first` is held back until nothing else can run, or until `then` has run while it was waiting.
    `succeeded` says whether that happened.
    """

    first: str
    then: str
    succeeded: bool = False
    _waiting: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        fit(self)

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """Anything but `first`, as long as there is a choice."""
        free = [e for e in ready if self.succeeded or e.label != self.first]
        if not free and may_stop:
            return None
        return min(free or ready, key=lambda e: e.seq)

    def enqueued(self, label: str) -> None:
        """Count the `first` that wait."""
        self._waiting += label == self.first

    def ran(self, label: str) -> None:
        """Note whether `then` overtook a waiting `first`."""
        if label == self.first:
            self._waiting -= 1
        elif label == self.then and self._waiting > 0:
            self.succeeded = True


@dataclass(eq=False)
class Scripted(InOrder):
    """Follows `script`, a list of choices, then always the first option. Keeps its `trail`."""

    script: Sequence[int] = ()
    trail: list[tuple[int, int]] = field(default_factory=list)  # (choice, number of options)

    def __post_init__(self) -> None:
        fit(self)

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """The option that the script names; letting the host go on is the last option."""
        options = len(ready) + may_stop
        if options == 1:
            return ready[0] if ready else None
        at = len(self.trail)
        pick = self.script[at] if at < len(self.script) else 0
        self.trail.append((pick, options))
        return ready[pick] if pick < len(ready) else None


def every_order(run: Callable[[Order], T], limit: int = 100_000) -> Iterator[T]:
    """The results of `run` under every legal order, at most `limit` of them, each order once."""
    script: list[int] = []
    if not callable(run) or isinstance(limit, bool) or not isinstance(limit, int):
        raise InputError(
            f"every_order: expected a function and a number, got {shown(run)}, {shown(limit)}"
        )
    for _ in range(limit):
        order = Scripted(script)
        yield run(order)
        trail = order.trail
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return
        script = [pick for pick, _ in trail[:-1]] + [trail[-1][0] + 1]
