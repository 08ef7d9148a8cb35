"""Experts that are chosen by groups, beside the papers' words in loops."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden_kit import GOLDEN, changed

from ggraph import Graph, ModelError, input
from ggraph.ops.evaluate import evaluate
from models.families.deepseek2 import DEEPSEEK_V3
from models.gguf_config import to_gguf
from models.groups import limited
from models.registry import config_from_hf, open_model


def barred(row: list[float], groups: int, kept: int, best: int) -> list[float]:
    """A row's worth, and -inf outside of its best groups, the first ones where some are as good."""
    each = len(row) // groups
    parts = [row[g * each : g * each + each] for g in range(groups)]
    scores = [sum(sorted(part, reverse=True)[:best]) for part in parts]
    chosen = sorted(range(groups), key=lambda g: (-scores[g], g))[:kept]
    return [v if i // each in chosen else -np.inf for i, v in enumerate(row)]


@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize(("experts", "groups"), [(8, 1), (8, 2), (8, 4), (160, 8), (21, 7)])
def test_other_groups_are_barred(experts: int, groups: int, best: int) -> None:
    rng = np.random.default_rng(experts + groups)
    rows = rng.integers(-6, 7, (64, experts)) / 4  # sums are exact, and many are alike
    for kept in {1, groups // 2 or 1, groups}:
        y = limited(input("x", rows.shape), groups, kept, best)
        got = evaluate(Graph.of({"y": y}), {"x": rows.astype(np.float32)})["y"]
        expected = [barred(row, groups, kept, best) for row in rows.tolist()]
        assert np.array_equal(got, expected), kept
        assert (got > -np.inf).sum() == rows.size // groups * kept


def test_deepseek_v3_has_the_groups_of_its_class() -> None:
    """Its release says so too; R1 and Kimi K2 tell their own."""
    told = json.loads((GOLDEN / "tiny2" / "deepseek_v3" / "config.json").read_text())
    told = {k: v for k, v in told.items() if k not in ("n_group", "topk_group")}
    c = config_from_hf(DEEPSEEK_V3, {**told, "n_routed_experts": 256, "num_experts_per_tok": 8})
    assert (c.n_group, c.topk_group, c.best_of_group) == (8, 4, 2)


def test_a_file_that_tells_of_groups_tells_how_many_are_chosen(tmp_path: Path) -> None:
    keys = {"expert_group_count": 2, "expert_group_used_count": None}
    path = changed("tiny2/deepseek_v3", tmp_path / "m.gguf", keys)
    with pytest.raises(ModelError, match=r"topk_group = 0 of n_group = 2"):
        open_model(path)


@pytest.mark.parametrize("name", ["tiny2/nemotron_h", "tiny2/glm4_moe"])
def test_a_file_tells_of_groups_where_there_are_some(name: str) -> None:
    """Folders tell of one group, even of no experts, and llama.cpp ends where it reads of that."""
    c = open_model(GOLDEN / name).config
    assert not [key for key in to_gguf(c, c.architecture) if "expert_group" in key]
    grouped = to_gguf(open_model(GOLDEN / "tiny2" / "deepseek_v3").config, "deepseek2")
    told = {key: v for key, v in grouped.items() if "expert_group" in key}
    lead = "deepseek2.expert_group"
    assert told == {f"{lead}_count": 2, f"{lead}_used_count": 1}
