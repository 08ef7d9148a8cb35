"""The corpus: every bad plan is refused and corrupts, every fixed plan is proved and survives."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ggraph.errors import InputError, PlanError
from ggraph.hazards import HAZARDS, UNEXPRESSED, Hazard, find, plan_of, run_hazard, timelines
from ggraph.hazards.corpus import Expected, Recipe
from ggraph.hazards.faults import forgets_sync, forgets_wait, records_early
from ggraph.verify import Rejected, verify

DOCS = Path(__file__).parents[1] / "docs"
WITH_BAD_PLAN = tuple(h for h in HAZARDS if h.bad is not None)


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.id)
@pytest.mark.parametrize("seed", [0, 1])
def test_hazard_behaves_as_documented(hazard: Hazard, seed: int) -> None:
    report = run_hazard(hazard, seed, orders=15)
    assert report.ok, report.failures
    assert report.certificate is not None
    assert (report.counter_example is None) == (hazard.bad is None)


@pytest.mark.parametrize("hazard", WITH_BAD_PLAN, ids=lambda h: h.id)
def test_bad_plan_cannot_become_a_verified_one(hazard: Hazard) -> None:
    assert hazard.bad is not None
    with pytest.raises(Rejected):
        verify(plan_of(hazard, hazard.bad))


@pytest.mark.parametrize("hazard", WITH_BAD_PLAN, ids=lambda h: h.id)
def test_bad_memory_is_the_list_planner_s(hazard: Hazard) -> None:
    """No bad plan places anything by hand: the map is that of mode ggml."""
    assert hazard.bad is not None
    assert plan_of(hazard, hazard.bad).memory.mode == "ggml"


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.id)
def test_other_recipes_verify(hazard: Hazard) -> None:
    for recipe in hazard.others.values():
        verify(plan_of(hazard, recipe))


def test_rows_of_the_catalogue_are_all_accounted_for() -> None:
    rows = {h.row for h in HAZARDS}
    assert len(rows - {33}) >= 32
    assert rows.isdisjoint(UNEXPRESSED)
    assert rows | set(UNEXPRESSED) == set(range(1, 38))
    assert len({h.id for h in HAZARDS}) == len(HAZARDS)
    assert all(h.id.startswith(f"{h.row:02d}") for h in HAZARDS)


def test_eagle3_loses_drafts_and_gets_them_back() -> None:
    for name in ("01H", "01P"):
        report = run_hazard(find(name), orders=1)
        assert report.corruption is not None
        assert report.corruption.agreement is not None
        assert report.corruption.agreement < 1.0


def test_eagle3_forced_synchronisation_buys_nothing() -> None:
    report = run_hazard(find("01S"), orders=1)
    forced = report.prices["upstream's forced synchronisation"]
    assert forced.seconds > report.prices["fixed"].seconds


def test_eagle3_forced_synchronisation_hides_the_missing_wait() -> None:
    """Behind the flag's host wait the copy of the logits needs no event: none can be forgotten."""
    h = find("01H")
    assert h.bad is not None
    flagged = h.others["upstream's forced synchronisation"].forced_sync
    with pytest.raises(PlanError, match="nothing to forget"):
        plan_of(h, replace(h.bad, forced_sync=flagged))


def test_a_missing_wait_costs_its_wait_and_no_bytes() -> None:
    price = run_hazard(find("01H"), orders=0).fix_price
    assert price is not None
    assert (price.nbytes, price.waits) == (0, 1)


def test_a_wrong_expectation_is_reported() -> None:
    wrong = replace(find("28"), expected=Expected("race", "b.rms", "a.rms"))
    (failure,) = run_hazard(wrong, orders=0).failures
    assert "expected counter-example" in failure
    harmless = replace(find("28"), bad=Recipe())
    assert run_hazard(harmless, orders=0).failures == ("the bad plan is accepted",)


def test_a_fixed_plan_that_races_is_reported() -> None:
    hazard = find("28")
    assert hazard.bad is not None
    report = run_hazard(replace(hazard, fixed=hazard.bad), orders=0)
    assert not report.ok
    assert "the fixed plan is refused" in report.failures[0]


def test_report_is_plain_json_and_deterministic() -> None:
    rows = [run_hazard(find("13"), 3, orders=2).to_json() for _ in range(2)]
    text = json.dumps(rows[0], allow_nan=False)
    assert json.loads(text)["corruption"]["got"] == "nan"
    assert rows[0] == rows[1]


def test_faults_must_find_what_they_forget() -> None:
    hazard = find("32")
    for fault in (
        forgets_wait("after:nothing"),
        forgets_sync("no such label"),
        records_early("after:nothing"),
    ):
        with pytest.raises(PlanError, match="nothing"):
            plan_of(hazard, Recipe(faults=(fault,)))


def test_listed_and_streams_refuse_unknown_names() -> None:
    with pytest.raises(PlanError, match="no_such_node"):
        plan_of(find("28"), Recipe(listed=("no_such_node",)))
    with pytest.raises(PlanError, match="stream 9"):
        plan_of(find("28"), Recipe(on_stream={"a": 9}))


@pytest.mark.parametrize("name", ["", "99", "1", "x", "01"])
def test_find_refuses(name: str) -> None:
    with pytest.raises(InputError, match="no hazard"):
        find(name)


@pytest.mark.parametrize(
    ("name", "found"), [("1h", "01H"), ("7", "07"), ("07", "07"), ("10", "10")]
)
def test_find(name: str, found: str) -> None:
    assert find(name).id == found


@pytest.mark.parametrize("bad", [(-1, 0), (0, -1)])
def test_run_refuses_negative_numbers(bad: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="negative"):
        run_hazard(find("32"), *bad)


def test_timelines_cover_both_plans() -> None:
    found = timelines(find("01P"))
    assert list(found) == ["bad", "fixed"]
    assert found["bad"].faults and not found["fixed"].faults
    assert found["fixed"].seconds > 0


def test_documentation_lists_every_hazard_with_its_picture() -> None:
    page = (DOCS / "hazards.md").read_text()
    for h in HAZARDS:
        assert f"## {h.id} " in page
        assert (DOCS / "hazards" / f"{h.id}.svg").read_text().startswith("<svg")
    linked = set(re.findall(r"\(hazards/(\w+)\.svg\)", page))
    assert linked == {h.id for h in HAZARDS}
