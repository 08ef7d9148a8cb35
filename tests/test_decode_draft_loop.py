"""A chain of drafts as one plan: the same tokens as step by step, and nothing in between."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler
from cuda_kit import one_replay, over
from head_loop import saved, variant

from ggraph.backends import open_backend
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.acceptance import only
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.draft.loop import table, unrolled
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import InputError
from ggraph.session import Session
from ggraph.tensor import input
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
TARGET = TINY / "llama_tied"
HEAD = TINY / "eagle3_for_llama_tied"
PROMPT = [5, 17, 200, 33, 8, 91]
TREE = TreeShape(12, 3, 3)


def head_of(name: str, folder: Path) -> Head:
    target = open_model(TARGET)
    made = open_head(HEAD if name == "golden" else saved(folder, *variant(name)), target)
    assert isinstance(made, Head)
    return made


def drafts(
    session: Session, head: Head, unrolls: bool, limit: int, law: SamplerConfig | None = None
) -> list[tuple[int, ...]]:
    """Two drafts after features that have nothing to do with a target."""
    rng = np.random.default_rng(3)
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    runner.unrolls = unrolls
    drafter = EagleDrafter(runner, law=law)
    width = len(head.taps) * head.config.target_hidden_size
    found = []
    drafter.begin(PROMPT[0])
    for _ in range(2):
        features = rng.standard_normal((len(PROMPT), width)).astype(np.float32)
        drafter.observe(PROMPT, features)
        found.append(drafter.propose(limit).tokens)
    return found


@pytest.mark.parametrize("name", ["golden", "latent", "latent, two layers, 3.1"])
@pytest.mark.parametrize("limit", [2, 5, 9])
def test_one_plan_drafts_what_single_steps_draft(name: str, limit: int, tmp_path: Path) -> None:
    head = head_of(name, tmp_path / "head")
    session = open_session(threads=1, exact=True)
    wanted = drafts(session, head, False, limit)
    before = session.plans_made
    assert drafts(session, head, True, limit) == wanted
    assert all(len(d) == limit for d in wanted)
    assert session.plans_made == before + 1, "one plan for the whole chain"
    session.close()


def test_the_next_text_builds_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has a drafter of its own; where the session has the plans, graphs would only be
    built to be compared, a millisecond for each kind of step."""
    head = head_of("golden", tmp_path)
    session = open_session(threads=1)
    wanted = drafts(session, head, False, 3)
    monkeypatch.setattr(Head, "build", lambda *_: pytest.fail("a graph was built again"))
    assert drafts(session, head, False, 3) == wanted
    session.close()


def test_a_windowed_or_choosy_drafter_goes_step_by_step(tmp_path: Path) -> None:
    session = open_session(threads=1)
    runner = DraftRunner(head_of("golden", tmp_path), session, 64)
    assert not runner.unrolls, "without replay there is nothing to gain"
    runner.unrolls = True
    assert EagleDrafter(runner)._is_one_plan(3)
    assert not EagleDrafter(runner, p_min=0.1)._is_one_plan(3)
    assert EagleDrafter(runner, law=SamplerConfig())._is_one_plan(3)
    assert not EagleDrafter(runner, p_min=0.1, law=SamplerConfig())._is_one_plan(3)
    assert not EagleDrafter(runner, reads_logits=True)._is_one_plan(3)
    session.close()


def test_wrong_graphs_are_refused(tmp_path: Path) -> None:
    head = head_of("golden", tmp_path)
    ids, root = table(head.name, head.target_ids), input("root", (1, head.width))
    true_rows = head.build(DraftShape(1, 256, 1, 513, False))
    fed_back = head.build(DraftShape(1, 256, 1, 513, True))
    for graph, count in ((true_rows, 2), (fed_back, 0)):
        with pytest.raises(InputError, match="cannot be drafted"):
            unrolled(graph, count, ids, root)


@need_compiler
def test_on_a_gpu_a_draft_is_one_replay_and_text_stays_the_same(tmp_path: Path) -> None:
    head = head_of("golden", tmp_path)
    texts = []
    for length in (0, 4):
        driver = HostDriver()
        session = Session({"cuda0": over(driver), "cpu": open_backend("cpu", threads=1)})
        runner = Runner(open_model(TARGET), session, 128, taps=head.taps)
        engine = Engine(runner, ())
        drafter = EagleDrafter(DraftRunner(head, session, 128, target=runner))
        drafts = Speculation([drafter], Fixed(length)) if length else None
        pick = lambda logits: int(logits.argmax())  # noqa: E731
        found = engine.generate(PROMPT, pick, lambda token: None, limit=10, drafts=drafts)
        texts.append(list(found))
        if length:
            _one_replay(session, driver, drafter)
        session.close()
    assert texts[0] == texts[1]


@need_compiler
def test_of_a_step_only_tokens_come_back(tmp_path: Path) -> None:
    """What is picked on the device is what the host picks from the logits; a step then brings back
    four bytes per row, the greatest logits and the taps. The text of plain steps is the same."""
    head = head_of("golden", tmp_path)
    texts = {}
    for picks in (0, 1):
        session = Session({"cuda0": over(HostDriver())})
        runner = Runner(open_model(TARGET), session, 128, taps=head.taps)
        engine, runner.picks = Engine(runner, ()), picks
        for length, shape in ((0, None), (4, None), (11, None), (11, TREE)):
            drafter = EagleDrafter(DraftRunner(head, session, 128, target=runner), tree=shape)
            drafts = Speculation([drafter], Fixed(length)) if length else None
            engine.reset()
            pick = only if picks else lambda logits: int(logits.argmax())
            found = engine.generate(PROMPT, pick, lambda token: None, limit=7, drafts=drafts)
            texts[picks, length, shape] = list(found)
        plan = runner.plan(runner.shape(5, 5, 20)).plan
        sizes = {t.name: t.nbytes for t in plan.graph.outputs}
        assert sizes == ({"best": 20, "greatest": 20} if picks else {"logits": 5 * 320 * 4})
        session.close()
    assert len({tuple(t) for t in texts.values()}) == 1, texts


@need_compiler
def test_of_a_draw_only_tokens_come_back(tmp_path: Path) -> None:
    """Drawn text, plain or with drafts: of each row four bytes come back, and the tokens are those
    that the host's sampler takes of all logits, of one number after another."""
    head = head_of("golden", tmp_path)
    config = SamplerConfig(seed=11, temp=1.5, top_k=9)
    texts = {}
    for on_device in (False, True):
        session = Session({"cuda0": over(HostDriver())})
        runner = Runner(open_model(TARGET), session, 128, taps=head.taps)
        engine = Engine(runner, ())
        engine.remembers = True
        for length, seed, shape in (
            (0, 11, None), (4, 11, None), (11, 11, None), (11, 11, TREE), (0, 12, None),
        ):  # fmt: skip
            sampler = Sampler(replace(config, seed=seed), runner.model.vocab_size)
            runner.picks = sampler if on_device else 0
            drafter = EagleDrafter(DraftRunner(head, session, 128, target=runner), tree=shape)
            drafts = Speculation([drafter], Fixed(length)) if length else None
            engine.reset()
            found = engine.generate(PROMPT, sampler.sample, sampler.accept, limit=8, drafts=drafts)
            texts[on_device, length, seed, shape] = list(found)
            other = Sampler(replace(config, seed=seed), runner.model.vocab_size)
            for _ in range(8):
                other.uniform()
            assert sampler.uniform() == other.uniform(), "a number per token"
        plan = runner.plan(runner.shape(5, 5, 20)).plan
        sizes = {t.name: t.nbytes for t in plan.graph.outputs}
        assert sizes == ({"best": 20} if on_device else {"logits": 5 * 320 * 4})
        session.close()
    assert len({tuple(t) for (_, _, seed, _), t in texts.items() if seed == 11}) == 1, texts
    assert texts[True, 0, 12, None] == texts[False, 0, 12, None] != texts[True, 0, 11, None]


@need_compiler
def test_a_law_needs_the_greatest_logits_alone(tmp_path: Path) -> None:
    """Drafts that are held against the law: of each row `top_k` ids and logits come back, and the
    tokens are those that all logits give."""
    head = head_of("golden", tmp_path)
    config = SamplerConfig(seed=11, temp=1.5, top_k=9)
    texts = {}
    for picks in (0, 9):
        session = Session({"cuda0": over(HostDriver())})
        runner = Runner(open_model(TARGET), session, 128, taps=head.taps)
        engine, runner.picks = Engine(runner, ()), picks
        sampler = Sampler(config, runner.model.vocab_size)
        drafter = EagleDrafter(DraftRunner(head, session, 128, target=runner))
        drafts = Speculation([drafter], Fixed(4), law=sampler)
        found = engine.generate(PROMPT, sampler.sample, sampler.accept, limit=12, drafts=drafts)
        texts[picks] = list(found)
        plan = runner.plan(runner.shape(5, 5, 20)).plan
        sizes = {t.name: t.nbytes for t in plan.graph.outputs}
        assert sizes == ({"best": 180, "greatest": 180} if picks else {"logits": 5 * 320 * 4})
        session.close()
    assert texts[0] == texts[9]


def test_a_greatest_logit_that_is_no_number_is_refused_by_who_looks_at_it() -> None:
    """As the sampler refuses it: another row may be that of a wrong guess."""
    runner = Runner(open_model(TARGET), Session({"cpu": open_backend("cpu", threads=1)}), 64)
    runner.picks = 1
    greatest = np.array([1.0, np.nan, 0.0], np.float32).reshape(3, 1, 1)
    out = {"best": np.array([4, 5, 6], np.int32), "greatest": greatest}
    assert runner._said(out, 3).tolist() == [[4], [-1], [6]]
    sampler = Sampler(SamplerConfig(), runner.model.vocab_size)
    runner.picks = sampler
    drawn = runner._said({"best": np.array([4, 5, -1], np.int32)}, 3)
    assert drawn.tolist() == [[4], [5], [-1]]
    for pick in (only, sampler.sample):
        assert pick(drawn[1]) == 5
        with pytest.raises(InputError, match="greatest value is no finite number"):
            pick(drawn[2])


def _one_replay(session: Session, driver: HostDriver, drafter: EagleDrafter) -> None:
    """What a chain asks of the driver once its plan is captured; and its plan on one device."""
    for _ in range(2):
        drafter.runner.chain(7, 3)
    one_replay(session, driver, lambda: drafter.runner.chain(9, 3), "chain")


@pytest.mark.parametrize("name", ["golden", "latent"])
def test_the_graphs_guess_is_what_the_host_reads_from_logits(name: str, tmp_path: Path) -> None:
    head = head_of(name, tmp_path / "head")
    found = []
    for reads_logits in (True, False):
        session = open_session(threads=1, exact=True)
        runner = DraftRunner(head, session, 64, cache_dtype=F32)
        drafter = EagleDrafter(runner, reads_logits=reads_logits)
        drafter.begin(PROMPT[0])
        width = len(head.taps) * head.config.target_hidden_size
        features = np.random.default_rng(3).standard_normal((len(PROMPT), width))
        drafter.observe(PROMPT, features.astype(np.float32))
        found.append(drafter.propose(5))
        session.close()
    host, graph = found
    assert graph.tokens == host.tokens and len(host.tokens) == 5
    np.testing.assert_allclose(graph.chances, host.chances, rtol=1e-5)
    assert all(0 < c < 1 for c in graph.chances)


@pytest.mark.parametrize("law", [None, SamplerConfig(seed=1)], ids=["best", "drawn"])
def test_a_guess_leaves_nothing_to_numpy(law: SamplerConfig | None) -> None:
    """Else its plan runs in pieces, which costs more than reading the logits does."""
    session = open_session(threads=1, profile=True)
    backend = session.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    head = open_head(HEAD, open_model(TARGET))
    assert isinstance(head, Head)
    drafts(session, head, False, 3, law)
    found = {op for op, _ in backend.profile.times}
    session.close()
    chosen = {"argmax", "soft_max"} if law is None else {"top_k", "get_rows"}
    assert chosen <= {op.split()[0] for op in found}
    assert not [op for op in found if op.endswith("(NumPy)")]
