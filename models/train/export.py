"""A trained head as files: SafeAILab's layout, and GGUF. Needs PyTorch."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ggraph import Array, ModelError

from ..eagle3 import Head
from ..heads.layouts import default_taps, open_head
from ..registry import Model
from ..run.convert import head_to_gguf
from ..run.outputs import write_whole
from .net import DraftNet

_NAMES = {
    "q_proj": "midlayer.self_attn.q_proj",
    "k_proj": "midlayer.self_attn.k_proj",
    "v_proj": "midlayer.self_attn.v_proj",
    "o_proj": "midlayer.self_attn.o_proj",
    "gate_proj": "midlayer.mlp.gate_proj",
    "up_proj": "midlayer.mlp.up_proj",
    "down_proj": "midlayer.mlp.down_proj",
    "hidden_norm": "midlayer.hidden_norm",
    "input_layernorm": "midlayer.input_layernorm",
    "post_attention_layernorm": "midlayer.post_attention_layernorm",
}


def layout_name(name: str) -> str:
    """What SafeAILab's layout calls a tensor of the net."""
    part, _, last = name.rpartition(".")
    return f"{_NAMES.get(part, part)}.{last}"


def export_folder(net: DraftNet, target: Model, taps: Sequence[int], ids: Array, out: Path) -> None:
    """Write `config.json` and `model.safetensors` (float16) into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in net.state_dict().items():
        data = value.detach().float().cpu().numpy()
        tensors[layout_name(name)] = data.astype(np.float16)
    tensors["d2t"] = np.asarray(ids, np.int64) - np.arange(len(ids))  # as offsets
    known = np.zeros(target.vocab_size, bool)
    known[ids] = True
    tensors["t2d"] = known
    write_whole(out / "model.safetensors", save(tensors))
    config = json.dumps(_config(net, target, taps), indent=2) + "\n"
    write_whole(out / "config.json", config.encode())


def _config(net: DraftNet, target: Model, taps: Sequence[int]) -> dict[str, object]:
    c = net.config
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.width,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_base,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": c.vocabulary,
        "max_position_embeddings": target.config.max_position_embeddings,
        "torch_dtype": "float16",
    }
    if c.feedback_norm:
        config["norm_output"] = True
    if tuple(taps) != default_taps(target.layer_count):
        config["eagle_aux_hidden_state_layer_ids"] = list(taps)  # at the top level: layer inputs
    return config


def export_gguf(folder: Path, target: Model, out: Path, type_name: str) -> Head:
    """Write the head in `folder` as GGUF; returns it as it is read back from there."""
    head = open_head(folder, target)
    if not isinstance(head, Head):
        raise ModelError(f"{folder} holds no EAGLE-3 head")
    head_to_gguf(head, target, out, type_name)
    found = open_head(out, target)
    if not isinstance(found, Head):
        raise ModelError(f"{out} reads back as no EAGLE-3 head")
    return found
