"""Vectors of texts, as the makers of embedding models mean them.

`golden/embeddings.json` is what transformers 5.24 gave in float32 for the folders and the texts of
embedding_kit.py: the token ids of each, and the first, the mean and the last of the states
(`last_hidden_state`), of length 1.
"""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_kit import FAMILIES, GOLDEN, TEXTS, embedding_folder, pooled
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient

from ggraph import ModelError
from ggraph.errors import FormatWarning
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from models.pooling import pooling_of
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.load import load
from models.serve.app import make_app
from models.serve.engine import Service
from models.serve.settings import Settings

SAID = json.loads((GOLDEN / "embeddings.json").read_text())
NEAR = 2e-5  # of float32 against float32; the record is rounded to six places
KIND = {"lasttoken": "last", "mean": "mean", "cls_token": "cls"}
NUMBER = {"mean": 1, "cls": 2, "last": 3}


@contextmanager
def serving(path: Path, context: int = 256) -> Iterator[TestClient]:
    """A server on the model, computed in float32."""
    m = load(path, threads=1, exact=True, cache_type="f32", ctx_size=context)
    service = Service(m, Settings(parallel=4), 4 * context)
    with TestClient(make_app(service)) as client:
        yield client
    m.close()


def vectors(client: TestClient, given: Any, **more: Any) -> np.ndarray:
    """One row for each text [N, E]."""
    reply = client.post("/v1/embeddings", json={"input": given, **more})
    assert reply.status_code == 200, reply.text
    return np.array([d["embedding"] for d in reply.json()["data"]])


def refusal(client: TestClient, given: Any, **more: Any) -> dict[str, Any]:
    reply = client.post("/v1/embeddings", json={"input": given, **more})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def recorded(name: str, kind: str) -> np.ndarray:
    return np.array([t[kind] for t in SAID[name]])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("embeddings")
    for name in FAMILIES:
        embedding_folder(name, made / name)
        model_to_gguf(open_model(made / name), made / f"{name}.gguf", "f32")
    return made


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_transformers(name: str, suffix: str, root: Path) -> None:
    """With nothing asked for: the tokens around a text, the pooling, and the empty text, too. Every
    text alone as among others, and by its ids; usage counts what was read."""
    kind = KIND[FAMILIES[name][2]]
    wanted, ids = recorded(name, kind), [t["ids"] for t in SAID[name]]
    with serving(root / f"{name}{suffix}") as client:
        reply = client.post("/v1/embeddings", json={"input": TEXTS, "parse_special": True}).json()
        count = sum(map(len, ids))
        assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}
        found = np.array([d["embedding"] for d in reply["data"]])
        assert np.abs(found - wanted).max() < NEAR
        assert np.array_equal(vectors(client, ids), found)
        for i, text in enumerate(TEXTS):
            assert np.array_equal(vectors(client, text, parse_special=True)[0], found[i])
        for asked in ("last", "mean", "cls"):
            other = vectors(client, ids, pooling=asked)
            assert np.abs(other - recorded(name, asked)).max() < NEAR
        short = wanted[:, :24] / np.linalg.norm(wanted[:, :24], axis=1, keepdims=True)
        assert np.abs(vectors(client, ids, dimensions=24) - short).max() < 2 * NEAR
        raw = client.post("/v1/embeddings", json={"input": ids, "encoding_format": "base64"})
        packed = [base64.b64decode(d["embedding"]) for d in raw.json()["data"]]
        assert np.array_equal([np.frombuffer(p, "<f4") for p in packed], np.float32(found))


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_gives_the_same_vectors(name: str, root: Path) -> None:
    """Of the file that `convert` writes: its end of texts and its pooling go along."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(root / f"{name}.gguf"), 256, 1
    params.embedding, params.warmup = True, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    reply = server.handle_embeddings({"input": list(TEXTS), "model": "m"})
    found = np.array([d["embedding"] for d in reply["data"]])
    assert reply["usage"]["prompt_tokens"] == sum(len(t["ids"]) for t in SAID[name])
    assert np.abs(found - recorded(name, KIND[FAMILIES[name][2]])).max() < 1e-3
    metadata = open_checkpoint(root / f"{name}.gguf").metadata
    assert metadata["tokenizer.ggml.add_eos_token"] is True


def test_a_prompt_that_goes_on_has_no_end(root: Path) -> None:
    """Neither a completion nor what /tokenize tells of one."""
    for name in ("qwen3", "qwen3.gguf"):
        with serving(root / name) as client:
            reply = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}).json()
            assert reply["usage"]["prompt_tokens"] == 3
            told = client.post("/tokenize", json={"content": "abc", "add_special": True}).json()
            assert told["tokens"] == [97, 98, 99]


def test_markers_in_a_text_are_text_unless_asked_for(root: Path) -> None:
    ids = [*b"<|endoftext|>", 259]
    with serving(root / "qwen3") as client:
        assert np.array_equal(vectors(client, "<|endoftext|>"), vectors(client, [ids]))


def test_a_text_fits_with_its_end_or_is_refused(root: Path) -> None:
    """Nothing is cut off."""
    with serving(root / "qwen3", context=32) as client:
        assert vectors(client, "a" * 31).shape == (1, 64)
        error = refusal(client, ["b", "a" * 32])
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
        assert "at least 33 tokens" in error["message"]
        assert refusal(client, [[1] * 33])["code"] == "context_length_exceeded"
        assert "is empty" in refusal(client, [])["message"]
        assert "token id 320" in refusal(client, [[320]])["message"]


CONFIGS: dict[str, tuple[Any, str | None]] = {
    "flag": ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "last"),
    "flag, mean": ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
    "root": ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),
    "name": ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
    "list": ({"pooling_mode": ["cls"]}, "cls"),
    "none": ({"word_embedding_dimension": 64}, "mean"),
    "two": ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
    "two names": ({"pooling_mode": ["cls", "mean"]}, None),
    "max": ({"pooling_mode_max_tokens": True}, None),
    "weighted": ({"pooling_mode": "weightedmean"}, None),
    "list of lists": ({"pooling_mode": [[]]}, None),
    "no object": ([], None),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_s_pooling(name: str, root: Path, tmp_path: Path) -> None:
    """As sentence-transformers reads it. What is not made here is refused where a vector is asked
    for, and where a file is written that could not say it."""
    config, kind = CONFIGS[name]
    folder = pooled(Path(shutil.copytree(root / "qwen3", tmp_path / "hf")), config, "Normalize")
    model, out = open_model(folder), tmp_path / "m.gguf"
    if kind is not None:
        assert pooling_of(model.checkpoint) == kind
        model_to_gguf(model, out, "f32")
        assert open_checkpoint(out).metadata["qwen3.pooling_type"] == NUMBER[kind]
        return
    for ask in (lambda: pooling_of(model.checkpoint), lambda: model_to_gguf(model, out, "f32")):
        with pytest.raises(ModelError, match="1_Pooling"):
            ask()
    with serving(folder) as client:
        error = refusal(client, "a")
        assert error["param"] == "pooling" and "1_Pooling" in error["message"]
        assert vectors(client, "a", pooling="last").shape == (1, 64)
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: pooled(f, {"pooling_mode": "mean"}, "Dense", "Normalize"), "Dense"),
        (_without("1_Pooling/config.json"), "cannot be read"),
        (lambda f: (f / "modules.json").write_text("{}"), "expected a list"),
        (lambda f: (f / "modules.json").write_text("["), "cannot be read"),
        (lambda f: (f / "modules.json").write_text("[]"), "goes through nothing"),
    ],
)
def test_modules_that_would_change_a_vector_are_refused(
    spoil: Callable[[Path], None], said: str, root: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(root / "qwen3", tmp_path / "hf"))
    spoil(folder)
    with pytest.raises(ModelError, match=said):
        pooling_of(open_checkpoint(folder))


def test_a_folder_without_modules_has_the_mean(root: Path, tmp_path: Path) -> None:
    """As sentence-transformers reads one; and GGUF says nothing of it."""
    folder = Path(shutil.copytree(root / "qwen3", tmp_path / "hf"))
    (folder / "modules.json").unlink()
    with serving(folder) as client:
        found = vectors(client, [t["ids"] for t in SAID["qwen3"]])
    assert np.abs(found - recorded("qwen3", "mean")).max() < NEAR
    model_to_gguf(open_model(folder), tmp_path / "m.gguf", "f32")
    assert "qwen3.pooling_type" not in open_checkpoint(tmp_path / "m.gguf").metadata


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, r"0 \(none\)"), (4, r"4 \(rank\)"), (9, "pooling_type 9 "), ("1", "not an integer")],
)
def test_what_gives_no_vector_is_refused_and_kept(
    number: Any, said: str, root: Path, tmp_path: Path
) -> None:
    """A GGUF file of another kind: by `quantize` it stays of its kind."""
    given = open_checkpoint(root / "qwen3.gguf")
    changed = {**given.metadata, "qwen3.pooling_type": number}
    write_gguf(tmp_path / "m.gguf", changed, list(given.tensors.values()))
    with pytest.raises(ModelError, match=said):
        pooling_of(open_checkpoint(tmp_path / "m.gguf"))
    model_to_gguf(open_model(tmp_path / "m.gguf"), tmp_path / "q.gguf", "f16")
    assert open_checkpoint(tmp_path / "q.gguf").metadata["qwen3.pooling_type"] == number
    with serving(tmp_path / "q.gguf") as client:
        assert refusal(client, "a")["param"] == "pooling"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_folders_without_an_output_matrix(
    name: str, tied: bool, root: Path, tmp_path: Path
) -> None:
    """As embedding models are saved: the bare class, whose tensors have shorter names."""
    folder = Path(shutil.copytree(root / name, tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    bare = {"qwen3": "Qwen3Model", "gemma3": "Gemma3TextModel", "llama": "LlamaModel"}[name]
    config |= {"architectures": [bare], "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(folder / "model.safetensors")
    held = {n.removeprefix("model."): t for n, t in held.items() if n != "lm_head.weight"}
    save_file(held, folder / "model.safetensors")
    heard = nullcontext() if tied else pytest.warns(FormatWarning, match="only its embeddings")
    with heard, serving(folder) as client:
        found = vectors(client, [t["ids"] for t in SAID[name]])
    assert np.abs(found - recorded(name, KIND[FAMILIES[name][2]])).max() < NEAR
