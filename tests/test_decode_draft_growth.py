"""The growth of a tree as one plan: the host's trees, ties and all, and nothing in between."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_host import need_compiler
from cuda_kit import one_replay, session_on
from head_loop import base, saved, variant

from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.growth import grown
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.draft.loop import table
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft
from ggraph.dtype import F32
from ggraph.errors import InputError
from ggraph.session import Session
from ggraph.tensor import input
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model

TINY = Path(__file__).parent / "golden" / "tiny"
TARGET = TINY / "llama_tied"
PROMPT = [5, 17, 200, 33, 8, 91]
SHAPES = [TreeShape(60, 6, 10), TreeShape(16, 4, 4), TreeShape(8, 7, 1), TreeShape(6, 1, 5)]
HEADS = ["golden", "random", "equal pairs", "all equal", "no number", "certain", "latent"]


def head_of(name: str, folder: Path) -> Head:
    """A head whose output matrix makes what the name says."""
    w, options = variant(name) if name == "latent" else (base(), {})
    out = w["lm_head.weight"].copy()
    if name == "random":
        out = np.random.default_rng(9).standard_normal(out.shape).astype(np.float32)
    elif name == "equal pairs":
        out[1::2] = out[::2]
    elif name == "all equal":
        out[:] = 0
    elif name == "no number":
        out[7] = 3e38
    elif name == "certain":  # chances of all but one vanish in float32
        out *= 3000
    made = open_head(saved(folder, w | {"lm_head.weight": out}, options), open_model(TARGET))
    assert isinstance(made, Head)
    return made


def drafter_of(session: Session, head: Head, shape: TreeShape, unrolls: bool) -> EagleDrafter:
    """A drafter that was told of a text, with features that have nothing to do with a target."""
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    runner.unrolls = unrolls
    drafter = EagleDrafter(runner, tree=shape)
    width = len(head.taps) * head.config.target_hidden_size
    features = np.random.default_rng(3).standard_normal((len(PROMPT), width)).astype(np.float32)
    drafter.begin(PROMPT[0])
    drafter.observe(PROMPT, features)
    return drafter


def trees(device: str, head: Head, shape: TreeShape, limits: list[int]) -> list[list[Draft]]:
    """The drafts of each limit, level by level with the host in between, and of one plan."""
    found = []
    for unrolls in (False, True):
        with session_on(device) as session:
            drafter = drafter_of(session, head, shape, unrolls)
            drafts = []
            for limit in limits:
                drafts.append(drafter.propose(limit))
                assert all(0 <= t < head.target_vocabulary for t in drafts[-1].tokens)
            found.append(drafts)
            grew = [k for k in session._executors if "tree" in k]  # type: ignore[operator]
            assert len(grew) == unrolls, (
                "one plan for all limits, and only where plans are replayed"
            )
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_one_plan_grows_the_hosts_trees(name: str, shape: TreeShape, tmp_path: Path) -> None:
    limits = [1, 2, 3, shape.total_tokens // 2, shape.total_tokens - 1, 500]
    levels, plan = trees("cpu", head_of(name, tmp_path / "head"), shape, limits)
    assert plan == levels
    assert [len(d) for d in plan] == [min(n, shape.total_tokens - 1) for n in limits]


@need_compiler
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("device", ["sim", "cuda"])
def test_devices_grow_the_hosts_trees(device: str, name: str, tmp_path: Path) -> None:
    """Ties and what is no number among the scores, too: each device orders them as the host."""
    shape = TreeShape(24, 3, 5)
    levels, plan = trees(device, head_of(name, tmp_path / "head"), shape, [5, 59])
    assert plan == levels
    assert len(plan[1]) == shape.total_tokens - 1


@need_compiler
def test_on_a_gpu_a_tree_is_one_replay_that_brings_back_numbers(tmp_path: Path) -> None:
    """Of a tree of 60 some hundred bytes: which nodes are kept, their tokens, who went on."""
    shape = TreeShape(60, 2, 10)
    with session_on("cuda") as session:
        drafter = drafter_of(session, head_of("golden", tmp_path / "head"), shape, True)
        driver = session.backends["cuda0"].driver  # type: ignore[attr-defined]
        for _ in range(3):  # loads, is captured
            first = drafter.propose(59)
        again = []
        plan = one_replay(session, driver, lambda: again.append(drafter.propose(59)), "tree")
        assert again == [first] and len(first) == 59
        sizes = {t.name: t.nbytes for t in plan.graph.outputs}
        assert sizes == {"kept": 59 * 4, "tokens": 59 * 4, "chosen": 10 * 4}


def test_windowed_heads_and_long_trees_grow_level_by_level(tmp_path: Path) -> None:
    with session_on("cpu") as session:
        plain = drafter_of(session, head_of("golden", tmp_path / "head"), TreeShape(9, 9, 1), True)
        assert len(plain.propose(8)) == 8
        windowed = open_head(saved(tmp_path / "w", *variant("sliding window")), open_model(TARGET))
        assert isinstance(windowed, Head)
        assert len(drafter_of(session, windowed, TreeShape(9, 3, 3), True).propose(8)) == 8
        assert not [k for k in session._executors if "tree" in k]  # type: ignore[operator]


def test_graphs_that_cannot_grow_are_refused(tmp_path: Path) -> None:
    head = head_of("golden", tmp_path / "head")
    ids, root = table(head.name, head.target_ids), input("root", (1, head.width))
    shape = DraftShape(4, 256, 4, 513, True)
    for wrong, depth in (
        (replace(shape, fed_back=False), 2), (replace(shape, wanted=1), 2), (shape, 0)
    ):  # fmt: skip
        with pytest.raises(InputError, match="no tree grows"):
            grown(head.build(wrong), depth, 9, ids, root)
