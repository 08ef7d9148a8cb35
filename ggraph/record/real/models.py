"""Models that the configurations need and nobody ships: made from the one that everybody has.

A mixture of experts whose experts are all equal says what the dense model says, whichever of them
is chosen: an oracle for free. The adapter is noise, small enough that the text stays a text.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ggraph.dtype import F32
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.gguf import read_gguf, write_gguf

EXPERTS, USED = 4, 2
RANK, SCALE, SEED = 4, 0.002, 7


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
        yield replace(t, name=name, shape=(EXPERTS, *t.shape), data=np.stack([t.data] * EXPERTS))
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
