"""Towers: what makes rows for a decoder of an image's tiles, out of a folder or llama.cpp's mmproj.

A tile is a square of pixels, cut into patches. A vision transformer (SigLIP) reads all of its
patches, each of which sees all others; several neighbours then become one row of the decoder:
joined and through a product (Idefics3), or their mean, through a norm and a product (Gemma 3).
Patches are not in the order of lines: those that become one row stand together, so that joining
them is no work, and `positions` say where each is. Towers that take images of any size are in
`tower_qwen`; files are read in `tower_files`.

Sources: Zhai et al. 2023 (arXiv 2303.15343), Laurencon et al. 2024 (arXiv 2408.12637), Gemma team
2025 (arXiv 2503.19786); transformers' `modeling_idefics3` and `modeling_gemma3`.

Legend: T patches of a tile, P numbers of a patch, S pixels of a tile's side, N rows of a tile, W
width of a patch's state, E width of a decoder's row.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes, input, ops
from ggraph.decode.model import StepShape
from ggraph.formats.lazy_array import Storage
from ggraph.tensor import Kind

from . import blocks
from .architecture import Tensors
from .config import DecoderConfig
from .families import gpt2
from .step import Step

IDEFICS3, GEMMA3 = "idefics3", "gemma3"  # as llama.cpp calls projectors, and what belongs to them
QWEN2, QWEN25, QWEN3 = "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"
CHANNELS = 3
MOST_ROWS = 256  # of a block: a step of a batch must take it whole
JOINED = "mm.model.fc"  # the product that makes rows of joined patches
MEAN_NORM, MEAN = "mm.soft_emb_norm", "mm.input_projection"  # the norm and product of their mean


@dataclass(frozen=True)
class Sight:
    """How a tower of a `kind` looks at an image: tiles of `size` pixels a side, in patches of
    `patch`, of which `merge` on a side become one row; images are resized to `longest` and split,
    or where that is 0 each becomes one tile. Pixels have `mean` and `std`, of 0 to 1, for each
    channel. Where there are a `fewest` and a `most`, an image becomes one tile of so many pixels,
    whose sides are whole multiples of `size`."""

    kind: str
    size: int
    patch: int
    merge: int
    longest: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fewest: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        step = self.patch * self.merge
        if min(self.size, self.patch, self.merge) < 1 or self.size % step or self.longest < 0:
            raise ModelError(
                f"tower: tiles of {self.size} pixels in patches of {self.patch}, of which "
                f"{self.merge} on a side become one row, of images of up to {self.longest}"
            )
        if len(self.mean) != CHANNELS or len(self.std) != CHANNELS or 0 in self.std:
            raise ModelError(f"tower: pixels with mean {self.mean} and deviation {self.std}")
        if self.most and not (self.size == step and 0 < self.fewest <= self.most >= step**2):
            raise ModelError(
                f"tower: images of {self.fewest} to {self.most} pixels, of whole rows of {step}"
            )
        if self.together and self.rows > MOST_ROWS:
            raise ModelError(f"tower: {self.rows} rows that see one another; at most {MOST_ROWS}")

    @property
    def together(self) -> bool:
        """Whether a tile's rows see one another in the decoder, too."""
        return self.kind == GEMMA3

    @property
    def side(self) -> int:
        """Patches on a tile's side."""
        return self.size // self.patch

    @property
    def rows(self) -> int:
        """N, rows of a tile of `size` pixels a side."""
        return (self.side // self.merge) ** 2

    def grid(self, tile: Array) -> tuple[int, int]:
        """Lines and columns of the rows of a tile u8 [H, W, 3]."""
        step = self.patch * self.merge
        return tile.shape[0] // step, tile.shape[1] // step

    def count(self, tile: Array) -> int:
        """T, patches of a tile."""
        lines, columns = self.grid(tile)
        return lines * columns * self.merge**2

    @property
    def positions(self) -> Array:
        """i32 [T]: where each patch stands, counted by lines."""
        lines = np.arange(self.side**2, dtype=np.int32).reshape(self.side, self.side)
        return self.neighbours(lines[:, :, None]).reshape(-1)

    def patches(self, tile: Array) -> Array:
        """f32 [T, P] of a tile u8 [H, W, 3]: of a patch all of one channel, then the next."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        values = (tile.astype(np.float32) / 255 - mean) / std
        p, (n, m) = self.patch, (side // self.patch for side in tile.shape[:2])
        cut = values.reshape(n, p, m, p, CHANNELS).transpose(0, 2, 4, 1, 3)
        return self.neighbours(cut.reshape(n, m, -1))

    def neighbours(self, cut: Array) -> Array:
        """[T, n] of a grid [lines, columns, n]: those that become one row behind one another."""
        (lines, columns), m = cut.shape[:2], self.merge
        grid = cut.reshape(lines // m, m, columns // m, m, -1).swapaxes(1, 2)
        return np.ascontiguousarray(grid.reshape(lines * columns, -1))


@dataclass(frozen=True, eq=False)
class Tower:
    """A tower ready to be built."""

    name: str
    config: DecoderConfig = field(repr=False)
    sight: Sight
    catalogue: Tensors = field(repr=False)

    @property
    def width(self) -> int:
        """The width of the rows that it makes: E, for as many layers of a decoder as take one."""
        return self.catalogue[f"{JOINED if self.sight.kind == IDEFICS3 else MEAN}.weight"].shape[0]

    def build(self, count: int) -> Graph:
        """The graph of one tile of so many patches: `patches` f32 [T, P], `positions` i32 [T], and
        `groups` i32 [N, T / N], the patches of each row, where their mean is taken; to `rows` f32
        [N, E]."""
        return self.checked(build(self.step(count), self.sight))

    def step(self, count: int, listed: int = 0) -> Step:
        """What a graph of so many patches is made with; perhaps with lists of what each sees."""
        shape = StepShape(count, count, count, count, cache_dtype=dtypes.F32, listed=listed)
        return Step(self.config, self.catalogue, shape)

    def checked(self, graph: Graph) -> Graph:
        """This graph of it. ModelError where it leaves tensors out."""
        left = self.catalogue.keys() - {t.name for t in graph.leaves(Kind.WEIGHT)}
        if left:
            raise ModelError(f"{self.name}: no place for tensor {min(left)!r} in this tower")
        return graph

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight."""
        return self.catalogue[t.name].storage

    def feeds(self, tile: Array) -> dict[str, Array]:
        """The inputs for a tile u8 [S, S, 3]."""
        return {"patches": self.sight.patches(tile), **self._alike}

    @cached_property
    def _alike(self) -> dict[str, Array]:
        """The inputs that are the same for every tile."""
        found = {"positions": self.sight.positions}
        if self.sight.kind == GEMMA3:
            count = self.sight.side**2
            found["groups"] = np.arange(count, dtype=np.int32).reshape(self.sight.rows, -1)
        return found


def build(s: Step, sight: Sight) -> Graph:
    """The graph of a tile."""
    c, count = s.config, s.shape.rows
    wide = s.catalogue["patch_embd.weight"].shape[1]
    x = blocks.linear(s, input("patches", (count, wide)), "patch_embd", c.hidden_size)  # [T, W]
    at = s.w("position_embd.weight", c.max_position_embeddings, c.hidden_size)
    x = x + ops.get_rows(at, s.positions, name="position")
    for i in range(c.num_hidden_layers):
        x = gpt2.layer(s, x, i)
    x = blocks.layer_norm(s, x, "output_norm")
    rows = (joined if sight.kind == IDEFICS3 else averaged)(s, x, sight.rows)
    return Graph.of({"rows": rows}, name=f"{c.architecture} tower")


def joined(s: Step, x: Tensor, count: int) -> Tensor:
    """Patches [T, W] side by side, through a product: [N, E]."""
    together = x.reshape(count, x.size // count)
    return blocks.linear(s, together, JOINED, s.catalogue[f"{JOINED}.weight"].shape[0])


def averaged(s: Step, x: Tensor, count: int) -> Tensor:
    """The mean of patches [T, W], through a norm and a product: [N, E]. The mean is attention that
    finds all of its patches alike, as that of an encoder's rows (`vectors`)."""
    c = s.config
    parts = x.reshape(x.shape[0], c.num_attention_heads, c.head_dim)  # [T, H, D]
    groups = input("groups", (count, x.shape[0] // count), dtypes.I32)
    mean = ops.flash_attn(ops.rows(parts, 0, count), parts, parts, groups, scale=0.0)
    even = blocks.norm(s, mean.reshape(count, x.shape[1]), MEAN_NORM)
    return blocks.linear(s, even, MEAN, s.catalogue[f"{MEAN}.weight"].shape[0])
