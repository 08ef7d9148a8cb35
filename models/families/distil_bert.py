"""DistilBERT: BERT without parts of a text, under other names. Its GGUF files are BERT's.

Sources: Sanh et al. 2019 (arXiv 1910.01108); transformers `modeling_distilbert`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import bert, gpt2

OWN = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}  # fmt: skip


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys under their usual names."""
    return {**values, **{usual: values[own] for own, usual in OWN.items()}}


DISTIL_BERT = replace(
    bert.BERT, name="distilbert", written_as="bert",
    hf=("DistilBertModel", "DistilBertForMaskedLM"),
    layer_prefix=r"(?:distilbert\.)?transformer\.layer\.",
    layer_names={
        **{f"attention.{part}_lin": f"attn_{part}" for part in "qkv"},
        "attention.out_lin": "attn_output", "sa_layer_norm": "attn_output_norm",
        "ffn.lin1": "ffn_up", "ffn.lin2": "ffn_down", "output_layer_norm": "layer_output_norm",
    },
    top_names={lead + a: b for a, b in bert.TOPS.items() for lead in ("", "distilbert.")},
    fixed={"activation": gpt2.EXACT},
    hf_defaults={
        "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072,
        "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
    },
    translate=translate,
)  # fmt: skip
