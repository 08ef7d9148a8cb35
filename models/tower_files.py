"""Towers in files: a model's folder, or one of llama.cpp's GGUF files beside a model's (mmproj).

What only Qwen's towers have is in `tower_qwen_files`.

Sources: transformers' `modeling_idefics3`, `modeling_gemma3` and their processors; llama.cpp's
`clip.cpp` for names and keys of GGUF.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import ModelError
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.hf import read_json

from . import tower_qwen_files as qwen
from .architecture import FUSED, Architecture, Tensors, joined
from .config import DecoderConfig, Keys, Rope
from .families import gemma2, gpt2
from .registry import sanitize
from .tower import CHANNELS, GEMMA3, IDEFICS3, JOINED, MEAN, MEAN_NORM, QWEN3, Sight, Tower
from .tower_qwen import FIRST, MERGE, SECOND

MMPROJ = "clip"  # what llama.cpp's files of towers call their architecture
_VISION, _GGUF = "clip.vision.", "GGUF metadata"
_PIXELS = ("image_mean", "image_std")
# As GGUF files name a layer's tensors, and as `blocks` do
_LAYER = {"attn_out": "attn_output", "ln1": "attn_norm", "ln2": "ffn_norm"}
_TOPS = {
    "v.patch_embd": "patch_embd", "v.position_embd": "position_embd", "v.post_ln": "output_norm",
    **{name: name for name in (JOINED, MEAN_NORM, MEAN, *MERGE[1:])},
}  # fmt: skip
_SECOND, _DEEP = "v.patch_embd.weight.1", re.compile(r"v\.deepstack\.\d+\.\w+")
_SIGLIP_TOPS = {
    "embeddings.patch_embedding": "patch_embd", "post_layernorm": "output_norm",
    "embeddings.position_embedding": "position_embd",
}  # fmt: skip
_SIGLIP_LAYER = {
    "self_attn.out_proj": "attn_output", "layer_norm1": "attn_norm", "layer_norm2": "ffn_norm",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What a kind of towers has of its own: a folder's classes, what its tensors' names begin with,
    and those of the projector's; keys of `vision_config` that may be left out."""

    classes: tuple[str, ...]
    lead: str  # a regular expression
    own: tuple[str, ...]
    projector: Mapping[str, str]
    defaults: Mapping[str, Any]
    see: Callable[[Keys, Keys, Keys], Sight]  # of the processor's, the whole and own config
    layers: str = r"encoder\.layers\."  # behind the lead
    layer_names: Mapping[str, str] = field(default_factory=lambda: _SIGLIP_LAYER)
    tops: Mapping[str, str] = field(default_factory=lambda: _SIGLIP_TOPS)
    acts: Sequence[str] = (*gpt2.EXACT, *gpt2.TANH)
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values

    def names(self, found: Mapping[str, Any], k: Keys) -> Architecture:
        """Names of a folder's tensors, by those that are there, and by its own config."""
        top = re.compile(rf"{self.lead}({'|'.join(map(re.escape, self.tops))})\.(weight|bias)")
        matched = {n: m for n in found if (m := top.fullmatch(n))}
        return Architecture(
            "tower", _never, causal=False, layer_prefix=self.lead + self.layers,
            layer_names=self.layer_names,
            top_names={
                **{n: f"{self.tops[m[1]]}.{m[2]}" for n, m in matched.items()}, **self.projector,
                **qwen.deep_names(found, k),
            },
        )  # fmt: skip


def _never(step: Any) -> Any:
    raise ModelError("a tower is built by `models.tower`")


def _idefics3(p: Keys, whole: Keys, k: Keys) -> Sight:
    size = k.integer("image_size")
    tile = Keys(p.mapping("max_image_size"), "max_image_size").integer("longest_edge", size)
    if tile != size:
        raise ModelError(f"tower: tiles of {tile} pixels for a tower of {size}")
    longest = Keys(p.mapping("size"), "size").integer("longest_edge", 4 * size)
    longest = longest if p.flag("do_image_splitting", True) else 0
    merge = whole.integer("scale_factor", 2)
    mean, std = _normal(p)
    return Sight(IDEFICS3, size, k.integer("patch_size"), merge, longest, mean, std)


def _gemma3(p: Keys, whole: Keys, k: Keys) -> Sight:
    size, patch = k.integer("image_size"), k.integer("patch_size")
    told = Keys(p.mapping("size"), "size")
    if (told.integer("height", size), told.integer("width", size)) != (size, size):
        raise ModelError(f"tower: images of other sizes than {size} pixels a side")
    if p.get("do_pan_and_scan"):
        raise ModelError("tower: images are not cropped here (do_pan_and_scan)")
    few = isqrt(whole.integer("mm_tokens_per_image", 256))
    merge = size // patch // few if patch > 0 and few > 0 else 0
    mean, std = _normal(p)
    sight = Sight(GEMMA3, size, patch, merge, 0, mean, std)
    if sight.rows != few**2:
        raise ModelError(f"tower: {sight.rows} rows of {sight.side**2} patches, not {few**2}")
    return sight


def _normal(p: Keys) -> Iterator[tuple[float, ...]]:
    """Mean and deviation of pixels."""
    return (p.reals(n) if p.has(n) else (0.5,) * CHANNELS for n in _PIXELS)


COMMON = {
    "num_hidden_layers": 12,
    "num_channels": CHANNELS,
    "image_size": 224,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "intermediate_size": 3072,
}
KINDS = {
    IDEFICS3: Kind(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        r"model\.vision_model\.", ("model.vision_model.", "model.connector."),
        {"model.connector.modality_projection.proj.weight": f"{JOINED}.weight"},
        {**COMMON, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}, _idefics3,
    ),
    GEMMA3: Kind(
        ("Gemma3ForConditionalGeneration",), r"(?:model\.)?vision_tower\.(?:vision_model\.)?",
        tuple(m + n for m in ("", "model.") for n in ("vision_tower.", "multi_modal_projector.")),
        {
            f"{m}multi_modal_projector.{theirs}": f"{ours}.weight" for m in ("", "model.")
            for theirs, ours in (("mm_input_projection_weight", MEAN),
                                 ("mm_soft_emb_norm.weight", MEAN_NORM))
        },
        {**COMMON, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}, _gemma3,
    ),
    **{
        kind: Kind(
            classes, qwen.LEAD, qwen.OWN, {}, {**COMMON, **qwen.DEFAULTS[kind]},
            partial(qwen.sight, kind), qwen.LAYERS, qwen.LAYER_NAMES, qwen.TOPS, qwen.ACTS[kind],
            partial(qwen.translated, kind),
        ) for kind, classes in qwen.CLASSES.items()
    },
}  # fmt: skip


def tower_of(checkpoint: Checkpoint) -> Tower | None:
    """The tower in a model's folder; None where there is none, or one that is not known here.
    ModelError for one that is known and does not fit together."""
    named = set(checkpoint.metadata.get("architectures") or [])
    kind = next((k for k in KINDS.values() if named & set(k.classes)), None)
    if checkpoint.format != "hf" or kind is None:
        return None
    told = Keys(checkpoint.metadata, "config.json")
    own = kind.translate({**kind.defaults, **told.mapping("vision_config")})
    k = Keys(own, "config.json vision_config")
    act = k.get("hidden_act")
    if act not in kind.acts:
        raise ModelError(f"tower: hidden_act {act!r:.60}; known: {', '.join(kind.acts)}")
    folder = Path(checkpoint.path)
    sight = kind.see(_processor(folder), told, k)
    config = _config(
        sight, k.integer("hidden_size"), k.integer("intermediate_size"),
        k.integer("num_hidden_layers"), k.integer("num_attention_heads"),
        k.real("layer_norm_eps"), exact=act in gpt2.EXACT,
    )  # fmt: skip
    held = {n: t for n, t in checkpoint.tensors.items() if n.startswith(kind.own)}
    layer = re.compile(rf"{kind.lead}{kind.layers}(\d+)\.")
    count = 1 + max((int(m[1]) for n in held if (m := layer.match(n))), default=-1)
    if count > config.num_hidden_layers:  # which `sanitize` would take for a decoder's that draft
        told_of = f"{config.num_hidden_layers} in the config"
        raise ModelError(f"tower: {count} layers in the files, {told_of}")
    if sight.most:
        config = qwen.completed(config, sight, k)
    found = sanitize(held, config, kind.names(held, k))
    if f"{MEAN_NORM}.weight" in found:  # the norm multiplies by 1 + weight; GGUF holds the sum
        found[f"{MEAN_NORM}.weight"] = gemma2.grown(found[f"{MEAN_NORM}.weight"])
    return _made(folder.name, config, sight, found)


def _processor(folder: Path) -> Keys:
    """How the folder's image processor is configured: by a file of its own, or a part of one."""
    files = ("preprocessor_config.json", "processor_config.json")
    found = [read_json(folder / f) for f in files if (folder / f).is_file()]
    nested = [v.get("image_processor", v) for v in found]
    told: Mapping[str, Any] = next((v for v in nested if "image_mean" in v), {})
    return Keys(told, "the image processor's config")


def open_mmproj(path: Path, checkpoint: Checkpoint) -> Tower:
    """The tower in one of llama.cpp's GGUF files beside a model's. ModelError for another file, or
    one that does not fit together."""
    if checkpoint.architecture != MMPROJ:
        raise ModelError(
            f"{path} holds a model ({checkpoint.architecture}), and no tower for images"
        )
    told = Keys(checkpoint.metadata, _GGUF)
    kind = told.get("clip.vision.projector_type", told.get("clip.projector_type"))
    if kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ModelError(f"{path}: a tower of kind {kind!r:.60}; known: {known}")
    k = Keys(checkpoint.metadata, _GGUF, _VISION)
    mean, std = (_channels(checkpoint, n) for n in _PIXELS)
    see = qwen.sight_by_gguf if kind in qwen.CLASSES else _sight_by_gguf
    sight = see(str(kind), k, mean, std)
    config = _config(
        sight, k.integer("embedding_length"), k.integer("feed_forward_length"),
        k.integer("block_count"), k.integer("attention.head_count"),
        k.real("attention.layer_norm_epsilon"),
    )  # fmt: skip
    if sight.most:
        config = qwen.completed_by_gguf(config, sight, k)
    return _made(path.stem, config, sight, _ours(checkpoint.tensors, config.intermediate_size))


def _sight_by_gguf(kind: str, k: Keys, mean: tuple[float, ...], std: tuple[float, ...]) -> Sight:
    size = k.integer("image_size")
    longest = k.integer("preproc_image_size", 4 * size) if kind == IDEFICS3 else 0
    merge = k.integer("projector.scale_factor", None if kind == IDEFICS3 else 4)
    return Sight(kind, size, k.integer("patch_size"), merge, longest, mean, std)


def _channels(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    """A number for each channel."""
    held = checkpoint.metadata.get(f"{_VISION}{name}")
    listed = held.tolist() if isinstance(held, np.ndarray) else held
    return Keys({name: listed}, _GGUF).reals(name, CHANNELS)


def _ours(tensors: Mapping[str, RawTensor], wide: int) -> Tensors:
    """A GGUF file's tensors under the names of `blocks`."""
    found: Tensors = {}
    for name, t in tensors.items():
        stem, _, end = name.rpartition(".")
        layer = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)", stem)
        if layer is not None:
            title = f"blk.{layer[1]}.{_LAYER.get(layer[2], layer[2])}.{end}"
        elif stem in _TOPS:
            title = f"{_TOPS[stem]}.{end}"
        elif name == _SECOND:
            title = f"{SECOND}.weight"
        elif _DEEP.fullmatch(stem):
            title = name
        else:
            raise ModelError(f"tower: unknown tensor {name!r} in the file")
        found[title] = replace(t, name=title)
    return _turned(found, wide)


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


def told(tower: Tower) -> dict[str, Any]:
    """What a GGUF file says of a tower."""
    c, sight = tower.config, tower.sight
    own = {
        "patch_size": sight.patch, "image_mean": list(sight.mean), "image_std": list(sight.std),
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "block_count": c.num_hidden_layers, "attention.head_count": c.num_attention_heads,
        "projection_dim": tower.width, "attention.layer_norm_epsilon": c.rms_norm_eps,
    }  # fmt: skip
    units: Mapping[str, bool] = {"clip.use_gelu": True}
    if sight.most:
        units, more = qwen.UNITS[sight.kind], qwen.told(tower)
    else:
        more = {"image_size": sight.size, "projector.scale_factor": sight.merge}
        more |= {"preproc_image_size": sight.longest} if sight.kind == IDEFICS3 else {}
    return {
        "clip.has_vision_encoder": True, "clip.projector_type": sight.kind, **units,
        **{f"{_VISION}{key}": value for key, value in {**own, **more}.items()},
    }  # fmt: skip


def stored(tower: Tower) -> Tensors:
    """A tower's tensors as a GGUF file has them, where the patches' matrix is a convolution's, and
    the mean's product is transposed."""
    found: Tensors = {}
    held = joined(tower.catalogue, FUSED if tower.sight.kind == QWEN3 else {})  # as it is read
    for title, t in held.items():
        stem = title.rpartition(".")[0]
        if stem in (FIRST, SECOND) and len(t.shape) == 2:
            kernel = (t.shape[0], CHANNELS, tower.sight.patch, tower.sight.patch)
            t = replace(t, shape=kernel, storage=t.data.reshape(kernel))
        name = _theirs(title)
        found[name] = replace(transposed(t) if stem == MEAN else t, name=name)
    return found


def _theirs(title: str) -> str:
    """How a GGUF file calls a tensor."""
    layers, tops = ({ours: theirs for theirs, ours in m.items()} for m in (_LAYER, _TOPS))
    stem, _, end = title.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is not None:
        return f"v.blk.{layer[1]}.{layers.get(layer[2], layer[2])}.{end}"
    if stem == SECOND:
        return _SECOND
    return title if _DEEP.fullmatch(stem) else f"{tops[stem]}.{end}"


def transposed(t: RawTensor) -> RawTensor:
    """A matrix the other way. ModelError for one in blocks, whose rows cannot be columns."""
    if t.dtype.is_block or len(t.shape) != 2:
        raise ModelError(f"{t.name!r}: {t.dtype} {list(t.shape)} cannot be transposed")
    return replace(t, shape=t.shape[::-1], storage=np.ascontiguousarray(t.data.T))


def _config(
    sight: Sight, wide: int, inner: int, layers: int, heads: int, eps: float, *, exact: bool = False
) -> DecoderConfig:
    if heads < 1 or wide % heads:
        raise ModelError(f"tower: {heads} heads of {wide} numbers together")
    return DecoderConfig(
        sight.kind, wide, inner, layers, heads, heads, wide // heads, eps, 0, sight.side**2,
        Rope("neox", 0), causal=False, rotated_layers=(False,) * layers, exact_gelu=exact,
    )  # fmt: skip


def _made(name: str, config: DecoderConfig, sight: Sight, tensors: Tensors) -> Tower:
    """The tower, whose kernel of a convolution is a matrix, since patches do not overlap."""
    if sight.most:
        return qwen.made(name, config, sight, tensors)
    numbers, is_joined = CHANNELS * sight.patch**2, sight.kind == IDEFICS3
    title = f"{JOINED if is_joined else MEAN}.weight"
    kernel, fc = tensors.get("patch_embd.weight"), tensors.get(title)
    if kernel is None or prod(kernel.shape[1:]) != numbers or fc is None or len(fc.shape) != 2:
        raise ModelError(f"{name}: no tower of patches of {numbers} numbers and a projector")
    if not is_joined:
        tensors[title] = fc = transposed(fc)
    if fc.shape[1] != config.hidden_size * (sight.merge**2 if is_joined else 1):
        raise ModelError(f"{name}: {title!r} is {list(fc.shape)}, for {sight.merge**2} patches")
    flat = (kernel.shape[0], numbers)
    tensors["patch_embd.weight"] = replace(kernel, shape=flat, storage=kernel.data.reshape(flat))
    return Tower(name, config, sight, {n: t.widened() for n, t in tensors.items()})
