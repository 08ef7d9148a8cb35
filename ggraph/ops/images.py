"""Images made larger by whole factors.

Legend: H W image sides, s t factors of rows and columns.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32
from ggraph.ops.rules import choice, expect, f32, integers, moved, rank, rule
from ggraph.tensor import Arg, Array, Attrs, Example, Meta, OpSpec, Tensor, apply, register

MODES = ("nearest", "bilinear")


def _rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, factor = sources[0], integers(attrs, "factor", 2)
    rank(x, 2)
    expect(x.dtype is F32, f"{x.label} is {x.dtype}: expected f32, cast it")
    choice(attrs, "mode", MODES)
    expect(min(factor) > 0, f"factor={factor}: expected whole numbers above 0")
    sides = (n * f for n, f in zip(x.shape[-2:], factor, strict=True))
    return Meta((*x.shape[:-2], *sides), F32)


def neighbours(n: int, factor: int) -> tuple[Array, Array, Array]:
    """For each result along an axis of n pixels: the pixels before and after its place, i32, and
    how far it is from the one to the other, f32. Pixels have their values at their centres; the
    outermost go on beyond the edge."""
    place = (np.arange(n * factor) + 0.5) / factor - 0.5
    before = np.floor(place)
    first, last = (np.clip(before + i, 0, n - 1).astype(np.int32) for i in (0, 1))
    return first, last, (place - before).astype(np.float32)


def _upscale(x: Array, *, factor: tuple[int, int], mode: str) -> Array:
    (*lead, height, width), (s, t) = x.shape, factor
    if mode == "nearest":
        spread = x[..., :, None, :, None]
        whole = (*lead, height * s, width * t)
        return np.broadcast_to(spread, (*lead, height, s, width, t)).reshape(whole)
    above, below, down = neighbours(height, s)
    rows = x[..., above, :] * (1 - down)[:, None] + x[..., below, :] * down[:, None]
    left, right, across = neighbours(width, t)
    return f32(rows[..., left] * (1 - across) + rows[..., right] * across)


def _attrs(mode: str, *factor: int) -> Attrs:
    return {"factor": factor, "mode": mode}


UPSCALE = register(
    OpSpec(
        "upscale",
        infer=rule("upscale", "x", _rule),
        reference=_upscale,
        ggml="UPSCALE",
        cost=moved,
        examples=tuple(
            Example((Arg(shape),), _attrs(mode, *factor))
            for mode in MODES
            for shape, factor in (
                ((2, 3, 4, 5), (2, 2)),
                ((2, 4, 7), (3, 1)),
                ((1, 1), (2, 4)),
                ((0, 4, 4), (2, 2)),
            )
        ),
        doc="upscale(x, factor, mode): each pixel as many, alike or between its neighbours.",
    )
)


def upscale(x: Tensor, factor: tuple[int, int], mode: str = "nearest", *, name: str = "") -> Tensor:
    """x f32 [.., H, W] with each pixel as s * t -> f32 [.., H*s, W*t].

    mode: "nearest", or "bilinear", which weighs the four nearest centres and goes on beyond the
    edge with its pixels. ggml: GGML_OP_UPSCALE. Errors: ShapeError.
    """
    return apply("upscale", x, name=name, factor=factor, mode=mode)
