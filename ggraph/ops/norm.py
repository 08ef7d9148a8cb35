"""Normalisation of rows and of channel groups.

Legend: n row length, C channels, G groups, H W image sides. Sums in float64, as in ggml, but for
rms_norm, whose kernel on the CPU adds squares in several float32 parts.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ggraph.dtype import F16
from ggraph.ops.rules import (
    expect,
    f64,
    integer,
    last_axis,
    like,
    rank,
    real,
    rule,
    same_row,
    same_shape,
)
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _cost(t: Tensor) -> Cost:
    """Four operations per element; the row is read once and written once."""
    return Cost(4 * t.size, t.nbytes + t.sources[0].nbytes)


def _rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    eps = real(attrs, "eps")
    expect(eps >= 0, f"eps={eps}: expected 0 or more")
    return same_row(sources, attrs)


def _norm(x: Array, *, eps: float) -> Array:
    centred = f64(x) - f64(x).mean(-1, keepdims=True)
    return like(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps), x)


def _rms_norm(x: Array, *, eps: float) -> Array:
    wide = f64(x)
    return like(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps), x)


def _l2_norm(x: Array, *, eps: float) -> Array:
    wide = f64(x)
    return like(wide / np.maximum(np.sqrt((wide**2).sum(-1, keepdims=True)), eps), x)


def _row_norm(name: str, reference: Callable[..., Array], eps: float, meaning: str) -> OpSpec:
    return register(
        OpSpec(
            name,
            infer=rule(name, "x", _rule),
            reference=reference,
            ggml=name.upper(),
            cost=_cost,
            inplace_ok=(0,),
            reduces=last_axis,
            examples=(
                Example((Arg((3, 8)),), {"eps": eps}),
                Example((Arg((2, 3, 67)),), {"eps": eps}),
                Example((Arg((1, 1)),), {"eps": 1e-2}),
                Example((Arg((0, 8)),), {"eps": eps}),
                Example((Arg((3, 8), F16),), {"eps": eps}, tolerance=2e-3),
            ),
            doc=f"{name}(x, eps): {meaning}.",
        )
    )


NORM = _row_norm("norm", _norm, 1e-5, "(x - mean) / sqrt(variance + eps) of each row")
RMS_NORM = _row_norm("rms_norm", _rms_norm, 1e-6, "x / sqrt(mean of squares + eps) of each row")
L2_NORM = _row_norm("l2_norm", _l2_norm, 1e-6, "x / max(length of the row, eps)")


def _group_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    rank(sources[0], 3)
    channels, groups, eps = sources[0].shape[-3], integer(attrs, "groups"), real(attrs, "eps")
    expect(groups >= 1 and channels % groups == 0, f"{channels} channels are not {groups} groups")
    expect(eps >= 0, f"eps={eps}: expected 0 or more")
    return same_shape(sources, attrs)


def _group_norm(x: Array, *, groups: int, eps: float) -> Array:
    lead, (c, h, w) = x.shape[:-3], x.shape[-3:]
    if x.size == 0:
        return x.copy()
    grouped = x.reshape(*lead, groups, c // groups * h * w)  # [.., C, H, W] -> [.., G, C/G*H*W]
    return _norm(grouped, eps=eps).reshape(x.shape)


GROUP_NORM = register(
    OpSpec(
        "group_norm",
        infer=rule("group_norm", "x", _group_rule),
        reference=_group_norm,
        ggml="GROUP_NORM",
        cost=_cost,
        inplace_ok=(0,),
        examples=(
            Example((Arg((4, 3, 5)),), {"groups": 2, "eps": 1e-5}),
            Example((Arg((2, 6, 1, 4)),), {"groups": 3, "eps": 1e-5}),
            Example((Arg((1, 1, 1)),), {"groups": 1, "eps": 1e-2}),
            Example((Arg((0, 4, 2, 2)),), {"groups": 4, "eps": 1e-5}),
            Example((Arg((4, 3, 5), F16),), {"groups": 2, "eps": 1e-5}, tolerance=2e-3),
        ),
        doc="group_norm(x, groups, eps): norm over each group of channels and their images.",
    )
)


def norm(x: Tensor, eps: float = 1e-5, *, name: str = "") -> Tensor:
    """Rows of x [..., n] with mean 0 and variance 1. ggml: GGML_OP_NORM. Errors: ShapeError.

    x: plain float, also the result's type. Source: Ba et al., arXiv 1607.06450.
    """
    return apply("norm", x, name=name, eps=float(eps))


def rms_norm(x: Tensor, eps: float = 1e-6, *, name: str = "") -> Tensor:
    """Rows of x [..., n] with mean square 1. ggml: GGML_OP_RMS_NORM. Errors: ShapeError.

    x: plain float, also the result's type. Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    return apply("rms_norm", x, name=name, eps=float(eps))


def l2_norm(x: Tensor, eps: float = 1e-6, *, name: str = "") -> Tensor:
    """Rows of x [..., n] divided by their length, at least eps. ggml: GGML_OP_L2_NORM.

    x: plain float, also the result's type. Errors: ShapeError.
    """
    return apply("l2_norm", x, name=name, eps=float(eps))


def group_norm(x: Tensor, groups: int, eps: float = 1e-5, *, name: str = "") -> Tensor:
    """`norm` over each of `groups` groups of channels of x [.., C, H, W]. ggml: GROUP_NORM.

    x: plain float, also the result's type. Source: Wu and He, arXiv 1803.08494. Errors: ShapeError.
    """
    return apply("group_norm", x, name=name, groups=groups, eps=float(eps))
