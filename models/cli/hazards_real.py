"""`ggraph hazards real`: the real llama.cpp, as it is and with faults put into it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.env import cache_dir
from ggraph.record.real import (
    MUTANTS,
    NEW,
    NOTHING_NEW,
    SETTINGS,
    Files,
    Found,
    Mutant,
    MutantFound,
    Setting,
    build_for,
    judge_mutant,
    judge_setting,
    setting,
)

from ..run.shipped import head_for
from .common import AsJson, ModelPath, model_path, print_json

_COUNT = re.compile(r"^\d+ x |\d+ races?, ")


def real(
    names: Annotated[
        list[str] | None, typer.Argument(help="Configurations and mutants; default: all.")
    ] = None,
    version: Annotated[str, typer.Option(help="Of llama-cpp-python, whose llama.cpp it is.")] = NEW,
    model: ModelPath = None,
    kept: Annotated[
        Path | None,
        typer.Option(
            "--rows", help="Keep each result here, one JSON object a line; what it has is not run."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record the real llama.cpp, as it is and with faults put into it, and judge every step.

    Fetches it through pip and builds it with cmake, which takes minutes the first time. A mutant's
    configuration is run without the fault first: its text is what the mutant's is compared with.

    Example: ggraph hazards real prompt-two wait-on-source

    Example: ggraph hazards real --rows found.jsonl
    """
    settings, mutants = _chosen(names or [], version)
    rows = _Rows(version, kept, as_json)
    settings = [s for s in settings if s.name not in rows.of]
    mutants = [m for m in mutants if m.name not in rows.of]
    if settings or mutants:
        files = _files(model_path(model))
        made = build_for(version, [*settings, *(setting(m.where) for m in mutants)])
        for s in settings:
            found = judge_setting(made, s, files)
            rows.add(_row(found) | {"text": found.text})
        for m in mutants:
            sound = rows.of[m.where]
            rows.add(_fault(judge_mutant(made, m, files, sound["text"]), sound))
    if as_json:
        print_json({"version": version, "rows": list(rows.of.values())})


class _Rows:
    """The rows of one version by name, those from the file `kept` included."""

    def __init__(self, version: str, kept: Path | None, quiet: bool) -> None:
        self._version, self._kept, self._quiet = version, kept, quiet
        self.of: dict[str, dict[str, Any]] = {}
        if kept is not None and kept.is_file():
            rows = [json.loads(line) for line in kept.read_text().splitlines()]
            self.of = {r["name"]: r for r in rows if r["version"] == version}

    def add(self, row: dict[str, Any]) -> None:
        """A new row: to be kept and told at once, since the next may take minutes."""
        self.of[row["name"]] = row
        if self._kept is not None:
            with self._kept.open("a") as file:
                print(json.dumps({"version": self._version} | row), file=file)
        _tell(row, self._quiet)


def _chosen(names: Sequence[str], version: str) -> tuple[list[Setting], list[Mutant]]:
    """Those of these names, or all; with a mutant comes its configuration. Mutants of one file
    follow one another, so that a build compiles one file."""
    known = [s for s in SETTINGS if version in s.versions]
    mutants = [m for m in MUTANTS if version in m.which and (not names or m.name in names)]
    unknown = {*names} - {s.name for s in known} - {m.name for m in mutants}
    if unknown or not (known or mutants):
        missing = ", ".join(sorted(unknown)) or "any"
        raise InputError(f"no configuration or mutant {missing} of version {version}")
    wanted = {*names, *(m.where for m in mutants)}
    settings = [s for s in known if not names or s.name in wanted]
    return settings, sorted(mutants, key=lambda m: m.file)


def _fault(found: MutantFound, sound: dict[str, Any]) -> dict[str, Any]:
    """A mutant's row: only what is not wrong without it, in `sound`, counts."""
    m, row = found.mutant, _row(found.found)
    known = {_COUNT.sub("", why) for why in sound["why"]}
    new = [why for why in row["why"] if _COUNT.sub("", why) not in known]
    if row["verdict"] == "refused" and not new:
        row["verdict"] = NOTHING_NEW
    fault = {"name": m.name, "where": m.where, "what": m.what, "expected": m.expect, "why": new}
    return row | fault | {"eager_same": found.eager_same, "lazy_same": found.lazy_same}


def _row(found: Found) -> dict[str, Any]:
    return {
        "name": found.setting.name,
        "what": found.setting.what,
        "devices": found.setting.devices,
        "contract": found.setting.contract,
        "verdict": found.word,
        "status": found.status,
        "steps": sum(v.count for v in found.verdicts),
        "proved": sum(v.count for v in found.verdicts if v.refused is None),
        "largest": max((v.commands for v in found.verdicts), default=0),
        "why": found.why.splitlines(),
    }


def _tell(row: dict[str, Any], quiet: bool) -> None:
    """One row of the table as soon as it is known."""
    if quiet:
        return
    size = f"{row['proved']:>5} of {row['steps']} steps proved, largest {row['largest']:,}"
    text = f"{row['verdict']:<12} {row['name']:<24} {size}"
    if "eager_same" in row:
        said = ["right" if row[k] else "wrong" for k in ("eager_same", "lazy_same")]
        text += f"; text eager {said[0]}, lazy {said[1]}; expected {row['expected']}"
    print(text, flush=True)
    for line in row["why"]:
        print(f"             {line}", flush=True)


def _files(model: Path) -> Files:
    head = head_for(model)
    if head is None or head == model:
        raise InputError(f"{model}: the configurations with drafts need SmolLM2-135M-Instruct")
    folder = cache_dir() / "record" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return Files(model, head, folder)
