"""Where the time of a program goes: every launch run alone, by the clock.

A profiled run does the same work in the same order, but in pieces, so it is slower as a whole; the
cost of starting a piece is measured and taken off. Bytes and operations are what the ops declare,
except that a matrix counts with the bytes of its packed form. Attention declares all of its cache
bucket, although it skips what the mask hides.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ggraph.backends.cpu.ceilings import Ceilings, launch_seconds, measure_ceilings
from ggraph.backends.cpu.lowering.needs import PRODUCTS
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Flat
from ggraph.backends.protocol import Launch
from ggraph.tensor import Kind, Tensor

Span = tuple[Launch, int, int]  # a launch and its instructions: first, one past the last


@dataclass(frozen=True, eq=False)
class Piece:
    """One launch by itself: what it is called, what it does, what it declares."""

    name: str
    rows: int
    run: Callable[[], None]
    flops: int
    nbytes: int


@dataclass
class OpTime:
    """The calls of one kind of launch: alike in name, rows and columns."""

    flops: int  # of one call
    nbytes: int
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """All calls together, each taken as the median one: another process may steal the core."""
        return float(np.median(self.times)) * len(self.times)


@dataclass(eq=False)
class Profile:
    """Times by name and rows, filled while `on`."""

    pool: Pool
    on: bool = False
    times: dict[tuple[str, int], OpTime] = field(default_factory=dict)
    _launch: float | None = None

    def run(self, pieces: Sequence[Piece]) -> None:
        """Run the pieces in order and add up their times."""
        if self._launch is None:
            self._launch = launch_seconds(self.pool)
        for piece in pieces:
            begun = time.perf_counter()
            piece.run()
            spent = time.perf_counter() - begun - self._launch
            kind = OpTime(piece.flops, piece.nbytes)
            self.times.setdefault((piece.name, piece.rows), kind).times.append(max(spent, 0.0))

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time anew what runs inside."""
        self.times.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False

    def ceilings(self) -> Ceilings:
        """What the pool's threads can do at most, measured now."""
        return measure_ceilings(self.pool)


def pieces_of(
    pool: Pool, flat: Flat, spans: Sequence[Span], held: Mapping[int, int]
) -> list[Piece]:
    """A flat program cut by its launches; `held` is packed bytes by the id of a weight's memory."""
    return [
        _piece(x, partial(pool.run, Flat(flat.code[a:b].copy(), flat.names[a:b], flat.kept)), held)
        for x, a, b in spans
        if b > a
    ]


def step_piece(x: Launch, step: Callable[[], None]) -> Piece:
    """A launch that NumPy computes."""
    piece = _piece(x, step, {})
    return Piece(f"{piece.name} (NumPy)", piece.rows, step, piece.flops, piece.nbytes)


def _piece(x: Launch, run: Callable[[], None], held: Mapping[int, int]) -> Piece:
    t = x.result.tensor
    assert t.spec is not None, f"{t.name!r} is a leaf"
    cost = t.spec.cost(t)
    nbytes = cost.bytes
    for ref in x.sources:
        if id(ref.memory) in held and t.op in PRODUCTS:
            nbytes += held[id(ref.memory)] - ref.tensor.nbytes
    shown = x.sources[1].tensor if t.spec.overwrites is not None else t  # not the whole cache
    rows = shown.shape[0] if shown.shape else 1
    return Piece(
        f"{label(t)} {shown.size // max(rows, 1)}".replace("> ", ">"), rows, run, cost.flops, nbytes
    )


def label(t: Tensor) -> str:
    """The op, with type and columns of its weight matrix where there is one."""
    weights = [s for s in t.sources if s.kind is Kind.WEIGHT and len(s.shape) > 1]
    return " ".join([t.op, *(f"{w.dtype} {w.shape[-1]}>" for w in weights)])
