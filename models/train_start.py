"""A head to go on from: its tensors as a net that learns. Floor 10; needs PyTorch (extra [train]).

Reads what `train_export` writes, and other heads of the same build.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from ggraph import Array, InputError

from .eagle3 import Head
from .heads import open_head
from .registry import Model
from .train_net import DraftNet, NetConfig
from .train_parts import half_split

_NAMES = {
    "fc": "fc",
    "hidden_norm": "blk.0.attn_norm_2",
    "input_layernorm": "blk.0.attn_norm",
    "q_proj": "blk.0.attn_q",
    "k_proj": "blk.0.attn_k",
    "v_proj": "blk.0.attn_v",
    "o_proj": "blk.0.attn_output",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "gate_proj": "blk.0.ffn_gate",
    "up_proj": "blk.0.ffn_up",
    "down_proj": "blk.0.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}


def started(path: Path, target: Model, taps: Sequence[int]) -> tuple[DraftNet, Array]:
    """The head at `path` (folder or GGUF) as a net, and its target ids i64 [W].

    InputError for a head that reads other layers, or whose build training does not know.
    """
    head = open_head(path, target)
    if not isinstance(head, Head) or head.masked is not None:
        raise InputError(f"{path}: only EAGLE-3 heads that draft in turn can be trained")
    if head.taps != tuple(taps):
        raise InputError(f"{path} reads layers {head.taps}, the data has {tuple(taps)}")
    net = DraftNet(_config(head, path))
    tensors = {f"{part}.weight": _values(head, part, path) for part in _NAMES}
    if extra := set(head.catalogue) - {f"{name}.weight" for name in _NAMES.values()}:
        raise InputError(f"{path}: training has no place for {min(extra)!r}")
    net.load_state_dict(tensors)
    return net, head.target_ids


def _config(head: Head, path: Path) -> NetConfig:
    c, d = head.config, head.config.decoder
    if c.norm_before_residual or d.num_hidden_layers != 1 or d.hidden_size != c.target_hidden_size:
        raise InputError(
            f"{path}: {d.num_hidden_layers} layers, {d.hidden_size} wide for a target of "
            f"{c.target_hidden_size}, norm_before_residual {c.norm_before_residual}: training "
            "knows one layer as wide as its target, with the feature itself as residual"
        )
    return NetConfig(
        width=d.hidden_size,
        taps=len(c.taps),
        heads=d.num_attention_heads,
        kv_heads=d.num_key_value_heads,
        head_dim=d.head_dim,
        intermediate=d.intermediate_size,
        vocabulary=c.draft_vocab_size,
        rope_base=d.rope.freq_base,
        eps=d.rms_norm_eps,
        feedback_norm=c.norm_output,
    )


def _values(head: Head, part: str, path: Path) -> torch.Tensor:
    """A tensor as float32, rotary pairs half-split as training has them."""
    name, d = f"{_NAMES[part]}.weight", head.config.decoder
    stored = head.catalogue.get(name)
    if stored is None:
        raise InputError(f"{path}: training needs a {name!r} of the head's own")
    values = torch.from_numpy(stored.float32().copy())
    heads = {"q_proj": d.num_attention_heads, "k_proj": d.num_key_value_heads}.get(part, 0)
    return half_split(values, heads) if heads and d.rope.mode == "normal" else values
