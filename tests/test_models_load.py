"""Loading for decoding: what is refused before anything is planned."""

from pathlib import Path

import pytest
from small_model import small_model

from ggraph import InputError
from models.run.load import load


def test_a_cache_of_blocks_needs_whole_blocks_per_head(tmp_path: Path) -> None:
    path = small_model(tmp_path / "small.gguf")
    with pytest.raises(InputError, match=r"cache type q8_0: small has 16 numbers per head"):
        load(path, cache_type="q8_0")
    with pytest.raises(InputError, match=r"cache type 'q4_0'; known: f32, f16, q8_0"):
        load(path, cache_type="q4_0")
