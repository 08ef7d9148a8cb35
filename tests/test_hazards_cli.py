"""`ggraph hazards`: what it prints, in JSON and for people, and its exit status."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ggraph.errors import InputError
from ggraph.hazards import HAZARDS, Recipe, find
from models.cli import hazards as cli_hazards
from models.cli.app import app

RUN = CliRunner()


def test_list_json_has_a_row_per_hazard() -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["list", "--json"])
    assert result.exit_code == 0
    assert [row["id"] for row in json.loads(result.stdout)] == [h.id for h in HAZARDS]


def test_list_names_the_rows_without_a_plan() -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["list"])
    assert result.exit_code == 0
    assert "17, 18, 19, 20, 23" in result.stdout


def test_run_one_shows_verdict_damage_and_fix() -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["run", "01H", "--orders", "2"])
    assert result.exit_code == 0
    for part in ("verify refuses", "draft agreement", "2 random legal orders", "waits", "#18039"):
        assert part in result.stdout
    assert len(result.stdout.splitlines()) <= 50, "one screen"


def test_page_and_export_of_one_hazard(tmp_path: Path) -> None:
    page, plan = tmp_path / "race.html", tmp_path / "race.json"
    given = ["run", "01P", "--orders", "1", "--html", str(page), "--export", str(plan)]
    assert RUN.invoke(cli_hazards.hazards_app, given).exit_code == 0
    assert "no order" in page.read_text()
    refused = RUN.invoke(app, ["verify", str(plan), "--json"])
    assert refused.exit_code == 1
    found = json.loads(refused.stdout)["counter_example"]
    assert "qkv.e" in found["message"] and "norm_g.rms" in found["message"]


@pytest.mark.parametrize(
    "given",
    [["--all", "--html", "x.html"], ["--all", "--export", "x.json"], ["33", "--export", "x.json"]],
)
def test_pages_are_for_one_hazard_and_exports_for_a_bad_plan(given: list[str]) -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["run", "--orders", "0", *given])
    assert isinstance(result.exception, InputError)


def test_run_all_json() -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["run", "--all", "--orders", "1", "--json"])
    rows = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [row["id"] for row in rows] == [h.id for h in HAZARDS]
    assert all(row["ok"] for row in rows)


def test_run_all_for_people() -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["run", "--all", "--orders", "0"])
    assert result.exit_code == 0
    assert f"{len(HAZARDS)} of {len(HAZARDS)} as expected" in result.stdout


def test_failure_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(find("28"), bad=Recipe())
    monkeypatch.setattr(cli_hazards, "find", lambda _: broken)
    result = RUN.invoke(cli_hazards.hazards_app, ["run", "28", "--orders", "0"])
    assert result.exit_code == 1
    assert "NOT AS EXPECTED: the bad plan is accepted" in result.stdout


@pytest.mark.parametrize("given", [[], ["01H", "--all"], ["nope"], ["01H", "--device", "tpu"]])
def test_bad_requests(given: list[str]) -> None:
    result = RUN.invoke(cli_hazards.hazards_app, ["run", *given])
    assert isinstance(result.exception, InputError)
