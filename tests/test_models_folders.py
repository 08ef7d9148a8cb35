"""What a Hugging Face folder may say in more than one way, and what it may leave out."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_kit import GOLDEN, NAMES, TOLERANCE, folder, run_all, spread_error
from safetensors.numpy import load_file, save_file
from test_models_unsaid import FULL, QWEN

from ggraph.errors import FormatError, ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from ggraph.tensor import Array
from models.families import FAMILIES
from models.families.apertus import ROPE
from models.families.falcon_h1 import FALCON_H1
from models.families.gemma3 import GEMMA3
from models.families.gpt2 import GPT2
from models.families.lfm2 import LFM2
from models.registry import config_from_hf, open_model
from models.run.convert import model_to_gguf

MIXTURES = (
    "tiny/qwen3_moe", "tiny2/afmoe", "tiny2/dots1", "tiny2/ernie4_5_moe", "tiny2/exaone_moe",
    "tiny2/glm4_moe", "tiny2/glm4_moe_lite",
    "tiny2/hunyuan_v1_moe", "tiny2/lfm2_moe", "tiny2/minimax_m2", "tiny2/mixtral", "tiny2/olmoe",
    "tiny2/qwen2_moe", "tiny2/qwen3_5_moe", "tiny2/qwen3_next",
)  # fmt: skip
PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def error(path: Path, name: str) -> float:
    """Of its logits, held against the golden vectors of `name`."""
    expected = np.load(GOLDEN / name / "expected.npz")
    return spread_error(run_all(path, expected["ids"].tolist())["logits"], expected["logits"])


def stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """All experts of a layer in two tensors, as transformers 5 keeps and may save them."""
    found: dict[str, Array] = {}
    experts: dict[str, dict[tuple[int, int], Array]] = {}
    for given, t in tensors.items():
        name = given.replace("block_sparse_moe", "mlp")
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            found[name] = t
        else:
            experts.setdefault(match[1], {})[int(match[2]), PARTS[match[3]]] = t
    for lead, parts in experts.items():
        count = range(len(parts) // 3)
        both = [np.concatenate([parts[x, 0], parts[x, 1]]) for x in count]
        found[f"{lead}.gate_up_proj"] = np.stack(both)
        found[f"{lead}.down_proj"] = np.stack([parts[x, 2] for x in count])
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_one_tensor_are_those_in_many(name: str, tmp_path: Path) -> None:
    hf = folder(name, tmp_path / "hf", {})
    made = stacked(load_file(hf / "model.safetensors"))
    save_file(made, hf / "model.safetensors")
    assert error(hf, name) < TOLERANCE
    one = next(n for n in made if n.startswith("model.layers.2.") and n.endswith(".gate_up_proj"))
    for odd in (made[one][:, 1:], np.ones(3, np.float16)):
        damaged = {**made, one: np.ascontiguousarray(odd)}
        save_file(damaged, hf / "model.safetensors")
        with pytest.raises(ModelError, match=r"gate_up_proj'.*gate and up of shape"):
            open_model(hf)


def test_olmo_3_as_it_was_released(tmp_path: Path) -> None:
    """One scaling, of the full layers alone; the sliding ones listed, or not."""
    config = json.loads((GOLDEN / "tiny2" / "olmo3" / "config.json").read_text())
    scaling = dict(config["rope_parameters"]["full_attention"])
    older = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    for i, more in enumerate(({}, {"layer_types": None})):
        changes = {"rope_parameters": None, **older, **more}
        assert error(folder("tiny2/olmo3", tmp_path / str(i), changes), "tiny2/olmo3") < TOLERANCE


@pytest.mark.parametrize("lead", ["language_model.model.", "model.language_model."])
def test_ministral_3_as_it_was_released(lead: str, tmp_path: Path) -> None:
    """The text's part of a model that sees."""
    hf = folder("tiny2/ministral3", tmp_path / "hf", {})
    text = json.loads((hf / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    (hf / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    tensors = load_file(hf / "model.safetensors")
    told = {n.replace("model.", lead, 1): t for n, t in tensors.items()}
    others = ("vision_tower", "model.vision_tower", "multi_modal_projector")
    seen = {f"{side}.patch_conv.weight": np.ones(3, np.float16) for side in others}
    save_file({**told, **seen}, hf / "model.safetensors")
    assert error(hf, "tiny2/ministral3") < TOLERANCE


def test_experts_of_qwen_3_vl_as_they_were_released(tmp_path: Path) -> None:
    """With a column for each feature that they make."""
    hf = folder("tiny/qwen3_vl_moe", tmp_path / "hf", {})
    found = load_file(hf / "model.safetensors")
    columns = [n for n in found if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(columns) == 8
    found |= {n: np.ascontiguousarray(found[n].swapaxes(1, 2)) for n in columns}
    save_file(found, hf / "model.safetensors")
    assert error(hf, "tiny/qwen3_vl_moe") < TOLERANCE


def test_qwen_2_5_vl_as_it_was_released(tmp_path: Path) -> None:
    """No config of the text by itself, and an older name of its rotation."""
    told = json.loads((GOLDEN / "tiny" / "qwen2_bias" / "config.json").read_text())
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    changes = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_theta": told["rope_parameters"]["rope_theta"],
    }
    hf = folder("tiny/qwen2_bias", tmp_path / "hf", {
        **changes, "rope_parameters": None, "rope_scaling": rope, "vision_config": {"depth": 1},
    })  # fmt: skip
    tensors = load_file(hf / "model.safetensors")
    save_file({**tensors, "visual.merger.ln_q.weight": np.ones(3, np.float16)},
              hf / "model.safetensors")  # fmt: skip
    assert error(hf, "tiny/qwen2_bias") < TOLERANCE


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_queries_grow_by_the_contexts_of_the_training_however_they_turn(
    kind: str, tmp_path: Path
) -> None:
    """YaRN by 1 stretches nothing, and says how long those contexts were, too."""
    rope = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "factor": 1.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    found = []
    for name in (kind, "yarn"):
        told = {"rope_parameters": {**rope, "rope_type": name}}
        hf = folder("tiny2/ministral3", tmp_path / name, told)
        found.append(run_all(hf, np.load(hf / "expected.npz")["ids"].tolist())["logits"])
    assert spread_error(*found) < TOLERANCE


@pytest.mark.parametrize("kind", ["mistral", None])
def test_the_text_of_a_mistral_small_3_is_a_mistral(kind: str | None, tmp_path: Path) -> None:
    """Its config says so by the kind alone, or not at all."""
    text = json.loads((GOLDEN / "tiny" / "mistral_sliding" / "config.json").read_text())
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    for i, window in enumerate((text["sliding_window"], None)):
        own = {**text, "model_type": kind, "sliding_window": window}
        kept = {k: v for k, v in own.items() if v is not None}
        hf = folder("tiny/mistral_sliding", tmp_path / str(i), {**whole, "text_config": kept})
        (hf / "config.json").write_text(json.dumps({**whole, "text_config": kept}))
        c = open_model(hf).config
        assert (c.architecture, c.sliding_window) == ("mistral3", window or 4096)
        assert (error(hf, "tiny/mistral_sliding") < TOLERANCE) == (window is not None)


def test_gemma_3_4b_as_it_was_released() -> None:
    """Its config tells next to nothing of the text's part; scaled are the full layers alone."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024, "rope_scaling": scaling}  # fmt: skip
    c = config_from_hf(GEMMA3, text)
    sizes = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.vocab_size
    assert sizes == (8, 4, 256, 262208)
    assert (c.max_position_embeddings, c.attention_multiplier) == (131072, 1 / 16)
    assert [i for i in range(34) if not c.slides(i)] == [5, 11, 17, 23, 29]
    turns = [(rope.freq_base, rope.freq_scale) for i in (4, 5) if (rope := c.rope_of(i))]
    assert turns == [(1e4, 1.0), (1e6, 1 / 8)]


def test_hunyuan_as_it_was_released(tmp_path: Path) -> None:
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32}
    older = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": rope}
    hf = folder("tiny2/hunyuan_v1_dense", tmp_path / "hf", {**older, "num_experts": 1})
    assert error(hf, "tiny2/hunyuan_v1_dense") < TOLERANCE
    for i, alpha in enumerate((-1.0, 1e308)):
        odd = {**older, "rope_scaling": {k: v for k, v in {**rope, "alpha": alpha}.items() if v}}
        with pytest.raises(ModelError, match="dynamic rope with alpha"):
            open_model(folder("tiny2/hunyuan_v1_dense", tmp_path / str(i), odd))


def test_hunyuan_a13b_as_it_was_released(tmp_path: Path) -> None:
    """Numbers told of each layer, of latents that it has not, and a base stretched by `alpha`."""
    config = json.loads((GOLDEN / "tiny2" / "hunyuan_v1_moe" / "config.json").read_text())
    each = {"moe_topk": [2] * 4, "moe_intermediate_size": [24] * 4, "num_shared_expert": [1] * 4}
    latents = {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128, "use_mla": False}
    groups = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    base = config["rope_parameters"]["rope_theta"] / 1000.0 ** (16 / 14)
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    older = {"rope_parameters": None, "rope_theta": base, "rope_scaling": rope}
    changes = {**each, **latents, **groups, **older, "use_qk_norm": True, "use_cla": False}
    hf = folder("tiny2/hunyuan_v1_moe", tmp_path / "hf", changes)
    assert error(hf, "tiny2/hunyuan_v1_moe") < TOLERANCE


def test_trinity_as_it_was_released(tmp_path: Path) -> None:
    """Its first config tells of the router, and of an older rope."""
    router = {"score_func": "sigmoid", "route_norm": True, "load_balance_coeff": 0.001}
    groups = dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1)
    rope = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}
    hf = folder("tiny2/afmoe", tmp_path / "hf", {**router, **groups, **rope, "layer_types": None})
    assert error(hf, "tiny2/afmoe") < TOLERANCE


@pytest.mark.parametrize("name", ["ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"])
def test_k_exaone_as_it_was_released(name: str, tmp_path: Path) -> None:
    """Periods by letters beside lists, a layer that only drafts, an older rope and class."""
    told = {"architectures": [name], "sliding_window_pattern": "LLLG", "scoring_func": "sigmoid"}
    rope = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}
    changes = {**told, **rope, "num_nextn_predict_layers": 1}
    hf = folder("tiny2/exaone_moe", tmp_path / "hf", changes)
    tensors = load_file(hf / "model.safetensors")
    tensors = {n.replace("mlp.e_score", "mlp.gate.e_score"): t for n, t in tensors.items()}
    end = tensors["model.norm.weight"]
    drafting = {f"mtp.{n}.weight": end for n in ("fc", "norm", "layers.0.input_layernorm")}
    save_file({**tensors, **drafting}, hf / "model.safetensors")
    assert error(hf, "tiny2/exaone_moe") < TOLERANCE


def test_minimax_m2_as_it_was_released(tmp_path: Path) -> None:
    """The share of a head that turns is told as so many features."""
    told = {"rope_parameters": None, "rope_theta": 10000.0, "rotary_dim": 8}
    hf = folder("tiny2/minimax_m2", tmp_path / "hf", told)
    assert error(hf, "tiny2/minimax_m2") < TOLERANCE
    whole = open_model(folder("tiny2/minimax_m2", tmp_path / "whole", {**told, "rotary_dim": 16}))
    assert whole.config.rope.n_rot == 16


def test_apertus_has_the_numbers_of_its_unit(tmp_path: Path) -> None:
    """Each layer its own, as tensors of a folder and as keys of a GGUF file, without its name."""
    hf, path = folder("tiny2/apertus", tmp_path / "hf", {}), tmp_path / "m.gguf"
    model_to_gguf(open_model(hf), path, "f32")
    c = open_checkpoint(path)
    for value, words in ((None, "xIELU"), (np.nan, "xIELU"), ([0.5] * 3, "3 layers: has 4")):
        told = {**c.metadata, "xielu.beta": value}
        kept = {k: v for k, v in told.items() if v is not None}
        write_gguf(tmp_path / "odd.gguf", kept, list(c.tensors.values()))
        with pytest.raises(ModelError, match=words):
            open_model(tmp_path / "odd.gguf")
    once = {**c.metadata, "xielu.beta": 0.5, "xielu.eps": c.metadata["xielu.eps"][0]}
    write_gguf(tmp_path / "once.gguf", once, list(c.tensors.values()))
    assert error(tmp_path / "once.gguf", "tiny2/apertus") < TOLERANCE
    tensors = load_file(hf / "model.safetensors")
    del tensors["model.layers.2.mlp.act_fn.alpha_p"]
    save_file(tensors, hf / "model.safetensors")
    with pytest.raises(ModelError, match="xIELU"):
        open_model(hf)


def test_apertus_turns_as_its_class_where_nothing_is_told(tmp_path: Path) -> None:
    c = open_model(folder("tiny2/apertus", tmp_path / "hf", {"rope_parameters": None})).config
    told = open_model(folder("tiny2/apertus", tmp_path / "told", {"rope_parameters": ROPE})).config
    assert c.rope == told.rope and c.rope.freq_base == 12e6 and c.rope.freq_factors


def test_command_r_as_it_was_released(tmp_path: Path) -> None:
    """Its context under another name, and an older one's window, which it has not."""
    told = {"model_max_length": 131072, "max_position_embeddings": 8192, "sliding_window": 8}
    hf = folder("tiny/cohere", tmp_path / "hf", told)
    assert error(hf, "tiny/cohere") < TOLERANCE
    assert open_model(hf).context_length == 131072
    scaled = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0}}
    again = open_model(folder("tiny/cohere", tmp_path / "scaled", {**told, **scaled}))
    assert again.context_length == 8192


@pytest.mark.parametrize(
    ("unit", "newer"), [("gelu", None), ("gelu", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh", None)]
)
def test_gemma_as_it_was_released(unit: str, newer: str | None, tmp_path: Path) -> None:
    """Its gate is the tanh form of GELU under either name."""
    told = {"hidden_act": unit, "hidden_activation": newer, "rope_parameters": None}
    hf = folder("tiny/gemma", tmp_path / "hf", {**told, "rope_theta": 10000.0})
    assert open_model(hf).config == open_model(GOLDEN / "tiny" / "gemma").config


UNITS = (
    "hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "activation"
)  # fmt: skip


ONE_NAME = [n for n in NAMES if n != "tiny/gemma"]  # whose GELU has two


@pytest.mark.parametrize("name", ONE_NAME)
def test_another_unit_than_is_built_is_refused(name: str, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    key = next((key for key in UNITS if key in config), UNITS[0])
    exact = "gelu" if key != "activation_function" else "quick_gelu"  # GPT-2's may be exact
    tanh = key != UNITS[0] or config.get(key) in ("gelu_new", "gelu_pytorch_tanh")
    for i, unit in enumerate(("relu", exact, "silu" if tanh else "gelu_pytorch_tanh")):
        with pytest.raises(ModelError, match=f"{key} '{unit}'; known: "):
            open_model(folder(name, tmp_path / str(i), {key: unit}))


def test_every_family_says_what_its_unit_may_be_called() -> None:
    assert [a.name for a in FAMILIES if not a.fixed.keys() & set(UNITS)] == []


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SLIDING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PARTLY = (  # heads may turn so, or never do
    "tiny2/deepseek_v2", "tiny2/deepseek_v3", "tiny2/gpt2", "tiny2/glm4", "tiny2/glm4_moe",
    "tiny2/glm4_moe_lite", "tiny2/minimax_m2", "tiny2/nemotron", "tiny2/nemotron_h",
    "tiny2/nemotron_h_moe", "tiny2/phi2", "tiny2/phi3", "tiny2/qwen3_5", "tiny2/qwen3_5_moe",
    "tiny2/qwen3_next", "tiny2/stablelm",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((n, {"rope_parameters": HALF}) for n in NAMES if n not in PARTLY),
        ("tiny/llama_tied", {"rope_parameters": None, "partial_rotary_factor": 0.5}),
        *((n, {"rope_parameters": {"full_attention": {}, "sliding_attention": scaling}})
          for n in ("tiny2/gemma3_text", "tiny2/gemma3n", "tiny2/gemma4_text", "tiny2/olmo3")
          for scaling in (SLIDING, HALF, {"rope_type": "proportional"})),
        ("tiny2/gemma3_text", {"attn_logit_softcapping": 0.5}),
        ("tiny2/gemma3_text", {"use_bidirectional_attention": True}),
        ("tiny2/gemma4_text", {"use_bidirectional_attention": "all"}),
        *(("tiny2/gemma3n", {"intermediate_size": odd}) for odd in ([96] * 5 + [192], "96")),
        *(("tiny2/gemma3n", {"activation_sparsity_pattern": odd})
          for odd in (0.95, [0.95] * 5, [0.95] * 5 + [1.0], [0.0] * 5 + [-0.1], ["0.5"] * 6)),
        *(("tiny2/gemma3n", {f"altup_{key}": odd})
          for key, odd in (("active_idx", 1), ("num_inputs", 3), ("correct_scale", False))),
        ("tiny2/gemma3n", {"attention_bias": True}),
        *((n, {"topk_group": kept, "n_group": groups})
          for n in ("tiny2/deepseek_v2", "tiny2/deepseek_v3", "tiny2/exaone_moe",
                    "tiny2/glm4_moe", "tiny2/glm4_moe_lite", "tiny2/nemotron_h_moe")
          for kept, groups in ((3, 2), (0, 2), (1, 3), (1, 16))),
        *((n, {"topk_group": 8, "n_group": 8})  # which have no two best
          for n in ("tiny2/deepseek_v3", "tiny2/glm4_moe")),
        ("tiny2/deepseek_v2", {"topk_group": 1, "n_group": 8}),  # for two experts a row
        ("tiny2/deepseek_v2", {"topk_method": "noaux_tc"}),
        ("tiny2/glm4_moe_lite", {"rope_interleave": False}),
        ("tiny2/glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 5 + ["dense"]}),
        ("tiny2/glm4_moe_lite", {"mlp_layer_types": 3}),
        ("tiny2/ernie4_5_moe", {"moe_layer_end_index": 4}),
        ("tiny2/ernie4_5_moe", {"moe_layer_interval": 2}),
        ("tiny2/ernie4_5_moe", {"moe_norm_min": 0.5}),
        ("tiny2/gpt2", {"add_cross_attention": True}),
        ("tiny2/gpt_oss", {"swiglu_limit": 3.5}),
        ("tiny2/gpt_oss", {"swiglu_alpha": 1.0}),
        ("tiny2/lfm2_moe", {"use_expert_bias": False}),
        ("tiny2/qwen3_next", {"norm_topk_prob": False}),
        ("tiny2/olmoe", {"clip_qkv": 8.0}),
        ("tiny2/apertus", {"hidden_act": "silu"}),
        *((n, {"attention_bias": True}) for n in ("tiny2/afmoe", "tiny2/apertus", "tiny2/dots1")),
        *(("tiny2/afmoe", {key: 2})
          for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")),
        ("tiny2/afmoe", {"score_func": "softmax"}),
        ("tiny2/afmoe", {"route_norm": False}),
        ("tiny2/exaone_moe", {"scoring_func": "softmax"}),
        ("tiny2/exaone_moe", {"mlp_layer_types": ["sparse"] * 4 + ["dense"]}),
        ("tiny2/minimax_m2", {"scoring_func": "softmax"}),
        *(("tiny2/hunyuan_v1_moe", {key: True})
          for key in ("attention_bias", "mlp_bias", "use_cla", "use_mla")),
        *(("tiny2/hunyuan_v1_moe", {key: False}) for key in ("use_qk_norm", "use_mixed_mlp_moe")),
        ("tiny2/hunyuan_v1_moe", {"moe_layer_num_skipped": 1}),
        ("tiny2/hunyuan_v1_moe", {"moe_topk": [2, 2, 2, 1]}),
        ("tiny2/hunyuan_v1_moe", {"moe_intermediate_size": [48] * 4}),
        ("tiny2/hunyuan_v1_moe", {"num_experts": [8] * 4}),
        ("tiny2/llama4_text", {"attention_bias": True}),
        ("tiny2/llama4_text", {"num_experts_per_tok": 2}),
        *(("tiny2/llama4_text", {key: 3})
          for key in ("moe_layers", "no_rope_layers", "layer_types")),
        ("tiny2/llama4_text", {"no_rope_layers": [1, 0]}),
        ("tiny2/llama4_text", {"no_rope_layers": [1, 2, 1, 0, 1, 1]}),
        ("tiny2/nemotron", {"hidden_act": "silu"}),
        *(("tiny2/nemotron", {f"{part}_bias": True}) for part in ("attention", "mlp")),
        ("tiny2/stablelm", {"hidden_act": "gelu"}),
        *((f"tiny2/{n}", {"hidden_act": "gelu"}) for n in ("phi2", "starcoder2")),
        ("tiny2/phi2", {"qk_layernorm": True}),
        *(("tiny/arcee", {f"{part}_bias": True}) for part in ("attention", "mlp")),
        *(("tiny/gemma", {key: True}) for key in ("attention_bias", "use_bidirectional_attention")),
        ("tiny/gemma", {"tie_word_embeddings": False}),
        *(("tiny/gemma", {"hidden_act": unit}) for unit in ("relu", "silu", "quick_gelu")),
        *((n, {"logit_scale": odd}) for n in ("tiny/cohere", "tiny/cohere2") for odd in (0.0, -1)),
        *((n, {"tie_word_embeddings": False}) for n in ("tiny/cohere", "tiny/cohere2")),
        ("tiny/cohere2", {"attention_bias": True}),
        ("tiny2/deepseek_v2", {"norm_topk_prob": True}),
        *(("tiny2/deepseek_v2", {left: None}) for left in ("n_group", "topk_group")),
        ("tiny2/deepseek_v3", {"rope_interleave": False}),
        *(("tiny2/qwen2_moe", {"mlp_only_layers": odd}) for odd in (3, [1.5], ["1"])),
        *(("tiny2/qwen2_moe", {"decoder_sparse_step": odd}) for odd in (0, -1)),
        *((n, {"linear_value_head_dim": 32})
          for n in ("tiny2/qwen3_5", "tiny2/qwen3_5_moe", "tiny2/qwen3_next")),
        ("tiny/llama_tied", {"tie_word_embeddings": False}),
        ("tiny2/granite_hybrid", {"time_step_limit": [0.0, 0.1]}),
        ("tiny2/falcon_h1", {"mamba_rms_norm": True}),
        ("tiny2/falcon_h1", {"mlp_multipliers": [1.0, 2.0, 3.0]}),
        ("tiny2/falcon_h1", {"ssm_multipliers": [1.0]}),
        ("tiny2/falcon_h1", {"lm_head_multiplier": 0.0}),
        ("tiny2/nemotron_h", {"time_step_limit": [0.001, float("inf")]}),
        ("tiny2/nemotron_h", {"mamba_hidden_act": "gelu"}),
        ("tiny2/nemotron_h", {"sliding_window": 8}),
        ("tiny2/nemotron_h", {"layers_block_type": 3}),
        ("tiny2/nemotron_h_moe", {"layers_block_type": ["moe", "mlp"]}),
        ("tiny2/nemotron_h_moe", {"layers_block_type": ["mamba", "moe", "sliding_attention"]}),
    ],
)  # fmt: skip
def test_what_would_change_the_numbers_is_refused(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    words = "rope|partial_rotary_factor" if "rope_parameters" in changes else next(iter(changes))
    with pytest.raises(ModelError, match=words):
        open_model(folder(name, tmp_path / "hf", changes))


@pytest.mark.parametrize("name", ["tiny/qwen3_qknorm", "tiny2/olmo3"])
def test_two_ropes_are_one_too_many(name: str, tmp_path: Path) -> None:
    """As where someone follows a page that tells how to stretch an older config."""
    told = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.raises(ModelError, match=r"rope_scaling .* beside other rope_parameters"):
        open_model(folder(name, tmp_path / "two", told))
    config = json.loads((GOLDEN / name / "config.json").read_text())
    rope = config["rope_parameters"]
    alike = {"rope_scaling": rope.get("full_attention", rope)}
    again = open_model(folder(name, tmp_path / "again", alike))
    assert again.config == open_model(GOLDEN / name).config


def test_layers_of_granite_4_under_their_older_names(tmp_path: Path) -> None:
    kinds = open_model(GOLDEN / "tiny2" / "granite_hybrid").config.recurrent_layers
    older = ["mamba" if recurs else "attention" for recurs in kinds]
    for i, key in enumerate(("layer_types", "layers_block_type")):
        hf = folder("tiny2/granite_hybrid", tmp_path / str(i), {"layer_types": None, key: older})
        assert error(hf, "tiny2/granite_hybrid") < TOLERANCE


@pytest.mark.parametrize("name", ["tiny2/nemotron_h", "tiny2/nemotron_h_moe"])
def test_nemotron_as_it_was_released(name: str, tmp_path: Path) -> None:
    """Layers by letters, a head's size under another name, experts in one tensor."""
    letters = "M-M*-M*" if name == "tiny2/nemotron_h" else "ME*MEME"
    older = {"hybrid_override_pattern": letters, "attention_head_dim": 32, "num_hidden_layers": 7}
    hf = folder(name, tmp_path / "hf", {**older, "layers_block_type": None, "head_dim": None})
    found, parts = {}, {}
    for title, t in load_file(hf / "model.safetensors").items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", title)
        if match is None:
            found[title.replace("backbone.", "model.")] = t
        else:
            parts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = t
    stacks = {title: np.stack([each[x] for x in range(8)]) for title, each in parts.items()}
    save_file({**found, **stacks}, hf / "model.safetensors")
    assert error(hf, name) < TOLERANCE
    assert len(stacks) == (6 if "moe" in name else 0)


def as_granite_4(out: Path, rope: str) -> Path:
    """The tiny Granite 3 as the class of Granite 4 says it: attention in all layers."""
    sizes = {
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "position_embedding_type": rope,
    }
    named = {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"] * 6}
    hf, found = folder("tiny2/granite", out, {**sizes, **named}), {}
    for name, t in load_file(hf / "model.safetensors").items():
        lead, _, part = name.partition(".mlp.")
        if part == "gate_proj.weight":
            up = load_file(hf / "model.safetensors")[f"{lead}.mlp.up_proj.weight"]
            found[f"{lead}.shared_mlp.input_linear.weight"] = np.concatenate([t, up])
        elif part == "down_proj.weight":
            found[f"{lead}.shared_mlp.output_linear.weight"] = t
        elif not part:
            found[name] = t
    save_file(found, hf / "model.safetensors")
    return hf


def test_a_granite_4_of_attention_alone_is_a_granite_3(tmp_path: Path) -> None:
    """As llama.cpp's converter has it; one that does not turn keeps to that in its GGUF file."""
    hf = as_granite_4(tmp_path / "hf", "rope")
    assert open_model(hf).config.architecture == "granite"
    assert error(hf, "tiny2/granite") < TOLERANCE
    for rope in ("rope", "nope"):
        model = open_model(as_granite_4(tmp_path / rope, rope))
        model_to_gguf(model, tmp_path / f"{rope}.gguf", "f32")
        again = open_model(tmp_path / f"{rope}.gguf").config
        assert again.architecture == "granite"
        assert [again.rope_of(i) is not None for i in range(6)] == [rope == "rope"] * 6


@pytest.mark.parametrize("told", [True, False, None])
def test_all_layers_of_a_qwen_3_with_experts_slide_or_none(
    told: bool | None, tmp_path: Path
) -> None:
    """As in transformers, whose class reads no list and no number of layers."""
    for i, changes in enumerate((QWEN, {**QWEN, "layer_types": [FULL] * 6})):
        hf = folder("tiny/qwen3_moe", tmp_path / str(i), {**changes, "use_sliding_window": told})
        c = open_model(hf).config
        assert [c.slides(i) for i in range(6)] == [bool(told)] * 6


@pytest.mark.parametrize(
    ("changes", "slides"),
    [
        ({}, [0, 2, 4]),
        ({"max_window_layers": 3}, [0, 2]),
        ({"layer_types": [FULL] * 5 + ["sliding_attention"]}, [5]),
        ({"use_sliding_window": False}, []),
        ({"use_sliding_window": None}, []),
    ],
)
def test_which_layers_of_a_qwen_2_with_experts_slide(
    changes: dict[str, Any], slides: list[int], tmp_path: Path
) -> None:
    """Every other one of the first, as in transformers' class."""
    told = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, **changes}
    c = open_model(folder("tiny2/qwen2_moe", tmp_path / "hf", told)).config
    assert [i for i in range(6) if c.slides(i)] == slides


@pytest.mark.parametrize(
    ("changes", "slides"),
    [
        ({}, [0, 1, 2, 4, 5]),
        ({"sliding_window_pattern": 3}, [0, 1, 3, 4]),
        ({"layer_types": [FULL, "sliding_attention"] * 3}, [1, 3, 5]),
        ({"layer_types": [FULL] * 6}, []),
    ],
)
def test_the_layers_of_a_cohere_2_that_slide_turn(
    changes: dict[str, Any], slides: list[int], tmp_path: Path
) -> None:
    hf = folder("tiny/cohere2", tmp_path / "hf", {"layer_types": None, **changes})
    c = open_model(hf).config
    assert [i for i in range(6) if c.slides(i)] == slides
    assert [i for i in range(6) if c.rope_of(i) is not None] == slides


@pytest.mark.parametrize("told", [True, False])
def test_layers_of_smollm3_that_do_not_turn_may_slide(told: bool, tmp_path: Path) -> None:
    changes = {"sliding_window": 8, "layer_types": None, "use_sliding_window": told}
    c = open_model(folder("tiny2/smollm3", tmp_path / "hf", changes)).config
    assert [i for i in range(6) if c.slides(i)] == ([3] if told else [])


@pytest.mark.parametrize(
    ("changes", "slides", "turns"),
    [
        ({}, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
        ({"layer_types": None}, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
        ({"layer_types": None, "sliding_window_pattern": 2}, [0, 2, 4], [0, 2, 4]),
        ({"layer_types": [FULL] * 6}, [], []),
    ],
)
def test_layers_of_exaone_4_turn_where_they_slide(
    changes: dict[str, Any], slides: list[int], turns: list[int], tmp_path: Path
) -> None:
    c = open_model(folder("tiny2/exaone4", tmp_path / "hf", changes)).config
    assert [i for i in range(6) if c.slides(i)] == slides
    assert [i for i in range(6) if c.rope_of(i)] == turns


def test_all_layers_of_exaone_4_turn_where_none_slides(tmp_path: Path) -> None:
    """Of which its folder says that the window is null."""
    hf = folder("tiny2/exaone4", tmp_path / "hf", {})
    told = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**told, "sliding_window": None}))
    c = open_model(hf).config
    assert [i for i in range(6) if c.slides(i)] == []
    assert [i for i in range(6) if c.rope_of(i)] == list(range(6))


THETA = {"rope_type": "default"}
CHUNKED = "chunked_attention"
KINDS = [CHUNKED, CHUNKED, CHUNKED, FULL, CHUNKED, CHUNKED]
SWA = [*["sliding_attention"] * 3, FULL, "sliding_attention"]
LINEAR = "linear_attention"
LEFT_OUT: tuple[tuple[str, dict[str, Any]], ...] = (  # as transformers 5.24 means it
    ("tiny/mistral_sliding", {"sliding_window": 4096}),
    ("tiny2/ministral3", {"rms_norm_eps": 1e-5, "head_dim": 128}),
    ("tiny2/ministral3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1}}),
    ("tiny2/llama4_text", {"moe_layers": [1, 3, 5], "layer_types": KINDS}),
    ("tiny2/llama4_text", {"no_rope_layers": [1, 1, 1, 0, 1, 1], "no_rope_layer_interval": 4}),
    ("tiny2/llama4_text", {"use_qk_norm": True, "num_experts_per_tok": 1, "head_dim": 128}),
    ("tiny2/llama4_text", {"attn_temperature_tuning": True, "attn_scale": 0.1}),
    ("tiny2/llama4_text", {"floor_scale": 8192, "attention_chunk_size": 8192}),
    ("tiny2/llama4_text", {"rms_norm_eps": 1e-5, "intermediate_size_mlp": 16384}),
    ("tiny2/mixtral", {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2}),
    ("tiny2/mixtral", {"rope_parameters": {**THETA, "rope_theta": 1e6}}),
    ("tiny2/olmo2", {"rms_norm_eps": 1e-5}),
    ("tiny2/olmo3", {"rms_norm_eps": 1e-5, "sliding_window": 4096}),
    ("tiny2/olmo3", {"rope_parameters": {**THETA, "rope_theta": 5e5}}),
    ("tiny2/olmoe", {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "intermediate_size": 2048}),
    ("tiny2/olmoe", {"norm_topk_prob": False}),
    ("tiny2/phi3", {"rms_norm_eps": 1e-5}),
    ("tiny2/phi2", {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "qk_layernorm": False}),
    ("tiny2/phi2", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    ("tiny2/qwen2_moe", {"num_experts_per_tok": 4, "norm_topk_prob": False}),
    ("tiny2/qwen2_moe", {"intermediate_size": 5632, "moe_intermediate_size": 1408}),
    ("tiny2/qwen2_moe", {"shared_expert_intermediate_size": 5632}),
    ("tiny2/qwen2_moe", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
    ("tiny2/smollm3", {"rope_parameters": {**THETA, "rope_theta": 2e6}}),
    ("tiny/arcee", {"rms_norm_eps": 1e-5, "hidden_act": "relu2"}),
    ("tiny/cohere", {"rope_parameters": {**THETA, "rope_theta": 5e5}, "layer_norm_eps": 1e-5}),
    ("tiny/cohere", {"logit_scale": 0.0625}),
    ("tiny/cohere2", {"rope_parameters": {**THETA, "rope_theta": 1e4}, "layer_norm_eps": 1e-5}),
    ("tiny/cohere2", {"logit_scale": 0.0625, "sliding_window": 4096}),
    ("tiny2/lfm2", {"rope_parameters": {**THETA, "rope_theta": 1e6}, "conv_L_cache": 3}),
    ("tiny2/lfm2_moe", {"rope_parameters": {**THETA, "rope_theta": 1e6}, "conv_L_cache": 3}),
    ("tiny2/lfm2_moe", {"num_dense_layers": 2, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    ("tiny2/granite", {"attention_multiplier": 1.0}),
    ("tiny2/gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    ("tiny2/gemma2", {"query_pre_attn_scalar": 256, "sliding_window": 4096}),
    ("tiny2/gemma3_text", {"query_pre_attn_scalar": 256, "sliding_window": 4096}),
    ("tiny2/gemma3_text", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    ("tiny2/gemma3_text", {"max_position_embeddings": 131072, "vocab_size": 262208}),
    ("tiny2/gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 1e6},
                                               "sliding_attention": {"rope_theta": 1e4}}}),
    ("tiny2/gemma3n", {"sliding_window": 512, "final_logit_softcapping": 30.0}),
    ("tiny2/gemma3n", {"rope_parameters": {"full_attention": {"rope_theta": 1e6},
                                           "sliding_attention": {"rope_theta": 1e4}}}),
    ("tiny2/gemma3n", {"activation_sparsity_pattern": [0.0] * 6, "num_kv_shared_layers": 15}),
    ("tiny2/gemma4_text", {"sliding_window": 512}),
    ("tiny2/gemma4_text", {"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                           "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4}}}),
    ("tiny2/exaone4", {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}),
    ("tiny2/exaone_moe", {"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": SWA}),
    ("tiny2/exaone_moe", {"mlp_layer_types": [*["dense"] * 2, *["sparse"] * 3]}),
    ("tiny2/exaone_moe", {"intermediate_size": 16384, "moe_intermediate_size": 1024}),
    ("tiny2/exaone_moe", {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("tiny2/exaone_moe", {"num_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    ("tiny2/afmoe", {"rms_norm_eps": 1e-5, "sliding_window": 1024, "layer_types": SWA}),
    ("tiny2/afmoe", {"global_attn_every_n_layers": 4, "num_dense_layers": 1, "head_dim": 128}),
    ("tiny2/afmoe", {"num_shared_experts": 2, "route_scale": 1.0, "mup_enabled": False}),
    ("tiny2/afmoe", {"intermediate_size": 6144, "moe_intermediate_size": 1408}),
    ("tiny2/hunyuan_v1_dense", {"rms_norm_eps": 1e-5}),
    ("tiny2/hunyuan_v1_moe", {"rms_norm_eps": 1e-5, "moe_intermediate_size": [24] * 4}),
    ("tiny2/hunyuan_v1_moe", {"moe_topk": 1, "intermediate_size": 11008, "num_shared_expert": 1}),
    ("tiny2/starcoder2", {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"}),
    ("tiny2/glm4", {"rms_norm_eps": 1.5625e-7, "head_dim": 128}),
    ("tiny2/glm4", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    ("tiny2/glm4_moe", {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": True}),
    ("tiny2/glm4_moe", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
    ("tiny2/glm4_moe", {"n_shared_experts": 1, "moe_intermediate_size": 1408}),
    ("tiny2/glm4_moe", {"first_k_dense_replace": 1}),
    ("tiny2/seed_oss", {"head_dim": 128}),
    ("tiny2/glm4_moe_lite", {"norm_topk_prob": True, "routed_scaling_factor": 1.8}),
    ("tiny2/glm4_moe_lite", {"rms_norm_eps": 1e-5, "num_experts_per_tok": 4}),
    ("tiny2/ernie4_5", {"rms_norm_eps": 1e-5, "head_dim": 128}),
    ("tiny2/ernie4_5", {"rope_parameters": {**THETA, "rope_theta": 5e5}}),
    ("tiny2/ernie4_5_moe", {"rms_norm_eps": 1e-5, "moe_k": 6}),
    ("tiny2/ernie4_5_moe", {"rope_parameters": {**THETA, "rope_theta": 5e5}}),
    ("tiny2/ernie4_5_moe", {"moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    ("tiny2/ernie4_5_moe", {"moe_intermediate_size": 1536, "moe_layer_end_index": -1}),
    ("tiny2/gpt_oss", {"rms_norm_eps": 1e-5, "sliding_window": 128, "num_experts_per_tok": 4}),
    ("tiny2/gpt_oss", {"rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}}),
    ("tiny2/qwen3_5", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.25},
                       "linear_conv_kernel_dim": 4}),
    ("tiny2/qwen3_5_moe", {"num_experts_per_tok": 8}),
    ("tiny2/qwen3_next", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.25},
                          "linear_conv_kernel_dim": 4, "num_experts_per_tok": 10,
                          "norm_topk_prob": True}),
    ("tiny/qwen3_moe", {"num_experts_per_tok": 8, "norm_topk_prob": False}),
    ("tiny/qwen3_moe", {"intermediate_size": 6144, "moe_intermediate_size": 768}),
    ("tiny2/granite_hybrid", {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}),
    ("tiny2/granite_hybrid", {"mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2}),
    ("tiny2/granite_hybrid", {"attention_multiplier": 1.0, "shared_intermediate_size": 1024}),
    ("tiny2/granite_hybrid", {"time_step_limit": [0.0, float("inf")], "layer_types": [LINEAR] * 6}),
    ("tiny2/granite_hybrid_moe", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("tiny2/falcon_h1", {"mamba_d_head": "auto", "mamba_d_conv": 4}),
    ("tiny2/falcon_h1", {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}),
    ("tiny2/falcon_h1", {"key_multiplier": 1.0, "ssm_in_multiplier": 1.0, "rms_norm_eps": 1e-5}),
    ("tiny2/falcon_h1", {"lm_head_multiplier": 1.0, "embedding_multiplier": 1.0}),
    ("tiny2/nemotron_h", {"layer_norm_epsilon": 1e-5, "n_groups": 8, "ssm_state_size": 128}),
    ("tiny2/nemotron_h", {"mamba_num_heads": 128, "mamba_head_dim": 64, "conv_kernel": 4}),
    ("tiny2/nemotron_h_moe", {"norm_topk_prob": True, "routed_scaling_factor": 1.0}),
    ("tiny2/nemotron_h_moe", {"num_experts_per_tok": 2, "head_dim": 128}),
    *((f"tiny/{n}", {"use_sliding_window": False}) for n in ("qwen2_bias", "qwen3_qknorm")),
)  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), LEFT_OUT)
def test_a_key_that_is_left_out_means_what_the_class_means(
    name: str, meant: dict[str, Any], tmp_path: Path
) -> None:
    for i, (key, value) in enumerate(meant.items()):
        told, unsaid = (
            open_model(folder(name, tmp_path / f"{i} {given}", {key: given})).config
            for given in (value, None)
        )
        assert told == unsaid, key


LINEAR_SIZES = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
}  # fmt: skip
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
          "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
SIZES: tuple[tuple[str, int | None, int, dict[str, Any]], ...] = (  # likewise; of 32 heads
    ("tiny/mistral_sliding", 8, 131072, {}),
    ("tiny/qwen2_bias", 32, 32768, {}),
    ("tiny/qwen3_qknorm", 32, 32768, {"head_dim": 128}),
    ("tiny/qwen3_moe", 4, 32768, {}),
    ("tiny2/mixtral", 8, 131072, {}),
    ("tiny2/ministral3", 8, 262144, {"head_dim": 128}),
    ("tiny2/ernie4_5", 2, 131072, {"head_dim": 128}),
    ("tiny2/ernie4_5_moe", 4, 131072, {}),
    ("tiny2/exaone4", 32, 2048, {}),
    ("tiny2/exaone_moe", 32, 2048, {"num_experts": 64, "num_experts_per_tok": 8}),
    ("tiny2/falcon_h1", 8, 8192, {}),
    ("tiny2/gemma2", 4, 8192, {"head_dim": 256}),
    ("tiny2/gemma3_text", 4, 131072, {"head_dim": 256}),
    ("tiny2/gemma3n", 2, 32768, {"head_dim": 256, "hidden_size_per_layer_input": 256}),
    ("tiny2/gemma4_text", 4, 131072, {"head_dim": 256}),
    ("tiny2/glm4", 2, 131072, {"head_dim": 128}),
    ("tiny2/glm4_moe", 8, 131072, {}),
    ("tiny2/glm4_moe_lite", None, 202752, {
        "moe_intermediate_size": 1536, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}),
    ("tiny2/gpt_oss", 8, 131072, {"head_dim": 64}),
    ("tiny2/lfm2", 8, 128000, {"block_auto_adjust_ff_dim": True}),
    ("tiny2/lfm2_moe", 8, 128000, {}),
    ("tiny2/nemotron_h", 8, 4096, {"head_dim": 128}),
    ("tiny2/olmoe", 32, 4096, {}),
    ("tiny/arcee", 32, 4096, {}),
    ("tiny/cohere", 32, 8192, {}),
    ("tiny/cohere2", 32, 8192, {}),
    ("tiny/gemma", 16, 8192, {"head_dim": 256}),
    ("tiny2/deepseek_v2", None, 2048, {
        "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0,
        **LATENT}),
    ("tiny2/deepseek_v3", None, 4096, {
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, **LATENT}),
    ("tiny2/afmoe", None, 16384, {"num_experts": 64, "num_experts_per_tok": 6}),
    ("tiny2/apertus", None, 65536, {}),
    ("tiny2/dots1", 32, 2048, {"moe_intermediate_size": 1408}),
    ("tiny2/llama4_text", 8, 131072, {"head_dim": 128}),
    ("tiny2/hunyuan_v1_moe", None, 2048, {"intermediate_size": 11008}),
    ("tiny2/minimax_m2", 8, 196608, {"head_dim": 128, "intermediate_size": 1536}),
    ("tiny2/nemotron", None, 4096, {}),
    ("tiny2/stablelm", 32, 4096, {}),
    ("tiny2/starcoder2", 2, 4096, {}),
    ("tiny2/phi2", None, 2048, {}),
    ("tiny2/phi3", 32, 4096, {}),
    ("tiny2/qwen2_moe", 16, 32768, {}),
    ("tiny2/qwen3_5", 4, 32768, {"head_dim": 256, **LINEAR_SIZES}),
    ("tiny2/qwen3_5_moe", 2, 32768, {"head_dim": 256, **LINEAR_SIZES}),
    ("tiny2/qwen3_next", 2, 32768, {"head_dim": 256, **LINEAR_SIZES}),
    ("tiny2/seed_oss", 8, 524288, {"head_dim": 128}),
    ("tiny2/smollm3", 4, 32768, {}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "kv", "context", "others"), SIZES)
def test_sizes_that_are_left_out_are_those_of_the_class(
    name: str, kv: int | None, context: int, others: dict[str, Any]
) -> None:
    values = json.loads((GOLDEN / name / "config.json").read_text())
    a = next(a for a in FAMILIES if values["architectures"][0] in a.hf)
    values |= {"hidden_size": 64, "num_attention_heads": 32}
    if "n_routed_experts" in values:  # enough for each size in turn
        values |= {"n_routed_experts": 64}
    values.pop("linear_value_head_dim", None)  # which is that of keys
    meant = {"num_key_value_heads": kv, "max_position_embeddings": context, **others}
    for key, value in meant.items():
        if value is None:
            continue
        unsaid = {k: v for k, v in values.items() if k != key}
        of_class, other = ({**unsaid, key: v} for v in (value, 16 if value != 16 else 8))
        if isinstance(value, bool):
            other[key] = not value
        assert config_from_hf(a, unsaid) == config_from_hf(a, of_class), key
        assert config_from_hf(a, unsaid) != config_from_hf(a, other), key


def test_gpt_2_may_leave_out_its_sizes() -> None:
    values = json.loads((GOLDEN / "tiny2" / "gpt2" / "config.json").read_text())
    meant = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    values |= {"n_embd": 96, "n_head": 12}
    for key, value in meant.items():
        unsaid = {k: v for k, v in values.items() if k != key}
        assert config_from_hf(GPT2, unsaid) == config_from_hf(GPT2, {**unsaid, key: value}), key


def test_the_width_of_an_lfm2_without_a_factor_is_not_rounded(tmp_path: Path) -> None:
    cut = {"block_auto_adjust_ff_dim": True, "intermediate_size": 100}
    for i, (factor, width) in enumerate(((1.0, 256), (5.0, 512), (None, 66))):
        hf = folder("tiny2/lfm2", tmp_path / str(i), cut)
        config = json.loads((hf / "config.json").read_text())
        told = {**config, "block_ffn_dim_multiplier": factor}
        assert config_from_hf(LFM2, told).intermediate_size == width


def test_what_a_gemma_4_leaves_unsaid_of_its_layers(tmp_path: Path) -> None:
    """Every sixth layer sees everything, and the last one does, whatever is listed; full layers
    have heads of 512 numbers where no key tells of them."""
    sliding = "sliding_attention"
    for i, (listed, full) in enumerate(((None, [5]), ([sliding] * 6, [5]),
                                        ([FULL, *[sliding] * 5], [0, 5]))):  # fmt: skip
        c = open_model(folder("tiny2/gemma4_text", tmp_path / str(i), {"layer_types": listed}))
        assert [i for i in range(6) if not c.config.slides(i)] == full
    own, untold = 48, {"per_layer_config": None}
    for i, (wide, size) in enumerate(((own, own), (None, 512))):
        changes = {**untold, "global_head_dim": wide}
        c = open_model(folder("tiny2/gemma4_text", tmp_path / f"head {i}", changes))
        assert (c.config.head_dim_of(5), c.config.head_dim_of(0)) == (size, 32)


def test_the_layers_of_a_nemotron_may_be_listed_as_others_are(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "tiny2" / "nemotron_h" / "config.json").read_text())
    told = {"layers_block_type": None, "layer_types": config["layers_block_type"]}
    again = open_model(folder("tiny2/nemotron_h", tmp_path / "hf", told))
    assert again.config == open_model(GOLDEN / "tiny2" / "nemotron_h").config


@pytest.mark.parametrize("name", ["tiny2/qwen3_5", "tiny2/qwen3_5_moe", "tiny2/qwen3_next"])
def test_every_so_manieth_layer_has_attention_where_none_is_listed(
    name: str, tmp_path: Path
) -> None:
    for i, (period, full) in enumerate(((None, [3]), (4, [3]), (2, [1, 3, 5]))):
        changes = {"layer_types": None, "full_attention_interval": period}
        c = open_model(folder(name, tmp_path / str(i), changes)).config
        assert [i for i in range(6) if not c.remembers(i)] == full


@pytest.mark.parametrize("key", ["linear_num_key_heads", "linear_num_value_heads"])
@pytest.mark.parametrize("value", [None, 0, 3, 1 << 20])
def test_odd_heads_of_qwen_3_next_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"ssm_.*: expected \d+ rows, got \d+"):
        open_model(folder("tiny2/qwen3_next", tmp_path / "hf", {key: value}))


DRAFTING = {
    "tiny2/exaone_moe": ("mtp.fc", "mtp.norm", "mtp.layers.0.input_layernorm"),
    "tiny2/ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj", "model.mtp_emb_norm.0"),
    "tiny2/qwen3_next": ("mtp.fc", "mtp.norm", "mtp.layers.0.input_layernorm"),
}


@pytest.mark.parametrize(("name", "names"), DRAFTING.items())
def test_layers_that_only_draft_may_be_left_out(
    name: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Their classes read none either."""
    hf = folder(name, tmp_path / "hf", {})
    tensors = load_file(hf / "model.safetensors")
    drafting = {f"{n}.weight": tensors["model.norm.weight"] for n in names}
    save_file({**tensors, **drafting}, hf / "model.safetensors")
    assert error(hf, name) < TOLERANCE


def test_sizes_that_falcon_h1_leaves_out() -> None:
    values = json.loads((GOLDEN / "tiny2" / "falcon_h1" / "config.json").read_text())
    told = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_ssm": 1024}
    for key, value in told.items():
        unsaid = {k: v for k, v in values.items() if k != key}
        assert config_from_hf(FALCON_H1, unsaid) == config_from_hf(
            FALCON_H1, {**values, key: value}
        )
    wide = {**values, "mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 8}
    assert config_from_hf(FALCON_H1, wide).linear_inner_size == 2 * values["hidden_size"]


def test_dense_layers_are_told_by_number_or_by_kind(tmp_path: Path) -> None:
    kinds = ["dense", *["sparse"] * 5]
    for i, (number, listed) in enumerate(((1, None), (None, kinds), (None, None))):
        changes = {"first_k_dense_replace": number, "mlp_layer_types": listed}
        c = open_model(folder("tiny2/glm4_moe_lite", tmp_path / str(i), changes)).config
        assert [c.has_experts(i) for i in range(6)] == [False, *[True] * 5]


@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny2/granite", "tiny2/olmo2"])
def test_a_window_of_the_model_that_it_was_made_from_is_none(name: str, tmp_path: Path) -> None:
    """Its class reads no such key."""
    c = open_model(folder(name, tmp_path / "hf", {"sliding_window": 8})).config
    assert c.sliding_window is None


def test_the_whole_model_may_say_that_the_embedding_is_shared(tmp_path: Path) -> None:
    """The config of the text alone may hold what nobody asked it."""
    text = {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}
    assert open_model(folder("tiny/llama_tied", tmp_path / "hf", text)).vocab_size == 320


@pytest.mark.parametrize("method", ["hqq", "aqlm", "torchao", "quark", ["fp8"]])
def test_weights_that_another_library_quantised_are_refused(
    method: str | list[str], tmp_path: Path
) -> None:
    told = {"quantization_config": {"quant_method": method}}
    with pytest.raises(
        FormatError, match=rf"quantised by {re.escape(repr(method))} are not read.*a GGUF"
    ):
        open_model(folder("tiny/llama_tied", tmp_path / "hf", told))


@pytest.mark.parametrize("name", ["granite_hybrid", "granite_hybrid_moe", "nemotron_h"])
def test_a_norm_behind_the_gate_must_be_there(name: str, tmp_path: Path) -> None:
    """Falcon-H1 may have none; without its own another family would be another model."""
    hf = folder(f"tiny2/{name}", tmp_path / "hf", {})
    tensors = load_file(hf / "model.safetensors")
    left = {
        n: t
        for n, t in tensors.items()
        if not n.endswith(("mamba.norm.weight", "mixer.norm.weight"))
    }
    assert len(left) < len(tensors)
    save_file(left, hf / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'blk.\d.ssm_norm.weight'"):
        error(hf, f"tiny2/{name}")
