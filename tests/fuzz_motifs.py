"""What rewriting looks for, for random graphs: chains of ops that become one, operands shared.

A motif takes a graph in the making further, or raises GraphError where it does not fit. Legend: x
[m, n] float32 rows that are there, w matrices.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ggraph import ops
from ggraph.dtype import F16, F32, I32, I64, Q4_0, Q8_0, DType
from ggraph.errors import GraphError
from ggraph.formats.quantise import WRITABLE
from ggraph.ops.glu import UNITS
from ggraph.tensor import Arg, Kind, Tensor, apply

if TYPE_CHECKING:
    from fuzz_kit import Grown

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64)
BLOCKY = 2e-2  # what 8-bit activations may move a product by
ROUNDED = {"f16": 2e-3, "bf16": 8e-3}
TOLERANCE = 1e-5
FEW = 7
UNARY = (ops.silu, ops.tanh, ops.neg, ops.sqr, ops.relu, ops.sigmoid, ops.gelu)
Motif = Callable[["Grown"], None]


def coarse(s: Tensor) -> float:
    """What a kernel may lose that takes a source of this type as it lies."""
    return BLOCKY if s.dtype.is_block else ROUNDED.get(s.dtype.name, 0.0)


def _put(grown: "Grown", t: Tensor, off: float = TOLERANCE) -> Tensor:
    return grown.add(t.named(f"n{len(grown.made)}"), max(off, *map(coarse, t.sources)))


def _rows(grown: "Grown", width: int = 0) -> Tensor:
    """A float32 matrix of the pool, or a new one."""
    found = [t for t in grown.live() if len(t.shape) == 2 and t.dtype is F32 and t.size]
    if width:
        found = [t for t in found if t.shape[-1] == width]
    if found and grown.chance(0.8):
        return grown.r.choice(found)
    return grown.leaf(Arg((grown.r.choice(SIZES), width or grown.r.choice(SIZES))))


def _any_rows(grown: "Grown") -> Tensor:
    return _rows(grown, grown.r.choice((0, 0, 32, 64)))


def residual(grown: "Grown") -> None:
    """y = x + W x, in either order, and with W = x."""
    x = _any_rows(grown)
    n, r = x.shape[-1], grown.r
    square = x.shape[0] == n and grown.chance(0.3)
    dtype = Q4_0 if n % 32 == 0 and grown.chance(0.4) else r.choice((F32, F16))
    w = x if square else grown.leaf(Arg((n, n), dtype), Kind.WEIGHT)
    p = _put(grown, ops.mul_mat(w, x), BLOCKY if w.dtype.is_block else TOLERANCE)
    _put(grown, ops.add(*r.sample([p, x], 2)))


def norm(grown: "Grown") -> None:
    """A norm and its weight, read once or twice."""
    x = _any_rows(grown)
    weight = grown.leaf(Arg((x.shape[-1],)), Kind.WEIGHT)
    t = _put(grown, ops.mul(_put(grown, ops.rms_norm(x)), weight))
    if grown.chance(0.5):
        _put(grown, ops.add(t, x))


def stored_key(grown: "Grown") -> None:
    """A turned key into a cache."""
    r = grown.r
    heads, d, rows = r.choice((1, 2, 3)), r.choice((2, 4, 8)), r.choice((1, 2, 5))
    k = grown.fitting((rows, heads, d), F32)
    k = k if k is not None else grown.leaf(Arg((rows, heads, d)))
    p = grown.leaf(Arg((rows,), I32, "ids:1000"), Kind.INPUT)
    cache = grown.leaf(Arg((7, heads, d), r.choice((F32, F16))), Kind.STATE)
    index = grown.leaf(Arg((rows,), r.choice((I32, I64)), "ids:7"), Kind.INPUT)
    _put(grown, ops.set_rows(cache, _put(grown, ops.rope(k, p, n_rot=d)), index), 1e-3)


def gated_rows(grown: "Grown") -> None:
    """A gated unit before a quantised product."""
    x, r = _any_rows(grown), grown.r
    n = x.shape[-1]
    if n % 32:
        raise GraphError("rows are no blocks")
    act = _put(grown, ops.swiglu(x, _rows(grown, n) if grown.chance(0.3) else x))
    for _ in range(r.randint(1, 2)):
        w = grown.leaf(Arg((r.choice(SIZES), n), r.choice((Q4_0, Q8_0))), Kind.WEIGHT)
        _put(grown, ops.mul_mat(w, act), BLOCKY)


def chain(grown: "Grown") -> None:
    """Ops that may stay in place, over an operand that others read."""
    x, r = _any_rows(grown), grown.r
    t = x
    for _ in range(r.randint(2, 5)):
        other = r.choice([t, x, grown.leaf(Arg((x.shape[-1],)))])
        op = r.choice((ops.add, ops.mul, ops.sub))
        t = _put(grown, op(t, other) if grown.chance(0.6) else r.choice(UNARY)(t))


def overwritten(grown: "Grown") -> None:
    """A value is kept, then overwritten."""
    x, r = _any_rows(grown), grown.r
    t = _put(grown, ops.scale(x, 0.5))
    kept = _put(grown, ops.cont(t)) if grown.chance(0.5) else t
    rows = r.randint(1, 3)
    index = grown.leaf(Arg((rows,), I64, f"ids:{x.shape[0]}"), Kind.INPUT)
    new = grown.leaf(Arg((rows, x.shape[-1])), Kind.INPUT)
    held = _put(grown, ops.scale(kept, 2.0))
    _put(grown, ops.add(_put(grown, ops.set_rows(t, new, index)), held))


def _wide_rows(grown: "Grown") -> Tensor:
    """Rows for products, often whole blocks, often behind a norm."""
    x = _rows(grown, grown.r.choice((0, 32, 32, 64, 96, 256)))
    if grown.chance(0.4):
        weight = grown.leaf(Arg((x.shape[-1],)), Kind.WEIGHT)
        x = _put(grown, ops.mul(_put(grown, ops.rms_norm(x)), weight))
    return x


def _matrices(grown: "Grown", count: int, k: int, heights: Sequence[int]) -> list[Tensor]:
    """Matrices [height, k], most of them weights of one type; some of them again, parts of each
    other, states, or results."""
    r = grown.r
    known = [d for d in WRITABLE if k % d.block == 0]
    dtype, found = r.choice(known), list[Tensor]()
    for n in heights[:count]:
        alike = [t for t in found if t.shape[0] == n]
        taller = [t for t in found if t.shape[0] > n]
        roll = r.random()
        if alike and roll < 0.2:
            found.append(r.choice(alike))
        elif taller and roll < 0.3:
            found.append(_part(grown, r.choice(taller), n))
        elif roll < 0.4 and (there := grown.fitting((n, k), F32)) is not None:
            found.append(there)
        else:
            found.append(_matrix(grown, n, k, r.choice(known) if roll > 0.9 else dtype))
    return found


def _part(grown: "Grown", w: Tensor, n: int) -> Tensor:
    """n rows of a matrix, from any one on."""
    start = grown.r.randint(0, w.shape[0] - n)
    return _put(grown, ops.slice(w, [start, 0], [n, w.shape[1]]), 0.0)


def _matrix(grown: "Grown", n: int, k: int, dtype: DType) -> Tensor:
    if dtype.is_block and n < FEW:  # what cancels out in all of few results is no size to go by
        dtype = F32
    plain = dtype in (F32, F16)
    roll = grown.r.random()
    kind = Kind.STATE if plain and roll < 0.1 else Kind.INPUT if roll < 0.15 else Kind.WEIGHT
    return grown.leaf(Arg((n, k), dtype), kind)


def several(grown: "Grown") -> None:
    """Products of the same rows, and what reads them."""
    x, r = _wide_rows(grown), grown.r
    count = r.randint(2, 6)
    heights = [r.choice(SIZES) for _ in range(r.randint(1, 3))]
    products: list[Tensor] = []
    for w in _matrices(grown, count, x.shape[-1], [r.choice(heights) for _ in range(count)]):
        t = _put(grown, ops.mul_mat(w, x))
        like = [p for p in (*products, x) if p.shape == t.shape]
        if like and grown.chance(0.3):
            t = _put(grown, ops.add(*r.sample([t, r.choice(like)], 2)))
        products.append(t)
    for t in products:
        if grown.chance(0.3):
            _put(grown, r.choice(UNARY)(t))


def gated_products(grown: "Grown") -> None:
    """The gated unit of two products of the same rows, what reads it, and a residual."""
    x, r = _wide_rows(grown), grown.r
    n = r.choice((*SIZES, 32, 64, 96))
    gate, up = _matrices(grown, 2, x.shape[-1], [n, n])
    both = [_put(grown, ops.mul_mat(w, x)) for w in (gate, up)]
    unit = r.choice(("swiglu", "swiglu", *UNITS))
    act = _put(grown, apply(unit, *both, name="act"))
    if n % 32 == 0 or grown.chance(0.5):
        (down,) = _matrices(grown, 1, n, [x.shape[-1] if grown.chance(0.6) else r.choice(SIZES)])
        y = _put(grown, ops.mul_mat(down, act))
        if y.shape == x.shape:
            _put(grown, ops.add(*r.sample([x, y], 2)))
    if grown.chance(0.2):
        _put(grown, ops.add(both[0], act))


def taken_then_overwritten(grown: "Grown") -> None:
    """Products of rows, or with a state, that something overwrites afterwards."""
    r = grown.r
    x = _put(grown, ops.scale(_wide_rows(grown), 0.5))
    m, n = x.shape
    state = grown.leaf(Arg((r.choice(SIZES), n), r.choice((F32, F16))), Kind.STATE)
    for w in (state, *_matrices(grown, 2, n, [r.choice(SIZES)] * 2)):
        _put(grown, ops.mul_mat(w, x))
    for old, most in ((state, state.shape[0]), (x, m)):
        rows = r.randint(1, 3)
        index = grown.leaf(Arg((rows,), I64, f"ids:{most}"), Kind.INPUT)
        new = grown.leaf(Arg((rows, n)), Kind.INPUT)
        if grown.chance(0.7):
            t = _put(grown, ops.set_rows(old, new, index), 1e-3)
            if t.dtype is F32:
                _put(grown, ops.mul_mat(t, new))


MOTIFS: tuple[Motif, ...] = (
    residual, norm, stored_key, gated_rows, chain, overwritten, several, several, gated_products,
    gated_products, taken_then_overwritten,
)  # fmt: skip
