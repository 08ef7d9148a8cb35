"""Names and token ids of draft heads, from every layout to one form.

Legend: W draft vocabulary, V target vocabulary.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ggraph import Array, ModelError, Tensor
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import Storage

from .. import latent

_LAYER_NAMES = {
    "hidden_norm": "attn_norm_2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    **latent.NAMES,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "fc": "fc",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_norm": "enc.output_norm",
    **{f"fc_norm.{i}": f"fc_norm.{i}" for i in range(8)},
}
_MAP_NAMES = ("d2t", "draft_id_to_target_id")
_IGNORED = re.compile(r"t2d|mask_hidden|target_id_to_draft_id|.*rotary_emb\.inv_freq")
_LAYER = re.compile(r"(?:model\.)?(?:midlayer|layers\.(\d+))\.(.+)\.(weight|bias)")


def title_of(name: str) -> str | None:
    """What GGUF calls the tensor of this name in any layout of heads; None for an unknown one."""
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"blk.{layer[1] or 0}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, last = name.removeprefix("model.").rpartition(".")
    known = stem in _TOP_NAMES and last in ("weight", "bias")
    return f"{_TOP_NAMES[stem]}.{last}" if known else None


def sanitize_head(
    tensors: Mapping[str, RawTensor], where: Path
) -> tuple[dict[str, RawTensor], Array | None]:
    """Tensors under GGUF names, and the draft-to-target map where there is one."""
    found: dict[str, RawTensor] = {}
    mapping: Array | None = None
    for name, t in tensors.items():
        short = name.removeprefix("model.")
        if short in _MAP_NAMES:
            mapping = np.asarray(t.data).reshape(-1).astype(np.int64)
        elif (title := title_of(name)) is not None:
            found[title] = replace(t, name=title)
        elif not _IGNORED.fullmatch(short):
            raise ModelError(f"{where}: unknown tensor {name!r} in the head")
    return found, mapping


def tensor_of(tensors: Mapping[str, RawTensor], name: str, where: Path) -> RawTensor:
    """The tensor of this name. ModelError where the head has none."""
    if name not in tensors:
        raise ModelError(f"{where}: the head has no tensor {name!r}")
    return tensors[name]


def target_ids(
    mapping: Array | None, hint: Array | None, count: int, vocabulary: int, where: Path
) -> Array:
    """i64 [W]: the target's id of each draft token.

    `mapping` holds offsets (id - index) or absolute ids. `hint` (t2d, bool [V]) settles it; else
    strictly increasing values that are nowhere below their index are absolute.
    """
    if mapping is None:
        if count != vocabulary:
            raise ModelError(f"{where}: draft vocabulary {count} of {vocabulary}, but no d2t")
        return np.arange(vocabulary, dtype=np.int64)
    if len(mapping) != count:
        raise ModelError(f"{where}: d2t has {len(mapping)} entries for {count} draft tokens")
    index = np.arange(count, dtype=np.int64)
    if hint is not None and int(hint.astype(bool).sum()) == count:
        ids = np.flatnonzero(hint)
    else:
        absolute = bool(np.all(np.diff(mapping) > 0) and np.all(mapping >= index))
        ids = mapping if absolute else mapping + index
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ModelError(f"{where}: d2t points to {ids.min()} .. {ids.max()} of {vocabulary}")
    if len(np.unique(ids)) != count:
        raise ModelError(f"{where}: d2t names {count - len(np.unique(ids))} tokens twice")
    return ids.astype(np.int64)


def own_or_borrowed(
    t: Tensor, prefix: str, own: Mapping[str, RawTensor], borrowed: Mapping[str, RawTensor]
) -> Storage:
    """Raw storage of a weight of a head: its `own` have the prefix, others are the target's."""
    name = t.name.removeprefix(prefix)
    return (own[name] if t.name.startswith(prefix) and name in own else borrowed[t.name]).storage
