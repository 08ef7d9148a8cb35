"""Random draft heads for SmolLM2-135M, in the layouts of the wild; for checks, not for speed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WIDTH, FFN, HEADS_, KV, DIM, DRAFT = 576, 1536, 9, 3, 64, 8192
RANK, PLAIN, TURNED = 128, 32, 32  # of latent attention
Tensors = dict[str, np.ndarray[Any, Any]]
RNG = np.random.default_rng(0)


def matrix(n: int, k: int) -> np.ndarray[Any, Any]:
    """[n, k] float16 whose products keep the size of what goes in."""
    drawn: np.ndarray[Any, Any] = RNG.standard_normal((n, k)) / np.sqrt(k)
    return drawn.astype(np.float16)


def layer(prefix: str, wide: int) -> Tensors:
    """A llama layer whose attention reads `wide` values."""
    shapes = {
        "self_attn.q_proj": (HEADS_ * DIM, wide), "self_attn.k_proj": (KV * DIM, wide),
        "self_attn.v_proj": (KV * DIM, wide), "self_attn.o_proj": (WIDTH, HEADS_ * DIM),
        "mlp.gate_proj": (FFN, WIDTH), "mlp.up_proj": (FFN, WIDTH), "mlp.down_proj": (WIDTH, FFN),
    }  # fmt: skip
    made = {f"{prefix}.{n}.weight": matrix(*s) for n, s in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"{prefix}.{name}.weight"] = np.ones(WIDTH, np.float16)
    return made


def around(first: Tensors) -> Tensors:
    """The tensors around an EAGLE-3 head's layers."""
    return first | {
        "midlayer.hidden_norm.weight": np.ones(WIDTH, np.float16),
        "fc.weight": matrix(WIDTH, 3 * WIDTH), "norm.weight": np.ones(WIDTH, np.float16),
        "lm_head.weight": matrix(DRAFT, WIDTH), "d2t": np.zeros(DRAFT, np.int64),
    }  # fmt: skip


def saved(folder: Path, tensors: Tensors, **changes: object) -> Path:
    """Write tensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": WIDTH, "rms_norm_eps": 1e-5,
        "intermediate_size": FFN, "num_attention_heads": HEADS_, "num_key_value_heads": KV,
        "num_hidden_layers": 1, "vocab_size": 49152, "draft_vocab_size": DRAFT,
        "max_position_embeddings": 2048, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle3(folder: Path) -> Path:
    """SafeAILab's layout."""
    return saved(folder, around(layer("midlayer", 2 * WIDTH)))


def latent(folder: Path) -> Path:
    """Latent attention and EAGLE-3.1's norms, as heads for Kimi have them."""
    attention = {
        "q_a_proj": (192, 2 * WIDTH), "q_b_proj": (HEADS_ * (PLAIN + TURNED), 192),
        "kv_a_proj_with_mqa": (RANK + TURNED, 2 * WIDTH),
        "kv_b_proj": (HEADS_ * (PLAIN + DIM), RANK), "o_proj": (WIDTH, HEADS_ * DIM),
    }  # fmt: skip
    made = {k: v for k, v in layer("midlayer", 2 * WIDTH).items() if "self_attn" not in k}
    made |= {f"midlayer.self_attn.{n}.weight": matrix(*s) for n, s in attention.items()}
    made["midlayer.self_attn.q_a_layernorm.weight"] = np.ones(192, np.float16)
    made["midlayer.self_attn.kv_a_layernorm.weight"] = np.ones(RANK, np.float16)
    made |= {f"fc_norm.{i}.weight": np.ones(WIDTH, np.float16) for i in range(3)}
    return saved(folder, around(made), norm_output=True)


def parallel(folder: Path) -> Path:
    """P-EAGLE's: two layers and a masked row."""
    made = around(layer("midlayer", 2 * WIDTH)) | layer("layers.1", WIDTH)
    made["mask_hidden"] = RNG.standard_normal((1, 1, 3 * WIDTH)).astype(np.float16)
    return saved(folder, made, ptd_token_id=17)


def eagle1(folder: Path) -> Path:
    """The first generation's."""
    made = layer("layers.0", WIDTH) | {"fc.weight": matrix(WIDTH, 2 * WIDTH)}
    del made["layers.0.input_layernorm.weight"]
    return saved(folder, made, architectures=["LlamaForCausalLM"], draft_vocab_size=None)


HEADS: dict[str, Callable[[Path], Path]] = {
    "eagle3": eagle3, "latent": latent, "parallel": parallel, "eagle1": eagle1,
}  # fmt: skip
