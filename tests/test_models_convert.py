"""`ggraph convert` and `quantize`: every type, read back by us and by the `gguf` package."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from golden_kit import GOLDEN, NAMES, TOLERANCE, folder, run_all, spread_error
from safetensors.numpy import load_file, save_file
from test_models_heads import EXPECTED, HEAD, TINY, logits

from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import InputError, ModelError
from ggraph.formats.quantise import WRITABLE
from ggraph.formats.quants import dequantize
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.convert import (
    FILE_TYPES,
    KEPT,
    head_to_gguf,
    model_to_gguf,
    tensor_type,
    tensor_types,
)
from models.run.load import open_session

WIDTH = 256


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A llama of one layer whose rows are whole blocks of every type."""
    folder, rng = tmp_path_factory.mktemp("wide"), np.random.default_rng(2)
    shapes = {
        "embed_tokens": (40, WIDTH), "layers.0.self_attn.q_proj": (WIDTH, WIDTH),
        "layers.0.self_attn.k_proj": (WIDTH, WIDTH), "layers.0.self_attn.v_proj": (WIDTH, WIDTH),
        "layers.0.self_attn.o_proj": (WIDTH, WIDTH), "layers.0.mlp.gate_proj": (2 * WIDTH, WIDTH),
        "layers.0.mlp.up_proj": (2 * WIDTH, WIDTH), "layers.0.mlp.down_proj": (WIDTH, 2 * WIDTH),
    }  # fmt: skip
    weights = {f"model.{n}.weight": rng.standard_normal(s) * 0.1 for n, s in shapes.items()}
    weights["lm_head.weight"] = rng.standard_normal((40, WIDTH))
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        weights[f"model.{name}.weight"] = np.ones(WIDTH)
    save_file({k: v.astype(np.float32) for k, v in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": 512,
        "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 40, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(folder)


def test_every_type_that_can_be_written_has_a_name() -> None:
    assert {t.name for t in WRITABLE} == FILE_TYPES.keys() - {"q3_k_m", "q4_k_m", "q5_k_m", KEPT}
    for kind in gguf.quants._type_traits.values():
        try:
            kind.quantize(np.zeros((1, 256), np.float32))
        except NotImplementedError:
            continue
        assert kind.qtype.name.lower() in FILE_TYPES


@pytest.mark.parametrize("name", [n for n in FILE_TYPES if n != KEPT])
def test_a_model_in_every_type(name: str, wide: Model, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    model_to_gguf(wide, out, name)
    read = gguf.GGUFReader(out)
    assert read.fields["general.file_type"].contents() == FILE_TYPES[name]
    again = open_model(out)
    types = tensor_types({n: t.shape for n, t in again.catalogue.items()}, name)
    for t in read.tensors:
        assert t.tensor_type == types[t.name].gguf
        theirs = gguf.dequantize(t.data, t.tensor_type).reshape(again.catalogue[t.name].shape)
        assert np.array_equal(theirs, again.catalogue[t.name].float32())
    kept = wide.catalogue["blk.0.ffn_up.weight"].float32()
    got = again.catalogue["blk.0.ffn_up.weight"].float32()
    bits = 8 * types["blk.0.ffn_up.weight"].row_bytes(WIDTH) / WIDTH
    assert np.abs(got - kept).mean() < 0.1 * 2.0 ** (2.2 - min(bits, 8.0))


def test_nvfp4_is_kept_and_not_made(wide: Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="type 'nvfp4' keeps matrices that are in it; here are"):
        model_to_gguf(wide, tmp_path / "out.gguf", KEPT)


def mixed(type_name: str, layers: int, *more: str, experts: int = 0) -> dict[str, str]:
    """The types of the tensors of a file: a few of each layer, a table, and `more`."""
    inner = ("attn_v", "attn_k", "attn_output", "ffn_down")
    names = [f"blk.{i}.{n}.weight" for i in reversed(range(layers)) for n in inner]
    shapes = dict.fromkeys((*names, "token_embd.weight", *more), (512, 512))
    if experts:
        shapes |= {f"blk.{i}.ffn_gate_inp.weight": (experts, 512) for i in range(layers)}
    return {n: t.name for n, t in tensor_types(shapes, type_name).items()}


def layers_of(found: dict[str, str], part: str, type_name: str) -> list[int]:
    """The layers in which a part has a type."""
    return sorted(
        int(n.split(".")[1]) for n, t in found.items() if f".{part}." in n and t == type_name
    )


def test_a_mix_is_that_of_llama_cpp() -> None:
    # the layers of a model of 28: the first and the last eighth, and every third between
    wide = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    tied = mixed("q4_k_m", 28)
    for part in ("attn_v", "ffn_down"):
        assert layers_of(tied, part, "q6_k") == wide
        assert layers_of(tied, part, "q4_k") == [i for i in range(28) if i not in wide]
    assert {tied[f"blk.{i}.attn_output.weight"] for i in range(28)} == {"q4_k"}
    assert tied["token_embd.weight"] == "q6_k"
    apart = mixed("q4_k_m", 28, "output.weight")
    assert (apart["output.weight"], apart["token_embd.weight"]) == ("q6_k", "q4_k")


def test_finer_and_coarser_mixes_are_those_of_llama_cpp() -> None:
    finer = mixed("q5_k_m", 28)
    coarser = mixed("q4_k_m", 28)
    assert {n: t for n, t in finer.items() if t != "q5_k"} == {
        n: t for n, t in coarser.items() if t != "q4_k"
    }
    three = mixed("q3_k_m", 32)
    assert layers_of(three, "attn_v", "q5_k") == layers_of(three, "ffn_down", "q5_k") == [0, 1]
    for part in ("attn_v", "ffn_down"):
        assert layers_of(three, part, "q4_k") == list(range(2, 32))
    assert layers_of(three, "attn_output", "q4_k") == layers_of(three, "attn_k", "q3_k")
    four = mixed("iq4_xs", 32, "output.weight")
    assert layers_of(four, "attn_v", "q5_k") == list(range(32))
    assert layers_of(four, "ffn_down", "q5_k") == [0, 1, 2, 3]
    assert (four["output.weight"], four["token_embd.weight"]) == ("q6_k", "iq4_xs")
    for found in (three, finer, coarser):
        assert found["token_embd.weight"] == "q6_k"


def test_a_mix_counts_what_few_layers_have() -> None:
    # values of layers 3, 7, 11, 15 of 16: the last of four is finer, and the one in the third place
    few = {f"blk.{i}.attn_v.weight": (512, 512) for i in (15, 3, 11, 7)}
    every = {f"blk.{i}.ffn_up.weight": (512, 512) for i in range(16)}
    found = {n: t.name for n, t in tensor_types(few | every, "q4_k_m").items()}
    assert layers_of(found, "attn_v", "q6_k") == [11, 15]


@pytest.mark.parametrize("name", NAMES)
def test_a_mix_counts_matrices(name: str) -> None:
    """Whatever biases a family has beside them."""
    shapes = {n: t.shape for n, t in open_model(GOLDEN / name).catalogue.items()}
    bare = {n: shape for n, shape in shapes.items() if not n.endswith(".bias")}
    found = tensor_types(shapes, "q4_k_m")
    assert {n: found[n] for n in bare} == tensor_types(bare, "q4_k_m")


def test_a_mix_of_eight_experts_keeps_attention_finer() -> None:
    found = mixed("q4_k_m", 8, experts=8)
    assert {t for n, t in found.items() if n.endswith(("_v.weight", "_k.weight"))} == {"q8_0"}
    assert layers_of(found, "attn_output", "q5_k") == list(range(8))
    assert layers_of(found, "ffn_down", "q6_k") == [0, 3, 6, 7]
    assert layers_of(mixed("q4_k_m", 8, experts=16), "attn_v", "q6_k") == [0, 3, 6, 7]


def test_which_tensors_a_type_keeps_finer() -> None:
    few = mixed("tq2_0", 1, "output.weight")
    assert few["output.weight"] == few["token_embd.weight"] == "q6_k"
    assert few["blk.0.attn_output.weight"] == "tq2_0"
    assert tensor_type("blk.0.attn_q.weight", (64, 576), "q4_k").name == "q5_0"
    assert tensor_type("blk.0.attn_q.weight", (64, 33), "q4_k").name == "f16"
    for added in ("position_embd.weight", "token_types.weight"):  # llama.cpp adds float32 alone
        assert tensor_type(added, (512, 512), "q8_0").name == "f32"


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q4_1", "q6_k", "mxfp4"])
def test_a_head_in_many_types_still_drafts(name: str, tmp_path: Path) -> None:
    target = open_model(TINY / "llama_tied")
    head = open_head(HEAD, target)
    assert isinstance(head, Head)
    head_to_gguf(head, target, tmp_path / "head.gguf", name)
    again = open_head(tmp_path / "head.gguf", target)
    assert isinstance(again, Head)
    assert again.taps == head.taps and np.array_equal(again.target_ids, head.target_ids)
    part = again.catalogue["fc.weight"]
    assert part.dtype.name == tensor_type("fc.weight", part.shape, name).name
    raw = np.ascontiguousarray(part.data).view(np.uint8).reshape(part.shape[0], -1)
    assert np.isfinite(dequantize(raw, part.dtype)).all()
    error = np.abs(logits(again) - EXPECTED["draft_logits"]).max()
    loose = {"f32": 5e-4, "f16": 5e-4, "bf16": 0.1, "q8_0": 0.3, "q6_k": 0.3}
    assert error < loose.get(name, 5.0)


# llama.cpp reads the first, and counts YaRN's pairs in whole numbers alone.
OTHERS = ("attention.recurrent_layers", "rope.scaling.yarn_truncate")
ROOMS = [vars(room).values() for room in vars(gguf.Keys).values() if isinstance(room, type)]
KEYS = {key for room in ROOMS for key in room} | {f"{{arch}}.{key}" for key in OTHERS}


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_tensors_are_those_that_the_gguf_package_knows(name: str, tmp_path: Path) -> None:
    """By its own lists, of every architecture."""
    model_to_gguf(open_model(GOLDEN / name), tmp_path / "m.gguf", "f32")
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    lead = read.fields["general.architecture"].contents()
    told = {k.replace(f"{lead}.", "{arch}.", 1) for k in read.fields if not k.startswith("GGUF.")}
    assert told <= KEYS
    family = {title: kind for kind, title in gguf.MODEL_ARCH_NAMES.items()}[lead]
    roles = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[family]}
    names = (re.sub(r"^blk\.\d+", "blk.{bid}", t.name) for t in read.tensors)
    assert {re.sub(r"\.(weight|bias|scale)$", "", n) for n in names} <= roles


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny/llama_tied", {"rope_parameters": YARN}),
        ("tiny/llama_tied", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
        ("tiny/llama_tied", {"rope_parameters": {**YARN, "truncate": False}}),
        ("tiny/qwen2_bias", {**WINDOW, "max_window_layers": 2, "layer_types": None}),
        ("tiny/qwen3_moe", WINDOW),
        ("tiny/cohere2", {"layer_types": ["full_attention", "sliding_attention"] * 3}),
        ("tiny2/gemma2", {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 4}),
        ("tiny2/glm4_moe", {"norm_topk_prob": False, "routed_scaling_factor": 0.5}),
        ("tiny2/glm4_moe_lite", {"norm_topk_prob": False, "routed_scaling_factor": 0.5}),
        ("tiny2/gpt_oss", {"rope_parameters": {**YARN, "truncate": True}}),
        ("tiny2/granite", {"attention_multiplier": None, "logits_scaling": 2.0}),
        ("tiny2/ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.2}}),
        ("tiny2/mixtral", {"sliding_window": 8}),
        ("tiny2/olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 3}),
        ("tiny2/phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    ],
)  # fmt: skip
def test_a_file_says_what_its_folder_says(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    hf = folder(name, tmp_path / "hf", changes)
    model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
    ids = np.load(hf / "expected.npz")["ids"].tolist()
    told, again = (run_all(path, ids)["logits"] for path in (hf, tmp_path / "m.gguf"))
    assert spread_error(again, told) < TOLERANCE
    assert spread_error(told, np.load(hf / "expected.npz")["logits"]) > TOLERANCE, "no change"


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n", "gemma4_text", "olmo3"])
def test_a_scaled_rope_of_sliding_layers_is_not_written(name: str, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "tiny2" / name / "config.json").read_text())
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ropes = {**config["rope_parameters"], "sliding_attention": scaled}
    model = open_model(folder(f"tiny2/{name}", tmp_path / "hf", {"rope_parameters": ropes}))
    with pytest.raises(ModelError, match="GGUF cannot say how sliding layers scale"):
        model_to_gguf(model, tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tiny2/lfm2_moe", {"norm_topk_prob": False}),
        ("tiny2/lfm2_moe", {"routed_scaling_factor": 2.0}),
        ("tiny/qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_shares_that_llama_cpp_would_change_are_not_written(
    name: str, told: dict[str, Any], tmp_path: Path
) -> None:
    hf = folder(name, tmp_path / "hf", told)
    ids = np.load(hf / "expected.npz")["ids"].tolist()
    assert spread_error(run_all(hf, ids)["logits"], np.load(hf / "expected.npz")["logits"]) > 0.01
    with pytest.raises(ModelError, match="GGUF cannot say what experts' shares sum to"):
        model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(
    ("name", "said"), [("tiny2/exaone4", "only"), ("tiny/cohere2", "no layer slides")]
)
def test_full_layers_that_all_turn_not_are_not_written(
    name: str, said: str, tmp_path: Path
) -> None:
    hf = folder(name, tmp_path / "hf", {"layer_types": ["full_attention"] * 6})
    with pytest.raises(ModelError, match=f"GGUF cannot say that {said}"):
        model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(
    ("name", "layer"),
    [("granite_hybrid", 0), ("lfm2", 0), ("nemotron_h", 0), ("qwen3_next", 3), ("qwen3_5", 3)],
)
def test_a_hybrid_of_one_kind_of_layers_is_read_again(
    name: str, layer: int, tmp_path: Path
) -> None:
    """Its only layer is one that has a state, or the first that attends."""
    golden = json.loads((GOLDEN / "tiny2" / name / "config.json").read_text())
    one = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "full_attn_idxs": None}
    kinds = {key: golden[key][layer:][:1] for key in ("layer_types", "layers_block_type")
             if golden.get(key)}  # fmt: skip
    hf, out = folder(f"tiny2/{name}", tmp_path / "hf", {**one, **kinds}), tmp_path / "m.gguf"
    kept, own = {}, re.compile(r"(model\.layers\.)(\d+)")
    for title, t in load_file(hf / "model.safetensors").items():
        match = own.match(title)
        if not title.startswith("mtp.") and (match is None or int(match[2]) == layer):
            kept[own.sub(r"\g<1>0", title)] = t
    save_file(kept, hf / "model.safetensors")
    model_to_gguf(open_model(hf), out, "f32")
    found = []
    for path in (hf, out):
        session = open_session(threads=1, exact=True)
        runner = Runner(open_model(path), session, 64, cache_dtype=F32)
        found.append(runner.text(range(1, 30), every=True).logits)
        session.close()
    assert spread_error(found[1], found[0]) < TOLERANCE


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_an_embedding_s_factor_is_not_that_of_the_logits(factor: float, tmp_path: Path) -> None:
    """Files of Falcon-H1 have it in the matrix, which makes the logits, too, where it is shared."""
    told = {"tie_word_embeddings": True, "lm_head_multiplier": factor, "embedding_multiplier": 3.0}
    hf, out = folder("tiny2/falcon_h1", tmp_path / "hf", told), tmp_path / "m.gguf"
    tensors = load_file(hf / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, hf / "model.safetensors")
    model_to_gguf(open_model(hf), out, "f32")
    ids = np.load(hf / "expected.npz")["ids"].tolist()
    found, expected = (run_all(path, ids)["logits"] for path in (out, hf))
    assert spread_error(found, expected) < TOLERANCE
    assert np.allclose(found.std(), expected.std(), rtol=1e-3)


def test_latent_attention_in_float32_stays_so(tmp_path: Path) -> None:
    """Its matrix, which a file has in two parts, is whole again, bit by bit."""
    hf, out = folder("tiny2/glm4_moe_lite", tmp_path / "hf", {}), tmp_path / "m.gguf"
    tensors = load_file(hf / "model.safetensors")
    finer = {n: t.astype(np.float32) * np.float32(1.0001) for n, t in tensors.items()}
    save_file(finer, hf / "model.safetensors")
    model_to_gguf(open_model(hf), out, "f32")
    name = "blk.0.attn_kv_b.weight"
    told, again = (open_model(path).catalogue[name] for path in (hf, out))
    assert again.dtype is told.dtype
    assert np.array_equal(again.float32(), told.float32())


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.0}])
def test_yarn_of_another_magnitude_is_not_written_of_latent_attention(
    more: dict[str, float], tmp_path: Path
) -> None:
    """There it stands in the scale of the scores alone."""
    hf = folder("tiny2/glm4_moe_lite", tmp_path / "hf", {"rope_parameters": {**YARN, **more}})
    with pytest.raises(ModelError, match="GGUF cannot say how YaRN changes magnitudes"):
        model_to_gguf(open_model(hf), tmp_path / "m.gguf", "f32")
