"""What `bench/results` holds, and that the pages made of it are the pages that stand there."""

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
LONGEST, LARGEST = 200, 40_000  # lines of a summary; bytes of any file

sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "scripts")]
kept: Any = importlib.import_module("kept")
performance: Any = importlib.import_module("performance")

SUMMARIES = sorted(p for p in RESULTS.glob("*/*.json"))


def test_results_are_short() -> None:
    assert len(SUMMARIES) > 10
    files = [p for p in RESULTS.rglob("*") if p.is_file()]
    assert {p.name: p.stat().st_size for p in files if p.stat().st_size > LARGEST} == {}
    lines = {p.name: len(p.read_text().splitlines()) for p in files if p.suffix != ".gz"}
    assert {name: n for name, n in lines.items() if n > LONGEST} == {}


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda p: str(p.relative_to(RESULTS)))
def test_a_summary_names_what_it_was_measured_on(path: Path) -> None:
    found = json.loads(path.read_text())
    assert "answers" not in found
    for key in ("processor", "instructions", "commit", "date"):
        assert found.get(key), f"{path.name} does not say its {key}"


def test_a_result_survives_being_kept(tmp_path: Path) -> None:
    whole = {
        "command": "x", "empty": {}, "none": None, "list": [1, [2.5, "é"]], "flat": [1, 2, 3],
        "tables": {"a": {"all": {"mean": 1.23456789, "least": 0.1}}, "b": [{"case": "c"}]},
        "answers": [{"prompt": "81", "speeds": [1.0, 2.0]}],
    }  # fmt: skip
    path = tmp_path / "result.json"
    kept.write(path, whole)
    assert kept.read(path) == whole
    first = kept.raw_of(path).read_bytes()
    kept.write(path, kept.read(path))
    assert kept.raw_of(path).read_bytes() == first
    assert len(path.read_text().splitlines()) < 25


def test_a_clock_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        kept.write(tmp_path / "result.json", {"speed": float("nan")})


def test_the_raw_answers_give_the_tables() -> None:
    """Summary and packed runs are of one measurement."""
    checked = 0
    for path in RESULTS.glob("heads/*.json"):
        found = kept.read(path)
        for setting, groups in found["tables"].items():
            speeds = [a["settings"][setting]["speedup"] for a in found["answers"]]
            whole = groups["all"]
            assert len(speeds) == whole["prompts"]
            assert sum(speeds) / len(speeds) == pytest.approx(whole["mean_speedup"], rel=1e-6)
            assert min(speeds) == pytest.approx(whole["least_speedup"], rel=1e-6)
            checked += 1
    assert checked >= 8


def test_the_raw_rates_give_the_rows() -> None:
    checked = 0
    for path in RESULTS.glob("performance/*-*.json"):
        found = kept.read(path)
        for file, rows in found["tables"].items():
            for r in rows:
                runs = found["answers"][file][r["case"]]
                assert statistics.median(runs["ours"]) == pytest.approx(r["ours"], rel=1e-6)
                assert set(runs) == {"ours", *r["peers"]}
                for name, peer in r["peers"].items():
                    assert statistics.median(runs[name]) == pytest.approx(peer["rate"], rel=1e-6)
                checked += 1
    assert checked > 200


def test_the_page_of_performance_is_what_the_results_give() -> None:
    assert (ROOT / "docs" / "performance.md").read_text() == performance.page_text()


def test_the_table_of_the_readme_is_what_the_results_give() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == performance.readme_text()
    assert "ik_llama.cpp" in text and "Q4_K_M" in text


def test_the_command_keeps_what_a_benchmark_wrote(tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps({"tables": {"a": 1}, "answers": [1, 2]}))
    out = tmp_path / "kept"
    out.mkdir()
    command = [sys.executable, str(ROOT / "bench" / "kept.py"), str(raw), "--into", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads((out / "raw.json").read_text()) == {"tables": {"a": 1}}
    assert kept.read(out / "raw.json")["answers"] == [1, 2]
