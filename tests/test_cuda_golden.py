"""Logits of whole models on CUDA against golden vectors: in graphs and out of them, by few rows and
by prompts. On the stand-in for a driver, or on a GPU (see `cuda_kit`).

NumPy and pytest are all that this file needs beside the package.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_kit import driver_of, need_driver
from cuda_plan import Recording
from ruled_weights import write

from ggraph import Options, Session, dtypes
from ggraph.backends.cuda import Events, attention, cuda_spec, matmul
from ggraph.decode.runner import Runner
from ggraph.serving.encoder import Encoder, Passage
from models.registry import open_model
from models.run.convert import model_to_gguf

pytestmark = need_driver
GOLDEN = Path(__file__).parent / "golden"


def names(folder: str) -> list[str]:
    """The models of a folder that have vectors."""
    found = sorted(p.parent.name for p in (GOLDEN / folder).glob("*/expected.npz"))
    return [f"{folder}/{name}" for name in found if "eagle" not in name]


ROUNDED = 1e-2  # of a row's spread: prompts are rounded to the weights' 16 bits
EXACT = 2e-4


def error_of(got: Any, expected: Any) -> float:
    """Largest difference over the largest spread of a row."""
    return float(np.abs(got - expected).max() / np.ptp(expected, axis=-1).max())


def logits(
    name: str,
    split_at: int,
    streams: int = 1,
    graphs: bool = True,
    kind: str = "f32",
    path: Path | None = None,
) -> tuple[Any, int]:
    """All rows' logits of the golden ids, the first `split_at` in one step and the others one by
    one (0: four by four, 24 in all), over a cache of a type; and how many graphs were captured.
    `path` is another file of the same model."""
    driver = driver_of()
    cuda = Recording(cuda_spec("cuda0", driver), driver, graphs, Events())
    session = Session({"cuda0": cuda}, Options(streams=streams))
    runner = Runner(open_model(path or GOLDEN / name), session, 64, cache_dtype=dtypes.dtype(kind))
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()
    parts = (
        [ids[:split_at], *([i] for i in ids[split_at:])]
        if split_at
        else [ids[i : i + 4] for i in range(0, 24, 4)]
    )
    results = [runner.text(part, every=True).logits for part in parts]
    session.close()
    return np.concatenate(results), len(cuda.made)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 33 rows on a step is a prompt's: by cuBLASLt, and attention by tiles where it can."""
    for room in (matmul, attention):
        monkeypatch.setattr(room, "FEW_ROWS", 32)


@pytest.mark.parametrize("name", names("tiny"))
def test_logits_equal_the_golden_vectors(name: str, prompts: None) -> None:
    """A prompt of 44 rows, then row by row."""
    got, graphs = logits(name, 44)
    expected = np.load(GOLDEN / name / "expected.npz")["logits"]
    assert error_of(got, expected) < ROUNDED
    assert graphs, "plans are replayed as graphs"


@pytest.mark.parametrize("name", names("tiny2"))
def test_few_rows_are_exact_for_every_architecture(name: str, tmp_path: Path) -> None:
    """In float32, so that only the order of sums differs."""
    model_to_gguf(open_model(GOLDEN / name), tmp_path / "model.gguf", "f32")
    got, graphs = logits(name, 0, path=tmp_path / "model.gguf")
    expected = np.load(GOLDEN / name / "expected.npz")["logits"]
    assert error_of(got, expected[:24]) < EXACT
    assert graphs, "plans are replayed as graphs"


@pytest.mark.parametrize(
    "name",
    ["bert", "bert_score", "gemma_embedding", "xlm_roberta", "xlm_roberta_score", "modern_bert"],
)
def test_encoders_give_the_golden_vectors(name: str, tmp_path: Path) -> None:
    """By few rows, in float32; and together, as prompts are, rounded to 16 bits. What a text's
    vector is taken from is another in turn."""
    folder = write(GOLDEN / "encoders" / name, tmp_path / "hf")
    model_to_gguf(open_model(folder), tmp_path / "m", "f32")
    held = np.load(GOLDEN / "encoders" / name / "expected.npz")
    pairs = "scores" in held.files
    kinds = ["scores"] if pairs else ["cls", "mean", "last"]
    texts, expected = list[Passage](), []
    for i, ids in enumerate(held["ids"]):
        kind = kinds[i % len(kinds)]
        row = {"mean": None, "last": -1}.get(kind, 0)
        second = (held["types"][i] == 0).sum() if pairs else None
        texts.append(Passage(ids[ids >= 0].tolist(), row, second))
        expected.append(held[kind][i])
    assert len(texts) >= len(kinds)
    driver = driver_of()
    session = Session({"cuda0": Recording(cuda_spec("cuda0", driver), driver, True, Events())})
    for rows, bar in ((1, EXACT), (512, ROUNDED)):
        encoder = Encoder(open_model(tmp_path / "m").beside(f"{rows}."), session, 128, rows=rows)
        got = np.array(encoder.vectors(texts))
        wanted = np.array(expected).reshape(got.shape)
        if pairs:
            got, wanted = got.T, wanted.T
        else:
            got /= np.linalg.norm(got, axis=1, keepdims=True)
        assert max(map(error_of, got, wanted)) < bar, rows
    session.close()


@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny/qwen3_moe"])
def test_few_rows_are_exact_in_graphs_and_out_of_them_on_any_number_of_streams(name: str) -> None:
    expected = np.load(GOLDEN / name / "expected.npz")["logits"]
    whole, _ = logits(name, 0)
    assert error_of(whole, expected[:24]) < EXACT
    for streams, graphs in ((1, False), (4, False), (4, True)):
        got, made = logits(name, 0, streams, graphs)
        assert np.array_equal(got, whole), (streams, graphs)
        assert bool(made) == graphs


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_caches_of_every_type_keep_the_logits(kind: str, prompts: None) -> None:
    """Rounding of keys and values is all that differs."""
    expected = np.load(GOLDEN / "tiny/llama_tied" / "expected.npz")["logits"]
    bar = {"f16": 2e-3, "bf16": 2e-2}[kind]
    for split_at in (0, 44):
        got, _ = logits("tiny/llama_tied", split_at, kind=kind)
        error = error_of(got, expected[: len(got)])
        assert error < bar + (ROUNDED if split_at else 0), (kind, split_at, error)
