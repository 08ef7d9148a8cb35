"""Test files on a GPU, for `gpu_check.py`: a journal that outlives crashes and time limits.

As a pytest plugin (`-p gpu_tests`) it writes a line when a test begins and when it ends, passes
over tests that the journal already has, and stops when the device no longer answers. `run` begins
again behind such a test, in a new process, until all have run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOURNAL = "GGRAPH_TEST_JOURNAL"
RESTARTS = 20  # of a process whose device was lost
USAGE, NOTHING = 4, 5  # pytest's statuses: not begun, no test chosen


def run(journal: Path, files: Sequence[str], chosen: str, device: str) -> dict[str, Any]:
    """Every test of the files once; `chosen` is a `-k` expression. `device` "": the stand-in."""
    paths = os.pathsep.join(str(ROOT / d) for d in ("scripts", "tests", "."))
    environment = {**os.environ, JOURNAL: str(journal), "GGRAPH_TEST_DEVICE": device,
                   "PYTHONPATH": os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")]),
                   "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider",
               "-p", "gpu_tests", "-q", "-rfE", *files, "-k", chosen]  # fmt: skip
    status, crashes = 0, 0
    for _ in range(RESTARTS):
        before = len(entries(journal))
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        held = entries(journal)
        lost = held and held[-1]["outcome"] in ("begun", "lost")
        if not lost or len(held) == before:
            break
        crashes += 1
    return {**summary(journal), "restarts": crashes, "status": status}


def entries(journal: Path) -> list[dict[str, Any]]:
    """What the journal has of each test, the last line of each."""
    lines = journal.read_text().splitlines() if journal.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [*{e["test"]: e for e in found}.values()]


def summary(journal: Path) -> dict[str, Any]:
    """Counts by outcome, and the tests that did not pass; ok where there are passes alone."""
    held = entries(journal)
    counts: dict[str, int] = {}
    for e in held:
        counts[e["outcome"]] = counts.get(e["outcome"], 0) + 1
    wrong = [f"{e['test']}: {e['outcome']} {e.get('why', '')}".strip() for e in held
             if e["outcome"] not in ("passed", "skipped")]  # fmt: skip
    return {"ok": bool(counts.get("passed")) and not wrong, **counts, "wrong": wrong}


def _write(**entry: Any) -> None:
    with Path(os.environ[JOURNAL]).open("a") as out:
        out.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what has run."""
    done = {e["test"] for e in entries(Path(os.environ[JOURNAL]))}
    items[:] = [i for i in items if i.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Named before it runs, so that a crash names it."""
    _write(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One outcome per test: of the call, or of a step around it that went wrong."""
    if report.when != "call" and report.outcome == "passed":
        return
    why = "" if report.outcome == "passed" else str(report.longrepr)[-500:]
    _write(test=report.nodeid, outcome=report.outcome, why=why, seconds=round(report.duration, 3))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End where the device does not answer: what follows would fail with it."""
    from cuda_kit import DEVICE, driver_of

    if DEVICE:
        try:
            driver_of().synchronise()
        except Exception as error:
            _write(test=item.nodeid, outcome="lost", why=str(error))
            os._exit(3)
