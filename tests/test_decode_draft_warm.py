"""Plans for rounds are made before any is needed: none is made amid a text."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.session import Session
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
TARGET, HEAD = TINY / "llama_tied", TINY / "eagle3_for_llama_tied"


class Counted(Speculation):
    """Notes how many plans there are when reading begins, right behind `warm`."""

    session: Session
    planned = 0

    def read(self) -> None:
        self.planned = self.session.plans_made
        super().read()


def plans_amid(
    head: Head,
    prompt: Sequence[int],
    drafter: EagleDrafter,
    runner: Runner,
    length: int,
    *,
    early: bool = False,
) -> tuple[int, int]:
    """Plans that were made amid a text of 24 tokens, and how many drafts it had."""
    drafts = Counted([drafter], Fixed(length), longest=length)
    drafts.session = runner.session
    engine = Engine(runner, ())
    engine.early = lambda: early
    pick = lambda logits: int(logits.argmax())  # noqa: E731
    text = list(engine.generate(prompt, pick, lambda token: None, limit=24, drafts=drafts))
    assert len(text) == 24 and drafts.planned
    return runner.session.plans_made - drafts.planned, engine.statistics.rounds


# A part of all: every value of one meets every value of each other.
KINDS, COUNTS = ("chain", "drawn", "tree"), (2, 40, 300)
HALF = [(u, w, (w is None) == u) for u in (False, True) for w in (None, 64)]
PART = [
    (kind, *half, COUNTS[(k + i) % 3])
    for k, kind in enumerate(KINDS)
    for i, half in enumerate(HALF)
]


@pytest.mark.parametrize(("kind", "unrolls", "window", "early", "count"), PART)
def test_a_round_behind_warm_plans_nothing(
    kind: str, unrolls: bool, window: int | None, early: bool, count: int
) -> None:
    """Nor do later rounds, the last one of which has less room than the others."""
    shape = TreeShape(12, 3, 3) if kind == "tree" else None
    law = SamplerConfig(seed=1) if kind == "drawn" else None
    target = open_model(TARGET)
    head = open_head(HEAD, target)
    assert isinstance(head, Head)
    session = open_session(threads=1)
    runner = Runner(target, session, 600, taps=head.taps)
    reads = DraftRunner(head, session, 600, target=runner)
    reads.unrolls = unrolls
    drafter = EagleDrafter(reads, tree=shape, law=law, window=window)
    prompt = [5 + 7 * i % 200 for i in range(count)]
    made, rounds = plans_amid(
        head, prompt, drafter, runner, 4 if shape is None else 11, early=early
    )
    assert made == 0 and rounds > 3
    session.close()


def test_rows_that_lie_apart_move_by_plans_that_are_there() -> None:
    """A tree's path that is not its first branch."""
    session = open_session(threads=1)
    runner = Runner(open_model(TARGET), session, 64)
    runner.text([5, 17, 200])
    runner.movable(4)
    before = session.plans_made
    for path in ([0, 2], [0, 3, 5], [0, 1, 4, 9]):
        runner.past = 3
        runner.keep(path)
        assert runner.past == 3 + len(path)
    assert session.plans_made == before
    session.close()
