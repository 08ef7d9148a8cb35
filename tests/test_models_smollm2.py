"""SmolLM2-135M-Instruct against transformers in float32, where the model is on this machine.

Skipped where the model is not in the cache; CI fetches it first.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ggraph import cache_dir
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from models.run.fetch import DEFAULT
from models.run.load import Loaded, load

GOLDEN = Path(__file__).parent / "golden"
MODEL = cache_dir() / DEFAULT.file
GAP = 1e-2  # below this a greedy choice may fall either way

pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason=f"{DEFAULT.file} is not in the cache")
REFERENCE = np.load(GOLDEN / "smollm2_reference.npz")
PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(MODEL, ctx_size=512, threads=2, exact=True)


def fresh(m: Loaded, taps: tuple[int, ...] = ()) -> Runner:
    return Runner(m.model, m.session, 512, cache_dtype=F32, taps=taps)


@pytest.mark.parametrize("i", range(4))
def test_prompt_ids_equal(loaded: Loaded, i: int) -> None:
    assert loaded.prompt_ids(PROMPTS[i]) == REFERENCE[f"p{i}_ids"].tolist()


@pytest.mark.parametrize("i", range(4))
def test_logits_of_every_position(loaded: Loaded, i: int) -> None:
    logits = fresh(loaded).text(REFERENCE[f"p{i}_ids"].tolist(), every=True).logits
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
    assert np.abs(total - REFERENCE[f"p{i}_logsumexp"]).max() < 1e-3
    top = REFERENCE[f"p{i}_top8_logit"]
    clear = top[:, 0] - top[:, 1] > GAP
    assert np.array_equal(logits.argmax(1)[clear], REFERENCE[f"p{i}_top8_id"][clear, 0])
    picked = np.take_along_axis(logits, REFERENCE[f"p{i}_top8_id"].astype(np.int64), 1)
    assert np.abs(picked - top).max() < 1e-2


def test_layer_inputs_and_last_logits(loaded: Loaded) -> None:
    result = fresh(loaded, (2, 15, 27)).text(REFERENCE["p0_ids"].tolist(), every=True)
    for layer, got in result.taps.items():
        expected = REFERENCE[f"p0_layer_input_{layer}"]
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(result.logits[-1] - REFERENCE["p0_last_logits"]).max() < 1e-2


@pytest.mark.parametrize("i", range(4))
def test_greedy_text_up_to_the_first_doubtful_step(loaded: Loaded, i: int) -> None:
    runner = fresh(loaded)
    expected, gaps = REFERENCE[f"p{i}_greedy"].tolist(), REFERENCE[f"p{i}_greedy_gap"]
    doubtful = np.flatnonzero(gaps < GAP)
    count = int(doubtful[0]) if len(doubtful) else len(gaps)
    token = int(runner.text(REFERENCE[f"p{i}_ids"].tolist()).logits[-1].argmax())
    text = [token]
    while len(text) < count:
        token = int(runner.text([token]).logits[-1].argmax())
        text.append(token)
    assert text[:count] == expected[:count]


def test_replaying_adds_no_planning(loaded: Loaded) -> None:
    runner = fresh(loaded)
    runner.text(REFERENCE["p0_ids"].tolist())
    runner.text([1])
    before = loaded.session.plans_made
    for _ in range(5):
        runner.text([1])
    assert loaded.session.plans_made == before


@pytest.mark.parametrize(("kind", "error"), [("f16", 2e-3), ("q8_0", 0.05)])
def test_a_narrow_cache_stays_near_the_reference(kind: str, error: float) -> None:
    m = load(MODEL, ctx_size=512, threads=2, exact=True, cache_type=kind)
    ids = REFERENCE["p0_ids"].tolist()
    exact = fresh(load(MODEL, ctx_size=512, threads=2, exact=True)).text(ids, every=True).logits
    found = m.runner.text(ids, every=True).logits
    assert m.runner.cache_dtype.name == kind
    spread = np.ptp(exact, axis=1, keepdims=True)
    assert (np.abs(found - exact) / spread).max() < error
