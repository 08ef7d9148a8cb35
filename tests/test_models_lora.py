"""LoRA adapters, against PEFT's logits and llama.cpp's tokens."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from golden_kit import GOLDEN, TOLERANCE, spread_error
from safetensors.numpy import load_file, save_file
from serve_kit import served
from small_model import small_model
from typer.testing import CliRunner

from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import GgraphError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.api import Chat
from models.cli.app import app
from models.lora import adapted
from models.registry import Model, open_model
from models.run.convert import model_to_gguf
from models.run.load import open_session

LORA = GOLDEN / "lora"
BASES = {"llama_tied": GOLDEN / "tiny/llama_tied", "phi3": GOLDEN / "tiny2/phi3"}


def logits(model: Model, ids: list[int]) -> np.ndarray:
    session = open_session(threads=1, exact=True)
    found = Runner(model, session, 64, cache_dtype=F32).text(ids, every=True).logits
    session.close()
    return found


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(("chosen", "which"), [(("whole",), "whole"), (("whole", "part"), "both"),
                                               (("part", "whole"), "both")])  # fmt: skip
def test_logits_are_those_of_peft(name: str, chosen: tuple[str, ...], which: str) -> None:
    """One adapter, and two at once, of other ranks, one of them scaled by the root of its rank.
    Phi-3's matrices are several of ours each."""
    expected = np.load(LORA / name / "expected.npz")
    model = adapted(open_model(BASES[name]), [(LORA / name / c, 1.0) for c in chosen])
    got = logits(model, expected["ids"].tolist())
    assert spread_error(got, expected[which]) < TOLERANCE


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(("chosen", "which"), [(("whole",), "whole"), (("whole", "part"), "both")])
def test_pefts_adapters_adapt_gguf_files_too(
    name: str, chosen: tuple[str, ...], which: str, tmp_path: Path
) -> None:
    """Llama's, whose rows of queries and keys have another order there, and Phi-3's."""
    expected = np.load(LORA / name / "expected.npz")
    model_to_gguf(open_model(BASES[name]), tmp_path / "base.gguf", "f32")
    base = open_model(tmp_path / "base.gguf")
    model = adapted(base, [(LORA / name / c, 1.0) for c in chosen])
    got = logits(model, expected["ids"].tolist())
    assert spread_error(got, expected[which]) < TOLERANCE


# And what of them cannot be adapted in both files, beside embeddings. Gemma 2's model is not here:
# its scores are scaled as no released one's, which convert puts into what makes the queries.
FAMILIES = {
    "tiny/mistral_sliding": "", "tiny/qwen2_bias": "", "tiny/qwen3_qknorm": "",
    "tiny/qwen3_moe": "experts", "tiny/cohere": "", "tiny/gemma": "", "tiny/arcee": "",
    "tiny/qwen3_vl": "visual", "tiny2/gemma3_text": "",
    "tiny2/llama4_text": "experts",
    "tiny2/gemma3n": "altup_(unembed_)?projections",  # which are one tensor there
    "tiny2/gemma4_text": r"2\.self_attn\.v_proj",  # which its keys stand for
    "tiny2/glm4": "", "tiny2/granite": "", "tiny2/olmo2": "", "tiny2/exaone4": "",
    "tiny2/afmoe": r"mlp\.experts", "tiny2/exaone_moe": r"mlp\.experts",
    "tiny2/smollm3": "", "tiny2/ernie4_5": "", "tiny2/qwen3_5": "linear_attn", "tiny2/lfm2": "",
    "tiny2/falcon_h1": ".",  # whose folders have factors beside their matrices
    "tiny2/granite_hybrid": "shared_mlp", "tiny2/deepseek_v2": r"kv_b_proj|mlp\.experts",
    "tiny2/gpt2": "c_attn|c_proj|c_fc", "tiny2/ministral3": "", "tiny2/hunyuan_v1_dense": "",
    "tiny2/hunyuan_v1_moe": "experts", "tiny2/starcoder2": "", "tiny2/phi2": "",
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_means_the_same_in_both_files(name: str, tmp_path: Path) -> None:
    """Of every matrix that it may adapt in a folder and in its GGUF file; others are refused."""
    folder, rng = open_model(GOLDEN / name), np.random.default_rng(3)
    model_to_gguf(folder, tmp_path / "base.gguf", "f32")
    file, whole = open_model(tmp_path / "base.gguf"), dict[str, np.ndarray]()
    refused, meant = set[str](), FAMILIES[name] or "(?!)"
    for title, t in folder.checkpoint.tensors.items():
        if len(t.shape) != 2 or not title.endswith(".weight"):
            continue
        lead = f"base_model.model.{title.removesuffix('.weight')}"
        a = 0.1 * rng.standard_normal((4, t.shape[1])).astype(np.float32)
        b = 0.1 * rng.standard_normal((t.shape[0], 4)).astype(np.float32)
        one = {f"{lead}.lora_A.weight": a, f"{lead}.lora_B.weight": b}
        try:
            for model in (folder, file):
                adapted(model, [(kept(tmp_path / title, one), 1.0)])
        except GgraphError:
            refused.add(title)
        else:
            whole.update(one)
        odd = re.search(rf"embed_tokens|wte|wpe|{meant}", title) is not None
        assert odd == (title in refused), title
    if not whole:
        return
    ids, path = list(range(5, 45)), kept(tmp_path / "whole", whole)
    want, got = (logits(adapted(m, [(path, 1.0)]), ids) for m in (folder, file))
    assert spread_error(got, want) < TOLERANCE < spread_error(got, logits(folder, ids))


def test_names_of_a_class_without_an_output_matrix_are_known(tmp_path: Path) -> None:
    """Of a model that was saved so, and of an adapter that was trained on such a one."""
    source = BASES["llama_tied"]
    for file in source.glob("*.json"):
        shutil.copy(file, tmp_path)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        n.removeprefix("model."): t for n, t in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    adapter = load_file(LORA / "llama_tied/whole/adapter_model.safetensors")
    bare = {n.replace("model.model.", "model."): t for n, t in adapter.items()}
    expected = np.load(LORA / "llama_tied/expected.npz")
    for base in (source, tmp_path):
        for names in (adapter, bare):
            model = adapted(open_model(base), [(kept(tmp_path / "a", names), 1.0)])
            assert (
                spread_error(logits(model, expected["ids"].tolist()), expected["whole"]) < TOLERANCE
            )


def kept(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A folder of PEFT's with these."""
    folder.mkdir(exist_ok=True)
    shutil.copy(LORA / "llama_tied/whole/adapter_config.json", folder)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_a_factor_of_nothing_leaves_the_model_and_halves_add_up() -> None:
    expected = np.load(LORA / "llama_tied/expected.npz")
    ids, base, path = expected["ids"].tolist(), open_model(BASES["llama_tied"]), LORA / "llama_tied"
    none = logits(adapted(base, [(path / "whole", 0.0)]), ids)
    assert spread_error(none, np.load(BASES["llama_tied"] / "expected.npz")["logits"]) < TOLERANCE
    halves = logits(adapted(base, [(path / "whole", 0.25), (path / "whole", 0.75)]), ids)
    assert spread_error(halves, expected["whole"]) < TOLERANCE


PLAIN = {"tokenizer.ggml.tokens": [f"w{i}" for i in range(320)]}  # whole UTF-8, for llama.cpp
CLOSE = 0.02  # where the two best logits are nearer than this, rounding may choose
KEYS = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": 6.0}  # fmt: skip


def drawn(path: Path, base: Path, seed: int, rank: int = 4, **keys: Any) -> Path:
    """A GGUF adapter of random matrices, of all that it may adapt in the model at `base`."""
    rng = np.random.default_rng(seed)
    tensors = []
    for name, t in open_model(base).checkpoint.tensors.items():
        if name.startswith("blk.") and len(t.shape) == 2:
            for end, shape in (("a", (rank, t.shape[1])), ("b", (t.shape[0], rank))):
                data = (0.15 * rng.standard_normal(shape)).astype(np.float32)
                tensors.append(RawTensor(f"{name}.lora_{end}", F32, shape, data))
    write_gguf(path, {**KEYS, **keys}, tensors)
    return path


def merged(path: Path, base: Path, adapters: Sequence[tuple[Path, float]]) -> Path:
    """The model at `base` with W + s B A in the place of each W, in float32."""
    c = open_model(base).checkpoint
    found = {n: t.float32() for n, t in c.tensors.items()}
    for file, factor in adapters:
        given = open_checkpoint(file)
        for name in {n.rpartition(".")[0] for n in given.tensors}:
            a, b = (given.tensors[f"{name}.lora_{end}"].float32() for end in "ab")
            found[name] += factor * given.metadata["adapter.lora.alpha"] / len(a) * (b @ a)
    write_gguf(path, c.metadata, [RawTensor(n, F32, v.shape, v) for n, v in found.items()])
    return path


def test_gguf_adapters_are_what_merging_would_be(tmp_path: Path) -> None:
    base = small_model(tmp_path / "base.gguf", PLAIN, dtype="f32")
    adapters = [
        (drawn(tmp_path / "a.gguf", base, 1), 1.0),
        (drawn(tmp_path / "b.gguf", base, 2, 7), -0.5),
    ]
    ids = list(range(5, 45))
    want = logits(open_model(merged(tmp_path / "merged.gguf", base, adapters)), ids)
    got = logits(adapted(open_model(base), adapters), ids)
    assert spread_error(got, want) < TOLERANCE
    assert spread_error(got, logits(open_model(base), ids)) > 0.1


PEER = """
import json, sys
import xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.cpuparams.n_threads = sys.argv[1], 256, 1, 1
p.lora_adapters = [x.CommonAdapterLoraInfo(f, float(s)) for f, s in json.loads(sys.argv[2])]
server, found = x.Server(p), []
for ids in json.loads(sys.argv[3]):
    reply = server.handle_completions({"prompt": ids, "max_tokens": 1, "temperature": 0,
        "samplers": ["top_k"], "top_k": 1, "n_probs": 1})
    found.append(reply["choices"][0]["logprobs"]["content"][0]["id"])
print("FOUND", json.dumps(found))
"""


def test_llama_cpp_goes_on_alike(tmp_path: Path) -> None:
    """The next token behind each beginning of a text, with two adapters."""
    pytest.importorskip("xllamacpp")
    base = small_model(tmp_path / "base.gguf", PLAIN, dtype="f32")
    adapters = [
        (drawn(tmp_path / "a.gguf", base, 1), 1.0),
        (drawn(tmp_path / "b.gguf", base, 2, 7), -0.5),
    ]
    ids = np.load(BASES["llama_tied"] / "expected.npz")["ids"].tolist()
    beginnings = [ids[:n] for n in range(3, len(ids))]
    told = json.dumps([(str(p), s) for p, s in adapters])
    said = subprocess.run(
        [sys.executable, "-c", PEER, base, told, json.dumps(beginnings)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    theirs = json.loads(said.partition("FOUND ")[2])
    ours = logits(adapted(open_model(base), adapters), ids)
    changed = 0
    plain = logits(open_model(base), ids)
    for i, token in enumerate(theirs, 2):
        assert ours[i].max() - ours[i][token] < CLOSE, (i, token)
        changed += int(token != plain[i].argmax())
    assert changed > 20


@pytest.mark.parametrize("kind", ["f16", "q4_0", "q4_k"])
def test_rows_are_computed_alike_alone_and_together(kind: str, tmp_path: Path) -> None:
    """As drafts need it, which never change a text."""
    base = small_model(tmp_path / "base.gguf", PLAIN, dtype=kind)
    model = adapted(open_model(base), [(drawn(tmp_path / "a.gguf", base, 1, 5), 1.0)])
    session = open_session(threads=2)
    ids = list(range(7, 27))
    together = Runner(model, session, 64).text(ids, every=True).logits
    runner = Runner(model, session, 64)
    alone = np.concatenate([runner.text([i], every=True).logits for i in ids])
    session.close()
    assert np.array_equal(together, alone)


def peft(folder: Path, **config: Any) -> Path:
    """A copy of the whole adapter of llama_tied, with changes of its config."""
    shutil.copytree(LORA / "llama_tied/whole", folder)
    told = folder / "adapter_config.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not read"),
        ({"use_dora": True}, "use_dora True: only an A and a B are read"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": None}, "alpha is None, expected a number"),
        ({"lora_alpha": True}, "alpha is True"),
    ],
)
def test_adapters_that_are_more_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(GgraphError, match=message):
        adapted(open_model(BASES["llama_tied"]), [(peft(tmp_path / "a", **config), 1.0)])


Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("keys", "shapes", "message"),
    [
        ({"general.type": "model"}, {}, "no LoRA adapter, for general.type is 'model'"),
        ({"general.architecture": "qwen3"}, {Q: (4, 64, 64, 4)}, "adapts 'qwen3', not 'llama'"),
        ({"adapter.lora.alpha": "x"}, {Q: (4, 64, 64, 4)}, "alpha is 'x'"),
        ({"adapter.alora.invocation_tokens": [5]}, {Q: (4, 64, 64, 4)}, "begins behind"),
        ({}, {}, "without matrices"),
        ({}, {Q: (4, 64, 64, 3)}, r"A \[4, 64\] and B \[64, 3\] do not fit"),
        ({}, {Q: (4, 32, 64, 4)}, r"is \[64, 64\], not \[64, 32\]"),
        ({}, {Q: (4, 64, 128, 4)}, r"is \[64, 64\], not \[128, 64\]"),
        ({}, {"blk.9.attn_q.weight": (4, 64, 64, 4)}, "no matrix 'blk.9.attn_q.weight'"),
        ({}, {"token_embd.weight": (4, 64, 320, 4)}, "of an embedding is not read"),
    ],
)
def test_adapters_of_something_else_are_refused(
    keys: dict[str, Any], shapes: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    zeros = [
        RawTensor(f"{name}.lora_{end}", F32, shape, np.zeros(shape, np.float32))
        for name, (r, n, m, s) in shapes.items()
        for end, shape in (("a", (r, n)), ("b", (m, s)))
    ]
    write_gguf(path, {**KEYS, **keys}, zeros)
    with pytest.raises(GgraphError, match=message):
        adapted(open_model(small_model(tmp_path / "base.gguf", PLAIN)), [(path, 1.0)])


def test_what_lacks_a_half_or_is_no_pair_is_refused(tmp_path: Path) -> None:
    base = open_model(small_model(tmp_path / "base.gguf", PLAIN))
    for name, message in (
        (f"{Q}.lora_a", "has no B"), (f"{Q}.lora_b", "has no A"), (Q, "is no A or B"),
        (f"{Q}.lora_magnitude", "is no A or B"),
    ):  # fmt: skip
        lone = RawTensor(name, F32, (4, 64), np.zeros((4, 64), np.float32))
        write_gguf(tmp_path / "a.gguf", KEYS, [lone])
        with pytest.raises(GgraphError, match=message):
            adapted(base, [(tmp_path / "a.gguf", 1.0)])


def test_a_file_adapts_files_alone(tmp_path: Path) -> None:
    base = small_model(tmp_path / "base.gguf", PLAIN, dtype="f32")
    with pytest.raises(GgraphError, match="in GGUF files, not Hugging Face folders"):
        adapted(open_model(BASES["llama_tied"]), [(drawn(tmp_path / "a.gguf", base, 1), 1.0)])
    for path, message in ((tmp_path / "none.gguf", "no adapter at"), (tmp_path, "adapter_config")):
        with pytest.raises(GgraphError, match=message):
            adapted(open_model(base), [(path, 1.0)])
    with pytest.raises(GgraphError, match="times nan, expected a finite number"):
        adapted(open_model(base), [(tmp_path / "a.gguf", float("nan"))])


def test_what_is_kept_otherwise_is_refused(tmp_path: Path) -> None:
    """Qwen3.5's delta nets have their heads in another order than Hugging Face's folders."""
    folder = tmp_path / "a"
    folder.mkdir()
    shutil.copy(LORA / "llama_tied/whole/adapter_config.json", folder)
    base = open_model(GOLDEN / "tiny2/qwen3_5")
    rows, columns = base.catalogue["blk.0.attn_qkv.weight"].shape
    title = "base_model.model.model.layers.0.linear_attn.in_proj_qkv"
    save_file(
        {f"{title}.lora_A.weight": np.zeros((4, columns), np.float32),
         f"{title}.lora_B.weight": np.zeros((rows, 4), np.float32)},
        folder / "adapter_model.safetensors",
    )  # fmt: skip
    with pytest.raises(GgraphError, match="in another form than its file"):
        adapted(base, [(folder, 1.0)])


def test_experts_are_refused(tmp_path: Path) -> None:
    """They stand in one tensor of three axes."""
    base = small_model(tmp_path / "base.gguf", PLAIN, GOLDEN / "tiny/qwen3_moe", "f32")
    lone = np.zeros((4, 4, 64), np.float32)
    tensors = [RawTensor(f"blk.0.ffn_up_exps.weight.lora_{e}", F32, lone.shape, lone) for e in "ab"]
    write_gguf(tmp_path / "a.gguf", {**KEYS, "general.architecture": "qwen3moe"}, tensors)
    with pytest.raises(GgraphError, match="do not fit"):
        adapted(open_model(base), [(tmp_path / "a.gguf", 1.0)])


def test_the_command_line_takes_adapters_and_factors(tmp_path: Path) -> None:
    base = small_model(tmp_path / "base.gguf")
    a, b = drawn(tmp_path / "a.gguf", base, 1), drawn(tmp_path / "b.gguf", base, 2)

    def said(*more: Any) -> str:
        line = ["generate", "-m", base, "--temp", 0, "-n", 12, "--json", "ab", *more]
        found = CliRunner().invoke(app, list(map(str, line)))
        assert found.exit_code == 0, found.output
        return str(json.loads(found.stdout)["text"])

    with Chat(base, lora=[(a, 1.0), (b, 0.5)]) as chat:
        want = "".join(chat.answer("ab", temp=0, limit=12))
    both = said("--lora", a, "--lora-scaled", f"{b}:0.5")
    assert both == want
    assert len({said(), said("--lora", a), said("--lora", b), both}) == 4
    assert said("--lora-scaled", f"{a}:0") == said()


def test_a_server_takes_adapters_too(tmp_path: Path) -> None:
    base = small_model(tmp_path / "base.gguf")
    a = drawn(tmp_path / "a.gguf", base, 1)
    with Chat(base, lora=[(a, 0.5)]) as chat:
        want = "".join(chat.answer("ab", chat=False, temp=0, limit=12))
    body = {"prompt": "ab", "max_tokens": 12, "temperature": 0}
    with served(base, "--lora-scaled", f"{a}:0.5") as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert reply["choices"][0]["text"] == want
