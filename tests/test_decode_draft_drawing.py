"""Drafts that are drawn: within one plan as by the host, from the law that rejection is told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_host import need_compiler
from cuda_kit import one_replay, session_on
from head_loop import base, saved

from ggraph import Graph, ops
from ggraph.decode.draft.drawing import CANDIDATES, Drawing
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft, Guess
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import CANDIDATE, Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32, F64
from ggraph.ops.evaluate import evaluate
from ggraph.ops.sort import TOP_K
from ggraph.session import Session
from ggraph.tensor import Array, input
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model

TINY = Path(__file__).parent / "golden" / "tiny"
TARGET, HEAD = TINY / "llama_tied", TINY / "eagle3_for_llama_tied"
PROMPT = [5, 17, 200, 33, 8, 91]
LAW = SamplerConfig(seed=3, temp=1.7, top_k=0, top_p=0.98, min_p=0.0)
HOT = SamplerConfig(seed=3, temp=9.0, top_k=12, top_p=1.0, min_p=0.0, repeat_penalty=1.5)


def head_of(folder: Path, name: str = "golden") -> Head:
    """A head with laws, or one some of whose rows have none."""
    w = base()
    if name == "no number":  # a token of two is infinite where one of 16 features exceeds 1.13
        w["lm_head.weight"][:32] = 0
        w["lm_head.weight"][range(32), np.arange(32) // 2] = np.where(
            np.arange(32) % 2, 3e38, -3e38
        )
    made = open_head(saved(folder, w, {}), open_model(TARGET))
    assert isinstance(made, Head)
    return made


def told(drafter: EagleDrafter, parts: int = 1) -> EagleDrafter:
    """Features that have nothing to do with a target, in so many parts."""
    model = drafter.runner.model
    assert isinstance(model, Head)
    width = len(model.taps) * model.config.target_hidden_size
    features = np.random.default_rng(3).standard_normal((len(PROMPT), width)).astype(np.float32)
    drafter.begin(1)
    for tokens, rows in zip(
        np.array_split(PROMPT, parts), np.array_split(features, parts), strict=True
    ):
        drafter.observe(tokens.tolist(), rows)
        drafter.propose(0)  # reads what it was told
    return drafter


def drafter_on(
    session: Session, head: Head, unrolls: bool, law: SamplerConfig = LAW
) -> EagleDrafter:
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    runner.unrolls = unrolls
    return told(EagleDrafter(runner, law=law))


def same(one: Draft, two: Draft) -> None:
    """Tokens, and laws to the bit."""
    assert (one.tokens, one.parents, one.chances) == (two.tokens, two.parents, two.chances)
    assert one.laws.keys() == two.laws.keys()
    for node, law in one.laws.items():
        assert np.array_equal(law, two.laws[node]), node


@need_compiler
@pytest.mark.parametrize("law", [LAW, HOT], ids=["all", "few"])
@pytest.mark.parametrize("name", ["golden", "no number"])
@pytest.mark.parametrize("device", ["cpu", "sim", "cuda"])
def test_one_plan_draws_what_single_steps_draw(
    device: str, name: str, law: SamplerConfig, tmp_path: Path
) -> None:
    """The host draws behind each step, a device within the plan: tokens and laws are the same."""
    head = head_of(tmp_path / "head", name)
    drafts = []
    for unrolls in (False, True):
        with session_on(device) as session:
            drafter = drafter_on(session, head, unrolls, law)
            drafts.append([drafter.propose(limit) for limit in (1, 2, 5, 9)])
            assert unrolls == any("chain" in k for k in session._executors)  # type: ignore[operator]
    for steps, plan in zip(*drafts, strict=True):
        same(plan, steps)
    longest = drafts[1][-1]
    assert len(longest) == 9 and longest.tokens[:5] == drafts[1][2].tokens, "by place, any length"
    for node, found in longest.laws.items():
        assert abs(found.sum() - 1) < 1e-12 and found[longest.tokens[node + 1]] > 0
        assert 1 < np.count_nonzero(found) <= (CANDIDATES if law is LAW else law.top_k)
    certain = {*range(-1, 8)} - {*longest.laws}
    assert bool(certain) == (name == "no number")
    assert {longest.tokens[n + 1] for n in certain} <= {*head.target_ids[:32].tolist()}


@need_compiler
def test_on_a_gpu_a_drawn_chain_is_one_replay_that_brings_back_its_laws(tmp_path: Path) -> None:
    """Of each token 40 ids and logits, and itself: 324 bytes."""
    with session_on("cuda") as session:
        drafter = drafter_on(session, head_of(tmp_path / "head"), True)
        drafts = [drafter.propose(5) for _ in range(3)]  # loads, is captured
        driver = session.backends["cuda0"].driver  # type: ignore[attr-defined]
        plan = one_replay(session, driver, lambda: drafts.append(drafter.propose(5)), "chain")
        for again in drafts[1:]:
            same(again, drafts[0])
        sizes = {t.name: t.nbytes for t in plan.graph.outputs}
        assert sizes == {"drafted": 4 * 4, "best": 4 * 160, "greatest": 4 * 160}


def test_numbers_go_by_the_place_in_the_text(tmp_path: Path) -> None:
    """However a drafter came to a place, it draws the same there; another seed draws others."""
    head = head_of(tmp_path / "head")
    with session_on("cpu") as session:
        runner = DraftRunner(head, session, 64, cache_dtype=F32)
        found = [told(EagleDrafter(runner, law=LAW), parts).propose(6) for parts in (1, 2, 6)]
        for draft in found[1:]:
            assert draft.tokens == found[0].tokens
    one, other = Drawing(head, LAW), Drawing(head, SamplerConfig(seed=4))
    late = one.numbers(700, 3)
    assert np.array_equal(Drawing(head, LAW).numbers(0, 703)[700:], late)
    assert not np.array_equal(other.numbers(700, 3), late)
    sampler = Sampler(LAW, 9)
    assert not np.isin(sampler.ahead(range(64)), one.numbers(0, 703)).any(), "a stream of its own"


@pytest.mark.parametrize("seed", [3, None])
def test_texts_have_numbers_of_their_own_without_a_seed(seed: int | None, tmp_path: Path) -> None:
    with session_on("cpu") as session:
        runner = DraftRunner(head_of(tmp_path / "head"), session, 64, cache_dtype=F32)
        drafter = EagleDrafter(runner, law=replace(LAW, seed=seed))
        assert drafter.drawing is not None
        found = []
        for _ in range(2):
            drafter.begin(1)
            found.append(drafter.drawing.numbers(0, 300).copy())
            assert np.array_equal(drafter.drawing.numbers(0, 300), found[-1])
    assert np.array_equal(*found) == (seed is not None)


@pytest.mark.parametrize("config", [LAW, HOT], ids=["all", "few"])
def test_the_host_draws_as_the_op_does(config: SamplerConfig, tmp_path: Path) -> None:
    """Rows with ties, infinities and NaN; of all logits, and of the greatest alone."""
    head = head_of(tmp_path / "head")
    drawing, size, rng = Drawing(head, config), len(head.target_ids), np.random.default_rng(7)
    logits = (np.rint(rng.standard_normal((200, size)) * 6) / 4).astype(np.float32)
    logits[3], logits[4, 9], logits[5], logits[6, 2:] = -np.inf, np.inf, np.nan, np.nan
    numbers = rng.random(200)
    given = input("logits", logits.shape), input("numbers", (200,), F64)
    top_k, temp, top_p, min_p = drawing.config.stages
    y = ops.draw(*given, temp=temp, best=top_k, top_p=top_p, min_p=min_p, always=True, name="y")
    expected = evaluate(Graph.of({"y": y}), {"logits": logits, "numbers": numbers})["y"]
    ids = TOP_K.reference(logits, k=top_k)
    best = np.empty(ids.shape, CANDIDATE)
    best["id"], best["logit"] = ids, np.take_along_axis(logits, ids, axis=1)
    for row in range(200):
        token, law = drawing.token(best[row], numbers[row])
        assert token == head.target_ids[expected[row]]
        assert (law is None) == (3 <= row <= 6)
        if law is not None:
            again, whole = drawing.token(logits[row], numbers[row])
            assert again == token and np.array_equal(whole, law)  # type: ignore[arg-type]
            assert np.array_equal(drawing.law(best[row]), law)  # type: ignore[arg-type]


def test_tokens_that_are_drawn_have_the_law_that_is_told(tmp_path: Path) -> None:
    """20,000 numbers of a place each: the statistic stays below the 99.99 % point of its law."""
    drawing = Drawing(head_of(tmp_path / "head"), HOT)
    row = (np.random.default_rng(2).standard_normal(len(drawing._ids)) * 9).astype(np.float32)
    found = [drawing.token(row, n) for n in drawing.numbers(0, 20_000)]
    law = found[0][1]
    assert law is not None
    counts = np.bincount([t for t, _ in found], minlength=len(law))
    seen = law > 0
    assert not counts[~seen].any()
    expected = 20_000 * law[seen]
    freedom = int(seen.sum()) - 1
    statistic = ((counts[seen] - expected) ** 2 / expected).sum()
    assert freedom > 5 and statistic < freedom + 3.72 * np.sqrt(2 * freedom) + 10


@need_compiler
def test_by_rejection_text_is_the_same_however_drafts_are_drawn(tmp_path: Path) -> None:
    """Drawn within the plan, by the host behind each step, or with all logits at hand."""
    head, texts = head_of(tmp_path / "head"), {}
    for unrolls, picks in ((True, 12), (False, 12), (True, 0)):
        with session_on("cuda") as session:
            runner = Runner(open_model(TARGET), session, 128, taps=head.taps)
            runner.picks = picks
            sampler = Sampler(SamplerConfig(seed=11, temp=9.0, top_k=12), runner.model.vocab_size)
            reads = DraftRunner(head, session, 128, target=runner)
            reads.unrolls = unrolls
            drafts = Speculation([EagleDrafter(reads, law=HOT)], Fixed(4), law=sampler)
            engine = Engine(runner, ())
            found = engine.generate(PROMPT, sampler.sample, sampler.accept, limit=24, drafts=drafts)
            texts[unrolls, picks] = list(found)
    assert len({tuple(t) for t in texts.values()}) == 1, texts


@pytest.mark.parametrize("own", [0.4, 10.0])
def test_texts_have_the_targets_law(own: float, tmp_path: Path) -> None:
    """250 texts of 9 tokens, with drafts of three drawn in one plan from a law of its own: each
    token, and each class of tokens, comes as often as the target gives it behind the very text that
    stands there. A law that is told, but was not drawn from, shows in tokens where it is cold;
    numbers that acceptance uses too in classes where it is hot."""
    config = SamplerConfig(temp=5.0, top_k=0, top_p=1.0, min_p=0.0)
    head, target = head_of(tmp_path / "head"), open_model(TARGET)
    classes, size = np.arange(target.vocab_size) // 40, target.vocab_size
    excess, spread, kept = np.zeros(size + 8), np.zeros(size + 8), 0
    with session_on("cpu") as session:
        runner = Runner(target, session, 64, taps=head.taps, cache_dtype=F32)
        reads = DraftRunner(head, session, 64, target=runner, cache_dtype=F32)
        reads.unrolls = True
        engine = Engine(runner, ())
        for seed in range(250):
            sampler = Sampler(replace(config, seed=seed), size)
            law = replace(config, seed=seed, temp=own)
            drafts = Speculation([EagleDrafter(reads, law=law)], Fixed(3), law=sampler)
            engine.reset()
            text = list(engine.generate(
                PROMPT, sampler.sample, sampler.accept, limit=9, drafts=drafts
            ))  # fmt: skip
            kept += engine.statistics.accepted
            laws = laws_behind(runner, [*PROMPT, *text], sampler)[len(PROMPT) - 1 : -1]
            for token, law in zip(text, laws, strict=True):
                share = np.concatenate([law, np.bincount(classes, law)])
                excess -= share
                spread += share * (1 - share)
                excess[[token, size + classes[token]]] += 1
    assert kept > 60
    statistic = excess**2 / spread
    assert statistic[size:].max() < 4.5**2, statistic[size:]
    assert statistic[:size].sum() < size + 4.5 * np.sqrt(2 * size), statistic[:size].sum()


def laws_behind(runner: Runner, text: list[int], sampler: Sampler) -> list[Array]:
    """The target's law behind each token of a text."""
    runner.past = 0
    return [sampler.probabilities(row) for row in runner.text(text, every=True).logits]


def test_a_chain_of_guesses_tells_what_is_known_of_them() -> None:
    law = np.array([0.25, 0.75])
    assert Guess(1).best == 1 and Guess(1, 0.5).best == 0.5 and Guess(1, law=law).best == 0.75
    told = Draft.guessed([Guess(4, 0.5), Guess(5, 0.25)])
    assert told == Draft.chain([4, 5]) and told.chances == (0.5, 0.25)
    assert Draft.guessed([Guess(4, 0.5), Guess(5)]).chances == ()
    assert Draft.guessed([Guess(0), Guess(1, law=law)]).laws == {0: law}
    assert not Draft.guessed([])
