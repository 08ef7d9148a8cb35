"""Options of configs that no golden folder has, held against logits that transformers made.

Each case is a golden folder with other keys, and with tensors drawn here where the option needs
some; `options.npz` has, by the case's name, the last rows of its logits by transformers 5.24 in
float32, whose attention is "eager".
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_kit import GOLDEN, folder, run_all, spread_error
from safetensors.numpy import load_file, save_file

from ggraph.errors import ModelError
from ggraph.tensor import Array
from models.registry import open_model
from models.run.convert import model_to_gguf

EXPECTED = GOLDEN / "options.npz"
ROWS = 8  # at the end of the text
NEAR = 2e-5  # of the row's spread: an exact GELU differs by 2e-4
Held = dict[str, Array]


def as_they_are(tensors: Held, rng: np.random.Generator) -> Held:
    """No change."""
    return tensors


def with_biases(tensors: Held, rng: np.random.Generator) -> Held:
    """Biases of short convolutions and of the products around them."""
    found = dict(tensors)
    for name in [n for n in tensors if ".conv." in n]:
        bias = rng.standard_normal(len(tensors[name])) / 2
        found[name.replace(".weight", ".bias")] = bias.astype(np.float16)
    return found


def without_biases(tensors: Held, rng: np.random.Generator) -> Held:
    """Those of norms alone."""
    return {n: t for n, t in tensors.items() if not n.endswith(".bias") or "norm" in n}


def tied(tensors: Held, rng: np.random.Generator) -> Held:
    """No table of the logits."""
    return {n: t for n, t in tensors.items() if n != "lm_head.weight"}


LATENT = 24


def through_latents(tensors: Held, rng: np.random.Generator) -> Held:
    """The experts' first features alone, between two products."""
    found = dict(tensors)
    for name, t in tensors.items():
        if name.endswith("mixer.gate.weight"):
            wide, lead = t.shape[1], name.removesuffix("gate.weight")
            for part, shape in (("fc1", (LATENT, wide)), ("fc2", (wide, LATENT))):
                drawn = rng.standard_normal(shape) / 4
                found[f"{lead}{part}_latent_proj.weight"] = drawn.astype(np.float16)
        elif ".experts." in name:
            cut = t[..., :LATENT] if "up_proj" in name else t[..., :LATENT, :]
            found[name] = np.ascontiguousarray(cut)
    return found


SHARED = 48


def beside_experts(tensors: Held, rng: np.random.Generator) -> Held:
    """A feed-forward that every row takes."""
    found = dict(tensors)
    for name, t in tensors.items():
        if name.endswith("block_sparse_moe.router.layer.weight"):
            wide, lead = t.shape[1], name.partition("block_sparse_moe")[0]
            for part, shape in (("input", (2 * SHARED, wide)), ("output", (wide, SHARED))):
                drawn = rng.standard_normal(shape) / 4
                found[f"{lead}shared_mlp.{part}_linear.weight"] = drawn.astype(np.float16)
    return found


def biased(tensors: Held, rng: np.random.Generator, *modules: str) -> Held:
    """A bias beside each matrix of these modules."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith(tuple(f"{m}.weight" for m in modules))]:
        bias = rng.standard_normal(len(tensors[name])) / 2
        found[name.replace(".weight", ".bias")] = bias.astype(np.float16)
    return found


ATTENDING = tuple(f"self_attn.{role}_proj" for role in "qkvo")
PARTS = ("gate_proj", "up_proj", "down_proj")


def biased_ernie(tensors: Held, rng: np.random.Generator) -> Held:
    """Biases of all but the experts; logits have some, too, though they share the embedding."""
    feeding = (f"{m}.{part}" for m in ("mlp", "shared_experts") for part in PARTS)
    found = biased(tensors, rng, *ATTENDING, *feeding)
    wide = len(tensors["model.embed_tokens.weight"])
    return {**found, "lm_head.bias": rng.standard_normal(wide).astype(np.float16)}


def biased_falcon(tensors: Held, rng: np.random.Generator) -> Held:
    """Biases of all products, whatever factors stand before and behind them."""
    feeding = (f"feed_forward.{part}" for part in PARTS)
    return biased(tensors, rng, *ATTENDING, *feeding, "mamba.in_proj", "mamba.out_proj")


DENSE = {"mlp_only_layers": [3], "decoder_sparse_step": 2}
WIDE = 96


def some_dense(tensors: Held, rng: np.random.Generator) -> Held:
    """Plain feed-forwards in layers 0, 2 and 4 for their number, and in 3, which is listed."""
    mixed = ("model.layers.1.", "model.layers.5.")
    found = {n: t for n, t in tensors.items() if ".mlp." not in n or n.startswith(mixed)}
    for i in (0, 2, 3, 4):
        width = len(tensors[f"model.layers.{i}.input_layernorm.weight"])
        for part in PARTS:
            shape = (width, WIDE) if part == "down_proj" else (WIDE, width)
            drawn = rng.standard_normal(shape) / 4
            found[f"model.layers.{i}.mlp.{part}.weight"] = drawn.astype(np.float16)
    return found


def all_below_zero(tensors: Held, rng: np.random.Generator) -> Held:
    """Corrections so low that experts of other groups would win if they were worth 0."""
    found = dict(tensors)
    for name in [n for n in tensors if n.endswith("e_score_correction_bias")]:
        found[name] = rng.uniform(-3, -1, len(tensors[name])).astype(np.float16)
    return found


HEAD = 16


def each_head_normed(tensors: Held, rng: np.random.Generator) -> Held:
    """Norms of q and k whose weights differ from head to head, as Command R+ has them."""
    found = dict(tensors)
    for name, t in tensors.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            drawn = rng.normal(1, 0.5, (len(t) // HEAD, HEAD))
            found[name.replace("_proj", "_norm")] = drawn.astype(np.float16)
    return found


def side_by_side(tensors: Held, rng: np.random.Generator) -> Held:
    """One norm for attention and feed-forward, and one for each head of q and k."""
    found = {n: t for n, t in tensors.items() if "post_attention_layernorm" not in n}
    for name, t in tensors.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            lead = name.replace("_proj.weight", "_layernorm.norms")
            for head in range(len(t) // HEAD):
                found[f"{lead}.{head}.weight"] = rng.normal(1, 0.5, HEAD).astype(np.float16)
    return found


GRANITE_SHARED = {
    "shared_intermediate_size": SHARED, "model_type": "granitemoeshared",
    "architectures": ["GraniteMoeSharedForCausalLM"],
}  # fmt: skip
GRANITE_4 = {
    "shared_intermediate_size": SHARED, "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["full_attention"] * 6,
    "position_embedding_type": "rope", "mamba_n_heads": 8,
}  # fmt: skip
FALCON_BIASES = dict.fromkeys(
    ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), True
)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0}
SLIDING = {"sliding_window": 8, "max_window_layers": 2, "layer_types": None}
TWO = {"n_group": 2, "topk_group": 1}
ONE = {"n_group": 1, "topk_group": 1}
Case = tuple[str, Mapping[str, Any], Callable[[Held, np.random.Generator], Held]]
BY_LAYER = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
CASES: dict[str, Case] = {
    "gpt2_exact": ("tiny2/gpt2", {"activation_function": "gelu"}, as_they_are),
    "gpt2_by_layer": ("tiny2/gpt2", BY_LAYER, as_they_are),
    "gpt2_undivided": ("tiny2/gpt2", {"scale_attn_weights": False}, as_they_are),
    "gpt2_undivided_by_layer": (
        "tiny2/gpt2", {"scale_attn_weights": False, **BY_LAYER}, as_they_are,
    ),
    "lfm2_biases": ("tiny2/lfm2", {"conv_bias": True}, with_biases),
    "lfm2_moe_biases": ("tiny2/lfm2_moe", {"conv_bias": True}, with_biases),
    "nemotron_latent": ("tiny2/nemotron_h_moe", {"moe_latent_size": LATENT}, through_latents),
    "granite_shared": ("tiny2/granite_moe", GRANITE_SHARED, beside_experts),
    "granite_4_of_attention": ("tiny2/granite_moe", GRANITE_4, beside_experts),
    "qwen2_moe_dense": ("tiny2/qwen2_moe", DENSE, some_dense),
    "qwen2_moe_summing": ("tiny2/qwen2_moe", {"norm_topk_prob": True}, as_they_are),
    "qwen3_moe_dense": ("tiny/qwen3_moe", DENSE, some_dense),
    "ernie_biases": ("tiny2/ernie4_5_moe", {"use_bias": True}, biased_ernie),
    "falcon_biases": ("tiny2/falcon_h1", FALCON_BIASES, biased_falcon),
    "cohere_norms": ("tiny/cohere", {"use_qk_norm": True}, each_head_normed),
    "hunyuan_dynamic": ("tiny2/hunyuan_v1_dense", {"rope_parameters": DYNAMIC}, as_they_are),
    "deepseek_v2_greedy": ("tiny2/deepseek_v2", {"topk_method": "greedy"}, as_they_are),
    "deepseek_v3_whole": ("tiny2/deepseek_v3", ONE, as_they_are),
    "deepseek_v3_below_zero": ("tiny2/deepseek_v3", {}, all_below_zero),
    "glm4_moe_groups": ("tiny2/glm4_moe", TWO, as_they_are),
    "glm4_moe_lite_groups": ("tiny2/glm4_moe_lite", TWO, as_they_are),
    "nemotron_groups": ("tiny2/nemotron_h_moe", {"n_group": 4, "topk_group": 2}, as_they_are),
    "dots1_sliding": ("tiny2/dots1", SLIDING, as_they_are),
    "llama4_uneven": ("tiny2/llama4_text", {"use_qk_norm": False}, as_they_are),
    "llama4_still": ("tiny2/llama4_text", {"attn_temperature_tuning": False}, as_they_are),
    "llama4_whole": ("tiny2/llama4_text", {"layer_types": ["full_attention"] * 6}, as_they_are),
    "llama4_third": (
        "tiny2/llama4_text",
        {"no_rope_layers": None, "no_rope_layer_interval": 3, "layer_types": None}, as_they_are,
    ),
    "starcoder2_sliding": ("tiny2/starcoder2", {"sliding_window": 8}, as_they_are),
    "starcoder2_unbiased": ("tiny2/starcoder2", {"use_bias": False}, without_biases),
    "stablelm_beside": (
        "tiny2/stablelm", {"use_parallel_residual": True, "qk_layernorm": True}, side_by_side,
    ),
    "afmoe_unscaled": ("tiny2/afmoe", {"mup_enabled": False}, as_they_are),
    "afmoe_third": (
        "tiny2/afmoe", {"global_attn_every_n_layers": 3, "layer_types": None}, as_they_are,
    ),
    "exaone_moe_groups": ("tiny2/exaone_moe", TWO, as_they_are),
    "exaone_moe_other_layers": (
        "tiny2/exaone_moe", {"layer_types": ["full_attention", *["sliding_attention"] * 4]},
        as_they_are,
    ),
    "exaone_moe_whole": ("tiny2/exaone_moe", {"layer_types": ["full_attention"] * 5}, as_they_are),
    "exaone_moe_uneven": ("tiny2/exaone_moe", {"norm_topk_prob": False}, as_they_are),
    "exaone_moe_tied": ("tiny2/exaone_moe", {"tie_word_embeddings": True}, tied),
    "phi2_tied": ("tiny2/phi2", {"tie_word_embeddings": True}, tied),
    "glm_epsilon": ("tiny2/glm4_moe_lite", {"rms_norm_eps": 1e-2}, as_they_are),
}  # fmt: skip
ANOTHER = ("glm_epsilon",)  # whose GGUF files mean something else: all norms have one epsilon
BIASES, MATRICES = "convolutions have biases", "matrices have biases"
FOURTH = "others than each fourth layer see all"
NO_EXPERTS = r"layers \[0, 2, 3, 4\] have no experts"
UNTOLD = {  # by GGUF
    "gpt2_exact": "GELU is exact", "lfm2_biases": BIASES, "lfm2_moe_biases": BIASES,
    "qwen2_moe_dense": NO_EXPERTS, "qwen2_moe_summing": "experts' shares sum to 1",
    "afmoe_unscaled": "embeddings have no factor", "afmoe_third": FOURTH,
    "exaone_moe_whole": "no layer slides",
    "dots1_sliding": "layers slide", "qwen3_moe_dense": NO_EXPERTS, "ernie_biases": MATRICES,
    "falcon_biases": MATRICES, "llama4_whole": FOURTH, "llama4_third": FOURTH,
    "llama4_uneven": "queries and keys are not normalised",
}  # fmt: skip


def made(case: str, out: Path) -> Path:
    """The case's folder."""
    name, changes, change = CASES[case]
    hf = folder(name, out, changes)
    tensors = load_file(hf / "model.safetensors")
    save_file(change(tensors, np.random.default_rng(7)), hf / "model.safetensors")
    return hf


def error(path: Path, case: str) -> float:
    """Of the last rows of its logits."""
    ids = np.load(GOLDEN / CASES[case][0] / "expected.npz")["ids"].tolist()
    with np.load(EXPECTED) as expected:
        return spread_error(run_all(path, ids)["logits"][-ROWS:], expected[case])


@pytest.mark.parametrize("case", CASES)
def test_an_option_has_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    hf = made(case, tmp_path / "hf")
    assert error(hf, case) < NEAR
    if case in UNTOLD:
        with pytest.raises(ModelError, match=f"GGUF cannot say that {UNTOLD[case]}"):
            model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
    else:
        model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
        assert (error(tmp_path / "m.gguf", case) < NEAR) == (case not in ANOTHER)


@pytest.mark.parametrize("case", CASES)
def test_an_option_changes_the_logits(case: str) -> None:
    """Else its vectors would say nothing."""
    plain = np.load(GOLDEN / CASES[case][0] / "expected.npz")["logits"][-ROWS:]
    with np.load(EXPECTED) as expected:
        assert spread_error(expected[case], plain) > 5 * NEAR


def test_every_case_has_its_vectors() -> None:
    with np.load(EXPECTED) as expected:
        assert sorted(expected) == sorted(CASES)
