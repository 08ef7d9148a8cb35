"""Ministral 3: Llama stretched by YaRN, whose queries grow with the position (`blocks` does that).

Mistral Small 3's folders have the same class around a Mistral, and its GGUF files the same name.
Sources: Mistral AI 2025, the Ministral 3 release; transformers `modeling_ministral3`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Keys
from ..hf_config import GROWTH, scaling_of
from .llama import MISTRAL

UNSAID = {
    "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 262144, "rope_theta": 1e6, "rope_scaling": {
        "rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384, GROWTH: 0.1,
    },
}  # fmt: skip


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the class of the text means by what is left out; the growth stands among the rope's."""
    whole = values.get("model_type") == "ministral3"
    meant = {**(UNSAID if whole else MISTRAL.hf_defaults), **values}
    return {**meant, GROWTH: scaling_of(Keys(meant, "config.json")).get(GROWTH)}


MINISTRAL3 = replace(
    MISTRAL, name="mistral3", written_as="", translate=translate, hf_defaults={},
    hf=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
)  # fmt: skip
