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

from ggraph.backends.cpu.codegen.simd import ROWS_EACH
from ggraph.backends.cpu.kernels import (  # noqa: F401  (all register kernels)
    attention,
    cache,
    convolve,
    elementwise,
    enlarge,
    experts,
    gated_id,
    lay,
    matmul,
    matmul_id,
    pack,
    plain,
    quantise,
    slots,
    solve,
    sorts,
)
from ggraph.backends.cpu.kernels.elements import FLOATS
from ggraph.backends.cpu.kernels.tiles import activation_bytes
from ggraph.backends.cpu.lowering import carried, images, mixtures, native, products, systems
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.needs import (
    JOINED,
    attends,
    attends_plainly,
    bounded,
    is_rows,
    row_step,
    step_of,
    turns,
    turns_into,
)
from ggraph.backends.cpu.lowering.nesting import nests
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.ops.rope import rope_turns
from ggraph.ops.rules import integer, real

Lower = Callable[[Lowering, Launch], bool]


def lower(low: Lowering, launch: Launch) -> bool:
    """Append the instructions of one launch, or say that there is no kernel for it."""
    lowering = LOWERINGS.get(launch.result.tensor.op)
    low.begin(launch)
    if not bounded(launch.result.tensor):
        return False
    if native.call(low, launch) or (lowering is not None and lowering(low, launch)):
        return True
    if launch.result.tensor.op in JOINED:
        return False  # a nest's bits are not those of the parts, which more rows are left to
    return nests(low, launch)


def _set_rows(low: Lowering, x: Launch) -> bool:
    """Float rows into a cache, in place."""
    held, rows, index = (s.tensor for s in x.sources)
    step = row_step(rows)
    if held.dtype.name not in attention.KINDS or not held.is_contiguous or step is None:
        return False
    if not index.is_contiguous:
        return False
    n = prod(rows.shape[1:])
    low.add(
        "set_rows_" + held.dtype.name, x=low.at(x.sources[1]), y=low.at(x.result),
        index=low.at(x.sources[2]),
        m=rows.shape[0], n=n, xs=step, ys=held.dtype.row_bytes(n), limit=held.shape[0],
        ib=index.dtype.block_bytes,
    )  # fmt: skip
    return True


def _rms_norm(low: Lowering, x: Launch) -> bool:
    a, *by = (s.tensor for s in x.sources)
    step = step_of(a)
    if step is None or not all(map(is_rows, by)):
        return False
    n = a.shape[-1]
    w = low.at(x.sources[1]) if by else 0
    end, target = low.target(x)
    low.add(
        "rms_norm" + end, x=low.at(x.sources[0]), w=w, m=a.size // n, n=n, xs=step,
        eps=real(x.result.tensor.attrs, "eps"), **target,
    )  # fmt: skip
    return True


def _quantise(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    step = step_of(a)
    if step is None:
        return False
    k = a.shape[-1]
    low.add(
        "quantise", x=low.at(x.sources[0]), out=low.at(x.result), m=a.size // k, k=k, xs=step,
        os=activation_bytes(k),
    )  # fmt: skip
    return True


def _swiglu(low: Lowering, x: Launch) -> bool:
    """Two float tensors of one shape."""
    a, b = (s.tensor for s in x.sources)
    first, second = step_of(a), step_of(b)
    if first is None or second is None:
        return False
    n = a.shape[-1]
    sources: dict[str, Any] = {"a": low.at(x.sources[0]), "b": low.at(x.sources[1])}
    sources |= {"as": first, "bs": second}
    end, target = low.target(x)
    low.add("swiglu" + end, m=a.size // n, n=n, **sources, **target)
    return True


def _soft_max(low: Lowering, x: Launch) -> bool:
    """Rows as they are, or with a mask of the same shape."""
    a, y = x.sources[0].tensor, x.result.tensor
    attrs, shown = y.attrs, [s.tensor for s in x.sources[1:]]
    step = step_of(a)
    if step is None or attrs["has_sinks"] or attrs["max_bias"]:
        return False
    if any(not is_rows(s) or s.shape != a.shape for s in shown):
        return False
    n = a.shape[-1]
    low.add(
        "soft_max", x=low.at(x.sources[0]), mask=low.at(x.sources[1]) if shown else 0,
        y=low.at(x.result), m=a.size // n, n=n, xs=step, ms=n * 4, ys=n * 4,
        scale=real(attrs, "scale"),
    )  # fmt: skip
    return True


def _argmax(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    step = step_of(a)
    if step is None:
        return _by_row(low, x, "top_k_", k=1, rising=0)
    n = a.shape[-1]
    low.add("argmax", x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n, xs=step)
    return True


def _by_row(low: Lowering, x: Launch, kernel: str, **more: Any) -> bool:
    """A row kernel of `sorts.py`, for rows of a plain float type without gaps."""
    a = x.sources[0].tensor
    if a.dtype.name not in FLOATS or not a.is_contiguous:
        return False
    n, m = a.shape[-1], a.size // a.shape[-1]
    low.add(
        kernel + a.dtype.name, x=low.at(x.sources[0]), y=low.at(x.result), m=m, n=n,
        xs=a.nbytes // m, ys=x.result.tensor.nbytes // m, **more,
    )  # fmt: skip
    return True


def _cumsum(low: Lowering, x: Launch) -> bool:
    return _by_row(low, x, "cumsum_")


def _argsort(low: Lowering, x: Launch) -> bool:
    rising = int(x.result.tensor.attrs["order"] == "asc")
    return _by_row(low, x, "argsort_", rising=rising)


def _top_k(low: Lowering, x: Launch) -> bool:
    return _by_row(low, x, "top_k_", k=x.result.tensor.shape[-1], rising=0)


@dataclass(frozen=True, eq=False)
class Target:
    """Where rotated rows go: an address or a room beside, the element, the distance of heads, and
    the address of the rows' indices (0: in order) and the bytes of one."""

    y: int | Scratch
    kind: str
    head_bytes: int
    index: int = 0
    index_bytes: int = 8


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
        size = index.tensor.dtype.block_bytes
        target = Target(low.at(x.result), t.dtype.name, head_bytes, low.at(index), size)
        return _rotate(low, x, a, positions, target, factors)
    m, n = a.tensor.shape[0], prod(a.tensor.shape[1:])
    beside = x.room("turned")
    _rotate(low, x, a, positions, Target(beside, "f32", t.shape[2] * 4), factors)
    low.add(
        "set_rows_" + t.dtype.name, uses=[beside], x=beside, y=low.at(x.result),
        index=low.at(index), m=m, n=n, xs=n * 4, ys=t.dtype.row_bytes(n), limit=t.shape[0],
        ib=index.tensor.dtype.block_bytes,
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
    rotated = integer(attrs, "n_rot")
    freqs, magnitude = rope_turns(attrs)
    padded = np.zeros(-(-len(freqs) // 8) * 8, np.float64)
    padded[: len(freqs)] = freqs
    low.add(
        "rope_" + target.kind, makes=[target.y] if isinstance(target.y, Scratch) else [],
        x=low.at(a), y=target.y, pos=low.at(positions), index=target.index,
        freqs=low.constant(padded),
        factors=low.at(factors[0]) if factors else 0, m=rows, heads=heads, hd=dim, nr=rotated,
        halves=int(attrs["mode"] == "neox"), xs=a.tensor.strides[0], xh=a.tensor.strides[1],
        ys=heads * target.head_bytes, yh=target.head_bytes,
        limit=x.result.tensor.shape[0] if target.index else rows,
        mscale=magnitude, ib=target.index_bytes,
    )  # fmt: skip
    return True


def _flash_attn(low: Lowering, x: Launch) -> bool:
    """Attention over a cache; what the mask hides, or lies beyond `length`, is skipped."""
    if not attends(x.result.tensor):
        return _attend_plainly(low, x)
    q, k, v = (s.tensor for s in x.sources[:3])
    rows, heads, dim = q.shape
    wide, attrs = v.shape[2], x.result.tensor.attrs
    shown = x.sources[3].tensor.shape[1] if attrs["has_mask"] else k.shape[0]
    kind, entries = k.dtype.name, shown
    listed = low.shown(x)
    parts = [x.room("parts")] if rows <= ROWS_EACH else []
    values: dict[str, Any] = {
        "q": low.at(x.sources[0]), "k": low.at(x.sources[1]), "v": low.at(x.sources[2]),
        "list": listed, "y": low.at(x.result), "m": rows, "heads": heads,
        "kv_heads": k.shape[1], "hd": dim, "vd": wide, "n": entries, "c": k.shape[0],
        "qs": step_of(q, 2), "ks": k.strides[0], "kh": k.strides[1], "vs": v.strides[0],
        "vh": v.strides[1], "ys": heads * wide * 4,
        "part": parts[0] if parts else 0,
        "sinks": low.at(x.sources[-1]) if attrs["has_sinks"] else 0,
        "scale": real(attrs, "scale"), "softcap": real(attrs, "softcap"),
    }  # fmt: skip
    if parts:
        low.add("attend_chunks_" + kind, uses=[listed], makes=parts, **values)
        low.add("merge_chunks", uses=[listed, *parts], **values)
    else:
        low.add("attention_" + kind, uses=[listed], **values)
    return True


def _attend_plainly(low: Lowering, x: Launch) -> bool:
    """Any head size, mask and layout that the kernels above do not take, one number at a time."""
    t = x.result.tensor
    if not attends_plainly(t):
        return False
    q, k, v, *rest = x.sources
    masked, limited = bool(t.attrs["has_mask"]), bool(t.attrs["has_length"])
    mask = rest[0] if masked else None
    rows, heads, dim = q.tensor.shape
    room = x.room("scores")
    steps: dict[str, Any] = {
        f"{name}{axis}": s
        for name, ref in (("q", q), ("k", k), ("v", v))
        for axis, s in zip("rhd", ref.tensor.strides, strict=True)
    }
    kinds = f"{k.tensor.dtype.name}_{mask.tensor.dtype.name if mask else 'f32'}"
    low.add(
        f"attend_plainly_{kinds}", makes=[room], result=True, q=low.at(q), k=low.at(k), v=low.at(v),
        mask=low.at(mask) if mask else 0, length=low.at(rest[-1]) if limited else 0, scores=room,
        y=low.at(x.result), m=rows, heads=heads, kv_heads=k.tensor.shape[1], hd=dim,
        vw=v.tensor.shape[2], n=k.tensor.shape[0], scale=real(t.attrs, "scale"),
        softcap=real(t.attrs, "softcap"), **steps,
    )  # fmt: skip
    return True


LOWERINGS: dict[str, Lower] = {
    "mul_mat": products.mul_mat,
    "mul_mat_add": products.mul_mat,
    "mul_mat_gated": products.mul_mat_gated,
    "mul_mat_gated_quantise": products.mul_mat_gated,
    "mul_mat_id": products.mul_mat_id,
    "mul_mats": products.mul_mats,
    "conv_2d": products.conv_2d,
    "get_rows": products.get_rows,
    "set_rows": _set_rows,
    "rms_norm": _rms_norm,
    "rms_norm_mul": _rms_norm,
    "quantise": _quantise,
    "rms_norm_quantise": _rms_norm,
    "swiglu_quantise": _swiglu,
    "swiglu": _swiglu,
    "moe_shares": mixtures.moe_shares,
    "moe_mix": mixtures.moe_mix,
    "add_id": mixtures.add_id,
    "solve_tri": systems.lower,
    "upscale": images.lower,
    "soft_max": _soft_max,
    "argmax": _argmax,
    "argsort": _argsort,
    "top_k": _top_k,
    "cumsum": _cumsum,
    "rope": _rope,
    "rope_set_rows": _rope_set_rows,
    "flash_attn": _flash_attn,
    "ssm_conv": carried.ssm_conv,
    "ssm_conv_next": carried.ssm_conv_next,
    "delta_net": carried.delta_net,
    "delta_net_next": carried.delta_net_next,
}
