"""A head that drafts over racing plans: the text stays, the acceptance goes.

The golden head's weights are random, so its output matrix is fitted here (least squares over the
head's own hidden rows) until it knows one text of the golden model by heart. What is measured is
then the whole decoder's: target, head, caches, verification; only the head's plans change.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_model import TINY
from typer.testing import CliRunner

from ggraph import cache_dir
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft
from ggraph.decode.policy import Fixed
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.errors import InputError, PlanError
from ggraph.hazards import find, run_hazard
from ggraph.hazards.corpus import Expected, Recipe, planned
from ggraph.hazards.drafting import DRAFT_RECIPES, UnprovedSession
from ggraph.hazards.faults import forgets_waits_before
from ggraph.hazards.parts import GPU
from ggraph.tensor import Array, Tensor
from ggraph.verify import CounterExample, examine
from models.bench.hazard_drafts import DraftReport, drafts_under
from models.cli.hazards import hazards_app
from models.run.fetch import DEFAULT
from models.run.load import Loaded, load

HEAD = TINY / "eagle3_for_llama_tied"
PROMPT, LIMIT = "Hello there", 40
SOUND, FIXED, EARLY, REUSED = DRAFT_RECIPES


class Learned:
    """A head with another output matrix."""

    def __init__(self, head: Any, output: Array) -> None:
        self.head, self.output = head, output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def weight(self, t: Tensor) -> Array:
        return self.output if t.name == "draft.output.weight" else self.head.weight(t)


class Noted(EagleDrafter):
    """Keeps the logits from which each draft begins."""

    def propose(self, limit: int) -> Draft:
        draft = super().propose(limit)
        self.seen = [*getattr(self, "seen", []), self._last.rows[0]]
        return draft


def greedy(m: Loaded) -> Sampler:
    return Sampler(SamplerConfig(temp=0.0), m.model.vocab_size)


def learned(m: Loaded, ids: list[int]) -> Learned:
    """The head whose output matrix draws, from each row of this text, the next token but one."""
    head: Any = m.head
    drafter = Noted(DraftRunner(head, m.session, m.runner.context), reads_logits=True)
    drafts, sampler = Speculation([drafter], Fixed(1)), greedy(m)
    found = m.engine.generate(ids, sampler.sample, sampler.accept, limit=LIMIT, drafts=drafts)
    text = list(found)
    assert m.engine.statistics.accepted == 0, "every row begins a round"
    output = head.build(DraftShape(1, 256, 1, 513, False))["logits"].sources[0]
    old = np.asarray(head.weight(output), np.float64)  # [W, E]
    hidden = np.stack(drafter.seen) @ np.linalg.pinv(old.T)  # [N, E]
    wanted = np.zeros((len(hidden), len(old)))
    for row, token in zip(wanted, text[1:], strict=False):
        row[head.target_ids == token] = 8.0
    new = np.linalg.lstsq(hidden, wanted, rcond=None)[0].T  # [W, E]
    return Learned(head, new.astype(np.float16))


@pytest.fixture(scope="module")
def reports(model: Path) -> Iterator[dict[str, DraftReport]]:
    m = load(model, head=HEAD, ctx_size=256, threads=1)
    ids = m.prompt_ids(PROMPT, chat=False)
    apt: Any = learned(m, ids)
    yield {r.recipe: r for r in drafts_under(replace(m, head=apt), ids, LIMIT, 1)}
    m.close()


def test_the_text_is_the_targets_own_under_every_plan(reports: dict[str, DraftReport]) -> None:
    assert list(reports) == list(DRAFT_RECIPES)
    assert all(r.identical for r in reports.values())


def test_sound_plans_draft_alike_and_are_proved(reports: dict[str, DraftReport]) -> None:
    one, two = reports[SOUND], reports[FIXED]
    assert one.refused == two.refused == one.foreign_reads == two.foreign_reads == 0
    assert (one.rounds, one.accepted) == (two.rounds, two.accepted)
    assert one.first_accepted > 0.3, "what the draft vocabulary has, the head knows"


@pytest.mark.parametrize("recipe", [EARLY, REUSED])
def test_races_cost_acceptance(reports: dict[str, DraftReport], recipe: str) -> None:
    sound, bad = reports[SOUND], reports[recipe]
    silent = recipe == EARLY  # the plan that only reads the prompt gives the host nothing
    assert bad.refused == bad.plans - silent > 1
    assert bad.foreign_reads > 0
    assert bad.first_accepted < sound.first_accepted
    assert bad.acceptance_length < sound.acceptance_length


def test_stale_logits_hardly_ever_draft_right(reports: dict[str, DraftReport]) -> None:
    """The shape of the reports upstream: a few per cent, whatever the head knows."""
    assert reports[EARLY].first_accepted < 0.1


def test_the_reasons_are_those_of_the_corpus(reports: dict[str, DraftReport]) -> None:
    assert "'logits' and 'copy:logits@host'" in reports[EARLY].reason
    assert "nothing orders them" in reports[REUSED].reason


def test_reports_are_plain_data(reports: dict[str, DraftReport]) -> None:
    facts = reports[EARLY].to_json()
    assert facts["acceptance_length_counts_bonus"] and facts["recipe"] == EARLY


def test_every_graph_of_the_head_races_in_list_order_on_two_streams(model: Path) -> None:
    m = load(model, head=HEAD, ctx_size=256, threads=1)
    head: Any = m.head
    for fed_back in (False, True):
        graph = head.build(DraftShape(1, 256, 1, 513, fed_back))
        verdicts = {n: examine(planned(graph, (GPU,), r)) for n, r in DRAFT_RECIPES.items()}
        refused = {n for n, v in verdicts.items() if isinstance(v, CounterExample)}
        assert refused == {EARLY, REUSED}
    m.close()


NORMS = ("blk.0.attn_norm.rms", "blk.0.attn_norm_2.rms")  # of the embedding and of the feature
FORCED = "upstream's forced synchronisation"


@pytest.mark.parametrize(
    ("name", "bad", "expected"),
    [
        ("01H", DRAFT_RECIPES[EARLY], Expected("race", "logits", "copy:logits@host")),
        ("01P", DRAFT_RECIPES[REUSED], None),
        ("01S", None, None),
    ],
)
def test_the_three_forms_hold_on_the_real_decoder_graph(
    model: Path, name: str, bad: Recipe | None, expected: Expected | None
) -> None:
    """H corrupts and is refused, P too, S is proved; upstream's flag costs time in each."""
    m = load(model, head=HEAD, ctx_size=256, threads=1)
    head: Any = m.head
    graph = head.build(DraftShape(8, 256, 8, 513, True))
    m.close()
    two = name == "01P"
    form = replace(
        find(name),
        build=lambda: graph,
        bad=bad,
        expected=expected,
        fixed=DRAFT_RECIPES[FIXED if two else SOUND],
        others={FORCED: Recipe("hb" if two else "ggml", 2 if two else 1, forced_sync=NORMS)},
    )
    report = run_hazard(form, seed=1, orders=20)
    assert not report.failures and report.certificate is not None
    assert (report.counter_example is None) == (bad is None) == (report.corruption is None)
    fixed, forced = report.prices["fixed"], report.prices[FORCED]
    assert forced.seconds > fixed.seconds and forced.nbytes == fixed.nbytes


def test_an_unproved_session_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InputError, match="no plan was prepared for 'x'"):
        UnprovedSession(DRAFT_RECIPES[SOUND]).run("x", {})


def test_a_wait_that_is_not_there_cannot_be_forgotten(model: Path) -> None:
    m = load(model, head=HEAD, ctx_size=256, threads=1)
    head: Any = m.head
    graph = head.build(DraftShape(1, 256, 1, 513, True))
    recipe = replace(DRAFT_RECIPES[SOUND], faults=(forgets_waits_before("no such label"),))
    with pytest.raises(PlanError, match="nothing to forget"):
        planned(graph, (GPU,), recipe)
    m.close()


# The command.


def test_command_prints_acceptance_beside_the_sound_plans(model: Path) -> None:
    given = [
        "drafts",
        "--model",
        str(model),
        "--head",
        str(HEAD),
        "-n",
        "6",
        "--no-chat",
        "-t",
        "1",
        "Hi",
    ]
    result = CliRunner().invoke(hazards_app, given)
    assert result.exit_code == 0, result.exception
    for word in ("01H", "01P", "proved", "refused", "identical"):
        assert word in result.stdout


def test_command_knows_the_heads_that_come_with_ggraph(model: Path) -> None:
    error = CliRunner().invoke(hazards_app, ["drafts", "--model", str(model), "Hi"]).exception
    assert isinstance(error, InputError) and "small: --head names one" in str(error)
    default = cache_dir() / DEFAULT.file
    if not default.is_file():
        pytest.skip(f"{DEFAULT.file} is not in the cache")
    found = CliRunner().invoke(hazards_app, ["drafts", "--model", str(default), "-n", "1", "Hi"])
    assert "drafts of 3, 1 tokens" in str(found.exception)  # asked of a model that has its head


@pytest.mark.parametrize("most", ["0", "17"])
def test_command_refuses_odd_lengths(model: Path, most: str) -> None:
    given = ["drafts", "--model", str(model), "--head", str(HEAD), "--draft-max", most, "Hi"]
    assert isinstance(CliRunner().invoke(hazards_app, given).exception, InputError)
