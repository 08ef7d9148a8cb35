"""Taps stay in the target's session: a head gathers them, and a round brings back tokens alone."""

from collections.abc import Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler
from cuda_kit import over

from ggraph.backends import open_backend
from ggraph.decode.acceptance import Kept, only
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft
from ggraph.decode.engine import Engine, verification_rows
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import Array
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
TARGET, HEAD = TINY / "llama_tied", TINY / "eagle3_for_llama_tied"
PROMPT = [5, 17, 200, 33, 8, 91]
TREE = TreeShape(12, 3, 3)
E = 64


class Noted(EagleDrafter):
    """Notes what it was told and what it proposed."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.told: list[Array] = []
        self.drafts: list[Draft] = []

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        assert features is not None
        self.told.append(features)
        super().observe(tokens, features)

    def propose(self, limit: int) -> Draft:
        self.drafts.append(super().propose(limit))
        return self.drafts[-1]


def session_on(device: str) -> Session:
    if device == "cuda":
        return Session({"cuda0": over(HostDriver())})
    if device == "sim":
        return Session({"sim0": open_backend("sim0")}, Options(streams=2))
    return open_session(threads=1, exact=True)


@contextmanager
def told(device: str, tree: TreeShape | None, gathers: bool, texts: int = 1) -> Any:
    """A drafter behind texts of which each goes on from the one before, and their tokens."""
    session, target = session_on(device), open_model(TARGET)
    head = open_head(HEAD, target)
    assert isinstance(head, Head)
    runner = Runner(target, session, 160, taps=head.taps, cache_dtype=F32)
    given = runner if gathers else None
    reads = DraftRunner(head, session, 160, target=given, cache_dtype=F32)
    drafter, engine = Noted(reads, tree=tree), Engine(runner, ())
    assert drafter.gathers == gathers
    drafts = Speculation([drafter], Fixed(4 if tree is None else 11))
    pick = lambda logits: int(logits.argmax())  # noqa: E731
    limit = 24 if device != "cuda" else 8  # whose stand-in takes half a second a token
    said = [
        list(engine.generate(PROMPT, pick, lambda token: None, limit=limit, drafts=drafts))
        for _ in range(texts)
    ]
    yield runner, drafter, said
    session.close()


@need_compiler
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("device", ["cpu", "sim", "cuda"])
def test_gathered_features_are_those_that_travel(device: str, tree: TreeShape | None) -> None:
    """The same drafts in every round, so the same text, behind another text too."""
    with (
        told(device, tree, False, 2) as (_, travels, wanted),
        told(device, tree, True, 2) as (_, gathers, found),
    ):
        assert gathers.drafts == travels.drafts and len(travels.drafts) > 4
        assert found == wanted
        assert {f.dtype.name for f in gathers.told} == {"int32"}
        assert {f.shape[1] for f in travels.told} == {3 * E}
        assert (np.diff(np.concatenate(gathers.told)[:, 0]) >= 1).all(), "the second lies behind"


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_what_a_drafter_is_told_are_the_texts_own_taps(tree: TreeShape | None) -> None:
    """Of all rows, whatever was drafted in between."""
    with told("cpu", tree, False) as (runner, drafter, said):
        features = np.concatenate(drafter.told)
        text = [*PROMPT, *said[0]][: len(features)]
        runner.past = 0
        again = runner.text(text, every=True).taps
        wanted = np.concatenate([again[i] for i in drafter.taps], axis=1)
        assert np.array_equal(features, wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=need_compiler)])
def test_taps_move_with_the_keys(device: str) -> None:
    """A path that is not a tree's first branch: its rows lie apart."""
    session = session_on(device)
    runner = Runner(open_model(TARGET), session, 64, taps=(1, 3), cache_dtype=F32)
    runner.text(PROMPT)
    draft = Draft((40, 41, 42, 43), (-1, -1, 1, 2))  # two branches, the second one of three nodes
    runner.step(verification_rows(9, draft, runner.past), range(5))
    runner.keep([0, 2, 3, 4])
    assert any("move" in k for k in session._executors)  # type: ignore[operator]
    found = {i: t.copy() for i, t in runner.tapped(range(runner.past)).items()}
    runner.past = 0
    wanted = runner.text([*PROMPT, 9, 41, 42, 43]).taps
    for i in (1, 3):
        assert np.array_equal(found[i], wanted[i]), i
    session.close()


class Metered(Speculation):
    """Notes what a round moved between host and device."""

    driver: HostDriver
    rounds: list[tuple[int, int, int]]

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        self.rounds.append((self.driver.brought, self.driver.sent, len(draft)))
        super().learn(draft, kept, seconds)


@need_compiler
@pytest.mark.parametrize("rule", ["greedy", "drawn", "rejection"])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_round_brings_back_tokens_alone(tree: TreeShape | None, rule: str) -> None:
    """Counted at the driver, by round: the target's tokens, the head's first guesses with their
    chances, and the draft; by rejection the candidates of each row and of each drawn token. No
    taps, which were 768 bytes a row, and nothing that is hidden, 256."""
    driver, target = HostDriver(), open_model(TARGET)
    session, head = Session({"cuda0": over(driver)}), open_head(HEAD, target)
    runner = Runner(target, session, 128, taps=head.taps)
    config = SamplerConfig(seed=11, temp=1.5, top_k=9)
    sampler, by_law = Sampler(config, target.vocab_size), rule == "rejection"
    runner.picks = {"greedy": 1, "drawn": sampler, "rejection": 9}[rule]
    reads = DraftRunner(head, session, 128, target=runner)
    drafter = EagleDrafter(reads, tree=tree, law=config if by_law else None)
    drafts = Metered([drafter], Fixed(4 if tree is None else 11), law=sampler if by_law else None)
    drafts.driver, drafts.rounds = driver, []
    pick, engine = only if rule == "greedy" else sampler.sample, Engine(runner, ())
    said = engine.generate(PROMPT, pick, lambda token: None, limit=16, drafts=drafts)
    assert len(list(said)) == 16
    seen = [b - a for (a, _, _), (b, _, _) in pairwise(drafts.rounds)]
    full = [n for _, _, n in drafts.rounds[1:]]
    assert len(full) > 2
    for brought, nodes in zip(seen, full, strict=True):
        if nodes == drafts.policy.ask("", 99):
            assert brought == bytes_of_a_round(tree, rule)


def bytes_of_a_round(tree: TreeShape | None, rule: str) -> int:
    """What a whole draft brings back, by 9 candidates of a row."""
    verified = {"greedy": 8, "drawn": 4, "rejection": 8 * 9}[rule]  # of a row
    if tree is not None:  # of nodes number and token, and who went on
        return 8 * tree.top_k + 8 * 11 + 4 * 3 * 2 + 12 * verified
    first, other = (72, 4 + 72) if rule == "rejection" else (8, 4)
    return first + 3 * other + 5 * verified


@need_compiler
def test_rows_of_a_state_travel_alone() -> None:
    """`read_rows` brings the rows that are asked for, and not the state."""
    driver = HostDriver()
    session = Session({"cuda0": over(driver)})
    runner = Runner(open_model(TARGET), session, 64, taps=(1, 2))
    taps = runner.text(PROMPT).taps
    before = driver.brought
    part = taps[2]
    assert driver.brought - before == len(PROMPT) * 4 * E and part.shape == (len(PROMPT), E)
    name = f"{runner.model.name}.taps.2"
    rows = session.read_rows(name, [4, -1, 0, 4]).view(np.float32)
    assert np.array_equal(rows[[0, 2, 3]], part[[4, 0, 4]])
    assert session.read_rows(name, []).shape == (0, 4 * E)
    assert set(taps) == {1, 2} and len(taps) == 2 and 7 not in taps
    session.close()
