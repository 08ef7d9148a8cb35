"""A head to go on from: its tensors as a net that learns. Needs PyTorch (extra [train]).

Reads what `export` writes, and other heads of the same build.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ggraph import Array, InputError

from ..eagle3 import Head
from ..heads.layouts import open_head
from ..heads.names import title_of
from ..registry import Model
from .export import layout_name
from .net import DraftNet, NetConfig
from .parts import half_split


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
    titles = {name: title_of(layout_name(name)) for name in net.state_dict()}
    if extra := set(head.catalogue) - set(titles.values()):
        raise InputError(f"{path}: training has no place for {min(extra)!r}")
    tensors = {name: _values(head, name, title, path) for name, title in titles.items()}
    net.load_state_dict(tensors)
    return net, head.target_ids


def grown(net: DraftNet, ids: Array, more: Array, output: Array) -> tuple[DraftNet, Array]:
    """The head with further draft tokens: `ids` [W] and `more` ascending, none in both; `output`
    [V, E] is the target's.

    Their rows are the target's, carried over by the linear map that takes the target's rows of the
    old tokens nearest to the head's.
    """
    state, name = net.state_dict(), "lm_head.weight"
    old = state[name].double().numpy()
    carried, *_ = np.linalg.lstsq(output[ids].astype(np.float64), old, rcond=None)  # [E, E]
    both = np.concatenate([ids, more])
    rows = np.concatenate([old, output[more] @ carried])[np.argsort(both)]
    larger = DraftNet(replace(net.config, vocabulary=len(both)))
    larger.load_state_dict({**state, name: torch.from_numpy(rows.astype(np.float32))})
    return larger, np.sort(both)


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


def _values(head: Head, name: str, title: str | None, path: Path) -> torch.Tensor:
    """A tensor as float32, rotary pairs half-split as training has them."""
    stored = head.catalogue.get(title) if title is not None else None
    if stored is None:
        raise InputError(f"{path}: training needs a {title!r} of the head's own")
    values, d = torch.from_numpy(stored.float32().copy()), head.config.decoder
    rotated = {"q_proj.weight": d.num_attention_heads, "k_proj.weight": d.num_key_value_heads}
    heads = rotated.get(name, 0)
    return half_split(values, heads) if heads and d.rope.mode == "normal" else values
