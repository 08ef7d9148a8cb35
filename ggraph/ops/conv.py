"""Convolution as patches times a matrix, and pooling.

Legend: N images, I input and O output channels, H W image sides, h w kernel sides, Y X result
sides. Stride s, padding p, dilation d are pairs (rows, columns):
Y = (H + 2p - d(h - 1) - 1) // s + 1, as in ggml. Padding is zeros in patches, absent from maxima,
and counted in means.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F16, F32
from ggraph.errors import ShapeError
from ggraph.ops.matmul import mul_mat
from ggraph.ops.rules import choice, expect, f32, integers, plain_float, rank, rule
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

Pair = tuple[int, int]
POOLS = ("max", "avg")


def _side(n: int, k: int, s: int, p: int, d: int) -> int:
    """Places of a kernel of size k along an axis of size n."""
    sound = k > 0 and s > 0 and p >= 0 and d > 0
    expect(sound, f"kernel {k}, stride {s}, padding {p}, dilation {d} make no sense")
    count = (n + 2 * p - d * (k - 1) - 1) // s + 1
    expect(count > 0, f"a kernel of {d * (k - 1) + 1} does not fit {n} + 2 * {p}")
    return count


def _sides(shape: Sequence[int], attrs: Attrs, dilation: Sequence[int] = (1, 1)) -> list[int]:
    keys = [integers(attrs, key, 2) for key in ("kernel", "stride", "padding")]
    return [_side(n, *sizes) for n, *sizes in zip(shape[-2:], *keys, dilation, strict=True)]


def _windows(x: Array, kernel: Pair, stride: Pair, dilation: Pair) -> Array:
    """A window on x [.., H, W] that shows its patches: [.., Y, X, h, w]."""
    reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    all_places = np.lib.stride_tricks.sliding_window_view(x, reach, (-2, -1))
    places: Array = all_places[..., :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    return places


def _padded(x: Array, padding: Pair, value: float) -> Array:
    """x [.., H, W] within a border of `value`."""
    border = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    return np.pad(x, border, constant_values=value)


def _im2col_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x = sources[0]
    rank(x, 4, 4)
    plain_float(x)
    h, w = integers(attrs, "kernel", 2)
    y_count, x_count = _sides(x.shape, attrs, integers(attrs, "dilation", 2))
    return Meta((x.shape[0], y_count, x_count, x.shape[1] * h * w), x.dtype)


def _im2col(x: Array, *, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Array:
    found = _windows(_padded(x, padding, 0), kernel, stride, dilation)  # [N, I, Y, X, h, w]
    patches = found.transpose(0, 2, 3, 1, 4, 5)  # [N, Y, X, I, h, w]
    return patches.reshape(*patches.shape[:3], x.shape[1] * kernel[0] * kernel[1])


def _attrs(
    kernel: Pair, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Attrs:
    return {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}


IM2COL = register(
    OpSpec(
        "im2col",
        infer=rule("im2col", "x", _im2col_rule),
        reference=_im2col,
        ggml="IM2COL",
        cost=lambda t: Cost(0, t.nbytes + t.sources[0].nbytes),
        examples=(
            Example((Arg((2, 3, 5, 6)),), _attrs((3, 2))),
            Example((Arg((1, 2, 7, 8)),), _attrs((3, 3), (2, 1), (1, 2), (2, 3))),
            Example((Arg((2, 1, 4, 4), F16),), _attrs((2, 2), (2, 2))),
            Example((Arg((1, 1, 1, 1)),), _attrs((1, 1))),
            Example((Arg((0, 2, 4, 4)),), _attrs((2, 2))),
        ),
        doc="im2col(x, kernel): the patch that a kernel meets at each place, as a row.",
    )
)


def _pool_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x = sources[0]
    rank(x, 2)
    plain_float(x)
    choice(attrs, "kind", POOLS)
    kernel, padding = integers(attrs, "kernel", 2), integers(attrs, "padding", 2)
    narrow = all(p < k for p, k in zip(padding, kernel, strict=True))
    expect(narrow, f"padding {padding} leaves windows of the kernel {kernel} empty")
    return Meta((*x.shape[:-2], *_sides(x.shape, attrs)), F32)


def _pool_2d(x: Array, *, kind: str, kernel: Pair, stride: Pair, padding: Pair) -> Array:
    least = kind == "max"
    wide = _padded(f32(x), padding, -np.inf if least else 0)
    found = _windows(wide, kernel, stride, (1, 1))  # [.., Y, X, h, w]
    if least:
        return f32(found.max((-1, -2)))
    return f32(found.sum((-1, -2), dtype=np.float64) / (kernel[0] * kernel[1]))


def _pooling(kind: str, kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> Attrs:
    return {"kind": kind, "kernel": kernel, "stride": stride, "padding": padding}


POOL_2D = register(
    OpSpec(
        "pool_2d",
        infer=rule("pool_2d", "x", _pool_rule),
        reference=_pool_2d,
        ggml="POOL_2D",
        examples=(
            Example((Arg((2, 5, 6)),), _pooling("max", (2, 3), (1, 2))),
            Example((Arg((2, 2, 5, 6)),), _pooling("avg", (3, 3), (2, 2), (1, 1))),
            Example((Arg((4, 4), F16),), _pooling("max", (3, 3), (1, 1), (2, 1))),
            Example((Arg((1, 1)),), _pooling("avg", (1, 1), (1, 1))),
            Example((Arg((0, 4, 4)),), _pooling("max", (2, 2), (2, 2))),
        ),
        doc="pool_2d(x, kind, kernel): the greatest or mean element of each window.",
    )
)


def im2col(
    x: Tensor,
    kernel: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    name: str = "",
) -> Tensor:
    """Patches of x [N, I, H, W] (plain float) as rows: [N, Y, X, I*h*w], of x's dtype.

    ggml: GGML_OP_IM2COL. Errors: ShapeError when the kernel does not fit.
    """
    return apply("im2col", x, name=name, **_attrs(kernel, stride, padding, dilation))


def conv_2d(
    w: Tensor,
    x: Tensor,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    name: str = "",
) -> Tensor:
    """w [O, I, h, w] contiguous over x [N, I, H, W] -> f32 view [N, O, Y, X] of [N, Y, X, O].

    A composition of im2col and mul_mat, as ggml_conv_2d. Errors: ShapeError.
    """
    if len(w.shape) != 4 or len(x.shape) != 4 or w.shape[1] != x.shape[1]:
        raise ShapeError(
            f"conv_2d: expected [O, I, h, w] and [N, I, H, W], "
            f"got %{w.name} {list(w.shape)} and %{x.name} {list(x.shape)}"
        )
    patches = im2col(x, (w.shape[2], w.shape[3]), stride, padding, dilation)  # [N, Y, X, I*h*w]
    n, rows, columns, size = patches.shape
    flat = mul_mat(w.reshape(w.shape[0], size), patches.reshape(n * rows * columns, size))
    return apply(
        "permute", flat.reshape(n, rows, columns, w.shape[0]), name=name, axes=(0, 3, 1, 2)
    )


def conv_1d(
    w: Tensor, x: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1, *, name: str = ""
) -> Tensor:
    """w [O, I, k] over x [N, I, L], both contiguous -> f32 view [N, O, Y] of [N, Y, O].

    A composition of im2col and mul_mat, as ggml_conv_1d. Errors: ShapeError.
    """
    if len(w.shape) != 3 or len(x.shape) != 3 or w.shape[1] != x.shape[1]:
        raise ShapeError(
            f"conv_1d: expected [O, I, k] and [N, I, L], "
            f"got %{w.name} {list(w.shape)} and %{x.name} {list(x.shape)}"
        )
    image = x.reshape(*x.shape[:2], 1, x.shape[2])  # [N, I, 1, L]
    patches = im2col(image, (1, w.shape[2]), (1, stride), (0, padding), (1, dilation))
    n, _, count, size = patches.shape
    flat = mul_mat(w.reshape(w.shape[0], size), patches.reshape(n, count, size))  # [N, Y, O]
    return apply("transpose", flat, name=name)


def pool_2d(
    x: Tensor,
    kind: str,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = (0, 0),
    *,
    name: str = "",
) -> Tensor:
    """Greatest ("max") or mean ("avg") element of windows of x [.., H, W] -> f32 [.., Y, X].

    stride is the kernel by default. ggml: GGML_OP_POOL_2D. Errors: ShapeError.
    """
    return apply("pool_2d", x, name=name, **_pooling(kind, kernel, stride or kernel, padding))


def pool_1d(
    x: Tensor,
    kind: str,
    kernel: int,
    stride: int | None = None,
    padding: int = 0,
    *,
    name: str = "",
) -> Tensor:
    """`pool_2d` along the last axis of contiguous x [.., L] -> f32 [.., Y]. ggml: POOL_1D."""
    image = x.reshape(*x.shape[:-1], 1, x.shape[-1])  # [.., 1, L]
    found = pool_2d(image, kind, (1, kernel), (1, stride or kernel), (0, padding))
    return apply("reshape", found, name=name, shape=(*x.shape[:-1], found.shape[-1]))
