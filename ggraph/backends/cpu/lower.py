"""Launches to instructions: which kernel computes which op, on which addresses.

`LOWERINGS[op]` either appends instructions and returns True, or returns False where shapes, types
or layouts are not what its kernel takes; such a launch runs by its NumPy reference. A program is
thus a list of flat programs and Python steps, in the order of the launches.

Legend: m rows, n columns of the result, k columns of a product, T token rows, C cache rows,
H heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ggraph.backends.cpu import (  # noqa: F401
    attention,
    cache,
    carried,
    elementwise,
    experts,
    matmul,
    mixtures,
    moves,
    pack,
    products,
    quantise,
    slots,
)
from ggraph.backends.cpu.lowering import Lowering
from ggraph.backends.cpu.needs import FEW_ROWS, attends, is_rows, turns, turns_into
from ggraph.backends.cpu.tiles import activation_bytes
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.dtype import I64

Lower = Callable[[Lowering, Launch], bool]


def lower(low: Lowering, launch: Launch) -> bool:
    """Append the instructions of one launch, or say that there is no kernel for it."""
    lowering = LOWERINGS.get(launch.result.tensor.op)
    low.begin(launch)
    return lowering is not None and lowering(low, launch)


def _set_rows(low: Lowering, x: Launch) -> bool:
    """Float rows into a cache, in place."""
    held, rows, index = (s.tensor for s in x.sources)
    if held.dtype.name not in attention.KINDS or not held.is_contiguous or not is_rows(rows):
        return False
    if index.dtype is not I64 or not index.is_contiguous:
        return False
    n = prod(rows.shape[1:])
    low.add(
        "set_rows_" + held.dtype.name, x=low.at(x.sources[1]), y=low.at(x.result),
        index=low.at(x.sources[2]),
        m=rows.shape[0], n=n, xs=n * 4, ys=held.dtype.row_bytes(n), limit=held.shape[0],
    )  # fmt: skip
    return True


def _rms_norm(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not all(is_rows(s.tensor) for s in x.sources):
        return False
    n = a.shape[-1]
    w = low.at(x.sources[1]) if len(x.sources) > 1 else 0
    low.add(
        "rms_norm", x=low.at(x.sources[0]), w=w, y=low.at(x.result), m=a.size // n, n=n,
        xs=n * 4, ys=n * 4, eps=float(_number(x, "eps")),
    )  # fmt: skip
    return True


def _norm(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not is_rows(a):
        return False
    n = a.shape[-1]
    low.add(
        "norm", x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n, xs=n * 4,
        ys=n * 4, eps=_number(x, "eps"),
    )  # fmt: skip
    return True


def _quantise(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not is_rows(a):
        return False
    k = a.shape[-1]
    low.add(
        "quantise", x=low.at(x.sources[0]), out=low.at(x.result), m=a.size // k, k=k, xs=k * 4,
        os=activation_bytes(k),
    )  # fmt: skip
    return True


def _rms_norm_quantise(low: Lowering, x: Launch) -> bool:
    a, w = (s.tensor for s in x.sources)
    if not (is_rows(a) and is_rows(w)):
        return False
    n = a.shape[-1]
    low.add(
        "rms_norm_quantise", x=low.at(x.sources[0]), w=low.at(x.sources[1]), out=low.at(x.result),
        m=a.size // n, n=n, xs=n * 4, os=activation_bytes(n), eps=_number(x, "eps"),
    )  # fmt: skip
    return True


def _swiglu_quantise(low: Lowering, x: Launch) -> bool:
    a, b = (s.tensor for s in x.sources)
    if not (is_rows(a) and is_rows(b)):
        return False
    n = a.shape[-1]
    steps: dict[str, Any] = {"as": n * 4, "bs": n * 4, "os": activation_bytes(n)}
    sources: dict[str, Any] = {"a": low.at(x.sources[0]), "b": low.at(x.sources[1])}
    low.add(
        "silu_mul_quantise", out=low.at(x.result), m=a.size // n, n=n, **sources, **steps
    )  # fmt: skip
    return True


def _number(x: Launch, name: str) -> float:
    value = x.result.tensor.attrs[name]
    assert isinstance(value, (int, float)), f"{name} = {value!r}"
    return float(value)


def _binary(kernel: str) -> Lower:
    """Two float tensors of one shape, or a vector that repeats over the rows."""

    def lower(low: Lowering, x: Launch) -> bool:
        a, b = (s.tensor for s in x.sources)
        if not (is_rows(a) and is_rows(b)):
            return False
        n = a.shape[-1]
        if b.shape != a.shape and (b.size != n or b.shape[-1] != n):
            return False
        m = a.size // n
        steps: dict[str, Any] = {"as": n * 4, "bs": n * 4 if b.size == a.size else 0, "ys": n * 4}
        sources: dict[str, Any] = {"a": low.at(x.sources[0]), "b": low.at(x.sources[1])}
        low.add(kernel, y=low.at(x.result), m=m, n=n, **sources, **steps)
        return True

    return lower


def _unary(kernel: str) -> Lower:
    def lower(low: Lowering, x: Launch) -> bool:
        a, y = x.sources[0].tensor, x.result.tensor
        if not (is_rows(a) and is_rows(y)):
            return False
        n = a.shape[-1]
        low.add(
            kernel, x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n,
            xs=n * 4, ys=n * 4,
        )  # fmt: skip
        return True

    return lower


def _scale(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not is_rows(a):
        return False
    n = a.shape[-1]
    low.add(
        "scale", x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n, xs=n * 4,
        ys=n * 4, scale=_number(x, "scale"), bias=_number(x, "bias"),
    )  # fmt: skip
    return True


def _soft_max(low: Lowering, x: Launch) -> bool:
    """Rows as they are, or with a mask of the same shape."""
    a, y = x.sources[0].tensor, x.result.tensor
    attrs, shown = y.attrs, [s.tensor for s in x.sources[1:]]
    if not is_rows(a) or attrs["has_sinks"] or attrs["max_bias"]:
        return False
    if any(not is_rows(s) or s.shape != a.shape for s in shown):
        return False
    n = a.shape[-1]
    low.add(
        "soft_max", x=low.at(x.sources[0]), mask=low.at(x.sources[1]) if shown else 0,
        y=low.at(x.result), m=a.size // n, n=n, xs=n * 4, ms=n * 4, ys=n * 4,
        scale=_number(x, "scale"),
    )  # fmt: skip
    return True


def _argmax(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not is_rows(a):
        return False
    n = a.shape[-1]
    low.add("argmax", x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n, xs=n * 4)
    return True


def _swiglu_oai(low: Lowering, x: Launch) -> bool:
    a, b = (s.tensor for s in x.sources)
    if not (is_rows(a) and is_rows(b)):
        return False
    n = a.shape[-1]
    steps: dict[str, Any] = {"as": n * 4, "bs": n * 4, "ys": n * 4}
    low.add(
        "swiglu_oai", a=low.at(x.sources[0]), b=low.at(x.sources[1]), y=low.at(x.result),
        m=a.size // n, n=n, alpha=_number(x, "alpha"), limit=_number(x, "limit"), **steps,
    )  # fmt: skip
    return True


@dataclass(frozen=True, eq=False)
class Target:
    """Where rotated rows go: an address or a room beside, the element, the distance of heads, and
    the address of the rows' indices (0: in order)."""

    y: int | Scratch
    kind: str
    head_bytes: int
    index: int = 0


def _rope(low: Lowering, x: Launch) -> bool:
    a = x.sources[0]
    dim = a.tensor.shape[2] * 4
    return _rotate(low, x, a, x.sources[1], Target(low.at(x.result), "f32", dim), x.sources[2:])


def _rope_set_rows(low: Lowering, x: Launch) -> bool:
    """Rotated rows straight into a cache, in place; for blocks they are rotated beside it first."""
    if not turns_into(x.result.tensor):
        return False
    held, a, positions, index, *factors = x.sources
    t = held.tensor
    if not t.dtype.is_block:
        head_bytes = t.dtype.row_bytes(t.shape[2])
        target = Target(low.at(x.result), t.dtype.name, head_bytes, low.at(index))
        return _rotate(low, x, a, positions, target, factors)
    m, n = a.tensor.shape[0], prod(a.tensor.shape[1:])
    beside = x.room("turned")
    _rotate(low, x, a, positions, Target(beside, "f32", t.shape[2] * 4), factors)
    low.add(
        "set_rows_" + t.dtype.name, uses=[beside], x=beside, y=low.at(x.result),
        index=low.at(index), m=m, n=n, xs=n * 4, ys=t.dtype.row_bytes(n), limit=t.shape[0],
    )  # fmt: skip
    return True


def _rotate(
    low: Lowering, x: Launch, a: Ref, positions: Ref, target: Target, factors: Sequence[Ref]
) -> bool:
    """Rotate [T, H, D] rows."""
    attrs = x.result.tensor.attrs
    given = (a, positions, *factors)
    if not turns(x.result.tensor, *(s.tensor for s in given)):
        return False
    rows, heads, dim = a.tensor.shape
    rotated = int(_number(x, "n_rot"))
    exponent = -np.arange(0, rotated, 2, dtype=np.float64) / rotated
    freqs = _number(x, "freq_scale") * _number(x, "freq_base") ** exponent
    padded = np.zeros(-(-len(freqs) // 8) * 8, np.float64)
    padded[: len(freqs)] = freqs
    low.add(
        "rope_" + target.kind, makes=[target.y] if isinstance(target.y, Scratch) else [],
        x=low.at(a), y=target.y, pos=low.at(positions), index=target.index,
        freqs=low.constant(padded),
        factors=low.at(factors[0]) if factors else 0, m=rows, heads=heads, hd=dim, nr=rotated,
        halves=int(attrs["mode"] == "neox"), xs=heads * dim * 4, xh=dim * 4,
        ys=heads * target.head_bytes, yh=target.head_bytes,
        limit=x.result.tensor.shape[0] if target.index else rows,
        mscale=_number(x, "attn_factor"),
    )  # fmt: skip
    return True


def _flash_attn(low: Lowering, x: Launch) -> bool:
    """Attention over a cache; what the mask hides, or lies beyond `length`, is skipped."""
    if not attends(x.result.tensor):
        return False
    q, k, v = (s.tensor for s in x.sources[:3])
    rows, heads, dim = q.shape
    wide, attrs = v.shape[2], x.result.tensor.attrs
    kind, entries = k.dtype.name, x.sources[3].tensor.shape[1]
    listed = low.shown(x)
    parts = [x.room("parts")] if rows <= FEW_ROWS else []
    values: dict[str, Any] = {
        "q": low.at(x.sources[0]), "k": low.at(x.sources[1]), "v": low.at(x.sources[2]),
        "list": listed, "y": low.at(x.result), "m": rows, "heads": heads,
        "kv_heads": k.shape[1], "hd": dim, "vd": wide, "n": entries, "c": k.shape[0],
        "qs": heads * dim * 4, "ks": k.strides[0], "kh": k.strides[1], "vs": v.strides[0],
        "vh": v.strides[1], "ys": heads * wide * 4,
        "part": parts[0] if parts else 0,
        "sinks": low.at(x.sources[-1]) if attrs["has_sinks"] else 0,
        "scale": _number(x, "scale"), "softcap": _number(x, "softcap"),
    }  # fmt: skip
    if parts:
        low.add("attend_chunks_" + kind, uses=[listed], makes=parts, **values)
        low.add("merge_chunks", uses=[listed, *parts], **values)
    else:
        low.add("attention_" + kind, uses=[listed], **values)
    return True


LOWERINGS: dict[str, Lower] = {
    "mul_mat": products.mul_mat,
    "mul_mat_add": products.mul_mat,
    "mul_mat_id": products.mul_mat_id,
    "get_rows": products.get_rows,
    "set_rows": _set_rows,
    "norm": _norm,
    "rms_norm": _rms_norm,
    "rms_norm_mul": _rms_norm,
    "quantise": _quantise,
    "rms_norm_quantise": _rms_norm_quantise,
    "swiglu_quantise": _swiglu_quantise,
    "add": _binary("add"),
    "sub": _binary("sub"),
    "mul": _binary("mul"),
    "div": _binary("div"),
    "swiglu": _binary("silu_mul"),
    "swiglu_oai": _swiglu_oai,
    "geglu": _binary("gelu_mul"),
    "top_k": mixtures.top_k,
    "moe_shares": mixtures.moe_shares,
    "moe_mix": mixtures.moe_mix,
    "add_id": mixtures.add_id,
    "silu": _unary("silu"),
    "sigmoid": _unary("sigmoid"),
    "gelu": _unary("gelu"),
    "relu": _unary("relu"),
    "exp": _unary("exp"),
    "neg": _unary("neg"),
    "tanh": _unary("tanh"),
    "softplus": _unary("softplus"),
    "cont": moves.copy,
    "dup": moves.copy,
    "scale": _scale,
    "soft_max": _soft_max,
    "argmax": _argmax,
    "concat": moves.concat,
    "repeat": moves.repeat,
    "rope": _rope,
    "rope_set_rows": _rope_set_rows,
    "flash_attn": _flash_attn,
    "ssm_conv": carried.ssm_conv,
    "ssm_conv_next": carried.ssm_conv_next,
    "delta_net": carried.delta_net,
    "delta_net_next": carried.delta_net_next,
}
