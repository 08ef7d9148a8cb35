"""Towers: what makes rows for a decoder of an image's tiles, out of a folder or llama.cpp's mmproj.

A tile is a square of pixels, cut into patches. A vision transformer (SigLIP) reads all of its
patches, each of which sees all others; several neighbours then become one row of the decoder.
Patches are not in the order of lines: those that become one row stand together, so that joining
them is no work, and `positions` say where each is.

Sources: Zhai et al. 2023 (arXiv 2303.15343), Laurencon et al. 2024 (arXiv 2408.12637);
transformers' `modeling_idefics3`; llama.cpp's `clip.cpp` for names and keys of GGUF.

Legend: T patches of a tile, P numbers of a patch, S pixels of a tile's side, N rows of a tile, W
width of a patch's state, E width of a decoder's row.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, input, ops
from ggraph.decode.model import StepShape
from ggraph.dtype import F32
from ggraph.formats.checkpoint import Checkpoint
from ggraph.formats.hf import read_json
from ggraph.formats.lazy_array import Storage
from ggraph.tensor import Kind

from . import blocks
from .architecture import Architecture, Tensors
from .blocks import Step
from .config import DecoderConfig, Keys, Rope
from .families import gpt2
from .registry import sanitize

KIND = "idefics3"  # as llama.cpp calls the projector, and whatever belongs to it
MMPROJ = "clip"  # what its files of towers call their architecture
CLASSES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
CHANNELS = 3
MERGED = "mm.model.fc"  # the product that makes rows of joined patches
_VISION, _GGUF = "clip.vision.", "GGUF metadata"
_PIXELS = ("image_mean", "image_std")
# As GGUF files name a layer's tensors, and as `blocks` do
_LAYER = {"attn_out": "attn_output", "ln1": "attn_norm", "ln2": "ffn_norm"}
_TOPS = {
    "v.patch_embd": "patch_embd", "v.position_embd": "position_embd", "v.post_ln": "output_norm",
    MERGED: MERGED,
}  # fmt: skip


@dataclass(frozen=True)
class Sight:
    """How a tower looks at an image: tiles of `size` pixels a side, in patches of `patch`, of which
    `merge` on a side become one row; images are resized to `longest` and split, or where that is 0
    each becomes one tile. Pixels have `mean` and `std`, of 0 to 1, for each channel."""

    size: int
    patch: int
    merge: int
    longest: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        step = self.patch * self.merge
        if min(self.size, self.patch, self.merge) < 1 or self.size % step or self.longest < 0:
            raise ModelError(
                f"tower: tiles of {self.size} pixels in patches of {self.patch}, of which "
                f"{self.merge} on a side become one row, of images of up to {self.longest}"
            )
        if len(self.mean) != CHANNELS or len(self.std) != CHANNELS or 0 in self.std:
            raise ModelError(f"tower: pixels with mean {self.mean} and deviation {self.std}")

    @property
    def side(self) -> int:
        """Patches on a tile's side."""
        return self.size // self.patch

    @property
    def rows(self) -> int:
        """N, rows of a tile."""
        return (self.side // self.merge) ** 2

    @property
    def positions(self) -> Array:
        """i32 [T]: where each patch stands, counted by lines."""
        lines = np.arange(self.side**2, dtype=np.int32).reshape(self.side, self.side)
        return self._together(lines[:, :, None]).reshape(-1)

    def patches(self, tile: Array) -> Array:
        """f32 [T, P] of a tile u8 [S, S, 3]: of a patch all of one channel, then the next."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        values = (tile.astype(np.float32) / 255 - mean) / std
        p, n = self.patch, self.side
        cut = values.reshape(n, p, n, p, CHANNELS).transpose(0, 2, 4, 1, 3)
        return self._together(cut.reshape(n, n, -1))

    def _together(self, cut: Array) -> Array:
        """[T, n] of a grid [side, side, n]: those that become one row behind one another."""
        m, few = self.merge, self.side // self.merge
        grid = cut.reshape(few, m, few, m, -1).swapaxes(1, 2)
        return np.ascontiguousarray(grid.reshape(self.side**2, -1))


@dataclass(frozen=True, eq=False)
class Tower:
    """A tower ready to be built."""

    name: str
    config: DecoderConfig = field(repr=False)
    sight: Sight
    catalogue: Tensors = field(repr=False)

    @property
    def width(self) -> int:
        """E, the width of the rows that it makes."""
        return self.catalogue[f"{MERGED}.weight"].shape[0]

    def build(self) -> Graph:
        """The graph of one tile: `patches` f32 [T, P], `positions` i32 [T], and `mask` f32 [T, T]
        to `rows` f32 [N, E]."""
        count = self.sight.side**2
        shape = StepShape(count, count, count, count, cache_dtype=F32)
        graph = build(Step(self.config, self.catalogue, shape))
        left = self.catalogue.keys() - {t.name for t in graph.leaves(Kind.WEIGHT)}
        if left:
            raise ModelError(f"{self.name}: no place for tensor {min(left)!r} in this tower")
        return graph

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight."""
        return self.catalogue[t.name].storage

    def stored(self) -> Tensors:
        """The tensors as a GGUF file has them, where the patches' matrix is a convolution's."""
        found: Tensors = {}
        for title, t in self.catalogue.items():
            name = _written(title)
            if title == "patch_embd.weight":
                p = self.sight.patch
                kernel = (t.shape[0], CHANNELS, p, p)
                t = replace(t, shape=kernel, storage=t.data.reshape(kernel))
            found[name] = replace(t, name=name)
        return found

    def feeds(self, tile: Array) -> dict[str, Array]:
        """The inputs for a tile u8 [S, S, 3]."""
        return {"patches": self.sight.patches(tile), **self._alike}

    @cached_property
    def _alike(self) -> dict[str, Array]:
        """The inputs that are the same for every tile; all patches see one another."""
        count = self.sight.side**2
        mask = np.zeros((count, count), np.float32)
        return {"positions": self.sight.positions, "mask": mask}


def build(s: Step) -> Graph:
    """The graph of a tile."""
    c, count = s.config, s.shape.rows
    wide = s.catalogue["patch_embd.weight"].shape[1]
    x = blocks.linear(s, input("patches", (count, wide)), "patch_embd", c.hidden_size)  # [T, W]
    at = s.w("position_embd.weight", c.max_position_embeddings, c.hidden_size)
    x = x + ops.get_rows(at, s.positions, name="position")
    for i in range(c.num_hidden_layers):
        x = gpt2.layer(s, x, i)
    x = blocks.layer_norm(s, x, "output_norm")
    table = s.catalogue[f"{MERGED}.weight"].shape
    joined = x.reshape(x.size // table[1], table[1])  # [N, W of a row's patches]
    return Graph.of({"rows": blocks.linear(s, joined, MERGED, table[0])}, name=f"{KIND} tower")


NAMES = Architecture(
    KIND, build, causal=False, layer_prefix=r"model\.vision_model\.encoder\.layers\.",
    layer_names={
        "self_attn.out_proj": "attn_output", "layer_norm1": "attn_norm", "layer_norm2": "ffn_norm",
        "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    },
    top_names={
        "model.vision_model.embeddings.patch_embedding.weight": "patch_embd.weight",
        "model.vision_model.embeddings.patch_embedding.bias": "patch_embd.bias",
        "model.vision_model.embeddings.position_embedding.weight": "position_embd.weight",
        "model.vision_model.post_layernorm.weight": "output_norm.weight",
        "model.vision_model.post_layernorm.bias": "output_norm.bias",
        "model.connector.modality_projection.proj.weight": f"{MERGED}.weight",
    },
)  # fmt: skip
"""Names of a folder's tensors."""
OWN = ("model.vision_model.", "model.connector.")  # what a folder calls a tower's tensors
HF_DEFAULTS = {  # of transformers' `Idefics3VisionConfig`
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_channels": CHANNELS, "image_size": 224, "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip


def tower_of(checkpoint: Checkpoint) -> Tower | None:
    """The tower in a model's folder; None where there is none, or one that is not known here.
    ModelError for one that is known and does not fit together."""
    named = checkpoint.metadata.get("architectures") or []
    if checkpoint.format != "hf" or not set(named) & set(CLASSES):
        return None
    told = Keys(checkpoint.metadata, "config.json")
    k = Keys({**HF_DEFAULTS, **told.mapping("vision_config")}, "config.json vision_config")
    act = k.get("hidden_act")
    if act not in (*gpt2.EXACT, *gpt2.TANH):
        raise ModelError(f"tower: hidden_act {act!r:.60}; known: {', '.join(gpt2.TANH)}")
    sight = _seen_by(Path(checkpoint.path), k, told.integer("scale_factor", 2))
    config = _config(
        sight, k.integer("hidden_size"), k.integer("intermediate_size"),
        k.integer("num_hidden_layers"), k.integer("num_attention_heads"),
        k.real("layer_norm_eps"), exact=act in gpt2.EXACT,
    )  # fmt: skip
    held = {n: t for n, t in checkpoint.tensors.items() if n.startswith(OWN)}
    layer = re.compile(NAMES.layer_prefix + r"(\d+)\.")
    count = 1 + max((int(m[1]) for n in held if (m := layer.match(n))), default=-1)
    if count > config.num_hidden_layers:  # which `sanitize` would take for a decoder's that draft
        told_of = f"{config.num_hidden_layers} in the config"
        raise ModelError(f"tower: {count} layers in the files, {told_of}")
    return _made(Path(checkpoint.path).name, config, sight, sanitize(held, config, NAMES))


def _seen_by(folder: Path, k: Keys, merge: int) -> Sight:
    """As the folder's processor is configured; by its defaults where no file says so."""
    files = ("preprocessor_config.json", "processor_config.json")
    found = [read_json(folder / f) for f in files if (folder / f).is_file()]
    nested = [v.get("image_processor", v) for v in found]
    told: Mapping[str, Any] = next((v for v in nested if "image_mean" in v), {})
    p, size = Keys(told, "the image processor's config"), k.integer("image_size")
    tile = Keys(p.mapping("max_image_size"), "max_image_size").integer("longest_edge", size)
    if tile != size:
        raise ModelError(f"tower: tiles of {tile} pixels for a tower of {size}")
    whole = not p.flag("do_image_splitting", True)
    longest = Keys(p.mapping("size"), "size").integer("longest_edge", 4 * size)
    half = (0.5,) * CHANNELS
    mean, std = (p.reals(n) if p.has(n) else half for n in _PIXELS)
    return Sight(size, k.integer("patch_size"), merge, 0 if whole else longest, mean, std)


def open_mmproj(path: Path, checkpoint: Checkpoint) -> Tower:
    """The tower in one of llama.cpp's GGUF files beside a model's. ModelError for another file, or
    one that does not fit together."""
    if checkpoint.architecture != MMPROJ:
        raise ModelError(
            f"{path} holds a model ({checkpoint.architecture}), and no tower for images"
        )
    told = Keys(checkpoint.metadata, _GGUF)
    kind = told.get("clip.vision.projector_type", told.get("clip.projector_type"))
    if kind != KIND:
        raise ModelError(f"{path}: a tower of kind {kind!r:.60}; known: {KIND!r} (SmolVLM)")
    k = Keys(checkpoint.metadata, _GGUF, _VISION)
    size = k.integer("image_size")
    sight = Sight(
        size, k.integer("patch_size"), k.integer("projector.scale_factor"),
        k.integer("preproc_image_size", 4 * size), *(_channels(checkpoint, n) for n in _PIXELS),
    )  # fmt: skip
    config = _config(
        sight, k.integer("embedding_length"), k.integer("feed_forward_length"),
        k.integer("block_count"), k.integer("attention.head_count"),
        k.real("attention.layer_norm_epsilon"),
    )  # fmt: skip
    return _made(path.stem, config, sight, _ours(checkpoint.tensors, config.intermediate_size))


def _channels(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    """A number for each channel."""
    held = checkpoint.metadata.get(f"{_VISION}{name}")
    listed = held.tolist() if isinstance(held, np.ndarray) else held
    return Keys({name: listed}, _GGUF).reals(name, CHANNELS)


def _ours(tensors: Mapping[str, Any], wide: int) -> Tensors:
    """A GGUF file's tensors under the names of `blocks`."""
    found: Tensors = {}
    for name, t in tensors.items():
        stem, _, end = name.rpartition(".")
        layer = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem)
        if layer is not None:
            title = f"blk.{layer[1]}.{_LAYER.get(layer[2], layer[2])}.{end}"
        elif stem in _TOPS:
            title = f"{_TOPS[stem]}.{end}"
        else:
            raise ModelError(f"tower: unknown tensor {name!r} in the file")
        found[title] = replace(t, name=title)
    return _turned(found, wide)


def _written(title: str) -> str:
    """The other way."""
    layers, tops = ({ours: theirs for theirs, ours in m.items()} for m in (_LAYER, _TOPS))
    stem, _, end = title.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None:
        return f"{tops[stem]}.{end}"
    return f"v.blk.{layer[1]}.{layers.get(layer[2], layer[2])}.{end}"


def told(tower: Tower) -> dict[str, Any]:
    """What a GGUF file says of a tower."""
    c, sight = tower.config, tower.sight
    own = {
        "image_size": sight.size, "patch_size": sight.patch, "projector.scale_factor": sight.merge,
        "preproc_image_size": sight.longest, "image_mean": list(sight.mean),
        "image_std": list(sight.std), "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size, "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads, "projection_dim": tower.width,
        "attention.layer_norm_epsilon": c.rms_norm_eps,
    }  # fmt: skip
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": KIND, "clip.use_gelu": True,
        **{f"{_VISION}{key}": value for key, value in own.items()},
    }  # fmt: skip


def _turned(found: Tensors, wide: int) -> Tensors:
    """Early files call the two halves of a feed-forward by each other's names."""
    first = found.get("blk.0.ffn_down.weight")
    if first is None or first.shape[0] != wide:
        return found
    other = {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}
    swapped = {
        re.sub(r"ffn_(down|up)", lambda m: other[m[0]], name): t for name, t in found.items()
    }
    return {name: replace(t, name=name) for name, t in swapped.items()}


def _config(
    sight: Sight, wide: int, inner: int, layers: int, heads: int, eps: float, *, exact: bool = False
) -> DecoderConfig:
    if heads < 1 or wide % heads:
        raise ModelError(f"tower: {heads} heads of {wide} numbers together")
    return DecoderConfig(
        KIND, wide, inner, layers, heads, heads, wide // heads, eps, 0, sight.side**2,
        Rope("neox", 0), causal=False, rotated_layers=(False,) * layers, exact_gelu=exact,
    )  # fmt: skip


def _made(name: str, config: DecoderConfig, sight: Sight, tensors: Tensors) -> Tower:
    """The tower, whose kernel of a convolution is a matrix, since patches do not overlap."""
    numbers = CHANNELS * sight.patch**2
    kernel, fc = tensors.get("patch_embd.weight"), tensors.get(f"{MERGED}.weight")
    if kernel is None or prod(kernel.shape[1:]) != numbers or fc is None or len(fc.shape) != 2:
        raise ModelError(f"{name}: no tower of patches of {numbers} numbers and a projector")
    if fc.shape[1] != config.hidden_size * sight.merge**2:
        raise ModelError(f"{name}: {MERGED!r} is {list(fc.shape)}, for {sight.merge**2} patches")
    flat = (kernel.shape[0], numbers)
    tensors["patch_embd.weight"] = replace(kernel, shape=flat, storage=kernel.data.reshape(flat))
    return Tower(name, config, sight, {n: t.widened() for n, t in tensors.items()})
