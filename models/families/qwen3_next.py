"""Qwen3-Next, and Qwen3-Coder-Next: Qwen3.5's layers, whose values of one key stand together.

Hugging Face has the rows of each key head together, those of q, k, v and z, and those of beta and
alpha; GGUF files have the latter so, older ones both.
Sources: Qwen team 2025, the Qwen3-Next release; transformers `modeling_qwen3_next`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ggraph import Array, ModelError
from ggraph.formats.lazy_array import taken

from .. import blocks
from ..architecture import Tensors, changed, together
from ..config import DecoderConfig
from . import qwen35

FUSED = {"ssm_in": ("attn_qkv", "attn_gate"), "ssm_ba": ("ssm_beta", "ssm_alpha")}


def parts(c: DecoderConfig, role: str) -> tuple[Array, Array]:
    """Which rows of a fused tensor are those of its first part, and of its second."""
    g, d, r = c.linear_num_key_heads, c.linear_key_head_dim, _values(c)
    if role == "ssm_ba":
        both = np.arange(2 * g * r).reshape(g, 2, r)
        return both[:, 0].ravel(), both[:, 1].ravel()
    lanes = np.arange(2 * g * (1 + r) * d).reshape(g, -1)
    q, k, v, z = np.split(lanes, [d, 2 * d, (2 + r) * d], axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel()


def _values(c: DecoderConfig) -> int:
    """R, the heads of values that one of keys has."""
    return c.linear_num_value_heads // max(c.linear_num_key_heads, 1)


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Fused tensors in their parts. ModelError for one of another size."""
    pairs = 2 * c.linear_num_key_heads
    rows_of = {
        "ssm_in": pairs * (1 + _values(c)) * c.linear_key_head_dim,
        "ssm_ba": pairs * _values(c),
    }
    found: Tensors = {}
    for name, t in tensors.items():
        role = name.split(".")[-2] if name.endswith(".weight") else ""
        if role not in FUSED:
            found[name] = t
            continue
        if t.shape[0] != rows_of[role]:
            raise ModelError(f"{name!r}: expected {rows_of[role]} rows, got {t.shape[0]}")
        for part, rows in zip(FUSED[role], parts(c, role), strict=True):
            title, shape = name.replace(role, part), (len(rows), *t.shape[1:])
            found[title] = replace(t, name=title, shape=shape, storage=taken(t.storage, rows))
    return qwen35.load(found, c)


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Beta and alpha as one again, and no layer that only drafts: llama.cpp would take it for one
    of the others."""
    behind = tuple(f"blk.{c.num_hidden_layers + i}." for i in range(c.num_nextn_predict_layers))
    kept = {n: t for n, t in tensors.items() if not n.startswith(behind)}
    found, (first, second) = qwen35.store(kept, c), FUSED["ssm_ba"]
    back = np.argsort(np.concatenate(parts(c, "ssm_ba")))
    for name in [n for n in found if n.endswith(f".{first}.weight")]:
        b, a = found.pop(name), found.pop(name.replace(first, second))
        title = name.replace(first, "ssm_ba")
        both = together(title, (b, a))
        found[title] = changed(both, both.data[back])
    return found


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """As of Qwen3.5, but that it knows no images and no layers that only draft."""
    return {
        **qwen35.keys(replace(c, num_nextn_predict_layers=0)), "rope.dimension_sections": None,
        "block_count": c.num_hidden_layers, "nextn_predict_layers": None,
    }  # fmt: skip


QWEN3_NEXT = replace(
    qwen35.QWEN35_MOE, name="qwen3next", build=blocks.Stack(partial(qwen35.layer, together=True)),
    hf=("Qwen3NextForCausalLM",),
    layer_names={
        **qwen35.NAMES,
        "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
    },
    sanitize=qwen35.own_values, load=load, store=store, keys=keys,
    fixed={**qwen35.QWEN35.fixed, "norm_topk_prob": (True,)},
    gguf_defaults={"full_attention_interval": qwen35.PERIOD},
    hf_defaults={
        **qwen35.QWEN35_MOE.hf_defaults, "num_experts_per_tok": 10, "num_nextn_predict_layers": 1,
    },
)  # fmt: skip
