"""What a family of models says about itself: its graph, its names, its keys.

Weights carry the GGUF names (`blk.0.attn_q.weight`) inside, whatever the file. A family's record
says how its Hugging Face names and values become those, and what its GGUF files hold otherwise.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes
from ggraph.formats.checkpoint import RawTensor, scale_name
from ggraph.formats.lazy_array import LazyArray, Storage, row_numbers, stacked, taken
from ggraph.ops.rope import MODES

from .config import DecoderConfig, Keys
from .step import Step

Tensors = dict[str, RawTensor]

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
SHARED_NAMES = {f"mlp.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")}
NEXT_NAMES = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
"""What layers that only draft (multi-token prediction) have beside the others."""
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}


FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
"""What GGUF files of any family may hold as one tensor: llama.cpp's converter is asked for it by
`--fuse-qkv`, and by `--fuse-gate-up-exps` for experts' two parts."""
BOTH = "gate_up_exps.weight"
SWIGLU = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)}
"""What config.json may say of a model whose feed-forward is SwiGLU, and whose heads turn whole."""


def pairing_neighbours(c: DecoderConfig) -> DecoderConfig:
    """A `complete` for families whose Hugging Face files pair neighbours, too."""
    return replace(c, rope=replace(c.rope, mode="normal"))


def by_pairs(name: str, rows: Array, c: DecoderConfig) -> Array:
    """Rows [H*D, ...] of a tensor of a layer, by its GGUF name, as files of `rope_mode` "normal"
    have them: those of queries and keys are turned in pairs of neighbours, and not, as in Hugging
    Face's, in halves of heads. Others are as they were."""
    heads = {
        "attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads,
        "attn_q_norm": 1, "attn_k_norm": 1,  # weights of one head, which all heads share
    }.get(name.split(".")[2] if name.startswith("blk.") else "")  # fmt: skip
    if heads is None:
        return rows
    half = rows.shape[0] // heads // 2
    split = rows.reshape(heads, 2, half, *rows.shape[1:])  # [H, 2, D/2, ..]
    return split.swapaxes(1, 2).reshape(rows.shape)


def as_it_is(tensors: Tensors, config: DecoderConfig) -> Tensors:
    """No change."""
    return tensors


def untied(tensors: Tensors, config: DecoderConfig) -> Tensors:
    """A `store` for families whose logits llama.cpp asks a table of their own for: the embedding,
    where they share it."""
    if "token_embd.weight" not in tensors:
        return tensors
    shared = replace(tensors["token_embd.weight"], name="output.weight")
    return {"output.weight": shared, **tensors}


@dataclass(frozen=True)
class Architecture:
    """One family of models. Only `name` and `build` must be given."""

    name: str
    """What its GGUF files call it (`general.architecture`)."""
    build: Callable[[Step], Graph]
    """The graph of a step, made of `blocks`: mostly a `blocks.Stack` of layers."""
    hf: tuple[str, ...] = ()
    """Its class names in config.json."""
    rope_mode: str = "neox"
    """How its GGUF files pair the features that a rotation turns: "neox" pairs the two halves of a
    head, "normal" neighbours. Files made as Llama's are need "normal": with the other text is
    nonsense, and no error. Hugging Face's files are "neox", whatever stands here, but for
    those of families whose `complete` says otherwise."""
    written_as: str = ""
    """The name under which its models are written as GGUF; empty: `name`."""
    causal: bool = True
    """Whether no row sees later ones, as where text goes on; else it is an encoder, whose `build`
    has `vectors.vectors` at its end."""
    layer_names: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face names of a layer's tensors that it has beside Llama's, or means otherwise."""
    top_names: Mapping[str, str] = field(default_factory=dict)
    """The same for tensors outside of layers, by their whole names."""
    layer_prefix: str = r"model\.layers\."
    """What stands before a layer's number in Hugging Face names: a regular expression."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors of its files that hold several of `build`'s, one below the other."""
    told_by: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json, and their values, by which it is told from another family with the same
    classes."""
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that its GGUF files may leave out, and what is meant then."""
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that its config.json may leave out, and what is meant then."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json to which `build` has one answer, and the values that mean it. A model
    whose config says otherwise is refused."""
    translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    """Gives keys of config.json their usual names."""
    complete: Callable[[DecoderConfig], DecoderConfig] = lambda config: config
    """Sets what neither file says."""
    sanitize: Callable[[Tensors, DecoderConfig], Tensors] = as_it_is
    """Changes Hugging Face values into those of GGUF."""
    load: Callable[[Tensors, DecoderConfig], Tensors] = as_it_is
    """Changes either file's values into what `build` takes."""
    store: Callable[[Tensors, DecoderConfig], Tensors] = as_it_is
    """Changes them back again."""
    keys: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    """Keys of a GGUF file beyond the usual; a value of None is not told."""
    bare: tuple[str, ...] = ()
    """Those of them that stand there without its name."""
    learn: Callable[[Tensors, DecoderConfig], DecoderConfig] = lambda tensors, config: config
    """What the tensors of a Hugging Face folder, under GGUF names, tell of the config."""
    read: Callable[[Keys, int], Mapping[str, Any]] = lambda keys, layers: {}
    """What those keys say of the config, of so many layers."""
    layer: Callable[[Step, Tensor, int], Tensor] | None = None
    """One layer of `build`, T rows to T rows, where files may hold more of them that only draft."""

    def __post_init__(self) -> None:
        if self.rope_mode not in MODES:
            known = " or ".join(repr(m) for m in MODES)
            raise ModelError(
                f"architecture {self.name!r}: rope_mode = {self.rope_mode!r}: expected {known}"
            )

    @property
    def gguf(self) -> str:
        """The name under which its models are written."""
        return self.written_as or self.name

    def loaded(self, tensors: Tensors, config: DecoderConfig) -> Tensors:
        """A file's tensors, under GGUF names, as `build` takes them."""
        return self.load(split(tensors, self.fused, config), config)

    def parted(self, tensors: Tensors, config: DecoderConfig) -> Tensors:
        """A GGUF file's tensors, of which none holds several."""
        return split(tensors, {**FUSED, **self.fused}, config)

    def stored(self, tensors: Tensors, config: DecoderConfig) -> Tensors:
        """What `build` takes, as GGUF files hold it; scales of matrices with these."""
        return joined(self.store(with_own_scales(tensors), config), self.fused)


_FUSED = re.compile(r"blk\.(\d+)\.(.+)\.(\w+)")


def _rows(part: str, c: DecoderConfig, layer: int) -> int:
    """Rows of a part of a fused tensor."""
    if part.startswith("ffn_"):
        return c.intermediate_size
    heads = c.num_attention_heads if part == "attn_q" else c.kv_heads_of(layer)
    return heads * c.head_dim_of(layer)


def split(tensors: Tensors, fused: Mapping[str, tuple[str, ...]], config: DecoderConfig) -> Tensors:
    """Fused tensors cut into their parts; quantised rows stay as they are. Layers with a state have
    another use for such names."""
    found: Tensors = {}
    for name, t in tensors.items():
        if name.endswith(BOTH):
            found |= halves(name.removesuffix(f"_{BOTH}"), ("gate", "up"), t)
            continue
        match = _FUSED.fullmatch(name)
        layer, role, last = (int(match[1]), match[2], match[3]) if match else (0, "", "")
        parts = () if config.remembers(layer) else fused.get(role, ())
        at, sizes = 0, [_rows(p, config, layer) for p in parts]
        if not parts or (t.shape[0] == sizes[-1] and role in parts):
            found[name] = t
            continue
        if parts[0] == "attn_q" and t.shape[0] == sum(sizes) + sizes[0]:
            sizes[0] *= 2  # queries bring a gate along
        if t.shape[0] != sum(sizes):
            raise ModelError(f"{name!r}: expected {sum(sizes)} rows, got {t.shape[0]}")
        rows = row_numbers(t.storage)
        for part, size in zip(parts, sizes, strict=True):
            title, shape = f"blk.{layer}.{part}.{last}", (size, *t.shape[1:])
            own = taken(t.storage, rows[at : at + size])
            found[title] = replace(t, name=title, shape=shape, storage=own)
            at += size
    return found


def joined(tensors: Tensors, fused: Mapping[str, tuple[str, ...]]) -> Tensors:
    """The parts of fused tensors below one another again."""
    found = dict(tensors)
    for role, parts in fused.items():
        ends = [n for n in tensors if n.rpartition(".")[0].endswith(f".{parts[0]}")]
        for first in ends:
            lead, last = first.split(f".{parts[0]}.")
            pieces = [found.pop(f"{lead}.{p}.{last}") for p in parts]
            title = f"{lead}.{role}.{last}"
            found[title] = together(title, pieces)
    return found


def together(title: str, parts: Sequence[RawTensor], axis: int = 0) -> RawTensor:
    """Tensors as one, one behind the other; those of several types or scales in float32."""
    first = parts[0]
    if any(p.dtype is not first.dtype or not _same(p.scale, first.scale) for p in parts):
        parts = [RawTensor(p.name, dtypes.F32, p.shape, p.float32()) for p in parts]
    data = np.concatenate([p.data for p in parts], axis)
    return replace(changed(parts[0], data), name=title)


def _same(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def scales_apart(tensors: Tensors) -> Tensors:
    """Tensors as a graph takes them: scales of matrices are tensors of their own, too. ModelError
    where a model has one of another shape under that name."""
    found = dict(tensors)
    for name, t in tensors.items():
        if t.scale is None:
            continue
        title, scale = scale_name(name), t.scale
        if title in tensors:  # of the model, for each expert, beside that of the codes
            own = tensors[title].float32()
            if own.shape != scale.shape:
                raise ModelError(f"{title!r}: expected {list(scale.shape)}, got {list(own.shape)}")
            scale = scale * own
            found[name] = replace(t, scale=scale)
        found[title] = RawTensor(title, dtypes.F32, scale.shape, scale)
    return found


def with_own_scales(tensors: Tensors) -> Tensors:
    """The other way: scales of matrices with these alone."""
    apart = {scale_name(n) for n, t in tensors.items() if t.scale is not None}
    return {n: t for n, t in tensors.items() if n not in apart}


def stack(title: str, parts: Sequence[RawTensor]) -> RawTensor:
    """Matrices [n, k] of one type and shape as one tensor [X, n, k], with a scale for each."""
    first, scale = parts[0], None
    if any(p.scale is not None for p in parts):
        one = np.ones(1, np.float32)
        scale = np.concatenate([one if p.scale is None else p.scale for p in parts])
    held = stacked([p.storage for p in parts])
    return RawTensor(title, first.dtype, (len(parts), *first.shape), held, scale)


def halves(lead: str, parts: Sequence[str], t: RawTensor) -> Tensors:
    """Experts that stand in one tensor [X, n, k], whose rows are those of all parts."""
    if len(t.shape) != 3 or t.shape[1] % len(parts):
        raise ModelError(f"{t.name!r}: experts' {' and '.join(parts)} of shape {list(t.shape)}")
    found: Tensors = {}
    each = np.split(row_numbers(t.storage), len(parts), axis=1)
    for part, rows in zip(parts, each, strict=True):
        title, shape = f"{lead}_{part}_exps.weight", (*rows.shape, t.shape[2])
        own = taken(t.storage, rows)
        found[title] = replace(t, name=title, shape=shape, storage=own)
    return found


def changed(t: RawTensor, data: Storage) -> RawTensor:
    """The same tensor with other values; of a block type with other rows, of the same width."""
    if t.dtype.is_block and data.shape[-1] != t.storage.shape[-1]:
        raise ValueError(f"{t.name!r}: columns of {t.dtype}{list(t.shape)} cannot be taken apart")
    shape = (*data.shape[:-1], t.shape[-1]) if t.dtype.is_block else tuple(data.shape)
    own = data if isinstance(data, LazyArray) else np.ascontiguousarray(data)
    return replace(t, shape=shape, storage=own)


def plain(t: RawTensor) -> RawTensor:
    """The same tensor with values that can be put in any order: those of blocks in float32."""
    return RawTensor(t.name, dtypes.F32, t.shape, t.float32()) if t.dtype.is_block else t
