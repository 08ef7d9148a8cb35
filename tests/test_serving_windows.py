"""Texts in batches of models whose layers see a window, a stretch of the text, or what an earlier
layer remembers: those that they have alone."""

from collections import Counter
from pathlib import Path

import pytest
from serving_kit import World, differences, history
from small_model import TINY, small_model

NAMES = "tiny/mistral_sliding", "tiny2/afmoe", "tiny2/gemma3n", "tiny2/llama4_text"


@pytest.mark.parametrize("name", NAMES)
def test_no_history_changes_a_text(name: str, tmp_path: Path) -> None:
    path = small_model(tmp_path / "m.gguf", source=TINY.parent / name)
    world, seen = World.of(path, smaller=path), Counter[str]()
    assert not [d for seed in range(4) for d in differences(world, history(seed), seen)]
    assert seen["reused"] > 0 < seen["accepted"]
