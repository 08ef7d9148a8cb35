"""Soft-max, causal masks and flash attention.

Legend: T query rows, C key rows, H query heads, K key-value heads (H a multiple of K), D head
size of q and k, V head size of v. Masks are added to scores: 0 where visible, -inf where not. A
row that sees nothing gives zeros, in soft_max as in flash_attn.
"""

from collections.abc import Callable, Sequence
from math import floor, log2

import numpy as np

from ggraph.dtype import F16, F32, I32, Q8_0
from ggraph.errors import InputError
from ggraph.ops.rules import (
    expect,
    f32,
    flag,
    index_type,
    integer,
    like,
    plain_float,
    present,
    rank,
    real,
    real_valued,
    repeats_into,
    rule,
    same_row,
    same_shape,
)
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

INF = float("inf")


def alibi_slopes(heads: int, max_bias: float) -> Array:
    """f32 [heads]: what each head multiplies the mask with; 1 without ALiBi (max_bias 0).

    Source: Press et al., arXiv 2108.12409, and ggml's extension to head counts that are no power
    of two.
    """
    if max_bias <= 0 or heads == 0:
        return np.ones(heads, np.float32)
    even = 1 << floor(log2(heads))
    m0, m1 = 2 ** (-max_bias / even), 2 ** (-max_bias / 2 / even)
    slopes = [m0 ** (h + 1) if h < even else m1 ** (2 * (h - even) + 1) for h in range(heads)]
    return np.array(slopes, np.float32)


def _soft_max_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, rest = sources[0], list(sources[1:])
    max_bias = real(attrs, "max_bias")
    real(attrs, "scale")
    if flag(attrs, "has_mask"):
        plain_float(rest[0])
        repeats_into(rest.pop(0), x)
    expect(max_bias == 0 or flag(attrs, "has_mask"), "max_bias needs a mask")
    expect(max_bias == 0 or len(x.shape) >= 3, "max_bias needs a head axis: [.., H, T, C]")
    if flag(attrs, "has_sinks"):
        rank(x, 3)
        good = rest[0].dtype is F32 and rest[0].shape == (x.shape[-3],)
        expect(good, f"expected {rest[0].label} f32[{x.shape[-3]}]")
    return same_row(sources, attrs)


def weigh(scores: Array, sinks: Array | None = None) -> Array:
    """exp(scores) over their sum along the last axis; rows of -inf give zeros.

    `sinks` (broadcast to rows, last axis 1) is one more score per row that gets no weight.
    """
    top = scores.max(-1, keepdims=True, initial=-INF)  # [.., 1]
    if sinks is not None:
        top = np.maximum(top, sinks)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    chances: Array = weights / np.where(total == 0, 1, total)
    return chances


def _soft_max(
    x: Array, *rest: Array, scale: float, max_bias: float, has_mask: bool, has_sinks: bool
) -> Array:
    mask, sinks = present(rest, has_mask, has_sinks)
    scores = x * x.dtype.type(scale)
    if mask is not None:
        heads = x.shape[-3] if x.ndim >= 3 else 1
        slopes = alibi_slopes(heads, max_bias)  # [H]
        scores = scores + (slopes[:, None, None] * mask if max_bias > 0 else mask)
    return like(weigh(scores, sinks[:, None, None] if sinks is not None else None), x)


def _soft_max_attrs(**changes: float | bool) -> Attrs:
    return {"scale": 1.0, "max_bias": 0.0, "has_mask": False, "has_sinks": False, **changes}


SOFT_MAX = register(
    OpSpec(
        "soft_max",
        infer=rule("soft_max", "x mask? sinks?", _soft_max_rule),
        reference=_soft_max,
        ggml="SOFT_MAX",
        cost=lambda t: Cost(5 * t.size, t.nbytes + sum(s.nbytes for s in t.sources)),
        inplace_ok=(0,),
        examples=(
            Example((Arg((3, 5)),), _soft_max_attrs()),
            Example((Arg((2, 3, 37)),), _soft_max_attrs(scale=0.25)),
            Example(
                (Arg((2, 3, 5)), Arg((3, 5), fill="mask")), _soft_max_attrs(has_mask=True, scale=2)
            ),
            Example((Arg((3, 4, 5)), Arg((4, 5), F16)), _soft_max_attrs(has_mask=True, max_bias=8)),
            Example((Arg((2, 3, 5)), Arg((2,))), _soft_max_attrs(has_sinks=True)),
            Example((Arg((1, 1)),), _soft_max_attrs()),
            Example((Arg((0, 5)),), _soft_max_attrs()),
            Example((Arg((3, 5), F16),), _soft_max_attrs(), tolerance=2e-3),
        ),
        doc="soft_max(x, mask, sinks): rows of x * scale + slope * mask as chances that sum to 1.",
    )
)


def _causal_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    rank(sources[0], 2)
    expect(integer(attrs, "n_past") >= 0, f"n_past={attrs['n_past']}: expected 0 or more")
    return same_shape(sources, attrs)


def _causal(value: float) -> Callable[..., Array]:
    def reference(x: Array, *, n_past: int) -> Array:
        t, c = x.shape[-2:]
        later = np.arange(c) > np.arange(t)[:, None] + n_past  # [T, C]
        return np.where(later, np.float32(value), x)

    return reference


def _diagonal(name: str, value: float) -> OpSpec:
    return register(
        OpSpec(
            name,
            infer=rule(name, "x", _causal_rule),
            reference=_causal(value),
            ggml=name.upper(),
            inplace_ok=(0,),
            examples=(
                Example((Arg((4, 4)),), {"n_past": 0}),
                Example((Arg((2, 3, 7)),), {"n_past": 2}),
                Example((Arg((1, 1)),), {"n_past": 0}),
                Example((Arg((0, 4)),), {"n_past": 0}),
                Example((Arg((4, 4), F16),), {"n_past": 1}),
            ),
            doc=f"{name}(x, n_past): {value} in columns after n_past + row, x elsewhere.",
        )
    )


DIAG_MASK_INF = _diagonal("diag_mask_inf", -INF)
DIAG_MASK_ZERO = _diagonal("diag_mask_zero", 0.0)


def _flash_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    q, k, v, *rest = sources
    for t in (q, k, v):
        rank(t, 3, 3)
        real_valued(t)
    plain_float(q)
    real(attrs, "scale")
    expect(real(attrs, "softcap") >= 0, f"softcap={attrs['softcap']}: expected 0 or more")
    rows, heads, width = q.shape
    context, kv_heads, _ = k.shape
    expect(k.shape[2] == width, f"head sizes of q {width} and k {k.shape[2]} differ")
    expect(v.shape[:2] == k.shape[:2], f"expected {v.label} [{context}, {kv_heads}, any]")
    multiple = kv_heads > 0 and heads % kv_heads == 0
    expect(multiple, f"{heads} query heads are no multiple of {kv_heads}")
    if flag(attrs, "has_mask"):
        mask = rest.pop(0)
        listed = mask.dtype is I32
        if not listed:
            plain_float(mask)
        good = len(mask.shape) == 2 and mask.shape[0] == rows
        good = good and (listed or mask.shape[1] == context)
        expect(good, f"expected {mask.label} [{rows}, {context}], or lists i32[{rows}, any]")
    if flag(attrs, "has_length"):
        index_type(rest[0])
        length = rest.pop(0)
        expect(length.shape == (1,), f"expected {length.label} i32[1]")
    if flag(attrs, "has_sinks"):
        good = rest[0].dtype is F32 and rest[0].shape == (heads,)
        expect(good, f"expected {rest[0].label} f32[{heads}]")
    return Meta((rows, heads, v.shape[2]), F32)


def _flash(
    q: Array,
    k: Array,
    v: Array,
    *rest: Array,
    scale: float,
    softcap: float,
    has_mask: bool,
    has_length: bool,
    has_sinks: bool,
) -> Array:
    mask, length, sinks = present(rest, has_mask, has_length, has_sinks)
    seen = k.shape[0] if length is None else int(length[0])
    if not 0 <= seen <= k.shape[0]:
        raise InputError(f"flash_attn: length {seen} is outside [0, {k.shape[0]}]")
    if mask is not None and mask.dtype == np.int32:
        mask = _mask_of(mask, seen)
    t, h, d = q.shape
    kv = k.shape[1]
    keys = f32(k[:seen]).transpose(1, 2, 0)[:, None]  # [K, 1, D, C]
    values = f32(v[:seen]).transpose(1, 0, 2)[:, None]  # [K, 1, C, V]
    queries = f32(q).transpose(1, 0, 2).reshape(kv, h // kv, t, d)  # [K, H/K, T, D]
    scores = (queries * np.float32(scale)) @ keys  # [K, H/K, T, C]
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    if mask is not None:
        scores = scores + mask[:, :seen]
    extra = None if sinks is None else sinks.reshape(kv, h // kv, 1, 1)
    mixed = weigh(scores, extra) @ values  # [K, H/K, T, V]
    return f32(mixed.reshape(h, t, v.shape[2]).transpose(1, 0, 2))


def _mask_of(lists: Array, seen: int) -> Array:
    """f32 [T, seen] of lists i32 [T, S]: the logarithm of how often each slot is listed."""
    counts = np.zeros((lists.shape[0], seen), np.float32)
    for row, slots in zip(counts, lists, strict=True):
        ended = np.flatnonzero(slots < 0)
        held = slots[: ended[0]] if len(ended) else slots
        np.add.at(row, held[held < seen], 1)
    with np.errstate(divide="ignore"):
        return np.log(counts)


def _flash_limits(t: Tensor) -> dict[int, int]:
    """A length may be that of the whole cache."""
    slot = 3 + flag(t.attrs, "has_mask")
    return {slot: t.sources[1].shape[0] + 1} if flag(t.attrs, "has_length") else {}


def _flash_cost(t: Tensor) -> Cost:
    """The whole bucket is counted, though only `length` rows are read."""
    q, k, v = t.sources[:3]
    per_pair = 2 * (k.shape[2] + v.shape[2]) + 5
    flops = q.shape[0] * q.shape[1] * k.shape[0] * per_pair
    return Cost(flops, t.nbytes + sum(s.nbytes for s in t.sources))


def _flash_example(
    q: tuple[int, int, int],
    kv: tuple[int, int],
    *extra: Arg,
    v_dim: int | None = None,
    dtype: Arg | None = None,
    softcap: float = 0.0,
    tolerance: float = 2e-5,
) -> Example:
    cache = dtype.dtype if dtype else F32
    k_arg, v_arg = Arg((*kv, q[2]), cache), Arg((*kv, v_dim or q[2]), cache)
    kinds = {2: "has_mask", 1: "has_length"}
    names = ["has_sinks" if a.shape == q[1:2] else kinds[len(a.shape)] for a in extra]
    attrs = {
        "scale": q[2] ** -0.5,
        "softcap": softcap,
        "has_mask": "has_mask" in names,
        "has_length": "has_length" in names,
        "has_sinks": "has_sinks" in names,
    }
    return Example((Arg(q), k_arg, v_arg, *extra), attrs, tolerance)


HALF, Q8 = Arg((), F16), Arg((), Q8_0)
FLASH_ATTN = register(
    OpSpec(
        "flash_attn",
        infer=rule("flash_attn", "q k v mask? length? sinks?", _flash_rule),
        reference=_flash,
        limits=_flash_limits,
        ggml="FLASH_ATTN_EXT",
        cost=_flash_cost,
        examples=(
            _flash_example((3, 4, 8), (6, 2)),
            _flash_example((3, 4, 8), (6, 2), Arg((3, 6), fill="mask")),
            _flash_example((1, 9, 64), (37, 3), Arg((1, 37)), Arg((1,), I32, "ids:38")),
            _flash_example((5, 4, 64), (40, 2), Arg((5, 40), fill="mask"), dtype=HALF),
            _flash_example((2, 2, 32), (33, 1), Arg((1,), I32, "ids:34"), dtype=Q8),
            _flash_example((2, 4, 8), (5, 4), v_dim=6, softcap=10.0),
            _flash_example((2, 2, 8), (5, 2), Arg((2, 5), F16)),
            _flash_example((3, 4, 64), (40, 2), Arg((3, 50), I32, "ids:40"), dtype=HALF),
            _flash_example(
                (9, 4, 8), (40, 2), Arg((9, 6), I32, "ids:40"), Arg((1,), I32, "ids:41")
            ),
            _flash_example((5, 4, 64), (70, 2), Arg((5, 70), fill="mask"), softcap=5.0),
            _flash_example(
                (3, 4, 64), (70, 2), Arg((3, 70), fill="mask"), Arg((1,), I32, "ids:71"), Arg((4,))
            ),
            _flash_example((9, 4, 24), (150, 4), Arg((9, 150), fill="mask"), v_dim=16),
            _flash_example((2, 4, 16), (150, 4), Arg((2, 150), fill="mask"), v_dim=40, dtype=HALF),
            _flash_example((20, 4, 16), (40, 2), Arg((20, 40), fill="mask"), Arg((4,)), dtype=HALF),
            _flash_example((1, 1, 1), (1, 1)),
            _flash_example((0, 2, 8), (5, 2)),
            _flash_example((2, 2, 8), (5, 1), Arg((1,), I32, "ids:1")),
        ),
        doc="flash_attn(q, k, v, mask, length, sinks): each query row's attention to cached rows.",
    )
)


def soft_max(
    x: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float = 1.0,
    max_bias: float = 0.0,
    name: str = "",
) -> Tensor:
    """Rows of x [.., H, T, C] * scale + slope * mask as chances; same shape and dtype.

    mask (plain float) repeats into x; max_bias > 0 gives each head its ALiBi slope; sinks f32 [H]
    take part in the sum alone. Rows that are all -inf give zeros. ggml: GGML_OP_SOFT_MAX
    (soft_max_ext). Errors: ShapeError.
    """
    return apply(
        "soft_max",
        *[t for t in (x, mask, sinks) if t is not None],
        name=name,
        scale=float(scale),
        max_bias=float(max_bias),
        has_mask=mask is not None,
        has_sinks=sinks is not None,
    )


def diag_mask_inf(x: Tensor, n_past: int = 0, *, name: str = "") -> Tensor:
    """x [.., T, C] with -inf in columns after n_past + row. ggml: GGML_OP_DIAG_MASK_INF.

    x: plain float, also the result's type. Errors: ShapeError.
    """
    return apply("diag_mask_inf", x, name=name, n_past=n_past)


def diag_mask_zero(x: Tensor, n_past: int = 0, *, name: str = "") -> Tensor:
    """x [.., T, C] with 0 in columns after n_past + row. ggml: GGML_OP_DIAG_MASK_ZERO.

    x: plain float, also the result's type. Errors: ShapeError.
    """
    return apply("diag_mask_zero", x, name=name, n_past=n_past)


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    length: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    name: str = "",
) -> Tensor:
    """q [T, H, D] plain float; k [C, K, D], v [C, K, V] any float type or layout -> f32 [T, H, V].

    Query head h reads head h // (H / K) of k and v. Scores are q . k * scale, held within
    +-softcap by a tanh where it is not 0, plus mask [T, C]. A mask i32 [T, S] lists the rows of k
    and v that each row looks at, up to a number below 0; their order, and not where they lie,
    decides the bits. Only the first length[0] (i32 [1]) rows of k and v are looked at. sinks f32
    [H] are one more score per head, which takes part in the sum alone. ggml:
    GGML_OP_FLASH_ATTN_EXT, which puts T after H. Errors: ShapeError; InputError at run time for a
    length outside [0, C]. Source: arXiv 2205.14135.
    """
    return apply(
        "flash_attn",
        *[t for t in (q, k, v, mask, length, sinks) if t is not None],
        name=name,
        scale=float(scale),
        softcap=float(softcap),
        has_mask=mask is not None,
        has_length=length is not None,
        has_sinks=sinks is not None,
    )
