"""Golden encoders: what transformers gave for them, how near results are, and servers of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from embedding_kit import ENCODERS, GOLDEN, RERANKERS
from starlette.testclient import TestClient
from test_cuda_models import left_to_the_cpu, planned

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.serving.encoder import Encoder, Passage
from models.registry import open_model
from models.run.load import load_served, open_session
from models.serve.app import make_app
from models.serve.engine import service_of
from models.serve.settings import Settings

TOLERANCE = 1e-4  # of the vector's spread
KINDS = {"cls": 0, "mean": None, "last": -1}
OWN = {  # pooling, as the folder says it
    "bert": "cls", "gemma_embedding": "mean", "xlm_roberta": "mean", "modern_bert": "cls",
    "nomic_bert": "mean", "distil_bert": "mean", "mpnet": "mean",
}  # fmt: skip
ALL = (*ENCODERS, *RERANKERS)
TO_LLAMA_CPP = tuple(name for name in ALL if name != "mpnet")  # which it knows


def said(name: str) -> dict[str, np.ndarray]:
    """What transformers gave."""
    with np.load(GOLDEN / "encoders" / name / "expected.npz") as held:
        return dict(held)


def passages(name: str, row: int | None = None) -> list[Passage]:
    """What it was given: the ids of texts, or of pairs."""
    held = said(name)
    found = []
    for i, ids in enumerate(held["ids"]):
        kinds = held["types"][i] if "types" in held else np.zeros(0)
        second = int((kinds == 0).sum()) if len(kinds) else None
        found.append(Passage(ids[ids >= 0].tolist(), row, second))
    return found


@contextmanager
def opened(path: Path, threads: int = 1, **more: Any) -> Iterator[Encoder]:
    """An encoder that computes in float32, unless told otherwise."""
    session = open_session(threads=threads, **{"exact": True, **more})
    model = open_model(path)
    yield Encoder(model, session, model.context_length, texts=4, rows=64)
    session.close()


def spread_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference in units of the vector's spread."""
    return float((np.abs(got - expected) / np.ptp(expected, axis=1, keepdims=True)).max())


def even(vectors: list[np.ndarray]) -> np.ndarray:
    """Of length 1."""
    return np.array([v / np.linalg.norm(v) for v in vectors])


def llama_cpp(xllamacpp: Any, path: Path) -> Any:
    """A server of llama.cpp's on the file, which computes in float32."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel = str(path), 1
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.embedding, params.warmup = True, False
    off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = off  # with it keys and values are halves
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if open_model(path).scores:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    return xllamacpp.Server(params)


@contextmanager
def client(path: Path, parallel: int = 4) -> Iterator[TestClient]:
    """A server on the model, computed in float32."""
    m = load_served(path, parallel, threads=1, exact=True)
    with TestClient(make_app(service_of(m, Settings(parallel=parallel)))) as asked:
        yield asked
    m.close()


def largest_error(path: Path, name: str) -> float:
    """Of all vectors by every pooling, or of scores, in units of the spread."""
    with opened(path) as encoder:
        if name in RERANKERS:
            scores = np.concatenate(encoder.vectors(passages(name, 0)))
            return spread_error(scores[None], said(name)["scores"][None])
        made = ((even(encoder.vectors(passages(name, KINDS[k]))), said(name)[k]) for k in KINDS)
        return max(spread_error(*pair) for pair in made)


def without_kernel(path: Path) -> list[str]:
    """Ops that NumPy computes on the CPU."""
    session = open_session(threads=2, profile=True)
    backend = session.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    encoder = Encoder(open_model(path), session, 64)
    encoder.vectors([Passage([5, 6, 7], 0), Passage(list(range(40)))])
    found = {op for op, _ in backend.profile.times}
    session.close()
    assert len(found) > 6
    return sorted(op for op in found if op.endswith("(NumPy)"))


def left_on_cuda(path: Path) -> list[str]:
    """Launches that a plan for a GPU leaves to the CPU."""
    with opened(path) as encoder:
        graphs = [encoder.model.build(encoder.shape(rows)) for rows in (16, 512)]
    return [label for g in graphs for label in left_to_the_cpu(planned(g, 1))]


def apart(xllamacpp: Any, path: Path, name: str) -> tuple[float, int, int]:
    """The largest difference of a number of a vector from llama.cpp's, of texts that were stored,
    and how many tokens each has read; of a reranker that of a score, where both of two texts are
    first ones, as they are to llama.cpp."""
    peer = llama_cpp(xllamacpp, path)
    if open_model(path).scores:
        pairs = json.loads((GOLDEN / "encoders" / name / "texts.json").read_text())
        told = [peer.handle_rerank({"query": q, "documents": [d]}) for q, d in pairs]
        texts = [Passage(p.tokens, 0) for p in passages(name)]
        with opened(path) as encoder:
            own = np.concatenate(encoder.vectors(texts))
        found = np.array([t["results"][0]["relevance_score"] for t in told])
        counts = sum(t["usage"]["prompt_tokens"] for t in told), sum(len(t.tokens) for t in texts)
        return float(np.abs(found - own).max()), *counts
    asked = json.loads((GOLDEN / "encoders/bert/texts.json").read_text())[:-1]
    theirs = peer.handle_embeddings({"input": asked, "model": "m"})
    with client(path) as server:
        ours = server.post("/v1/embeddings", json={"input": asked, "parse_special": True}).json()
    found, own = (np.array([d["embedding"] for d in r["data"]]) for r in (theirs, ours))
    counts = theirs["usage"]["prompt_tokens"], ours["usage"]["prompt_tokens"]
    return float(np.abs(found - own).max()), *counts
