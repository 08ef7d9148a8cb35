"""Heads that come with ggraph: found by the model's own weights, whole, and small enough."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from small_model import small_model

from ggraph import dtypes
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.cli.draft import DraftFlags
from models.run.shipped import DATA, HEADS, Shipped, head_for

MOST_BYTES = 12_000_000


@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.file)
def test_a_head_is_whole_and_has_its_card(head: Shipped) -> None:
    path = DATA / head.file
    assert path.stat().st_size <= MOST_BYTES
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata["general.architecture"] == "eagle3"
    for name, t in checkpoint.tensors.items():
        assert np.isfinite(t.float32()).all(), name
    card = path.with_suffix(".md").read_text("utf-8")
    assert "Apache-2.0" in card and "acceptance" in card.lower()


def test_a_model_is_known_by_its_final_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_model(tmp_path / "own.gguf")
    assert head_for(path) is None and DraftFlags().head_of(path) is None
    checkpoint = open_checkpoint(path)
    norm = checkpoint.tensors["output_norm.weight"].float32()
    known = Shipped("own.gguf", hashlib.sha256(norm.tobytes()).hexdigest())
    monkeypatch.setattr("models.run.shipped.HEADS", (known,))
    assert head_for(path) == DATA / "own.gguf"
    tensors = dict(checkpoint.tensors)
    name = "blk.0.ffn_down.weight"
    data = tensors[name].float32().astype(np.float16)
    tensors[name] = RawTensor(name, dtypes.F16, tensors[name].shape, data)
    other = tmp_path / "half.gguf"
    write_gguf(other, checkpoint.metadata, list(tensors.values()))
    assert head_for(other) == DATA / "own.gguf", "other types of the matrices, the same model"


def test_which_drafters_run_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, head = tmp_path / "model.gguf", tmp_path / "head.gguf"
    monkeypatch.setattr("models.cli.draft.head_for", lambda model: head)
    assert DraftFlags().head_of(path) == head
    assert DraftFlags(draft="suffix,eagle3").head_of(path) == head
    assert DraftFlags(draft="suffix").head_of(path) is None, "another drafter was asked for"
    assert DraftFlags(model_draft=path).head_of(path) is None, "a draft model was asked for"
    assert DraftFlags(path, draft="suffix").head_of(path) == path, "what is given is taken"
    for given, tree, names in (
        (head, None, ("suffix", "eagle3")),
        (head, "8,2,3", ("eagle3",)),
        (None, None, ("suffix",)),
    ):
        found = DraftFlags(tree=tree).drafting(given, True, path)
        assert found.options.names == names
