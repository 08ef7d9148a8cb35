"""Models that the configurations need and nobody ships: made from the one that everybody has.

A mixture of experts whose experts are all equal says what the dense model says, whichever of them
is chosen: an oracle for free. The adapter is noise, small enough that the text stays a text. Models
and heads that draft are noise too: what is judged is who waits for whom, not what is said.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph.dtype import F32
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.gguf import read_gguf, write_gguf

EXPERTS, USED = 4, 2
RANK, SCALE, SEED = 4, 0.002, 7
HEAD = "attention.head_count"


def equal_experts(model: Path, target: Path) -> Path:
    """A llama model as a mixture of 4 equal experts, 2 of which are used; made once."""
    if not target.is_file():
        dense = read_gguf(model)
        experts = {"llama.expert_count": EXPERTS, "llama.expert_used_count": USED}
        write_gguf(target, dict(dense.metadata) | experts, _experts(dense))
    return target


def _experts(dense: Checkpoint) -> Iterator[RawTensor]:
    rng = np.random.default_rng(SEED)
    width = int(dense.metadata["llama.embedding_length"])
    for t in dense.tensors.values():
        part = t.name.rpartition(".weight")[0].rpartition(".")[2]
        if part not in ("ffn_gate", "ffn_up", "ffn_down"):
            yield t
            continue
        name = t.name.replace(part, f"{part}_exps")
        yield replace(t, name=name, shape=(EXPERTS, *t.shape), storage=np.stack([t.data] * EXPERTS))
        if part == "ffn_gate":
            router = rng.standard_normal((EXPERTS, width)).astype(np.float32)
            yield RawTensor(t.name.replace(part, "ffn_gate_inp"), F32, router.shape, router)


def noise_adapter(model: Path, target: Path) -> Path:
    """A LoRA adapter of rank 4 for the query products of a llama model; made once."""
    if not target.is_file():
        metadata = {
            "general.type": "adapter",
            "general.architecture": "llama",
            "adapter.type": "lora",
            "adapter.lora.alpha": float(RANK),
        }
        write_gguf(target, metadata, _noise(read_gguf(model)))
    return target


def _noise(model: Checkpoint) -> Iterator[RawTensor]:
    rng = np.random.default_rng(SEED)
    for t in model.tensors.values():
        if t.name.endswith("attn_q.weight"):
            for side, shape in (("a", (RANK, t.shape[1])), ("b", (t.shape[0], RANK))):
                data = (rng.standard_normal(shape) * SCALE).astype(np.float32)
                yield RawTensor(f"{t.name}.lora_{side}", F32, shape, data)


# A Qwen3.5 of four layers, the last of which has attention, and one layer more that drafts.
WIDTH, INNER, HEADS, DIM, STATE = 64, 96, 2, 32, 32
QWEN: dict[str, object] = {
    "block_count": 5,
    "nextn_predict_layers": 1,
    "full_attention_interval": 4,
    "context_length": 2048,
    "embedding_length": WIDTH,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": DIM,
    "attention.value_length": DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [3, 3, 2, 0],
    "rope.freq_base": 10000.0,
    "ssm.conv_kernel": 4,
    "ssm.state_size": STATE,
    "ssm.group_count": 1,
    "ssm.time_step_rank": HEADS,
    "ssm.inner_size": HEADS * STATE,
}
Shapes = dict[str, tuple[int, ...]]
EVERY: Shapes = {
    "attn_norm.weight": (WIDTH,),
    "post_attention_norm.weight": (WIDTH,),
    "ffn_gate.weight": (INNER, WIDTH),
    "ffn_up.weight": (INNER, WIDTH),
    "ffn_down.weight": (WIDTH, INNER),
}
DELTA_NET: Shapes = EVERY | {
    "attn_qkv.weight": ((HEADS + 2) * STATE, WIDTH),
    "attn_gate.weight": (HEADS * STATE, WIDTH),
    "ssm_conv1d.weight": ((HEADS + 2) * STATE, 4),
    "ssm_dt.bias": (HEADS,),
    "ssm_a": (HEADS,),
    "ssm_alpha.weight": (HEADS, WIDTH),
    "ssm_beta.weight": (HEADS, WIDTH),
    "ssm_norm.weight": (STATE,),
    "ssm_out.weight": (WIDTH, HEADS * STATE),
}
ATTENTION: Shapes = EVERY | {
    "attn_q.weight": (2 * HEADS * DIM, WIDTH),  # a gate stands beside each head
    "attn_k.weight": (DIM, WIDTH),
    "attn_v.weight": (DIM, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * DIM),
    "attn_q_norm.weight": (DIM,),
    "attn_k_norm.weight": (DIM,),
}
NEXT: Shapes = ATTENTION | {
    "nextn.eh_proj.weight": (WIDTH, 2 * WIDTH),
    "nextn.enorm.weight": (WIDTH,),
    "nextn.hnorm.weight": (WIDTH,),
}


def next_tokens(model: Path, target: Path) -> Path:
    """A Qwen3.5 of noise with a layer that drafts (MTP) and `model`'s tokenizer; made once."""
    if not target.is_file():
        words = _words(model)
        layers = [DELTA_NET] * 3 + [ATTENTION, NEXT]
        shapes: Shapes = {
            f"blk.{i}.{n}": x for i, part in enumerate(layers) for n, x in part.items()
        }
        shapes["token_embd.weight"] = (len(words["tokenizer.ggml.tokens"]), WIDTH)
        shapes["output_norm.weight"] = (WIDTH,)
        metadata = {"general.architecture": "qwen35"} | {f"qwen35.{k}": v for k, v in QWEN.items()}
        write_gguf(target, metadata | words, _drawn(shapes))
    return target


def block_drafter(model: Path, target: Path) -> Path:
    """A DFlash head of noise for `model`: one layer, which reads three of the model's and drafts
    three tokens at once; made once."""
    if not target.is_file():
        words, read = _words(model), read_gguf(model)
        c = {k.removeprefix("llama."): v for k, v in read.metadata.items() if "llama." in k}
        wide, heads, kv = (int(c[k]) for k in ("embedding_length", HEAD, f"{HEAD}_kv"))
        inner, dim = int(c["feed_forward_length"]), wide // heads
        metadata: dict[str, object] = {"general.architecture": "dflash"}
        metadata |= {f"dflash.{k}": v for k, v in c.items()}
        metadata |= {"dflash.block_count": 1, "dflash.block_size": 4}
        metadata["dflash.target_layers"] = [2, 15, 27]
        metadata["tokenizer.ggml.mask_token_id"] = 0
        shapes: Shapes = {
            "fc.weight": (wide, 3 * wide),
            "enc.output_norm.weight": (wide,),
            "output_norm.weight": (wide,),
            "blk.0.attn_norm.weight": (wide,),
            "blk.0.ffn_norm.weight": (wide,),
            "blk.0.attn_q.weight": (heads * dim, wide),
            "blk.0.attn_k.weight": (kv * dim, wide),
            "blk.0.attn_v.weight": (kv * dim, wide),
            "blk.0.attn_output.weight": (wide, heads * dim),
            "blk.0.attn_q_norm.weight": (dim,),
            "blk.0.attn_k_norm.weight": (dim,),
            "blk.0.ffn_gate.weight": (inner, wide),
            "blk.0.ffn_up.weight": (inner, wide),
            "blk.0.ffn_down.weight": (wide, inner),
        }
        write_gguf(target, metadata | words, _drawn(shapes))
    return target


def _words(model: Path) -> dict[str, Any]:
    """A model's tokenizer."""
    return {k: v for k, v in read_gguf(model).metadata.items() if k.startswith("tokenizer.")}


def _drawn(shapes: Shapes) -> Iterator[RawTensor]:
    """Noise that keeps its size from layer to layer; norms are 1, decays below 0."""
    rng = np.random.default_rng(SEED)
    for name, shape in shapes.items():
        data = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        if name.endswith("ssm_a"):
            data = -np.abs(data)
        elif "norm." in name:
            data = np.ones(shape, np.float32)
        yield RawTensor(name, F32, shape, data)
