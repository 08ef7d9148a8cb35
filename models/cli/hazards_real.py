"""`ggraph hazards real`: the real llama.cpp, as it is and with faults put into it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.env import cache_dir
from ggraph.record.real import (
    MUTANTS,
    NEW,
    SETTINGS,
    Files,
    Found,
    Mutant,
    Setting,
    build_for,
    judge_mutant,
    judge_setting,
    setting,
)

from ..run.shipped import head_for
from .common import AsJson, ModelPath, model_path, print_json


def real(
    names: Annotated[
        list[str] | None, typer.Argument(help="Configurations and mutants; default: all.")
    ] = None,
    version: Annotated[str, typer.Option(help="Of llama-cpp-python, whose llama.cpp it is.")] = NEW,
    model: ModelPath = None,
    as_json: AsJson = False,
) -> None:
    """Record the real llama.cpp, as it is and with faults put into it, and judge every step.

    Fetches it through pip and builds it with cmake, which takes minutes the first time.

    Example: ggraph hazards real prompt-two wait-on-source
    """
    settings, mutants = _chosen(names or [], version)
    folder = cache_dir() / "record" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    path = model_path(model)
    files = Files(path, _head(path), folder)
    made = build_for(version, [*settings, *(setting(m.where) for m in mutants)])
    rows, sound = [], {}
    for s in settings:
        rows.append(_row(judge_setting(made, s, files)))
        _tell(rows[-1], as_json)
    for m in mutants:
        if m.where not in sound:
            sound[m.where] = judge_setting(made, setting(m.where), files).text
        found = judge_mutant(made, m, files, sound[m.where])
        fault = {"name": m.name, "where": m.where, "what": m.what, "expected": m.expect}
        texts = {"eager_same": found.eager_same, "lazy_same": found.lazy_same}
        rows.append(_row(found.found) | fault | texts)
        _tell(rows[-1], as_json)
    if as_json:
        print_json({"version": version, "rows": rows})


def _chosen(names: Sequence[str], version: str) -> tuple[list[Setting], list[Mutant]]:
    settings = [s for s in SETTINGS if version in s.versions and (not names or s.name in names)]
    mutants = [m for m in MUTANTS if version in m.which and (not names or m.name in names)]
    unknown = {*names} - {s.name for s in settings} - {m.name for m in mutants}
    if unknown or not (settings or mutants):
        missing = ", ".join(sorted(unknown)) or "any"
        raise InputError(f"no configuration or mutant {missing} of version {version}")
    return settings, mutants


def _row(found: Found) -> dict[str, Any]:
    return {
        "name": found.setting.name,
        "what": found.setting.what,
        "devices": found.setting.devices,
        "contract": found.setting.contract,
        "verdict": found.word,
        "status": found.status,
        "steps": sum(v.count for v in found.verdicts),
        "largest": max((v.commands for v in found.verdicts), default=0),
        "why": found.why.splitlines(),
    }


def _tell(row: dict[str, Any], quiet: bool) -> None:
    """One row of the table as soon as it is known."""
    if quiet:
        return
    size = f"{row['steps']:>5} steps, largest {row['largest']:,}"
    text = f"{row['verdict']:<12} {row['name']:<24} {size}"
    if "eager_same" in row:
        said = ["right" if row[k] else "wrong" for k in ("eager_same", "lazy_same")]
        text += f"; text eager {said[0]}, lazy {said[1]}; expected {row['expected']}"
    print(text, flush=True)
    for line in row["why"]:
        print(f"             {line}", flush=True)


def _head(model: Path) -> Path:
    found = head_for(model)
    if found is None or found == model:
        raise InputError(f"{model}: the configurations with drafts need SmolLM2-135M-Instruct")
    return found
