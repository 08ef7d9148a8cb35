"""A GGUF that we wrote, in llama.cpp: the same greedy text, for each family that it knows.

Needs the extra [bench]; skips without it.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from coded_kit import FP4, is_linear, nvfp4, plain, write_stored
from golden_kit import folder
from identity_kit import calm_pair
from mtp_kit import EXPERTS, GLM, LARGE, NEXT, QWEN, with_draft_layer
from safetensors.numpy import load_file, save_file
from small_model import small_model
from test_formats_gguf import split
from test_models_options import CASES, UNTOLD, each_head_normed, made
from test_models_unsaid import DEEPSEEK, LONGROPE, SEEING, mixtral, older_deepseek, phi3, seeing

from ggraph import dtypes
from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.shared import SharedRunner
from ggraph.decode.draft.tree import Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from ggraph.tensor import Array
from models.bench.peer import LogprobPeer
from models.families import gemma2
from models.families.llama4 import GROWN, STRETCH
from models.heads.assistant import AssistantHead
from models.heads.dflash import BlockHead
from models.heads.layouts import AnyHead, open_head
from models.registry import ARCHITECTURES, open_model
from models.run.convert import SCALED, assistant_to_gguf, dflash_to_gguf
from models.run.load import open_session

pytest.importorskip("xllamacpp")
GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    "tiny/llama_tied", "tiny/llama3_rope_scaled", "tiny/qwen2_bias", "tiny/qwen2_5_vl",
    "tiny/qwen3_qknorm", "tiny/qwen3_moe", "tiny/qwen3_vl", "tiny/qwen3_vl_moe", "tiny/arcee",
    "tiny/cohere", "tiny/cohere2", "tiny/gemma", "tiny2/afmoe", "tiny2/apertus",
    "tiny2/deepseek_v2", "tiny2/deepseek_v3", "tiny2/dots1", "tiny2/ernie4_5", "tiny2/ernie4_5_moe",
    "tiny2/exaone4", "tiny2/exaone_moe", "tiny2/falcon_h1", "tiny2/gemma2", "tiny2/gemma3_text",
    "tiny2/gemma3n", "tiny2/gemma4_k_eq_v", "tiny2/gemma4_moe", "tiny2/gemma4_text", "tiny2/glm4",
    "tiny2/glm4_moe", "tiny2/glm4_moe_lite", "tiny2/gpt2", "tiny2/gpt_oss", "tiny2/granite",
    "tiny2/granite_hybrid", "tiny2/granite_hybrid_moe", "tiny2/granite_moe",
    "tiny2/hunyuan_v1_dense", "tiny2/hunyuan_v1_moe", "tiny2/lfm2", "tiny2/lfm2_moe",
    "tiny2/llama4_text", "tiny2/minimax_m2", "tiny2/ministral3", "tiny2/mixtral", "tiny2/nemotron",
    "tiny2/nemotron_h", "tiny2/nemotron_h_moe", "tiny2/olmo2", "tiny2/olmo3", "tiny2/olmoe",
    "tiny2/phi2", "tiny2/phi3", "tiny2/qwen2_moe", "tiny2/qwen3_5", "tiny2/qwen3_5_moe",
    "tiny2/qwen3_next", "tiny2/seed_oss", "tiny2/smollm3", "tiny2/stablelm", "tiny2/starcoder2",
)  # fmt: skip
GEMMA3N, LLAMA4 = "tiny2/gemma3n", "tiny2/llama4_text"
NEW, END, CONTEXT = 24, 257, 256
PLAIN = {
    "tokenizer.ggml.tokens": [f"w{i}" for i in range(320)],  # llama.cpp tells of whole UTF-8 only
    "general.name": "small",  # by some names it knows which tokens there must be
}
SHARED = 3  # layers of Gemma 4 that llama.cpp can say to share
NEAR = 1e-3  # as near as guesses of a draft layer come by rounding
CLOSE = 0.02  # where the two best logits are nearer than this, rounding may choose


def greedy(path: Path, ids: list[int]) -> tuple[list[int], list[float]]:
    """Our greedy continuation, and the distance of the two best logits at each step."""
    session = open_session(threads=1, exact=True)
    runner = Runner(open_model(path).reaching(CONTEXT), session, CONTEXT)
    logits, tokens, gaps = runner.text(ids).logits[-1], [], []
    for _ in range(NEW):
        logits[END] = -np.inf  # which llama.cpp is asked never to say
        second, best = np.sort(logits)[-2:]
        gaps.append(float(best - second))
        tokens.append(int(logits.argmax()))
        logits = runner.text(tokens[-1:]).logits[-1]
    session.close()
    return tokens, gaps


def source(name: str, out: Path) -> Path:
    """The golden folder, or one that llama.cpp can say: it counts YaRN's pairs in whole numbers
    alone, takes it that a sliding and a full layer stand before those that share caches, lets no
    EXAONE 4 slide but the one of 64 layers, knows a DeepSeek-V2-Lite by its 27, and of Gemma 3n the
    released sizes alone, as it does stretches of Llama 4."""
    if name == DEEPSEEK:
        return lite(out)
    if name == GEMMA3N:
        return as_released(out)
    if name not in ("tiny2/exaone4", "tiny2/gpt_oss", "tiny2/gemma4_text", LLAMA4):
        return GOLDEN / name
    shutil.copytree(GOLDEN / name, out)
    config = json.loads((out / "config.json").read_text())
    if name == "tiny2/gpt_oss":
        config["rope_parameters"]["truncate"] = True
    elif name == "tiny2/exaone4":
        config["sliding_window"] = None
    elif name == LLAMA4:
        config.update(attention_chunk_size=STRETCH, floor_scale=STRETCH, attn_scale=GROWN)
    else:
        config["num_kv_shared_layers"] = SHARED
    (out / "config.json").write_text(json.dumps(config))
    return out


def longer(
    name: str, out: Path, layers: Sequence[int], changes: Mapping[str, Any] | None = None
) -> Path:
    """A golden folder whose layers are these of its own, with other keys."""
    told = {"num_hidden_layers": len(layers), "layer_types": None, **(changes or {})}
    hf = folder(name, out, told)
    given = load_file(hf / "model.safetensors")
    found = {n: t for n, t in given.items() if ".layers." not in n}
    for i, own in enumerate(layers):
        lead = f"model.layers.{own}."
        found |= {n.replace(lead, f"model.layers.{i}."): t for n, t in given.items() if lead in n}
    save_file(found, hf / "model.safetensors")
    return hf


def lite(out: Path) -> Path:
    """A DeepSeek-V2 of 27 layers, which add so little that rounding does not grow from one to the
    next, and whose rows take all experts, so that it chooses none, nor any group."""
    every = {"num_experts_per_tok": 8, "topk_method": "greedy"}
    hf = longer(DEEPSEEK, out, [0, *(1 + i % 3 for i in range(26))], every)
    found = load_file(hf / "model.safetensors")
    for name in [n for n in found if n.endswith(("o_proj.weight", "down_proj.weight"))]:
        found[name] = found[name] / 8
    save_file(found, hf / "model.safetensors")
    return hf


def as_released(out: Path) -> Path:
    """A Gemma 3n of 25 layers, of which the last five share caches and the first ten shut gates, as
    llama.cpp takes for granted, with inputs of layers and products of low rank as wide as it knows.
    Where we divide the squares of F gates by F, it divides them by F - 1."""
    f, wide, rank, layers = 96, 256, 64, 25
    shut = NormalDist().cdf(NormalDist().inv_cdf(0.95) * (f / (f - 1)) ** 0.5)
    told = {
        "intermediate_size": f, "hidden_size_per_layer_input": wide, "laurel_rank": rank,
        "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [shut] * 10 + [0.0] * (layers - 10),
    }  # fmt: skip
    hf = longer(GEMMA3N, out, [i % 4 for i in range(layers)], told)
    found, rng = load_file(hf / "model.safetensors"), np.random.default_rng(7)
    sizes = {16: wide, 8: rank, 96: layers * wide}
    for name, t in found.items():
        if "per_layer" in name or "laurel.linear" in name:
            shape = [sizes.get(n, n) for n in map(int, t.shape)]
            found[name] = (rng.standard_normal(shape) / 4).astype(np.float16)
        elif "q_norm" in name or ".post_" in name:  # else rounding grows from layer to layer
            found[name] = t / 4
    save_file(found, hf / "model.safetensors")
    return hf


def watched(runner: DraftRunner) -> list[float]:
    """How far apart the two best guesses will have been, step by step."""
    gaps, step = [], runner.step

    def watching(rows: Rows, wanted: Sequence[int], features: Array, *, fed_back: bool) -> Array:
        logits = step(rows, wanted, features, fed_back=fed_back)
        for row in logits:
            second, best = np.sort(row)[-2:]
            gaps.append(float(best - second))
        return logits

    runner.step = watching  # type: ignore[method-assign]
    return gaps


def runner_of(head: AnyHead, target: Runner) -> DraftRunner:
    """Steps of a head of any kind."""
    if isinstance(head, BlockHead):
        return BlockRunner(head, target.session, 128, target=target)
    shares = isinstance(head, AssistantHead)
    if shares:
        return SharedRunner(head, target)
    return DraftRunner(head, target.session, 128, target=target)


def same_counts(path: Path, head_path: Path, texts: int, known: Sequence[list[int]] = ()) -> None:
    """On the texts that both engines say: as many drafted tokens, and as many of them kept, unless
    two guesses were so near that rounding chose."""
    model = open_model(path)
    head, session = open_head(head_path, model), open_session(threads=1, exact=True)
    target = Runner(model, session, 128, taps=head.taps)
    engine = Engine(target, ends=())
    peer, same, kept = LogprobPeer(path, 1, 256, head=head_path, chain=3), 0, 0
    drawn = [np.random.default_rng(seed).integers(3, 320, 12).tolist() for seed in range(texts)]
    for ids in [*known, *drawn]:
        runner = runner_of(head, target)
        gaps = watched(runner)
        drafter: Drafter = EagleDrafter(runner, name="mtp", reads_logits=True)
        if isinstance(head, BlockHead):
            assert isinstance(runner, BlockRunner), head.name
            drafter = BlockDrafter(runner, head.mask, head.block)
        drafts = Speculation([drafter], Fixed(3))
        sampler = Sampler(SamplerConfig(temp=0.0), model.vocab_size)
        engine.reset()
        said = engine.generate(ids, sampler.sample, sampler.accept, limit=48, drafts=drafts)
        ours = list(said)
        theirs = peer.logprobs(ids, 48)
        if ours != theirs.raw["ids"]:
            continue  # two logits so near that rounding chose
        counts = engine.statistics.drafted, engine.statistics.accepted
        if counts != theirs.drafts and min(gaps) < NEAR:
            continue
        same += 1
        kept += engine.statistics.accepted
        assert counts == theirs.drafts, min(gaps)
    peer.close()
    session.close()
    assert same >= 3 and kept >= 10, (same, kept)


@pytest.mark.parametrize("name", [QWEN, EXPERTS, GLM])
def test_own_layers_draft_as_often_and_as_well(name: str, tmp_path: Path) -> None:
    hf = with_draft_layer(name, tmp_path / "hf")
    path = small_model(tmp_path / "small.gguf", PLAIN, hf, "f32")
    same_counts(path, path, 12 if name == EXPERTS else 6)


def test_an_assistant_drafts_as_often_and_as_well(tmp_path: Path) -> None:
    hf, assistant = calm_pair(tmp_path / "pair")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "num_kv_shared_layers": SHARED}))
    path = small_model(tmp_path / "small.gguf", PLAIN, hf, "f32")
    head, out = open_head(assistant, open_model(path)), tmp_path / "assistant.gguf"
    assert isinstance(head, AssistantHead)
    assistant_to_gguf(head, out, "f32")
    same_counts(path, out, 6)


def test_blocks_are_drafted_as_often_and_as_well(tmp_path: Path) -> None:
    """Without the sliding layer, which llama.cpp lets see the whole block."""
    hf = tmp_path / "hf"
    shutil.copytree(GOLDEN / "dflash", hf)
    config = json.loads((hf / "config.json").read_text())
    config.update(layer_types=["full_attention"] * 3, sliding_window=None)
    (hf / "config.json").write_text(json.dumps(config))
    path = small_model(tmp_path / "small.gguf", PLAIN, GOLDEN / "tiny" / "qwen3_qknorm", "f32")
    target, out = open_model(path), tmp_path / "dflash.gguf"
    head = open_head(hf, target)
    assert isinstance(head, BlockHead)
    dflash_to_gguf(head, target, out, "f32")
    trained = np.load(GOLDEN / "dflash" / "expected.npz")
    same_counts(path, out, 6, [trained[f"prompt.{i}"].tolist() for i in range(2)])


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_says_the_same(name: str, tmp_path: Path) -> None:
    path = small_model(tmp_path / "small.gguf", PLAIN, source(name, tmp_path / "hf"), "f32")
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()[:20]
    ours, gaps = greedy(path, ids)
    peer = LogprobPeer(path, 1, CONTEXT)
    theirs = peer.logprobs(ids, NEW).raw["ids"]
    peer.close()
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:  # rounding may also choose another expert, and then anything may come
            mixture = open_model(path).config.num_experts > 0
            assert gaps[i] < CLOSE or mixture, (i, ours, theirs, gaps)
            assert i >= 8, f"too early to have said anything: {i}, {ours}, {theirs}"
            break


def written_by_hand(name: str, out: Path) -> Path:
    """A golden model as a folder of NVFP4, by ModelOpt's names; what it lays side by side for all
    families alike: products within a layer, without inputs of layers."""
    hf = source(name, out.with_suffix(".source"))
    config, coded = json.loads((hf / "config.json").read_text()), dict[str, tuple[str, Array]]()
    for title, t in load_file(hf / "model.safetensors").items():
        known = is_linear(title, t) and "per_layer" not in title and "linear_attn" not in title
        coded |= nvfp4(title, t)[0] if known else {title: plain(t)}
    return write_stored(out, {**config, "quantization_config": FP4}, coded)


MULTIPLIED = (
    "tiny/cohere2", "tiny/llama_tied", "tiny/qwen3_moe", "tiny/qwen3_qknorm", "tiny2/gemma4_moe",
    "tiny2/gemma4_text", "tiny2/ministral3", "tiny2/mixtral", "tiny2/nemotron_h",
    "tiny2/nemotron_h_moe", "tiny2/qwen3_5", "tiny2/qwen3_5_moe", "tiny2/qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("name", MULTIPLIED)
def test_llama_cpp_multiplies_by_the_same_scales(name: str, tmp_path: Path) -> None:
    """Of matrices in float32 divided by them, since its activations for NVFP4 have 8 bits."""
    hf = written_by_hand(name, tmp_path / "hf")
    held = open_checkpoint(small_model(tmp_path / "nvfp4.gguf", PLAIN, hf, "nvfp4"))
    assert held.architecture in SCALED
    tensors = []
    for t in held.tensors.values():
        if t.scale is not None:
            data = replace(t, scale=None).float32()
            t = RawTensor(t.name, dtypes.F32, t.shape, data, t.scale)
        tensors.append(t)
    assert sum(t.scale is not None for t in tensors) >= 10
    write_gguf(tmp_path / "small.gguf", held.metadata, tensors)
    experts = open_model(tmp_path / "small.gguf").config.num_experts > 0
    same_next(name, tmp_path / "small.gguf", most=3 if experts else 0)  # rounding chooses, too


def test_every_family_that_is_said_to_know_scales_was_asked() -> None:
    asked = {ARCHITECTURES[open_model(GOLDEN / n).config.architecture].gguf for n in MULTIPLIED}
    assert asked == SCALED


@pytest.mark.parametrize("name", ["tiny/qwen3_qknorm", "tiny/llama_tied"])
def test_llama_cpp_reads_nvfp4_alike(name: str, tmp_path: Path) -> None:
    """The likeliest tokens have nearly the same chances; without scales those are off by 5."""
    hf = written_by_hand(name, tmp_path / "hf")
    path = small_model(tmp_path / "small.gguf", PLAIN, hf, "nvfp4")
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()[:20]
    session = open_session(threads=1)
    logits = Runner(open_model(path), session, CONTEXT).text(ids).logits[-1].astype(np.float64)
    session.close()
    peer = LogprobPeer(path, 1, CONTEXT)
    theirs = peer.logprobs(ids, 1, 8).raw["probs"]
    peer.close()
    chances = logits - np.log(np.exp(logits).sum())
    assert max(abs(chances[token] - chance) for token, chance in theirs) < 0.5


def test_llama_cpp_reads_a_split_file_alike(tmp_path: Path) -> None:
    whole = small_model(tmp_path / "small.gguf", PLAIN, GOLDEN / "tiny" / "llama_tied", "f32")
    first = split(whole, tmp_path, 3)[0]
    ids = np.load(GOLDEN / "tiny" / "llama_tied" / "expected.npz")["ids"].tolist()[:20]
    peer = LogprobPeer(first, 1, CONTEXT)
    theirs = peer.logprobs(ids, NEW).raw["ids"]
    peer.close()
    whole.unlink()
    assert greedy(first, ids)[0] == theirs


YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.attn_factor": 1.2,
    "rope.scaling.original_context_length": 64,
}  # fmt: skip
NO_LAYERS = {"attention.recurrent_layers": None, "full_attention_interval": None}
CONVERTED = {"rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.attn_factor": None}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tiny/llama_tied", {"rope.scaling.factor": 4.0}),
        ("tiny/llama_tied", {"rope.scale_linear": 4.0}),
        ("tiny/llama_tied", {"rope.scaling.attn_factor": 1.5}),
        ("tiny/llama_tied", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        ("tiny2/olmo2", YARN),
        ("tiny2/olmo2", {**YARN, "attention.sliding_window": 8}),
        ("tiny2/gemma2", dict.fromkeys(gemma2.DEFAULTS)),
        ("tiny2/qwen3_next", NO_LAYERS),
        ("tiny2/ministral3", CONVERTED),
        ("tiny2/ministral3", {"rope.scaling.yarn_log_multiplier": 0.3}),
    ],
)
def test_llama_cpp_takes_what_a_file_leaves_unsaid_alike(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    lead = open_model(GOLDEN / name).config.architecture
    changes = {**PLAIN, **{f"{lead}.{key}": value for key, value in keys.items()}}
    same_next(name, small_model(tmp_path / "small.gguf", changes, GOLDEN / name, "f32"))


def test_llama_cpp_lets_the_same_layers_of_an_exaone_4_slide(tmp_path: Path) -> None:
    """It has as many as the released one; the golden ones come again and again."""
    hf = longer("tiny2/exaone4", tmp_path / "hf", [i % 6 for i in range(64)])
    c = open_model(hf).config
    assert [i for i in range(64) if not c.slides(i)] == list(range(3, 64, 4))
    same_next("tiny2/exaone4", small_model(tmp_path / "small.gguf", PLAIN, hf, "f32"))


def test_llama_cpp_norms_each_head_of_a_command_r_plus_alike(tmp_path: Path) -> None:
    """It looks for such norms in models of 64 layers; the golden ones come again and again."""
    hf = longer("tiny/cohere", tmp_path / "hf", [i % 6 for i in range(64)])
    found = each_head_normed(load_file(hf / "model.safetensors"), np.random.default_rng(7))
    save_file(found, hf / "model.safetensors")
    same_next("tiny/cohere", small_model(tmp_path / "small.gguf", PLAIN, hf, "f32"))


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_llama_cpp_reads_an_older_file_of_deepseek_v2_alike(mscale: float, tmp_path: Path) -> None:
    """Made before its cache was of small vectors."""
    hf = lite(tmp_path / "hf")
    tokens = open_checkpoint(small_model(tmp_path / "small.gguf", PLAIN)).metadata
    told = {k: v for k, v in tokens.items() if k.startswith("tokenizer.")}
    same_next(DEEPSEEK, older_deepseek(hf, tmp_path / "m.gguf", mscale, told))


@pytest.mark.parametrize("lead", SEEING)
def test_llama_cpp_says_the_same_of_a_qwen_that_sees(lead: str, tmp_path: Path) -> None:
    """Of texts, by its three positions."""
    tokens = open_checkpoint(small_model(tmp_path / "small.gguf", PLAIN)).metadata
    told = {k: v for k, v in tokens.items() if k.startswith("tokenizer.")}
    same_next(SEEING[lead], seeing(lead, tmp_path / "m.gguf", told))


@pytest.mark.parametrize(("name", "written"), [(LARGE, 1), (NEXT, 0)])
def test_llama_cpp_passes_over_a_draft_layer(name: str, written: int, tmp_path: Path) -> None:
    """It knows that there is one, and has no use for it; or does not, and none is written."""
    hf = with_draft_layer(name, tmp_path / "hf")
    path = small_model(tmp_path / "small.gguf", PLAIN, hf, "f32")
    assert open_model(hf).config.num_nextn_predict_layers == 1
    assert open_model(path).config.num_nextn_predict_layers == written
    same_next(f"tiny2/{name}", path)


def test_llama_cpp_says_the_same_of_a_glm_4_5_without_norms_of_heads(tmp_path: Path) -> None:
    """As the smaller ones are."""
    hf = folder(f"tiny2/{LARGE}", tmp_path / "hf", {"use_qk_norm": False})
    given = load_file(hf / "model.safetensors")
    left = {n: t for n, t in given.items() if not n.endswith(("q_norm.weight", "k_norm.weight"))}
    assert len(given) - len(left) == 2 * 6
    save_file(left, hf / "model.safetensors")
    same_next(f"tiny2/{LARGE}", small_model(tmp_path / "small.gguf", PLAIN, hf, "f32"))


def test_llama_cpp_norms_the_values_of_falcon_h1_alike(tmp_path: Path) -> None:
    """Where a checkpoint has a norm there; the golden one has none."""
    hf = tmp_path / "hf"
    shutil.copytree(GOLDEN / "tiny2" / "falcon_h1", hf)
    config = json.loads((hf / "config.json").read_text())
    normed = {**config, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    (hf / "config.json").write_text(json.dumps(normed))
    tensors, rng = load_file(hf / "model.safetensors"), np.random.default_rng(5)
    for i in range(config["num_hidden_layers"]):
        values = 1 + rng.normal(size=config["mamba_d_ssm"]) / 4
        tensors[f"model.layers.{i}.mamba.norm.weight"] = values.astype(np.float16)
    save_file(tensors, hf / "model.safetensors")
    same_next("tiny2/falcon_h1", small_model(tmp_path / "small.gguf", PLAIN, hf, "f32"))


LARGER = ("cohere_norms", "deepseek_v2_greedy")  # it knows by their layers: see tests of their own
UNSEEN = ("llama4_still", "starcoder2_sliding")  # it has no such windows
ASKED = [case for case in CASES if case not in (*UNTOLD, *LARGER, *UNSEEN)]


@pytest.mark.parametrize("case", ASKED)
def test_llama_cpp_takes_an_option_alike(case: str, tmp_path: Path) -> None:
    hf = made(case, tmp_path / "hf")
    same_next(CASES[case][0], small_model(tmp_path / "small.gguf", PLAIN, hf, "f32"))


@pytest.mark.parametrize("trained", [CONTEXT, CONTEXT - 1], ids=["short", "long"])
def test_llama_cpp_chooses_the_same_factors(trained: int, tmp_path: Path) -> None:
    hf = phi3(tmp_path / "hf", LONGROPE, trained)
    path = small_model(
        tmp_path / "small.gguf", {**PLAIN, "phi3.rope.scaling.type": None}, hf, "f32"
    )
    same_next("tiny2/phi3", path)


def test_llama_cpp_weighs_the_same_experts(tmp_path: Path) -> None:
    c = open_checkpoint(mixtral(tmp_path / "mixtral.gguf", 0.3))
    small = open_checkpoint(small_model(tmp_path / "small.gguf", PLAIN))
    path = tmp_path / "both.gguf"
    write_gguf(path, {**small.metadata, **c.metadata}, list(c.tensors.values()))
    same_next("tiny/llama_tied", path)


def same_next(name: str, path: Path, most: int = 0) -> None:
    """The next token behind every beginning of the golden text, but for so many; the end is said,
    or never."""
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()
    session = open_session(threads=1, exact=True)
    runner = Runner(open_model(path).reaching(CONTEXT), session, CONTEXT)
    logits = runner.text(ids, every=True).logits
    session.close()
    peer, others = LogprobPeer(path, 1, CONTEXT), []
    for i in range(2, len(ids)):
        said = peer.logprobs(ids[: i + 1], 1).raw["ids"][0]
        best = np.delete(logits[i], END).max() if said != END else logits[i].max()
        others += [] if best - logits[i][said] < CLOSE else [(i, said)]
    peer.close()
    assert len(others) <= most, others
