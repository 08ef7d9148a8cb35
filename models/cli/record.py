"""`ggraph record` and `ggraph torture`: other engines' programs on played devices, judged."""

import os
import tempfile
from pathlib import Path
from subprocess import DEVNULL
from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.text import Text

from ggraph import InputError
from ggraph.errors import printable
from ggraph.record import (
    CONTRACTS,
    Program,
    Recording,
    Stage,
    Trial,
    Verdict,
    fetch_sources,
    judge,
    missing,
    program,
    read_log,
)
from ggraph.record import torture as run_torture
from ggraph.show_html import plan_html

from .common import AsJson, apart, print_json, terminal, write_text

Command = Annotated[list[str] | None, typer.Argument(help="Behind --: the program, its arguments.")]
Devices = Annotated[int, typer.Option(help="How many devices are played, 1 to 8.")]
Contract = Annotated[str, typer.Option(help=f"What they promise: {', '.join(CONTRACTS)}.")]
Source = Annotated[
    str | None,
    typer.Option(help="The program's ggml sources: a folder, or a version of llama-cpp-python."),
]
Timeout = Annotated[float | None, typer.Option(help="Seconds that one run may take.")]


def record(
    command: Command = None,
    devices: Devices = 1,
    contract: Contract = "cuda",
    order: Annotated[str, typer.Option(help="eager, lazy, late:D, random:SEED.")] = "eager",
    source: Source = None,
    log: Annotated[Path | None, typer.Option(help="Keep the log, or judge it if alone.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the race in red.")] = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Record what a ggml program enqueues on played GPUs, and prove each kind of step.

    Exit status 0: all proved, 1: one refused, 2: nothing recorded, or not the whole run.

    Example: ggraph record --devices 2 -- llama-completion -m model.gguf -ngl 99 -p Hello -n 8

    Example: ggraph record --log run.jsonl.gz
    """
    stage = Stage(devices, contract, order)
    ended: list[str] = []
    apart(html, log, *_named(command))
    apart(log, *_named(command))
    if command:
        given = _program(command, source)
        recording, ended = _recorded(given, stage, log, timeout, quiet=as_json)
    elif log is not None:
        recording = read_log(log)
    else:
        raise InputError("name a program behind --, or a log with --log")
    verdicts = judge(recording)
    gaps = [*ended, *missing(recording, verdicts)]
    if html is not None:
        write_text(html, _page(verdicts))
    if as_json:
        print_json(_facts(recording, verdicts, gaps))
    else:
        _print(recording, verdicts, gaps)
    _exit(refused=any(v.refused for v in verdicts), gaps=gaps)


def torture(
    command: Command = None,
    devices: Devices = 1,
    contract: Contract = "cuda",
    source: Source = None,
    seeds: Annotated[int, typer.Option(help="Random orders.", min=0, max=100)] = 3,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Run a ggml program in the worst legal orders, and compare its output with an eager run's.

    Exit status 0: proved, and the same in every order, 1: not, 2: no run, or not the whole run.

    Example: ggraph torture --devices 2 -- llama-completion -m m.gguf -ngl 99 -p Hi -n 8 --temp 0
    """
    stage, told = Stage(devices, contract), terminal()
    given = _program(command or [], source)
    tell = (lambda _: None) if as_json else (lambda trial: told.print(_line(trial), soft_wrap=True))
    outcome = run_torture(given, stage, seeds=seeds, timeout=timeout, tell=tell)
    bad = any(v.refused for v in outcome.verdicts) or not all(t.sound for t in outcome.trials)
    gaps = list(outcome.missing)
    if as_json:
        verdicts = [v.to_json() for v in outcome.verdicts]
        trials = [t.to_json() for t in outcome.trials]
        sound = not bad and not gaps
        print_json({"verdicts": verdicts, "trials": trials, "sound": sound, "missing": gaps})
    else:
        for v in outcome.verdicts:
            told.print(_verdict(v))
        _print_gaps(gaps)
    _exit(refused=bad, gaps=gaps)


def _exit(*, refused: bool, gaps: list[str]) -> None:
    """1 for what was found; never 0 where something was not looked at."""
    if refused or gaps:
        raise typer.Exit(1 if refused else 2)


def _named(command: list[str] | None) -> list[Path]:
    """The files that a program's arguments name, as `-m FILE` or as `--model=FILE`."""
    words = [w for word in command or () for w in (word, word.partition("=")[2])]
    return [Path(w) for w in words if os.path.isfile(w)]


def _program(command: list[str], source: str | None) -> Program:
    if source is None:
        return program(command)
    folder = Path(source)
    return program(command, folder if folder.is_dir() else fetch_sources(source))


def _recorded(
    given: Program, stage: Stage, log: Path | None, timeout: float | None, *, quiet: bool
) -> tuple[Recording, list[str]]:
    """Run it: the log, and how it ended if not well. Its output goes where ours goes, or nowhere
    where ours is to be read by a program."""
    with tempfile.TemporaryDirectory() as folder:
        path = log if log is not None else Path(folder) / "log.jsonl"
        path.unlink(missing_ok=True)  # never judge the log of another run
        sink = DEVNULL if quiet else None
        ended = given.run(stage, path, output=sink, errors=sink, timeout=timeout)
        if not path.is_file():
            raise InputError(f"{given.arguments[0]} ended before it had loaded ggml")
        if ended.status == 0:
            return read_log(path), []
        how = "ran out of time" if ended.status is None else f"ended with {ended.status}"
        return read_log(path), [f"{given.arguments[0]} {how}; judged up to there"]


def _facts(recording: Recording, verdicts: list[Verdict], gaps: list[str]) -> dict[str, Any]:
    return {
        "contract": recording.contract,
        "devices": recording.devices,
        "cut_short": recording.cut_short,
        "missing": gaps,
        "proved": not gaps and not any(v.refused for v in verdicts),
        "kinds": [v.to_json() for v in verdicts],
    }


def _page(verdicts: list[Verdict]) -> str:
    """The first kind that was refused, otherwise the largest."""
    if not verdicts:
        raise InputError("nothing was recorded: there is nothing to show")
    refused = next((v for v in verdicts if v.refused), None)
    shown = refused or max(verdicts, key=lambda v: v.commands)
    facts = {"steps": shown.count, "commands": shown.commands}
    return plan_html(shown.judged.plan, facts, shown.refused, title=shown.kind)


def _print(recording: Recording, verdicts: list[Verdict], gaps: list[str]) -> None:
    console = terminal()
    streams = f"{recording.devices} device{'s' if recording.devices != 1 else ''}"
    console.print(f"{streams}, contract {recording.contract}", style="dim")
    for v in verdicts:
        console.print(_verdict(v), soft_wrap=True)
    _print_gaps(gaps)
    for v in verdicts:
        if v.refused is not None:
            body = "\n".join([str(v.refused), *_stack(v)])
            title = Text(f"refused: {printable(v.kind)}")
            console.print(Panel(Text(body), title=title, title_align="left", style="red"))


def _print_gaps(gaps: list[str]) -> None:
    """Why this is not about a whole run."""
    for gap in gaps:
        terminal().print(Text(gap), style="red", soft_wrap=True)


def _stack(v: Verdict) -> list[str]:
    return ["  touched by:", *(f"    {printable(x)}" for x in v.stack)] if v.stack else []


def _verdict(v: Verdict) -> Text:
    """One line, and the causes of its races below it."""
    steps = f"{v.count} step{'s' if v.count != 1 else ''}"
    different = f", {v.different} different" if v.different > 1 else ""
    word, style = ("refused", "red") if v.refused else ("proved ", "green")
    told = f"  {printable(v.kind)}: {steps}{different}, {v.commands:,} commands"
    text = Text.assemble((word, style), told)
    if v.refused is not None and v.diagnosis is None:
        text.append(f"\n         {v.refused.kind}: {printable(v.refused.message)}")
    for line in v.diagnosis.lines() if v.diagnosis is not None else ():
        text.append(f"\n         {line}")
    return text


def _line(t: Trial) -> Text:
    if t.sound:
        word, style = "same     ", "green"
    elif t.same_bytes:
        word, style = "lost     ", "red"
    else:
        word, style = ("numbers  " if t.same else "DIFFERENT"), "red"
    forced = {None: "", True: " (forced)", False: " (could not be forced)"}[t.forced]
    ended = "" if t.status == 0 else f" [status {t.status}]"
    hidden = ", same text, other numbers" if t.same and not t.same_bytes else ""
    hidden += f", {t.lost} copies into memory that was given back" if t.lost else ""
    shown = f"\n           {t.output[-200:]!r}" if not t.same else ""
    why = printable(t.why)
    return Text.assemble((word, style), f"  {t.order:<12} {why}{forced}{ended}{hidden}{shown}")
