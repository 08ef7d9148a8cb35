"""MPNet (all-mpnet-base-v2): BERT without parts of a text, whose heads add to each score a learned
number for how far apart the two rows are, by buckets of distances that all layers share.

Here a query carries what its row adds to the scores of each position behind its own numbers, and a
key a 1 at its position: the product has both, and attention stays one op, whose bits of a row
follow from its text alone.
Sources: Song et al. 2020 (arXiv 2004.09297); transformers `modeling_mpnet`; of the buckets Raffel
et al. 2019 (arXiv 1910.10683). llama.cpp does not know it; names in GGUF files are its T5's.

Legend: T token rows, E hidden_size, H heads, D head_dim, C positions, B buckets.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes, ops
from ggraph.formats.checkpoint import RawTensor

from .. import blocks
from ..architecture import Tensors
from ..config import DecoderConfig
from ..step import Step
from ..vectors import bare, vectors
from . import bert

BUCKETS = 32  # half of them for rows in front, of which half are for one distance each
TABLE = "attn_rel_b.weight"  # of files, [B, H]
ADDED, SPOTS = "attn_rel.weight", "spots.weight"  # made of it, [C, H*C], and of ones, [C, C]


def build(s: Step) -> Graph:
    """The step graph of an MPNet checkpoint."""
    c = s.config
    heads, count = c.num_attention_heads, c.max_position_embeddings
    added = ops.get_rows(s.w(ADDED, count, heads * count), s.positions).reshape(-1, heads, count)
    spots = ops.get_rows(s.w(SPOTS, count, count), s.positions).reshape(-1, 1, count)
    near = added, ops.repeat(spots, added.shape)  # [T, H, C] each
    layer = partial(bert.layer, attend=partial(attention, near=near))
    return blocks.Stack(layer, bare, bert.begin, vectors)(s)


def attention(s: Step, x: Tensor, i: int, near: tuple[Tensor, Tensor]) -> Tensor:
    """Self-attention of layer i, with what stands behind queries and keys: [T, E] -> [T, E]."""
    c = s.config
    q, k, v = (blocks.heads(s, x, i, role, c.num_attention_heads) for role in "qkv")
    queries = ops.concat((q * c.head_dim**-0.5, near[0]))  # [T, H, D+C]
    keys = ops.concat((k, near[1]))
    mask, name = blocks.mask_of(s, i), f"blk.{i}.attn"
    mixed = ops.flash_attn(queries, keys, v, mask, scale=1.0, name=name)  # [T, H, D]
    return blocks.linear(s, mixed.reshape(*x.shape), f"{name}_output", c.hidden_size)


def bucket(distance: Array) -> Array:
    """The bucket of each distance of a key from its query, in rows: one each up to 7, then as many
    for each two-fold, up to 90; those behind the query have the second half of the buckets."""
    n, half = np.abs(distance), BUCKETS // 2
    exact = half // 2
    steps = np.int64(exact**2) << np.arange(1, half - exact)  # squares of where the next begin
    large = exact + (n[..., None] ** 2 >= steps).sum(-1)
    found: Array = np.where(n < exact, n, large) + half * (distance > 0)
    return found


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """What each position adds to the scores of each, in place of the numbers of the buckets.
    ModelError for another number of them, or of positions."""
    count = c.max_position_embeddings
    wanted = {
        TABLE: (BUCKETS, c.num_attention_heads), bert.POSITIONS: (count, c.hidden_size),
    }  # fmt: skip
    for name, shape in wanted.items():
        if name not in tensors:
            return tensors  # the graph asks for it
        if tensors[name].shape != shape:
            got = list(tensors[name].shape)
            raise ModelError(f"{name!r}: expected {list(shape)}, got {got}")
    at = np.arange(count)
    each = tensors[TABLE].float32()[bucket(at - at[:, None])]  # [C, C, H]
    added = np.ascontiguousarray(each.transpose(0, 2, 1)).reshape(count, -1)
    return {
        **{n: t for n, t in tensors.items() if n != TABLE},
        ADDED: RawTensor(ADDED, dtypes.F32, added.shape, added),
        SPOTS: RawTensor(SPOTS, dtypes.F32, (count, count), np.eye(count, dtype=np.float32)),
    }


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The numbers of the buckets again; of those that no two positions are in, 0."""
    count, heads = c.max_position_embeddings, c.num_attention_heads
    added = tensors[ADDED].float32().reshape(count, heads, count)
    table, at = np.zeros((BUCKETS, heads), np.float32), np.arange(count)
    table[bucket(at)], table[bucket(-at)] = added[0].T, added[:, :, 0]
    kept = {n: t for n, t in tensors.items() if n not in (ADDED, SPOTS)}
    return {**kept, TABLE: RawTensor(TABLE, dtypes.F32, table.shape, table)}


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """As of RoBERTa; whatever the token of padding, positions begin behind number 1."""
    return bert.behind_padding({**values, "pad_token_id": 1})


MPNET = replace(
    bert.BERT, name="mpnet", build=build, hf=("MPNetModel", "MPNetForMaskedLM"),
    layer_prefix=r"(?:mpnet\.)?encoder\.layer\.",
    layer_names={
        **bert.BERT.layer_names, **{f"attention.attn.{part}": f"attn_{part}" for part in "qkv"},
        "attention.attn.o": "attn_output", "attention.LayerNorm": "attn_output_norm",
    },
    top_names={
        lead + a: b for lead in ("", "mpnet.")
        for a, b in {**bert.TOPS, "encoder.relative_attention_bias.weight": TABLE}.items()
    },
    fixed={"hidden_act": bert.BERT.fixed["hidden_act"], "relative_attention_num_buckets": (32,)},
    hf_defaults={**bert.BERT.hf_defaults, "vocab_size": 30527, "type_vocab_size": 0},
    translate=translate, sanitize=bert.cut, load=load, store=store,
)  # fmt: skip
