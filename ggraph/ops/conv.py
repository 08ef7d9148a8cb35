"""Convolution, patches, and pooling.

Legend: N images, I input and O output channels, H W image sides, h w kernel sides, Y X result
sides. Stride s, padding p, dilation d are pairs (rows, columns):
Y = (H + 2p - d(h - 1) - 1) // s + 1, as in ggml. Padding is zeros in patches, absent from maxima,
and counted in means.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np

from ggraph.dtype import F16, F32
from ggraph.ops.copies import cont
from ggraph.ops.join import pad
from ggraph.ops.matmul import mul_mat
from ggraph.ops.rules import choice, expect, f32, integers, plain_float, rank, rule
from ggraph.ops.shape import narrow
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

Pair = tuple[int, int]
Shape = tuple[int, ...]
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


def _conv_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    return _convolved(sources, attrs, "[O, I, h, w]", lambda w, x: w[1] == x[1])


def _depthwise_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    return _convolved(sources, attrs, "[I, 1, h, w]", lambda w, x: w[:2] == (x[1], 1))


def _convolved(
    sources: Sequence[Tensor], attrs: Attrs, kernels: str, fits: Callable[[Shape, Shape], bool]
) -> Meta:
    w, x = sources
    plain_float(w)
    plain_float(x)
    sound = len(w.shape) == len(x.shape) == 4 and fits(w.shape, x.shape)
    expect(sound, f"expected {kernels} and [N, I, H, W]")
    sizes = integers(attrs, "stride", 2), integers(attrs, "dilation", 2)
    pairs = zip(x.shape[2:], w.shape[2:], *sizes, strict=True)
    sides = [_side(n, k, s, 0, d) for n, k, s, d in pairs]
    return Meta((x.shape[0], w.shape[0], *sides), F32)


def _conv_2d(w: Array, x: Array, *, stride: Pair, dilation: Pair) -> Array:
    places = _windows(f32(x), w.shape[2:], stride, dilation)  # [N, I, Y, X, h, w]
    found: Array = np.einsum("niyxhw,oihw->noyx", places, f32(w), optimize=True)
    return found


def _conv_2d_dw(w: Array, x: Array, *, stride: Pair, dilation: Pair) -> Array:
    places = _windows(f32(x), w.shape[2:], stride, dilation)  # [N, I, Y, X, h, w]
    found: Array = np.einsum("niyxhw,ihw->niyx", places, f32(w[:, 0]))
    return found


def _conv_cost(t: Tensor) -> Cost:
    w, x = t.sources
    return Cost(2 * t.size * w.size // max(w.shape[0], 1), w.nbytes + x.nbytes + t.nbytes)


def _steps(stride: Pair = (1, 1), dilation: Pair = (1, 1)) -> Attrs:
    return {"stride": stride, "dilation": dilation}


CONV_2D = register(
    OpSpec(
        "conv_2d",
        infer=rule("conv_2d", "w x", _conv_rule),
        reference=_conv_2d,
        ggml="CONV_2D",
        cost=_conv_cost,
        examples=(
            Example((Arg((4, 3, 3, 2)), Arg((2, 3, 5, 6))), _steps()),
            Example((Arg((5, 2, 3, 3), F16), Arg((1, 2, 7, 8))), _steps((2, 1), (2, 3)), 2e-3),
            Example((Arg((37, 2, 1, 1)), Arg((1, 2, 9, 5))), _steps()),
            Example((Arg((2, 1, 2, 2)), Arg((1, 1, 4, 4), F16)), _steps((2, 2)), 2e-3),
            Example((Arg((1, 1, 1, 1)), Arg((1, 1, 1, 1))), _steps()),
            Example((Arg((3, 2, 2, 2)), Arg((0, 2, 4, 4))), _steps()),
        ),
        doc="conv_2d(w, x): every kernel of w at every place of x, which is padded before.",
    )
)
CONV_2D_DW = register(
    OpSpec(
        "conv_2d_dw",
        infer=rule("conv_2d_dw", "w x", _depthwise_rule),
        reference=_conv_2d_dw,
        ggml="CONV_2D_DW",
        cost=_conv_cost,
        examples=(
            Example((Arg((3, 1, 3, 2)), Arg((2, 3, 5, 6))), _steps()),
            Example((Arg((2, 1, 3, 3), F16), Arg((1, 2, 7, 8))), _steps((2, 1), (2, 3)), 2e-3),
            Example((Arg((1, 1, 1, 1)), Arg((1, 1, 1, 1))), _steps()),
            Example((Arg((2, 1, 2, 2)), Arg((0, 2, 4, 4))), _steps()),
        ),
        doc="conv_2d_dw(w, x): channel by channel its own kernel at every place of x.",
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
    """w [O, I, h, w] over x [N, I, H, W], both plain float -> f32 [N, O, Y, X].

    Padding is a `pad` of x before. ggml: GGML_OP_CONV_2D. Errors: ShapeError.
    """
    return apply("conv_2d", w, _bordered(x, padding), name=name, **_steps(stride, dilation))


def conv_2d_dw(
    w: Tensor,
    x: Tensor,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    name: str = "",
) -> Tensor:
    """Depthwise: w [I, 1, h, w] over x [N, I, H, W], both plain float -> f32 [N, I, Y, X].

    Padding is a `pad` of x before. ggml: GGML_OP_CONV_2D_DW. Errors: ShapeError.
    """
    return apply("conv_2d_dw", w, _bordered(x, padding), name=name, **_steps(stride, dilation))


def _bordered(x: Tensor, padding: Pair) -> Tensor:
    """x [N, I, H, W] within a border of zeros."""
    if not any(integers({"padding": padding}, "padding", 2)):
        return x
    border = (*(0,) * (len(x.shape) - 2), *padding)
    return pad(x, border, border)


def conv_transpose_2d(w: Tensor, x: Tensor, stride: Pair = (1, 1), *, name: str = "") -> Tensor:
    """w [I, O, h, w] contiguous, spread by each place of x [N, I, H, W] -> f32 [N, O, Y, X].

    Y = (H - 1) s + h. Plain float both. What each place gives is one `mul_mat` of all taps; taps
    a stride apart then lie side by side, and the others are added. ggml: CONV_TRANSPOSE_2D, which
    has no padding either: cut the result. Errors: ShapeError.
    """
    s = integers({"stride": stride}, "stride", 2)
    sound = len(w.shape) == len(x.shape) == 4 and w.shape[0] == x.shape[1] and min(s) > 0
    expect(
        sound,
        f"conv_transpose_2d({w.label} {list(w.shape)}, {x.label} {list(x.shape)}): expected "
        f"[I, O, h, w], [N, I, H, W] and strides above 0, got {s}",
    )
    (n, i, *sides), (_, o, *taps) = x.shape, w.shape
    rows = cont(x.permute(0, 2, 3, 1)).reshape(n * prod(sides), i)  # [N*H*W, I]
    flat = mul_mat(w.reshape(i, o * prod(taps)).T, rows)  # [N*H*W, O*h*w]
    given = flat.reshape(n, *sides, o, *taps).permute(0, 3, 1, 4, 2, 5)  # [N, O, H, h, W, w]
    turns = [-(-t // step) for t, step in zip(taps, s, strict=True)]
    total: Tensor | None = None
    for at in product(*map(range, turns)):
        part = _spread(given, at, turns, s)
        total = part if total is None else total + part
    assert total is not None, turns
    down, across = ((a - 1) * b + t for a, b, t in zip(sides, s, taps, strict=True))
    return apply("cont", total[:, :, :down, :across], name=name)


def _spread(given: Tensor, at: Sequence[int], turns: Sequence[int], s: Sequence[int]) -> Tensor:
    """The taps at[0] s .. and at[1] s .. of [N, O, H, h, W, w], where they fall: [N, O, Y, X] in
    whole strides."""
    n, o, rows, _, columns, _ = given.shape
    box = given
    for axis, first, step in zip((3, 5), at, s, strict=True):
        count = min(step, given.shape[axis] - first * step)
        box = narrow(box, axis, first * step, count)
    box = pad(box, (0, 0, 0, s[0] - box.shape[3], 0, s[1] - box.shape[5]))
    image = box.reshape(n, o, rows * s[0], columns * s[1])
    before = (0, 0, *(a * step for a, step in zip(at, s, strict=True)))
    after = (0, 0, *((t - 1 - a) * step for t, a, step in zip(turns, at, s, strict=True)))
    return pad(image, after, before) if any((*before, *after)) else image


def conv_1d(
    w: Tensor, x: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1, *, name: str = ""
) -> Tensor:
    """w [O, I, k] over x [N, I, L], both plain float -> f32 [N, O, Y].

    `conv_2d` of images of one row. ggml: ggml_conv_1d. Errors: ShapeError.
    """
    rank(w, 3, 3)
    rank(x, 3, 3)
    kernels = w.reshape(*w.shape[:2], 1, w.shape[2])  # [O, I, 1, k]
    image = x.reshape(*x.shape[:2], 1, x.shape[2])  # [N, I, 1, L]
    found = conv_2d(kernels, image, (1, stride), (0, padding), (1, dilation))  # [N, O, 1, Y]
    shape = (x.shape[0], w.shape[0], found.shape[3])
    return apply("reshape", found, name=name, shape=shape)


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
    step = kernel if stride is None else stride
    return apply("pool_2d", x, name=name, **_pooling(kind, kernel, step, padding))


def pool_1d(
    x: Tensor,
    kind: str,
    kernel: int,
    stride: int | None = None,
    padding: int = 0,
    *,
    name: str = "",
) -> Tensor:
    """`pool_2d` along the last axis of x [.., L] -> f32 [.., Y]. ggml: POOL_1D."""
    rank(x, 1)
    image = x.reshape(*x.shape[:-1], 1, x.shape[-1])  # [.., 1, L]
    step = kernel if stride is None else stride
    found = pool_2d(image, kind, (1, kernel), (1, step), (0, padding))
    return apply("reshape", found, name=name, shape=(*x.shape[:-1], found.shape[-1]))
