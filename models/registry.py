"""From a path to a model that can run: architecture by name, weights under one naming.

Weights carry the GGUF names (`blk.0.attn_q.weight`) whatever the file; `sanitize` maps the
Hugging Face names to them, and is the only place that knows both.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes
from ggraph.decode.model import StepShape
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import Checkpoint, RawTensor

from . import llama, qwen2, qwen3, qwen3_moe
from .blocks import Step
from .config import DecoderConfig, from_gguf, from_hf


@dataclass(frozen=True)
class Architecture:
    """How one family is built. `rope_mode` is the pairing that its GGUF files use."""

    build: Callable[[Step], Graph]
    rope_mode: str


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(llama.build, "normal"),
    "mistral": Architecture(llama.build, "normal"),
    "qwen2": Architecture(qwen2.build, "neox"),
    "qwen3": Architecture(qwen3.build, "neox"),
    "qwen3moe": Architecture(qwen3_moe.build, "neox"),
}
HF_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint ready to be built: implements `ggraph.decode.model.CausalModel`.

    `prefix` stands before the names of its weights and caches; models of one session need
    different ones, for a session knows both by name.
    """

    name: str
    config: DecoderConfig
    catalogue: Mapping[str, RawTensor]
    checkpoint: Checkpoint = field(repr=False)
    prefix: str = ""

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        """Most positions that the model was trained for."""
        return self.config.max_position_embeddings

    @property
    def layer_count(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @property
    def width(self) -> int:
        """E, the width of the residual stream."""
        return self.config.hidden_size

    @property
    def sliding_window(self) -> int | None:
        """Positions that a sliding layer sees, None where no layer slides."""
        return self.config.sliding_window

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step (see `ggraph.decode.model` for inputs and outputs)."""
        step = Step(self.config, self.catalogue, shape, self.prefix)
        return ARCHITECTURES[self.config.architecture].build(step)

    def weight(self, t: Tensor) -> Array:
        """Raw storage of a weight."""
        return self.catalogue[t.name.removeprefix(self.prefix)].data

    def beside(self, prefix: str) -> "Model":
        """The same model for a session that holds another one already."""
        return replace(self, name=f"{prefix}{self.name}", prefix=prefix)


def open_model(path: Path) -> Model:
    """The model in a GGUF file or a Hugging Face folder.

    Raises FormatError for a damaged file, ModelError for an architecture or shape we do not know.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.format == "gguf":
        architecture = str(checkpoint.architecture)
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}"
            )
        mode = ARCHITECTURES[architecture].rope_mode
        config = from_gguf(checkpoint.metadata, architecture, mode)
        catalogue = dict(checkpoint.tensors)
    else:
        architecture = _hf_architecture(path, checkpoint)
        config = from_hf(checkpoint.metadata, architecture)
        catalogue = sanitize(checkpoint.tensors, config)
    if "rope_freqs.weight" not in catalogue and config.rope.freq_factors is not None:
        catalogue["rope_freqs.weight"] = _vector("rope_freqs.weight", config.rope.freq_factors)
    catalogue = {name: t.widened() for name, t in catalogue.items()}
    return Model(path.stem if path.is_file() else path.name, config, catalogue, checkpoint)


def _hf_architecture(path: Path, checkpoint: Checkpoint) -> str:
    named = checkpoint.metadata.get("architectures") or [checkpoint.architecture]
    for name in named:
        if name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    raise ModelError(f"{path}: architectures {named}; known: {', '.join(HF_ARCHITECTURES)}")


def _vector(name: str, values: tuple[float, ...]) -> RawTensor:
    data = np.asarray(values, np.float32)
    return RawTensor(name, dtypes.F32, data.shape, data)


_LAYER_NAMES = {
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
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


def sanitize(tensors: Mapping[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    """Hugging Face tensors under GGUF names; experts stacked; unknown names are refused."""
    found: dict[str, RawTensor] = {}
    stacks: dict[str, dict[int, RawTensor]] = {}
    for name, t in tensors.items():
        match = _LAYER.fullmatch(name)
        if name in _TOP_NAMES:
            found[_TOP_NAMES[name]] = replace(t, name=_TOP_NAMES[name])
        elif match is not None and match[2] in _LAYER_NAMES:
            title = f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
            found[title] = replace(t, name=title)
        elif match is not None and (expert := _EXPERT.fullmatch(match[2])):
            title = f"blk.{match[1]}.ffn_{expert[2]}_exps.{match[3]}"
            stacks.setdefault(title, {})[int(expert[1])] = t
        elif not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"{config.architecture}: unknown tensor {name!r} in the checkpoint")
    for title, parts in stacks.items():
        found[title] = _stack(title, parts, config.num_experts)
    return found


def _stack(title: str, parts: Mapping[int, RawTensor], count: int) -> RawTensor:
    """Experts as one tensor [X, n, k]; all must be present and alike."""
    if sorted(parts) != list(range(count)):
        raise ModelError(f"{title}: experts {sorted(parts)} of {count}")
    first = parts[0]
    if any((p.shape, p.dtype) != (first.shape, first.dtype) for p in parts.values()):
        raise ModelError(f"{title}: the experts differ in shape or dtype")
    data = np.stack([parts[i].data for i in range(count)])
    return RawTensor(title, first.dtype, (count, *first.shape), data)
