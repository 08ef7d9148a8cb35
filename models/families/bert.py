"""BERT, as models of embeddings have it (BGE, E5, GTE, MiniLM, Arctic Embed): an encoder whose
layer norms come behind what they follow, with learned positions and exact GELU. RoBERTa and XLM-R
(BGE-M3, multilingual E5) are the same with other files, and BERT's own as GGUF.

Sources: Devlin et al. 2018 (arXiv 1810.04805); Liu et al. 2019 (arXiv 1907.11692); Conneau et al.
2019 (arXiv 1911.02116); transformers `modeling_bert`, `modeling_roberta`; llama.cpp's `bert.cpp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor, ops

from .. import blocks
from ..architecture import Architecture, Tensors, changed
from ..config import DecoderConfig, Keys
from ..step import Step
from ..vectors import INNER, SCORE, bare, vectors
from . import gpt2
from .cohere import epsilon

TYPES, TYPE_TABLE = "tokenizer.ggml.token_type_count", "token_types.weight"


def begin(s: Step, embed: Callable[[Step], Tensor] = blocks.placed_by_table) -> Tensor:
    """What the first layer takes: [T, E]."""
    c, x = s.config, embed(s)
    if c.type_vocab_size > 1 or s.has(TYPE_TABLE):
        kinds = s.w(TYPE_TABLE, c.type_vocab_size, c.hidden_size)
        alike = c.type_vocab_size == 1  # RoBERTa's parts of a text, which separators alone tell
        x = x + (kinds.reshape(-1) if alike else ops.get_rows(kinds, s.types, name="type"))
    return blocks.layer_norm(s, x, "token_embd_norm")


def layer(
    s: Step,
    x: Tensor,
    i: int,
    feed: blocks.Layer = gpt2.feed_forward,
    attend: blocks.Layer = blocks.attention,
) -> Tensor:
    """Layer i, of two halves: [T, E] -> [T, E]."""
    h = blocks.layer_norm(s, x + attend(s, x, i), f"blk.{i}.attn_output_norm")
    return blocks.layer_norm(s, h + feed(s, h, i), f"blk.{i}.layer_output_norm")


def complete(c: DecoderConfig) -> DecoderConfig:
    """Nothing rotates. GGUF does not say which GELU: released models have the exact one."""
    return replace(c, rotated_layers=(False,) * c.num_hidden_layers, exact_gelu=True)


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Without the pooler of a model that gives no scores: its vectors are made without. ModelError
    for a folder without the kinds of parts that its config tells of, as GGUF files may be."""
    if c.type_vocab_size and TYPE_TABLE not in tensors:
        raise ModelError(f"{c.architecture}: the checkpoint has no tensor {TYPE_TABLE!r}")
    if f"{SCORE}.weight" in tensors:
        return tensors
    return {n: t for n, t in tensors.items() if n.rpartition(".")[0] != INNER}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """How many kinds of parts there are, and the epsilon as of layer norms."""
    return {**epsilon(c), TYPES: c.type_vocab_size or 1}  # llama.cpp must be told


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """The former."""
    return {"type_vocab_size": k.integer(TYPES, 0)}


def behind_padding(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """With as many positions as a text has: RoBERTa's table begins with those of padding and of
    what comes before it, of which no text has any."""
    k = Keys(values, "config.json")
    count, unused = k.integer("max_position_embeddings"), k.integer("pad_token_id") + 1
    if not 0 <= unused < count:
        raise ModelError(f"config.json: of {count} positions {unused} belong to no text")
    return {**values, "max_position_embeddings": count - unused, "unused_positions": unused}


def cut(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Without the rows of those positions, as GGUF files have the table; of another size as it is,
    which the graph refuses."""
    found, unused = sanitize(tensors, c), c.unused_positions
    t = found.get(POSITIONS)
    if t is None or t.shape[0] != c.max_position_embeddings + unused:
        return found
    return {**found, POSITIONS: changed(t, t.data[unused:])}


# Folders of embeddings may still tell of what they were trained from: their weights have no head.
CLASSES = ("Model", "ForSequenceClassification", "ForMaskedLM")
POSITIONS = "position_embd.weight"
TOPS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": POSITIONS,
    "embeddings.token_type_embeddings.weight": TYPE_TABLE,
    **{f"embeddings.LayerNorm.{p}": f"token_embd_norm.{p}" for p in ("weight", "bias")},
    **{f"pooler.dense.{p}": f"{INNER}.{p}" for p in ("weight", "bias")},
}
BERT = Architecture(
    "bert", blocks.Stack(layer, bare, begin, vectors), tuple(f"Bert{end}" for end in CLASSES),
    causal=False,
    layer_prefix=r"(?:bert\.)?encoder\.layer\.",
    layer_names={
        **{f"attention.self.{long}": f"attn_{long[0]}" for long in ("query", "key", "value")},
        "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up", "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    },
    top_names={
        **{lead + a: b for a, b in TOPS.items() for lead in ("", "bert.")},
        **{f"classifier.{p}": f"{SCORE}.{p}" for p in ("weight", "bias")},
    },
    fixed={
        "hidden_act": gpt2.EXACT, "position_embedding_type": ("absolute",),
        "is_decoder": (False,), "add_cross_attention": (False,),
    },
    hf_defaults={
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    },
    complete=complete, sanitize=sanitize, keys=keys, read=read, bare=(TYPES,),
)  # fmt: skip
ROBERTA = replace(
    BERT, name="roberta", written_as="bert",
    hf=tuple(lead + end for lead in ("XLMRoberta", "Roberta") for end in CLASSES),
    layer_prefix=r"(?:roberta\.)?encoder\.layer\.",
    top_names={
        **{lead + a: b for a, b in TOPS.items() for lead in ("", "roberta.")},
        **{f"classifier.dense.{p}": f"{INNER}.{p}" for p in ("weight", "bias")},
        **{f"classifier.out_proj.{p}": f"{SCORE}.{p}" for p in ("weight", "bias")},
    },
    hf_defaults={**BERT.hf_defaults, "pad_token_id": 1},
    translate=behind_padding, sanitize=cut,
)  # fmt: skip
