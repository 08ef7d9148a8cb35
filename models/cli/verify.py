"""`ggraph verify`: prove or refuse a plan that any runtime wrote down as JSON."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.text import Text

from ggraph import InputError
from ggraph.errors import FormatError, printable
from ggraph.plan import Certificate, Plan
from ggraph.plan_json import MAX_TEXT_BYTES, plan_from_json
from ggraph.record.causes import diagnose
from ggraph.show_html import plan_html
from ggraph.verify import CounterExample, Rejected, examine, races

from .common import AsJson, apart, print_json, standard_input, terminal, write_text

IDLE = "No command reads, and no two touch a common byte: nothing was at stake."
MOST_LISTED = 1000  # races, with --all


def verify(
    plan: Annotated[Path, typer.Argument(help="Plan as JSON (docs/plan_json.md); - reads stdin.")],
    every: Annotated[
        bool, typer.Option("--all", help="Every race, by the wait that is missing, and repairs.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page, with the race in red.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove a plan of any runtime free of races. Exit status 0: proved, 1: refused, 2: no plan.

    Example: ggraph plan --export plan.json && ggraph verify plan.json
    """
    apart(html, plan)
    given = _plan(plan)
    verdict = examine(given)
    found = _races(given, verdict) if every else []
    diagnosis = diagnose(given) if found else None
    if html is not None:
        write_text(html, _page(given, verdict, plan.name))
    if as_json:
        why = diagnosis.to_json() if diagnosis is not None else {}
        print_json(_facts(verdict) | ({"races": found} if every else {}) | why)
    else:
        _print(given, verdict, [*found, *(diagnosis.lines() if diagnosis is not None else ())])
    if isinstance(verdict, CounterExample):
        raise typer.Exit(1)


def _plan(path: Path) -> Plan:
    """The plan of a file, or of standard input for `-`. FormatError or InputError, which name it,
    where it is none."""
    raw = _read(path)
    try:
        return plan_from_json(raw)
    except (FormatError, InputError) as error:
        where = "standard input" if str(path) == "-" else path
        raise type(error)(f"{where}: {error}") from None


def _read(path: Path) -> bytes:
    """The file's bytes, or standard input's for `-`; a byte more than a plan may have at most."""
    try:
        if str(path) == "-":
            return standard_input(MAX_TEXT_BYTES + 1)
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _races(plan: Plan, verdict: Certificate | CounterExample) -> list[str]:
    """Every race in words. What is refused before any order is looked at has none to list."""
    ordered = isinstance(verdict, Certificate) or verdict.kind in ("race", "stale", "unwritten")
    try:
        return [str(r) for r in races(plan)[:MOST_LISTED]] if ordered else []
    except Rejected as error:  # of more than can be listed
        return [str(error)]


def _facts(verdict: Certificate | CounterExample) -> dict[str, Any]:
    if isinstance(verdict, Certificate):
        return {"verified": True, "certificate": vars(verdict)}
    return {"verified": False, "counter_example": verdict.to_json()}


def _row(name: str, value: object) -> str:
    """A fact of the certificate; a number as such, what holds or does not as yes or no."""
    shown = ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"
    return f"{shown:>12}  {name.replace('_', ' ')}"


def _page(plan: Plan, verdict: Certificate | CounterExample, title: str) -> str:
    if isinstance(verdict, Certificate):
        return plan_html(plan, vars(verdict), title=title)
    facts = {"commands": len(plan.schedule.commands), "arena bytes": plan.memory.arena_bytes}
    return plan_html(plan, facts, verdict, title=title)


def _print(plan: Plan, verdict: Certificate | CounterExample, found: list[str]) -> None:
    console = terminal()
    for line in plan.log:
        console.print(Text(printable(line), style="dim"))
    if isinstance(verdict, CounterExample):
        title = Text(f"refused: {verdict.kind}")
        console.print(Panel(Text(str(verdict)), title=title, title_align="left", style="red"))
    else:
        facts = {k: v for k, v in vars(verdict).items() if not isinstance(v, tuple)}  # has no graph
        rows = [_row(k, v) for k, v in facts.items()]
        if not (verdict.pairs_checked or verdict.reads_proved):
            rows.append(IDLE)
        console.print(Panel(Text("\n".join(rows)), title="proved", title_align="left"))
    for race in found:
        console.print(Text(race, style="red"))
