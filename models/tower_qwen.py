"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which take images of any size.

An image is one tile, resized so that it is whole rows. Each patch is turned by its line and its
column, half of a head's pairs by each. In Qwen2.5-VL patches of most layers see those of their
window alone. In Qwen3-VL they have learned positions, too, between the nearest of a square; and
what some layers make becomes rows as well, which a decoder adds behind its own first layers
(DeepStack). Kernels of patches are for two images of a video, of which a picture is both.

Sources: Wang et al. 2024 (arXiv 2409.12191), Bai et al. 2025 (arXiv 2502.13923), Meng et al. 2024
(arXiv 2406.04334); transformers' `modeling_qwen2_vl`, `modeling_qwen2_5_vl`, `modeling_qwen3_vl`.

Legend: T patches, P numbers of a patch, N rows of an image, W width of a patch's state, D numbers
of a head, E width of a decoder's row, L patches of a window.
"""

import math

import numpy as np

from ggraph import Array, Graph, Tensor, dtypes, input, ops

from . import blocks
from .step import Step
from .tower import QWEN2, QWEN25, Sight, Tower

FIRST, SECOND = "patch_embd", "patch_embd_1"  # the kernel's halves
MERGE = ("output_norm", "mm.0", "mm.2")  # what makes rows: a norm, and two products
AXES = ("line", "column")
CORNERS = 4


def deep(layer: int) -> tuple[str, str, str]:
    """The same of what a layer has made."""
    lead = f"v.deepstack.{layer}."
    return f"{lead}norm", f"{lead}fc1", f"{lead}fc2"


class QwenTower(Tower):
    """A tower for images of any size."""

    @property
    def width(self) -> int:
        """The width of the rows that it makes: E, for as many layers of a decoder as take one."""
        ends = [n for n in self.catalogue if n.endswith(("mm.2.weight", ".fc2.weight"))]
        return sum(self.catalogue[n].shape[0] for n in ends)

    def build(self, count: int) -> Graph:
        """The graph of one tile of so many patches: `patches` f32 [T, P], where each stands (i32
        [T] by axis), and what turns by that (f32 [D / 2]); `mask` i32 [T, L], which others of its
        window each sees; learned positions around it, i32 [T], and how much of each, f32 [T, 1]; to
        `rows` f32 [N, layers * E]."""
        return self.checked(build(self.step(count, self.config.sliding_window or 0), self.sight))

    def feeds(self, tile: Array) -> dict[str, Array]:
        """The inputs for a tile u8 [H, W, 3]."""
        sight, at = self.sight, places(self.sight, tile)
        found = {
            "patches": sight.patches(tile),
            **dict(zip(AXES, np.ascontiguousarray(at.T), strict=True)),
            **turns(self.config.head_dim, self.config.rope.freq_base),
        }
        if self.config.sliding_window:
            found["mask"] = windows(at, math.isqrt(self.config.sliding_window))
        if "position_embd.weight" in self.catalogue:
            side = math.isqrt(self.catalogue["position_embd.weight"].shape[0])
            found |= corners(at, tile.shape[0] // sight.patch, tile.shape[1] // sight.patch, side)
        return found


def places(sight: Sight, tile: Array) -> Array:
    """i32 [T, 2]: line and column of each patch."""
    lines, columns = (side // sight.patch for side in tile.shape[:2])
    return sight.neighbours(np.indices((lines, columns), np.int32).transpose(1, 2, 0))


def windows(at: Array, side: int) -> Array:
    """i32 [T, side * side]: the patches, of which there are so many on a side, of each one's
    window; windows begin at the first line and column."""
    line, column = at.T // side
    number = line * (column.max() + 1) + column
    order = np.argsort(number, kind="stable").astype(np.int32)
    ends = np.cumsum(np.bincount(number))
    found = np.full((len(at), side * side), -1, np.int32)
    for own in np.split(order, ends[:-1]):
        found[own, : len(own)] = own
    return found


def turns(d: int, base: float) -> dict[str, Array]:
    """What divides the frequencies of each pair for lines and columns, f32 [D / 2]: the first half
    turn by the line, the others by the column, at the same frequencies, and not at all by the
    other. Frequencies are base^(-4i / D) there, and so those of a head with the base's square."""
    ahead = np.ones(d // 4, np.float32)
    away = np.full(d // 4, np.inf, np.float32)
    return {
        "line_turns": np.concatenate([ahead, away]),
        "column_turns": np.concatenate([away, ahead / np.float32(base)]),
    }


def corners(at: Array, lines: int, columns: int, side: int) -> dict[str, Array]:
    """Of a square of learned positions, whose corners are the image's, the four around each patch:
    their numbers i32 [T], and how much of each is taken, f32 [T, 1]."""
    sizes = np.array([lines, columns])
    place = at.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1).astype("f4")
    before = np.floor(place)
    share = place - before
    found: dict[str, Array] = {}
    for i in range(CORNERS):
        step = np.array([i // 2, i % 2])
        near = np.minimum(before.astype(np.int32) + step, side - 1)
        part = np.where(step == 1, share, 1 - share).prod(1, keepdims=True)
        found[f"corner.{i}"] = (near[:, 0] * side + near[:, 1]).astype(np.int32)
        found[f"part.{i}"] = part.astype(np.float32)
    return found


def build(s: Step, sight: Sight) -> Graph:
    """The graph of a tile."""
    c, count = s.config, s.shape.rows
    flat = input("patches", (count, s.catalogue[f"{FIRST}.weight"].shape[1]))
    x = blocks.linear(s, flat, FIRST, c.hidden_size) + blocks.linear(s, flat, SECOND, c.hidden_size)
    if s.has("position_embd.weight"):
        x = x + learned(s, count)
    at = [input(axis, (count,), dtypes.I32) for axis in AXES]
    by = [input(f"{axis}_turns", (c.head_dim // 2,)) for axis in AXES]
    found = list[Tensor]()
    for i in range(c.num_hidden_layers):
        x = layer(s, x, i, sight.kind, list(zip(at, by, strict=True)))
        norm, *products = deep(i)
        if s.has(f"{norm}.weight"):
            found.append(rows_of(s, normed(s, joined(x, sight), norm), products))
    norm, *products = MERGE
    first = rows_of(s, joined(normed(s, x, norm), sight), products)
    rows = ops.concat([first, *found], axis=-1) if found else first
    return Graph.of({"rows": rows}, name=f"{c.architecture} tower")


def learned(s: Step, count: int) -> Tensor:
    """Learned positions [T, W], between the four around each patch."""
    table = s.w("position_embd.weight", s.config.max_position_embeddings, s.config.hidden_size)
    parts = [
        ops.get_rows(table, input(f"corner.{i}", (count,), dtypes.I32))
        * input(f"part.{i}", (count, 1))
        for i in range(CORNERS)
    ]
    return parts[0] + parts[1] + parts[2] + parts[3]


def normed(s: Step, x: Tensor, name: str) -> Tensor:
    """A layer norm, or where it has no bias an RMS norm."""
    return (blocks.layer_norm if s.has(f"{name}.bias") else blocks.norm)(s, x, name)


def layer(s: Step, x: Tensor, i: int, kind: str, axes: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Layer i: [T, W] -> [T, W]."""
    c, blk = s.config, f"blk.{i}"
    y = normed(s, x, f"{blk}.attn_norm")
    q, k, v = (blocks.heads(s, y, i, role, c.num_attention_heads) for role in "qkv")
    base = c.rope.freq_base**2  # see `turns`
    for at, by in axes:
        q, k = (ops.rope(h, at, by, mode="neox", freq_base=base) for h in (q, k))
    seen = s.mask if c.slides(i) else None
    mixed = ops.flash_attn(q, k, v, seen, scale=c.head_dim**-0.5, name=f"{blk}.attn")
    h = x + blocks.linear(s, mixed.reshape(*x.shape), f"{blk}.attn_output", c.hidden_size)
    return h + feed_forward(s, normed(s, h, f"{blk}.ffn_norm"), i, kind)


def feed_forward(s: Step, x: Tensor, i: int, kind: str) -> Tensor:
    """Gated by SiLU, or plain, with GELU as the kind has it: [T, W] -> [T, W]."""
    if kind == QWEN25:
        return blocks.swiglu(s, x, i)
    up = blocks.linear(s, x, f"blk.{i}.ffn_up", s.config.intermediate_size)
    hidden = ops.gelu_quick(up) if kind == QWEN2 else ops.gelu(up)
    return blocks.linear(s, hidden, f"blk.{i}.ffn_down", s.config.hidden_size)


def joined(x: Tensor, sight: Sight) -> Tensor:
    """Those patches [T, W] that become one row side by side: [N, merge^2 * W]."""
    few = sight.merge**2
    return x.reshape(x.shape[0] // few, few * x.shape[1])


def rows_of(s: Step, x: Tensor, products: list[str]) -> Tensor:
    """Joined patches x through two products, with exact GELU between: [N, E]."""
    first, second = (s.catalogue[f"{name}.weight"].shape[0] for name in products)
    hidden = ops.gelu_erf(blocks.linear(s, x, products[0], first))
    return blocks.linear(s, hidden, products[1], second)
