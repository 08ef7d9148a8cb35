"""Random functions of rows, as graphs of any number of rows: what a row becomes is its own affair.

Choices hang on the seed alone, never on the rows, so that the same function is built for one row as
for many. No test is in here.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import numpy as np

from ggraph import ops
from ggraph.backends.cpu.kernels.tiles import LAYOUTS
from ggraph.backends.protocol import Backend
from ggraph.dtype import F32, I32, DType
from ggraph.formats.quantise import WRITABLE
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import to_storage
from ggraph.ops.glu import UNITS
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import Arg, Array, Kind, Tensor, apply, input, leaf

WIDTHS = (32, 64, 96, 33, 8, 256)
EXPERTS = 3
TYPES = [d for d in WRITABLE if d in LAYOUTS]  # NumPy multiplies by the others, as it likes
UNARY = (
    ops.silu, ops.tanh, ops.neg, ops.sqr, ops.relu, ops.sigmoid, ops.gelu, ops.rms_norm, ops.norm,
    ops.l2_norm, ops.soft_max, ops.exp, ops.softplus, ops.gelu_erf, ops.gelu_quick,
)  # fmt: skip
BINARY = (ops.add, ops.mul, ops.sub, ops.maximum)


@dataclass
class Rows:
    """A function in the making, for `m` rows: values [m, n], and what leaves hold by name."""

    r: Random
    m: int
    values: list[Tensor] = field(default_factory=list)
    given: dict[str, Arg] = field(default_factory=dict)

    def row(self) -> Tensor:
        """A value that is there, late ones more often."""
        return self.r.choice(self.values[-4:] if self.r.random() < 0.7 else self.values)

    def weight(self, *shape: int, dtype: DType = F32) -> Tensor:
        """A new weight."""
        name = f"w{len(self.given)}"
        self.given[name] = Arg(shape, dtype)
        return leaf(Kind.WEIGHT, name, shape, dtype)

    def per_row(self, n: int, limit: int) -> Tensor:
        """A new input i32 [m, n] of integers in [0, limit)."""
        name = f"i{len(self.given)}"
        self.given[name] = Arg((self.m, n), I32, f"ids:{limit}")
        return input(name, (self.m, n), I32)

    def matrix(self, n: int, k: int, dtype: DType | None = None) -> Tensor:
        """A weight [n, k] of any type that has rows of k."""
        known = [d for d in TYPES if k % d.block == 0]
        return self.weight(n, k, dtype=dtype or self.r.choice(known))

    def put(self, t: Tensor) -> Tensor:
        """Take a value [m, n] in."""
        self.values.append(t)
        return t


def product(f: Rows) -> None:
    """A product, perhaps with a residual."""
    x = f.row()
    y = ops.mul_mat(f.matrix(f.r.choice(WIDTHS), x.shape[-1]), x)
    alike = [t for t in f.values if t.shape == y.shape]
    f.put(ops.add(f.r.choice(alike), y) if alike and f.r.random() < 0.6 else y)


def several(f: Rows) -> None:
    """Products of the same rows with matrices of one type."""
    x, r = f.row(), f.r
    first = f.matrix(r.choice(WIDTHS), x.shape[-1])
    for _ in range(r.randint(1, 3)):
        f.put(ops.mul_mat(f.matrix(r.choice(WIDTHS), x.shape[-1], first.dtype), x))
    f.put(ops.mul_mat(first, x))


def gated(f: Rows) -> None:
    """A gated unit of two products, of two values, or of the halves of one."""
    x, r = f.row(), f.r
    n, roll = r.choice(WIDTHS), r.random()
    unit = r.choice(("swiglu", *UNITS))
    if roll < 0.6:
        w = f.matrix(n, x.shape[-1])
        up = f.matrix(n, x.shape[-1], w.dtype if r.random() < 0.8 else None)
        sides = ops.mul_mat(w, x), ops.mul_mat(up, x)
    elif roll < 0.8 and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        sides = ops.slice(x, [0, 0], [f.m, half]), ops.slice(x, [0, half], [f.m, half])
    else:
        sides = x, x
    y = f.put(apply(unit, *sides, name=f"u{len(f.values)}"))
    if r.random() < 0.7:
        f.put(ops.mul_mat(f.matrix(r.choice(WIDTHS), y.shape[-1]), y))


def elements(f: Rows) -> None:
    """Functions of elements and of whole rows, with vectors and other values."""
    t, r = f.row(), f.r
    for _ in range(r.randint(1, 4)):
        alike = [v for v in f.values if v.shape == t.shape]
        roll = r.random()
        if roll < 0.45:
            t = r.choice(UNARY)(t)
        else:
            other = r.choice(alike) if alike and roll < 0.7 else f.weight(t.shape[-1])
            t = r.choice(BINARY)(t, other)
        t = ops.clamp(t, -30.0, 30.0) if r.random() < 0.3 else t
    f.put(t)


def written_norm(f: Rows) -> None:
    """A norm that somebody wrote with reductions."""
    x, r = f.row(), f.r
    kind = r.choice(("mean", "sum", "max"))
    size = ops.reduce(ops.sqr(x), kind, (-1,))
    f.put(ops.mul(ops.div(x, ops.sqrt(ops.add(size, f.weight(1)))), f.weight(x.shape[-1])))


def columns(f: Rows) -> None:
    """Some columns, as a view or a copy."""
    x = f.row()
    n = x.shape[-1]
    size = f.r.choice([s for s in (*WIDTHS, 1) if s <= n])
    t = ops.slice(x, [0, f.r.randint(0, n - size)], [f.m, size])
    f.put(ops.cont(t) if f.r.random() < 0.4 else t)


def heads(f: Rows) -> None:
    """Heads that are normed, turned and put together again."""
    x, r = f.row(), f.r
    n = x.shape[-1]
    d = r.choice([s for s in (2, 4, 8, 16, 32) if n % s == 0] or [n])
    t = x.reshape(f.m, n // d, d)
    if r.random() < 0.6:
        t = ops.mul(ops.rms_norm(t), f.weight(d))
    if d % 2 == 0 and r.random() < 0.6:
        t = ops.rope(t, f.per_row(1, 900).reshape(f.m), n_rot=d)
    if r.random() < 0.3:
        t = ops.cont(t.permute(1, 0, 2)).permute(1, 0, 2)
    f.put(ops.cont(t).reshape(f.m, n))


def experts(f: Rows) -> None:
    """Products with experts chosen for each row."""
    x, r = f.row(), f.r
    k, n, used = x.shape[-1], r.choice(WIDTHS), r.randint(1, 2)
    w = f.weight(EXPERTS, n, k, dtype=r.choice([d for d in TYPES if k % d.block == 0]))
    y = ops.mul_mat_id(w, x.reshape(f.m, 1, k), f.per_row(used, EXPERTS))
    f.put(ops.cont(ops.slice(y, [0, used - 1, 0], [f.m, 1, n])).reshape(f.m, n))


STEPS: tuple[Callable[[Rows], None], ...] = (
    product, product, several, gated, gated, elements, elements, written_norm, columns, heads,
    experts,
)  # fmt: skip


class Rowwise(Protocol):
    """What is made of each row of its own."""

    @property
    def seed(self) -> int:
        """What it is known by."""

    @property
    def most(self) -> int:
        """Rows that values are made for."""

    def graph(self, m: int) -> tuple[Graph, dict[str, Arg]]:
        """The graph for m rows, and what its leaves hold."""

    def values(self) -> dict[str, Array]:
        """What leaves hold, inputs for `most` rows."""


@dataclass(frozen=True)
class Function:
    """The function of a seed."""

    seed: int
    most: int  # rows that values are made for

    def graph(self, m: int) -> tuple[Graph, dict[str, Arg]]:
        """The graph for m rows, and what its leaves hold."""
        f = Rows(Random(self.seed), m)
        k = f.r.choice(WIDTHS)
        f.put(input("x", (m, k)))
        f.given["x"] = Arg((m, k))
        for _ in range(f.r.randint(1, 6)):
            f.r.choice(STEPS)(f)
        shown = {len(f.values) - 1, *(f.r.randrange(len(f.values)) for _ in range(2))}
        graph = Graph.of({f"y{i}": ops.cont(f.values[i]) for i in sorted(shown)})
        return graph, f.given

    def values(self) -> dict[str, Array]:
        """What leaves hold, inputs for `most` rows."""
        graph, given = self.graph(self.most)
        rng = np.random.default_rng(self.seed)
        return {
            t.name: to_storage(examples.values(given[t.name], rng), t) for t in graph if t.is_leaf
        }


def outputs(
    function: Rowwise, m: int, values: Mapping[str, Array], devices: Mapping[str, Backend]
) -> dict[str, Array]:
    """What the function makes of the first m rows."""
    graph, _ = function.graph(m)
    with closing(Session(dict(devices), Options())) as session:
        session.prepare("rows", graph, values)
        inputs = graph.leaves(Kind.INPUT)
        found = session.run("rows", {t.name: values[t.name][:m] for t in inputs})
        return {name: np.array(a) for name, a in found.items()}


def complaint(
    function: Rowwise, counts: tuple[int, ...], opened: Callable[[], dict[str, Backend]]
) -> str:
    """Which rows are other ones in other company; nothing when all is right."""
    values = function.values()
    with np.errstate(all="ignore"):
        whole = outputs(function, function.most, values, opened())
        for m in counts:
            for name, part in outputs(function, m, values, opened()).items():
                same = part.view(np.int32) == whole[name][:m].view(np.int32)
                same |= np.isnan(part) & np.isnan(whole[name][:m])
                if not same.all():
                    row = int(np.argwhere(~same)[0][0])
                    return f"seed {function.seed}: {name}, row {row} of {m}, of {function.most}"
    return ""
