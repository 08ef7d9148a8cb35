"""Drafters over architectures of every kind of layer: no text changes; recurrent models draft too.

All architectures stand in docs/models.md, by the same runs.
"""

from pathlib import Path

import numpy as np
import pytest
from identity_kit import CONTEXT, GOLDEN, outcomes

from ggraph.decode.draft.lookup import PromptLookup
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from models.registry import open_model
from models.run.load import open_session

NAMES = (
    "tiny2/lfm2", "tiny2/qwen3_5_moe", "tiny2/granite_hybrid", "tiny2/nemotron_h_moe",
    "tiny2/falcon_h1",
    "tiny2/glm4_moe_lite",
    "tiny2/llama4_text", "tiny2/gemma3n",
    "tiny2/gemma4_text", "tiny2/gemma4_k_eq_v", "tiny2/gemma4_moe",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_drafter_changes_a_text(name: str, tmp_path: Path) -> None:
    kept = {}
    for drafter, found in outcomes(name, tmp_path):
        assert found.same == found.texts, (drafter, str(found))
        kept[drafter] = found.kept
    assert kept["itself, disturbed"] > 0 < kept["guesses"], kept


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "with lookup"])
@pytest.mark.parametrize(
    "name", ["tiny2/lfm2", "tiny2/qwen3_5", "tiny2/qwen3_5_moe", "tiny2/granite_hybrid"]
)
def test_a_recurrent_model_drafts_what_it_would_say(name: str, inner: bool) -> None:
    """Behind drafts that were taken back, kept in part, and kept whole."""
    session = open_session(threads=1, exact=True)
    drafting, saying = (open_model(GOLDEN / name).beside(p) for p in ("drafts.", "says."))
    runner = Runner(drafting, session, CONTEXT, cache_dtype=F32)
    drafter = ModelDrafter(runner, inner=PromptLookup(least=1) if inner else None)
    alone = Runner(saying, session, CONTEXT, cache_dtype=F32)

    def said(text: list[int], count: int) -> list[int]:
        """What the model says behind a text, token by token."""
        alone.past, found = 0, []
        for new in [text, *([0],) * (count - 1)]:
            logits = alone.text(new if new is text else found[-1:]).logits
            found.append(int(np.argmax(logits[-1])))
        return found

    text = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()[:9]
    drafter.begin(text[0])
    drafter.observe(text[1:], None)
    for kept in (0, 2, 5, 3):
        draft = list(drafter.propose(5).tokens)
        assert draft == said(text, 5)
        new = [*draft[:kept], (draft[min(kept, 4)] + 1) % 300]
        drafter.observe(new, None)
        text += new
    session.close()
