"""Towers of Qwen's vision models in files: what a folder's and a GGUF file's keys say of one.

Sources: transformers' `configuration_qwen2_vl`, `configuration_qwen2_5_vl`,
`configuration_qwen3_vl` and `image_processing_qwen2_vl`; llama.cpp's `clip.cpp` and its converter
for names and keys.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import ModelError

from .architecture import FUSED, Tensors, split
from .config import DecoderConfig, Keys, Rope
from .families import gpt2
from .gguf_config import every
from .tower import CHANNELS, QWEN2, QWEN3, QWEN25, Sight, Tower
from .tower_qwen import FIRST, MERGE, SECOND, QwenTower, deep

CLASSES = {
    QWEN2: ("Qwen2VLForConditionalGeneration",),
    QWEN25: ("Qwen2_5_VLForConditionalGeneration",),
    QWEN3: tuple(f"Qwen3{name}ForConditionalGeneration" for name in ("VL", "VLMoe", "_5", "_5Moe")),
}
# More than these rows no image becomes, though configs of released folders allow 16384: a context
# of 4096 holds three such images, attention of all patches grows with their square, and 1280 is
# what transformers' processor has where a config says nothing.
MOST_ROWS = 1280
FEWEST_PIXELS = {QWEN2: 56 * 56, QWEN25: 56 * 56, QWEN3: 256 * 256}  # of released folders
LEAD, OWN, LAYERS = r"(?:model\.)?visual\.", ("visual.", "model.visual."), r"blocks\."
TOPS = {
    "patch_embed.proj": FIRST, "pos_embed": "position_embd",
    **{f"merger.{t}": o for t, o in zip(("ln_q", "mlp.0", "mlp.2"), MERGE, strict=True)},
    **{f"merger.{t}": o for t, o in zip(("norm", "linear_fc1", "linear_fc2"), MERGE, strict=True)},
}  # fmt: skip
LAYER_NAMES = {
    "norm1": "attn_norm", "norm2": "ffn_norm", "attn.qkv": "attn_qkv", "attn.proj": "attn_output",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}  # fmt: skip
ACTS = {QWEN2: ("quick_gelu",), QWEN25: ("silu",), QWEN3: gpt2.TANH}
UNITS: Mapping[str, Mapping[str, bool]] = {
    QWEN2: {},
    QWEN25: {"clip.use_silu": True},
    QWEN3: {"clip.use_gelu": True},
}  # in GGUF files
CLIP = {  # how pixels are normalised where a processor's config does not say it
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_DEFAULTS: Mapping[str, Any] = {
    "num_heads": 16, "in_channels": CHANNELS, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    QWEN2: {
        **_DEFAULTS, "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14,
        "hidden_act": "quick_gelu",
    },
    QWEN25: {
        **_DEFAULTS, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14,
        "hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    QWEN3: {
        **_DEFAULTS, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip
BASE = 10000.0  # of what patches turn by
WINDOW = 112  # pixels, of files that do not say it
WIDEST_WINDOW = 64  # patches on a side
ASSUMED = 560  # pixels of an image's side, which llama.cpp asks of files that have none
_DEEP = re.compile(rf"{LEAD}deepstack_merger_list\.(\d+)\.(\w+)\.(weight|bias)")
_DEEP_PARTS = ("norm", "linear_fc1", "linear_fc2")


def translated(kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tower's own config under the usual names. ModelError for one that is made of something else
    than pairs of images in three colours."""
    k = Keys(values, "config.json vision_config")
    if (k.integer("in_channels"), k.integer("temporal_patch_size")) != (CHANNELS, 2):
        raise ModelError(
            f"tower: patches of {k.integer('temporal_patch_size')} images with "
            f"{k.integer('in_channels')} channels; known: 2 with {CHANNELS}"
        )
    own = {"num_hidden_layers": values["depth"], "num_attention_heads": values["num_heads"]}
    if kind == QWEN2:
        wide = k.integer("embed_dim")
        own |= {"hidden_size": wide, "intermediate_size": int(wide * k.real("mlp_ratio"))}
    return {**values, **own}


def sight(kind: str, p: Keys, whole: Keys, k: Keys) -> Sight:
    """How a folder's tower looks at images, as its processor is configured."""
    patch, merge = k.integer("patch_size"), k.integer("spatial_merge_size")
    told = p.integer("patch_size", patch), p.integer("merge_size", merge)
    if told != (patch, merge):
        raise ModelError(f"tower: {told} patches of images for a tower of {(patch, merge)}")
    sizes = Keys(p.mapping("size"), "size")
    fewest = p.integer("min_pixels", sizes.integer("shortest_edge", 56 * 56))
    most = p.integer("max_pixels", sizes.integer("longest_edge", MOST_ROWS * 28 * 28))
    mean, std = (p.reals(n) if p.has(n) else own for n, own in CLIP.items())
    return _sight(kind, patch, merge, mean, std, fewest, most)


def sight_by_gguf(kind: str, k: Keys, mean: tuple[float, ...], std: tuple[float, ...]) -> Sight:
    """The same of a GGUF file's keys."""
    patch, merge = k.integer("patch_size"), k.integer("spatial_merge_size", 2)
    fewest = k.integer("image_min_pixels", FEWEST_PIXELS[kind])
    most = k.integer("image_max_pixels", MOST_ROWS * (patch * merge) ** 2)
    return _sight(kind, patch, merge, mean, std, fewest, most)


def _sight(
    kind: str, patch: int, merge: int, mean: tuple[float, ...], std: tuple[float, ...],
    fewest: int, most: int,
) -> Sight:  # fmt: skip
    step = patch * merge
    return Sight(kind, step, patch, merge, 0, mean, std, fewest, min(most, MOST_ROWS * step**2))


def completed(c: DecoderConfig, sight: Sight, k: Keys) -> DecoderConfig:
    """The layers of a folder's tower: how they turn, and which see windows alone."""
    rope = Keys(k.mapping("rope_parameters"), "config.json vision_config rope")
    c = _turned(c, rope.real("rope_theta", BASE))
    if sight.kind != QWEN25:
        return c
    full = k.integers("fullatt_block_indexes")
    return _windowed(c, sight, k, tuple(i not in full for i in range(c.num_hidden_layers)))


def completed_by_gguf(c: DecoderConfig, sight: Sight, k: Keys) -> DecoderConfig:
    """The same of a GGUF file's keys."""
    c = _turned(c, BASE)
    period = k.integer("n_wa_pattern", 0) if sight.kind == QWEN25 else 0
    return _windowed(c, sight, k, every(period, c.num_hidden_layers)) if period else c


def _turned(c: DecoderConfig, base: float) -> DecoderConfig:
    if c.head_dim % 4:
        raise ModelError(f"tower: heads of {c.head_dim} numbers do not turn by lines and columns")
    return replace(c, rope=Rope("neox", c.head_dim, base), rotated_layers=())


def _windowed(c: DecoderConfig, sight: Sight, k: Keys, which: tuple[bool, ...]) -> DecoderConfig:
    """Windows are squares of whole rows."""
    side = k.integer("window_size", WINDOW) // sight.size * sight.merge
    if side < 1 or side > WIDEST_WINDOW:
        raise ModelError(f"tower: windows of {side} patches a side")
    return replace(c, sliding_window=side**2, windowed_layers=which) if any(which) else c


def deep_names(found: Mapping[str, Any], k: Keys) -> dict[str, str]:
    """Names of what makes rows of a layer's patches, which folders number by themselves."""
    names, layers = dict[str, str](), k.integers("deepstack_visual_indexes")
    for name in found:
        match = _DEEP.fullmatch(name)
        if match is None or match[2] not in _DEEP_PARTS or int(match[1]) >= len(layers):
            continue
        part = deep(layers[int(match[1])])[_DEEP_PARTS.index(match[2])]
        names[name] = f"{part}.{match[3]}"
    return names


def made(name: str, c: DecoderConfig, sight: Sight, tensors: Tensors) -> QwenTower:
    """The tower, whose kernel for two images is two matrices. ModelError where its parts do not
    fit together."""
    found = {n: t.widened() for n, t in split(_halved(tensors), FUSED, c).items()}
    numbers = CHANNELS * sight.patch**2
    for kernel in (FIRST, SECOND):
        t = found.get(f"{kernel}.weight")
        if t is None or math.prod(t.shape[1:]) != numbers:
            raise ModelError(f"{name}: no tower of patches of {numbers} numbers")
        flat = (t.shape[0], numbers)
        found[f"{kernel}.weight"] = replace(t, shape=flat, storage=t.data.reshape(flat))
    table = found.get("position_embd.weight")
    if (table is None) == (sight.kind == QWEN3) or (table and not _is_square(table.shape[0])):
        raise ModelError(f"{name}: learned positions {table.shape if table else 'are missing'}")
    if table is not None:
        c = replace(c, max_position_embeddings=table.shape[0])
    _check_rows(name, c, sight, found)
    return QwenTower(name, c, sight, found)


def _check_rows(name: str, c: DecoderConfig, sight: Sight, found: Tensors) -> None:
    """ModelError where products do not make rows of one width of as many patches."""
    wide, widths = c.hidden_size * sight.merge**2, set[int]()
    deeper = [deep(i) for i in range(c.num_hidden_layers)]
    for _, first, second in [MERGE, *(d for d in deeper if f"{d[0]}.weight" in found)]:
        a, b = (found.get(f"{n}.weight") for n in (first, second))
        if a is None or b is None or a.shape[1:] != (wide,) or b.shape[1:] != a.shape[:1]:
            shapes = [list(t.shape) for t in (a, b) if t]
            raise ModelError(f"{name}: {first!r} is {shapes}, for {sight.merge**2} patches")
        widths.add(b.shape[0])
    if len(widths) > 1:
        raise ModelError(f"{name}: rows of {sorted(widths)} numbers")


def _is_square(n: int) -> bool:
    return math.isqrt(n) ** 2 == n


def _halved(tensors: Tensors) -> Tensors:
    """A kernel [W, C, 2, S, S] as two."""
    title = f"{FIRST}.weight"
    kernel = tensors.get(title)
    if kernel is None or len(kernel.shape) != 5 or kernel.shape[2] != 2:
        return tensors
    both = {f"{stem}.weight": kernel.data[:, :, i] for i, stem in enumerate((FIRST, SECOND))}
    return tensors | {
        n: replace(kernel, name=n, shape=a.shape, storage=np.ascontiguousarray(a))
        for n, a in both.items()
    }


def told(tower: Tower) -> dict[str, Any]:
    """Keys of a GGUF file beyond the usual. ModelError for windows that it cannot tell of."""
    c, sight = tower.config, tower.sight
    table = tower.catalogue.get("position_embd.weight")
    size = sight.patch * math.isqrt(table.shape[0]) if table is not None else ASSUMED
    found: dict[str, Any] = {
        "image_size": size, "spatial_merge_size": sight.merge, "image_min_pixels": sight.fewest,
        "image_max_pixels": sight.most, "projection_dim": tower.catalogue["mm.2.weight"].shape[0],
    }  # fmt: skip
    if c.rope.freq_base != BASE:
        raise ModelError(f"{tower.name}: GGUF cannot say that patches turn by {c.rope.freq_base}")
    if sight.kind == QWEN3:
        deeper = [f"{deep(i)[0]}.weight" in tower.catalogue for i in range(c.num_hidden_layers)]
        found["is_deepstack_layers"] = np.array(deeper, np.bool_)
    if sight.kind == QWEN25:
        layers = c.num_hidden_layers
        which = c.windowed_layers or (False,) * layers
        period = next((n for n in range(1, layers + 2) if every(n, layers) == which), None)
        if period is None:
            raise ModelError(f"{tower.name}: GGUF cannot say that layers {which} have windows")
        found["n_wa_pattern"] = period
    if c.sliding_window:
        found["window_size"] = math.isqrt(c.sliding_window) * sight.patch
    return found
