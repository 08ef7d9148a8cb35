"""Functions of elements, gated units, copies and casts on CUDA.

The kernels are in src/elementwise.cu; the position in a table here is the `op` number there.
"""

from math import inf
from typing import Any

from ggraph.backends.cuda.kernels import WEIGHTS
from ggraph.backends.cuda.layout import (
    FLOATS,
    PLAIN,
    fits,
    is_flat,
    is_plain,
    sizes,
    spread,
    steps,
)
from ggraph.backends.cuda.lowering import Lowering, Rule, codes_of, number, offered, parts_of
from ggraph.backends.protocol import Launch
from ggraph.device import Need
from ggraph.dtype import BF16, F16, I32, I64, DType
from ggraph.strides import contiguous
from ggraph.tensor import Tensor

UNARY = (
    "identity", "neg", "abs", "sgn", "step", "sqr", "sqrt", "exp", "expm1", "log", "sin", "cos",
    "tanh", "sigmoid", "relu", "elu", "silu", "gelu", "gelu_erf", "gelu_quick", "softplus",
    "hardsigmoid", "hardswish", "floor", "ceil", "round", "trunc", "scale", "clamp",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "swiglu", "geglu", "geglu_erf", "geglu_quick", "reglu",
)  # fmt: skip
CONSTANTS = {"scale": ("scale", "bias"), "clamp": ("low", "high")}
MOVABLE = (1, 2, 4, 8)  # bytes of an element that the kernel `move` takes
INTEGERS = (I32, I64)
CHUNK = 8  # values that a thread decodes
FOUR = 4  # elements of a thread of `binary_flat` and `convert`


def _one(t: Tensor) -> bool:
    return is_plain(t, t.sources[0]) and fits(t)


def _unary(low: Lowering, x: Launch) -> None:
    t, a = x.result.tensor, x.sources[0]
    names = CONSTANTS.get(t.op)
    first, second = (number(x, n) for n in names) if names else (0.0, 0.0)
    given = {"x": low.at(a), "y": low.at(x.result), "op": UNARY.index(t.op), "a": first}
    if is_flat(t, a.tensor):
        low.per_element("unary_flat", t.size, b=second, **given)
        return
    kinds = {"from": PLAIN[a.tensor.dtype], "to": PLAIN[t.dtype]}
    views = {"shape": sizes(a.tensor), "strides": steps(a.tensor)}
    low.per_element("unary", t.size, b=second, **given, **kinds, **views)


def _two(t: Tensor) -> bool:
    return is_plain(t, *t.sources) and fits(t)


def _binary(low: Lowering, x: Launch) -> None:
    t, (a, b) = x.result.tensor, x.sources
    given: dict[str, Any] = {
        "x": low.at(a), "z": low.at(b), "y": low.at(x.result), "op": BINARY.index(t.op),
        "count": t.size,
    }  # fmt: skip
    if _is_flat_pair(t):
        grid = (-(-t.size // (128 * FOUR)), 1, 1)
        low.call(
            "binary_flat", grid, 128, **given, parts=parts_of(low, x), codes=codes_of(low, x),
            k=t.shape[-1],
        )  # fmt: skip
        return
    low.per_element(
        "binary", **given, shape=sizes(t), x_strides=steps(a.tensor),
        z_strides=spread(b.tensor, t), x_type=PLAIN[a.tensor.dtype], z_type=PLAIN[b.tensor.dtype],
    )  # fmt: skip


def _is_flat_pair(t: Tensor) -> bool:
    a, b = t.sources
    return is_flat(a, b) and a.shape == b.shape


def _pair_needs(t: Tensor) -> tuple[Need, ...]:
    return offered(t) if _is_flat_pair(t) else ()


def _clamped(low: Lowering, x: Launch) -> None:
    t, (a, b) = x.result.tensor, x.sources
    low.per_element(
        "swiglu_oai", t.size, x=low.at(a), z=low.at(b), y=low.at(x.result), shape=sizes(t),
        x_strides=steps(a.tensor), z_strides=steps(b.tensor), x_type=PLAIN[a.tensor.dtype],
        z_type=PLAIN[b.tensor.dtype], alpha=number(x, "alpha"), limit=number(x, "limit"),
    )  # fmt: skip


def _moved(t: Tensor) -> bool:
    a = t.sources[0]
    movable = not a.dtype.is_block and a.dtype.block_bytes in MOVABLE and fits(a)
    return a.is_contiguous or movable


def _move(low: Lowering, x: Launch) -> None:
    a, t = x.sources[0], x.result.tensor
    if a.tensor.is_contiguous:
        low.copy(low.at(x.result), low.at(a), t.nbytes)
        return
    _place(low, low.at(a), low.at(x.result), a.tensor, contiguous(a.tensor.shape, a.tensor.dtype))


def _place(low: Lowering, source: int, target: int, a: Tensor, strides: tuple[int, ...]) -> None:
    """Elements of `a` to `target` with other strides."""
    missing = (0,) * (4 - len(strides))
    low.per_element(
        "move", a.size, x=source, y=target, shape=sizes(a), x_strides=steps(a),
        y_strides=(*missing, *strides), size=a.dtype.block_bytes,
    )  # fmt: skip


def _joined(t: Tensor) -> bool:
    return t.dtype.block_bytes in MOVABLE and not t.dtype.is_block and fits(t)


def _concat(low: Lowering, x: Launch) -> None:
    t = x.result.tensor
    axis = int(number(x, "axis")) % len(t.shape)
    target = low.at(x.result)
    for a in x.sources:
        _place(low, low.at(a), target, a.tensor, t.strides)
        target += a.tensor.shape[axis] * t.strides[axis]


def _repeat(low: Lowering, x: Launch) -> None:
    a, t = x.sources[0], x.result.tensor
    low.per_element(
        "repeat", t.size, x=low.at(a), y=low.at(x.result), shape=sizes(t), sizes=sizes(a.tensor),
        strides=steps(a.tensor), size=t.dtype.block_bytes,
    )  # fmt: skip


def _cast(t: Tensor) -> bool:
    a = t.sources[0]
    if a.dtype.is_block and a.dtype.name in WEIGHTS:
        return t.dtype in FLOATS and a.is_contiguous and bool(a.shape)
    both = a.dtype in PLAIN and t.dtype in PLAIN
    return both and fits(a) and (a.is_contiguous or a.shape == t.shape)


def _convert(low: Lowering, x: Launch) -> None:
    t, a = x.result.tensor, x.sources[0]
    source, target, kind = low.at(a), low.at(x.result), a.tensor.dtype
    if kind.is_block:
        decode(low, kind, source, target, t.size, t.dtype)
        return
    if is_flat(a.tensor) and t.dtype in (F16, BF16):
        convert(low, source, target, t.size, t.dtype)
        return
    given = {"x": source, "y": target, "shape": sizes(a.tensor), "strides": steps(a.tensor)}
    kinds = {"from": PLAIN[kind], "to": PLAIN[t.dtype]}
    if kind in INTEGERS and t.dtype in INTEGERS:
        low.per_element("integers", t.size, **given, **kinds)
    else:
        low.per_element("unary", t.size, **given, **kinds, op=0, a=0.0, b=0.0)


def decode(low: Lowering, kind: DType, source: int, target: int, count: int, to: DType) -> None:
    """`count` values of whole rows of a block type as floats of type `to`."""
    low.per_element(
        "dequantise", count // CHUNK, type=kind.name, w=source, y=target, type_=PLAIN[to]
    )


def convert(
    low: Lowering, source: int, target: int, count: int, to: DType, most: float = inf
) -> None:
    """`count` values of float32 as a 16-bit type, held within +-most."""
    grid = (-(-count // (256 * FOUR)), 1, 1)
    low.call("convert", grid, 256, x=source, y=target, count=count, to=PLAIN[to], most=most)


def _boxed(t: Tensor) -> bool:
    x, part = t.sources
    return part.dtype is x.dtype and part.dtype.block_bytes in MOVABLE and fits(part)


def _set(low: Lowering, x: Launch) -> None:
    t, part = x.result.tensor, x.sources[1]
    starts = t.attrs["starts"]
    assert isinstance(starts, tuple), starts
    target = low.at(x.result) + sum(int(a) * s for a, s in zip(starts, t.strides, strict=True))
    _place(low, low.at(part), target, part.tensor, t.strides)


RULES: dict[str, Rule] = {
    **{name: Rule(_one, _unary) for name in UNARY[1:]},
    **{name: Rule(_two, _binary, _pair_needs) for name in BINARY},
    "swiglu_oai": Rule(_two, _clamped),
    "cont": Rule(_moved, _move),
    "dup": Rule(_moved, _move),
    "concat": Rule(_joined, _concat),
    "repeat": Rule(lambda t: fits(t) and not t.dtype.is_block, _repeat),
    "cast": Rule(_cast, _convert),
    "cpy": Rule(_cast, _convert),
    "set": Rule(_boxed, _set),
}
