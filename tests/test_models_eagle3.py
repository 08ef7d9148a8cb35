"""The EAGLE-3 head against golden vectors of SafeAILab's reference, and byte identity.

The head is random; its target is the tiny `llama_tied` model.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from head_loop import hidden
from identity_kit import Scripted

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.hidden import ROOT_ROW
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import NOTHING, ROOT, Draft
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import InputError
from ggraph.session import Session
from ggraph.tensor import Array
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
EXPECTED = np.load(TINY / "eagle3_for_llama_tied" / "expected.npz")
IDS = EXPECTED["ids"].tolist()
CONTEXT = 128


@pytest.fixture(scope="module")
def target() -> Model:
    return open_model(TINY / "llama_tied")


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session(threads=1, exact=True)


def drafter(session: Session, target: Model, tree: TreeShape | None = None) -> EagleDrafter:
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    return EagleDrafter(DraftRunner(head, session, CONTEXT, cache_dtype=F32), tree=tree)


def test_head_reads_the_default_taps(session: Session, target: Model) -> None:
    assert drafter(session, target).taps == (2, 3, 3)


def test_hidden_states_and_logits_equal_the_golden_vectors(session: Session, target: Model) -> None:
    runner = drafter(session, target).runner
    count = len(IDS) - 1
    logits = runner.step(
        Rows(IDS[1:], range(count), range(count)),
        range(count),
        EXPECTED["features"][:count],
        fed_back=False,
    )
    left = hidden(runner, 0, count)
    scale = np.abs(EXPECTED["prenorm_hidden"]).max()
    assert np.abs(left - EXPECTED["prenorm_hidden"]).max() < 1e-4 * max(1.0, scale)
    scale = np.abs(EXPECTED["draft_logits"]).max()
    assert np.abs(logits - EXPECTED["draft_logits"]).max() < 1e-4 * max(1.0, scale)


def test_the_dynamic_tree_is_the_golden_one(session: Session, target: Model) -> None:
    d = drafter(session, target, TreeShape(16, 4, 4))
    d.begin(IDS[0])
    d.observe(IDS[1:], EXPECTED["features"][: len(IDS) - 1])
    draft = d.propose(15)
    assert [IDS[-1], *draft.tokens] == EXPECTED["tree_tokens"].tolist()
    assert [0, *draft.depths()] == EXPECTED["tree_position"].tolist()
    assert np.array_equal(draft.visible(), EXPECTED["tree_mask"].astype(bool))
    assert np.array_equal(leaf_paths(draft), EXPECTED["retrieve_indices"])


def leaf_paths(draft: Draft) -> Array:
    """i32 [leaves, longest path + 1]: rows of each root-to-leaf path, -1 where it is shorter; row 0
    is the root. SafeAILab calls this `retrieve_indices`."""
    leaves = [n for n in range(len(draft)) if n not in draft.parents] or [ROOT]
    paths = [[0, *(n + 1 for n in draft.path(leaf))] for leaf in leaves]
    out = np.full((len(paths), max(map(len, paths))), -1, np.int32)
    for row, path in zip(out, paths, strict=True):
        row[: len(path)] = path
    return out


def test_nothing_of_a_step_is_left_to_numpy(target: Model) -> None:
    """One op without a kernel cuts a step in two, and costs more than all of a small head."""
    timed = open_session(threads=2, profile=True)
    backend = timed.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    head = DraftRunner(open_head(TINY / "eagle3_for_llama_tied", target), timed, CONTEXT)
    for count in (1, 4):
        rows, features = Rows(IDS[:count], range(count), range(count)), EXPECTED["features"]
        head.step(rows, [count - 1], features[:count], fed_back=False)
        head.read(rows, features[:count])
        head.step(Rows(IDS[:1], [count], [count]), [0], ROOT_ROW, fed_back=True)
    assert len(backend.profile.times) > 8
    assert not [name for name, _ in backend.profile.times if name.endswith("(NumPy)")]
    timed.close()


def plain(session: Session, target: Model, prompt: list[int], count: int) -> list[int]:
    engine = Engine(Runner(target, session, CONTEXT, cache_dtype=F32, taps=(2, 3)), ())
    return list(engine.generate(prompt, lambda x: int(x.argmax()), lambda t: None, limit=count))


def speculative(
    session: Session, target: Model, prompt: list[int], count: int, d: object, length: int
) -> list[int]:
    engine = Engine(Runner(target, session, CONTEXT, cache_dtype=F32, taps=(2, 3)), ())
    drafts = Speculation([d], Fixed(length))  # type: ignore[list-item]
    pick = lambda x: int(x.argmax())  # noqa: E731
    return list(engine.generate(prompt, pick, lambda t: None, limit=count, drafts=drafts))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["chain", "tree", "lookup", "suffix"])
def test_greedy_text_is_the_same_with_every_drafter(
    session: Session, target: Model, kind: str, length: int
) -> None:
    prompt = IDS[:12]
    made = {
        "chain": lambda: drafter(session, target),
        "tree": lambda: drafter(session, target, TreeShape(2 * length + 2, 3, 3)),
        "lookup": PromptLookup,
        "suffix": SuffixDrafter,
    }[kind]()
    limit = 2 * length + 1 if kind == "tree" else length
    assert speculative(session, target, prompt, 40, made, limit) == plain(
        session, target, prompt, 40
    )


@dataclass(frozen=True)
class Seldom(Fixed):
    """Asks in one round of three."""

    rounds: list[int] = field(default_factory=list)

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        self.rounds.append(len(draft))

    def ask(
        self, drafter: str, room: int, best: Draft = NOTHING, chances: Sequence[float] = ()
    ) -> int:
        return 0 if len(self.rounds) % 3 else super().ask(drafter, room, best, chances)


def test_the_parts_of_a_run_make_up_its_time(session: Session, target: Model) -> None:
    """Rounds with drafts, and rounds in which nobody was asked."""
    engine = Engine(Runner(target, session, CONTEXT, cache_dtype=F32, taps=(2, 3)), ())
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    drafter = EagleDrafter(DraftRunner(head, session, CONTEXT, cache_dtype=F32))
    drafts = Speculation([drafter], Seldom(2))
    begun = time.perf_counter()
    text = list(engine.generate(IDS[:12], slowly, lambda t: None, limit=24, drafts=drafts))
    whole = time.perf_counter() - begun
    assert text == plain(session, target, IDS[:12], 24)
    s = engine.statistics
    assert len(s.by_rows) > 1 and s.by_rows[1] > 1, "both kinds"
    assert sum(s.by_rows.values()) == s.rounds
    assert s.sample_seconds >= 0.002 * s.rounds, "choosing takes two milliseconds here"
    parts = s.draft_seconds + s.verify_seconds + s.sample_seconds + s.host_seconds
    assert parts == pytest.approx(s.decode_seconds)
    assert s.decode_seconds + s.prompt_seconds <= whole
    assert sum(s.clock.seconds.values()) == pytest.approx(s.decode_seconds + s.prompt_seconds)


def slowly(logits: Array) -> int:
    time.sleep(0.002)
    return int(logits.argmax())


def test_a_head_reads_the_prompt_in_the_prompts_time(session: Session, target: Model) -> None:
    read: list[tuple[int, float]] = []

    class Noted(EagleDrafter):
        def read(self) -> None:
            super().read()
            read.append((self.runner.past, engine.statistics.decode_seconds))

    engine = Engine(Runner(target, session, CONTEXT, cache_dtype=F32, taps=(2, 3)), ())
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    noted = Noted(DraftRunner(head, session, CONTEXT, cache_dtype=F32))
    drafts = Speculation([noted], Fixed(3))
    pick = lambda x: int(x.argmax())  # noqa: E731
    stream = engine.generate(IDS[:12], pick, lambda t: None, limit=20, drafts=drafts)
    first, before = next(stream), engine.statistics.prompt_seconds
    assert not read, "nobody waits for the first token longer"
    assert [first, *stream] == plain(session, target, IDS[:12], 20)
    assert read == [(12, 0.0)], "with the last row the first guess is made"
    assert engine.statistics.prompt_seconds > before


def test_adversaries_change_nothing(session: Session, target: Model) -> None:
    prompt = IDS[:9]
    truth = prompt + plain(session, target, prompt, 40)

    def right(text: list[int], limit: int) -> Draft:
        return Draft.chain(truth[len(text) : len(text) + limit])

    def wrong(text: list[int], limit: int) -> Draft:
        return Draft.chain([(truth[min(len(text), 48)] + 1) % 320] * limit)

    def wrong_at_two(text: list[int], limit: int) -> Draft:
        tokens = truth[len(text) : len(text) + limit]
        return Draft.chain([(t + 7) % 320 if i == 2 else t for i, t in enumerate(tokens)])

    def fork(text: list[int], limit: int) -> Draft:
        good = truth[len(text) : len(text) + 2]
        if len(good) < 2:
            return Draft()
        return Draft(((good[0] + 1) % 320, good[0], 5, good[1]), (ROOT, ROOT, 0, 1))

    def out_of_range(text: list[int], limit: int) -> Draft:
        good = truth[len(text) : len(text) + 1]
        return Draft.chain([*good, 320, -5, 1 << 31][:limit])

    for guess in (right, wrong, wrong_at_two, fork, out_of_range):
        got = speculative(session, target, prompt, 40, Scripted(guess), 4)
        assert prompt + got == truth, guess.__name__


def test_after_a_rejection_the_head_drafts_like_a_fresh_one(
    session: Session, target: Model
) -> None:
    features = EXPECTED["features"]
    used = drafter(session, target)
    used.begin(IDS[0])
    for start, stop in ((1, 20), (20, 23), (23, 31)):
        used.observe(IDS[start:stop], features[start - 1 : stop - 1])
        used.propose(6)
    fresh = drafter(session, target)
    fresh.begin(IDS[0])
    fresh.observe(IDS[1:31], features[:30])
    assert used.propose(6) == fresh.propose(6)


@pytest.mark.parametrize("tree", [None, TreeShape(10, 2, 3)], ids=["chain", "tree"])
def test_a_window_reads_the_end_of_what_waits(
    session: Session, target: Model, tree: TreeShape | None
) -> None:
    """As if the text began there: rope sees differences of positions alone. Later rows join."""
    features = EXPECTED["features"]
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    runner = DraftRunner(head, session, CONTEXT, cache_dtype=F32)
    windowed = EagleDrafter(runner, tree=tree, window=17)
    windowed.begin(IDS[0])
    apart = open_session(threads=1, exact=True)  # heads of one name share a session's cache
    tail = drafter(apart, target, tree)
    tail.begin(IDS[2])
    for start, stop in ((1, 20), (20, 23), (23, 24)):
        windowed.observe(IDS[start:stop], features[start - 1 : stop - 1])
        tail.observe(IDS[max(start, 3) : stop], features[max(start, 3) - 1 : stop - 1])
        assert windowed.propose(6) == tail.propose(6)
    assert windowed.runner.offset == 2 and windowed.runner.past == 21
    with pytest.raises(InputError, match="a window of 0"):
        EagleDrafter(runner, window=0)


def test_a_prompt_that_was_read_beforehand_gives_the_same_draft(
    session: Session, target: Model
) -> None:
    """Of a prompt of 41 rows 1 is passed over, 32 are only read, 8 make the first guess."""
    features = EXPECTED["features"]
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    eager = EagleDrafter(DraftRunner(head, session, CONTEXT, cache_dtype=F32), window=40)
    apart = open_session(threads=1, exact=True)
    plain = drafter(apart, target)
    ids = [IDS[i % len(IDS)] for i in range(60)]
    wide = np.concatenate([features, features[::-1], features])
    eager.begin(ids[0])
    eager.observe(ids[1:42], wide[:41])
    eager.read()
    assert (eager.runner.past, eager.runner.offset) == (40, 1)
    plain.begin(ids[1])
    plain.observe(ids[2:42], wide[1:41])
    assert eager.propose(4).tokens == plain.propose(4).tokens
    eager.observe(ids[42:44], wide[41:43])
    plain.observe(ids[42:44], wide[41:43])
    assert eager.propose(4).tokens == plain.propose(4).tokens
    eager.observe(ids[44:47], wide[43:46])
    eager.read()
    assert eager.runner.past == 45
