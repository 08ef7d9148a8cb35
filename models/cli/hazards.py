"""`ggraph hazards list` and `ggraph hazards run`: published races, executed."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ggraph import InputError
from ggraph.hazards import (
    HAZARDS,
    UNEXPRESSED,
    Hazard,
    HazardReport,
    Price,
    find,
    hazard_html,
    plan_of,
    run_hazard,
)
from ggraph.hazards.gpu import open_driver, run_on_gpu
from ggraph.plan import Plan
from ggraph.plan_json import plan_to_json

from ..bench.hazard_drafts import DraftReport, drafts_under
from ..run.load import load
from ..run.shipped import head_for
from .common import (
    AsJson,
    ModelPath,
    Threads,
    apart,
    model_path,
    notes,
    print_json,
    read_prompt,
    terminal,
    write_text,
)
from .hazards_real import real

hazards_app = typer.Typer(
    name="hazards",
    help="Races that engines really had: each bad plan refused, corrupted, and repaired.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

hazards_app.command("real")(real)

_Device = Annotated[str, typer.Option("--device", help="Where plans run: sim, or cuda0.")]
_Times = Annotated[int, typer.Option(help="Runs of each plan on a GPU.", min=1)]


@hazards_app.command("list")
def list_hazards(as_json: AsJson = False) -> None:
    """List the corpus.

    Example: ggraph hazards list
    """
    if as_json:
        print_json([_listed(h) for h in HAZARDS])
        return
    table = Table("id", "race", "upstream", box=None, pad_edge=False)
    for h in HAZARDS:
        table.add_row(h.id, Text(h.title), Text(", ".join(h.upstream[:2])))
    console = terminal()
    console.print(table)
    missing = ", ".join(map(str, UNEXPRESSED))
    console.print(f"\nRows {missing} of the catalogue have no plan; docs/hazards.md says why.")


@hazards_app.command("run")
def run(
    name: Annotated[str | None, typer.Argument(metavar="ID", help="Such as 01H or 7.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Run the whole corpus.")] = False,
    device: _Device = "sim",
    seed: Annotated[int, typer.Option(help="Seed of data and orders.", min=0)] = 0,
    orders: Annotated[int, typer.Option(help="Random orders per fixed plan.", min=0)] = 1000,
    html: Annotated[Path | None, typer.Option(help="Write a page, with the race in red.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the bad plan for `ggraph verify`.")
    ] = None,
    times: _Times = 100,
    as_json: AsJson = False,
) -> None:
    """Refuse, corrupt and repair one race, or all of them. Exit status 1 if one is not as expected.

    Example: ggraph hazards run 01H

    Example: ggraph hazards run 01P --html race.html

    Example: ggraph hazards run --all --json

    Example: ggraph hazards run 01H --device cuda0
    """
    if (name is None) != every:
        raise InputError("give one hazard's ID, or --all")
    if every and (html or export):
        raise InputError("--html and --export are for one hazard; give its ID instead of --all")
    if device != "sim" and (html or export):
        raise InputError("--html and --export show simulations: leave out --device")
    apart(html, export)
    chosen = HAZARDS if name is None else (find(name),)
    if device != "sim":
        _on_gpu(chosen, device, times, seed, as_json)
        return
    begun = time.perf_counter()
    reports = _run(chosen, seed, orders, quiet=as_json)
    seconds = time.perf_counter() - begun
    if html is not None:
        write_text(html, hazard_html(reports[0]))
    if export is not None:
        write_text(export, json.dumps(plan_to_json(_bad_plan(chosen[0]))) + "\n")
    if as_json:
        print_json([r.to_json() for r in reports] if every else reports[0].to_json())
    elif every:
        _print_all(reports, seconds)
    else:
        _print_one(reports[0], seconds)
    if not all(r.ok for r in reports):
        raise typer.Exit(1)


@hazards_app.command("drafts")
def drafts(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    head: Annotated[
        Path | None, typer.Option(help="EAGLE-3 head: folder or GGUF file; SmolLM2 has one.")
    ] = None,
    model: ModelPath = None,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", help="New tokens.")] = 48,
    draft_max: Annotated[int, typer.Option(help="Drafted tokens per round.")] = 3,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Decode with a head whose plans race as in 01H and 01P, and with sound ones: what the races
    cost in accepted drafts. The head runs on the simulator, the model on the CPU.

    Example: ggraph hazards drafts "Plan a one day trip to DC."
    """
    text, path = read_prompt(prompt), model_path(model)
    if head is None and (head := head_for(path)) is None:
        raise InputError(f"no head comes with ggraph for {path.stem}: --head names one")
    with closing(load(path, head=head, threads=threads)) as m:
        ids = m.prompt_ids(text, chat=not no_chat)
        with notes().status("the head drafts on the simulator, which takes its time"):
            reports = drafts_under(m, ids, n_predict, draft_max)
    if as_json:
        print_json([r.to_json() for r in reports])
    else:
        _print_drafts(reports)


def _print_drafts(reports: list[DraftReport]) -> None:
    columns = ("the head's plans", "verify", "first drafts accepted", "tokens per round", "text")
    table = Table(*columns, box=None, pad_edge=False)
    for r in reports:
        verdict = f"refused, {r.refused} of {r.plans}" if r.refused else f"proved, {r.plans}"
        table.add_row(
            r.recipe,
            verdict,
            f"{100 * r.first_accepted:.1f} %",
            f"{r.acceptance_length:.2f}",
            "identical" if r.identical else "another",
            style="red" if r.refused else "",
        )
    terminal().print(table)


def _bad_plan(h: Hazard) -> Plan:
    if h.bad is None:
        raise InputError(f"hazard {h.id} has no bad plan to export")
    return plan_of(h, h.bad)


def _on_gpu(chosen: tuple[Hazard, ...], device: str, times: int, seed: int, as_json: bool) -> None:
    """Both plans of each hazard on real streams, the losing one held back by a kernel."""
    if not device.startswith("cuda"):
        raise InputError(f"--device {device}: bad plans are run on sim or on a GPU (cuda0)")
    driver = open_driver(device)
    reports = [run_on_gpu(h, driver, times, seed) for h in chosen]
    if as_json:
        print_json([r.to_json() for r in reports])
    else:
        table = Table("id", "held back", "bad plan wrong", "fixed plan wrong", box=None)
        for r in reports:
            bad = "" if r.bad_wrong is None else f"{r.bad_wrong} of {r.times}"
            style = "" if r.ok else "red"
            table.add_row(r.hazard, r.late, bad, f"{r.fixed_wrong} of {r.times}", style=style)
        console = terminal()
        console.print(table)
        console.print(f"\n{driver.name}, seed {seed}")
    if not all(r.ok for r in reports):
        raise typer.Exit(1)


def _listed(h: Hazard) -> dict[str, Any]:
    return {
        "id": h.id,
        "row": h.row,
        "title": h.title,
        "upstream": list(h.upstream),
        "devices": [d.name for d in h.devices],
        "expected": None if h.expected is None else vars(h.expected),
    }


def _run(chosen: tuple[Hazard, ...], seed: int, orders: int, quiet: bool) -> list[HazardReport]:
    """All reports, with a progress bar on a terminal."""
    reports = []
    with Progress(console=notes(), transient=True, disable=quiet or len(chosen) == 1) as progress:
        task = progress.add_task("hazards", total=len(chosen))
        for h in chosen:
            progress.update(task, description=f"hazard {h.id}")
            reports.append(run_hazard(h, seed, orders))
            progress.advance(task)
    return reports


def _print_all(reports: list[HazardReport], seconds: float) -> None:
    """A line per hazard, then the totals."""
    table = Table("id", "bad plan refused for", "wrong on sim", "price of the fix", box=None)
    for r in reports:
        table.add_row(r.hazard.id, _refusal(r), _damage(r), _price(r.fix_price), style=_style(r))
    console = terminal()
    console.print(table)
    good = sum(r.ok for r in reports)
    runs = sum(r.orders for r in reports if r.ok)
    console.print(
        f"\n{good} of {len(reports)} as expected; {runs} random orders of fixed plans bit-equal; "
        f"{seconds:.1f} s"
    )
    for r in reports:
        for failure in r.failures:
            console.print(Text(f"{r.hazard.id}: {failure}", style="red"))


def _style(r: HazardReport) -> str:
    return "" if r.ok else "red"


def _refusal(r: HazardReport) -> Text:
    """The counter-example in a few words."""
    if r.hazard.expected is None or r.counter_example is None:
        return Text("(accepted, as it should be)" if r.ok else "(accepted)")
    e = r.hazard.expected
    return Text(f"{e.kind}: " + " / ".join(label for label in (e.first, e.second) if label))


def _damage(r: HazardReport) -> Text:
    c = r.corruption
    if c is None:
        return Text("")
    share = f"{c.elements} of {c.of}"
    return Text(
        share if c.agreement is None else f"{share}, drafts {100 * c.agreement:.0f} % right"
    )


def _price(p: Price | None) -> Text:
    return Text("" if p is None else str(p))


def _print_one(r: HazardReport, seconds: float) -> None:
    """Everything about one hazard, on one screen."""
    console = terminal()
    h = r.hazard
    console.print(Text(f"{h.id}  {h.title}", style="bold"))
    console.print(Text(", ".join(h.upstream), style="dim"))
    console.print(Text(h.story + "\n"))
    if r.counter_example is not None:
        head = str(r.counter_example).split("\n  nearby:")[0]
        console.print(Panel(Text(head), title="verify refuses the bad plan", title_align="left"))
    if r.corruption is not None:
        console.print(Panel(_corruption(r), title="what it does on sim", title_align="left"))
    console.print(Panel(_repair(r), title="the fix", title_align="left"))
    for failure in r.failures:
        console.print(Text(f"NOT AS EXPECTED: {failure}", style="red"))
    console.print(f"{'as expected' if r.ok else 'failed'}, seed {r.seed}, {seconds:.1f} s")


def _corruption(r: HazardReport) -> Text:
    c = r.corruption
    assert c is not None, r.hazard.id
    lines = [f"order: {c.order}", str(c)]
    lines += [c.fault] if c.fault else []
    if c.agreement is not None:
        lines.append(f"draft agreement: {100 * c.agreement:.1f} % of rows, 100 % with the fix")
    return Text("\n".join(lines))


def _repair(r: HazardReport) -> Text:
    """What is done, the proof, the orders that were run, and every plan's price."""
    lines = [r.hazard.repair]
    if r.certificate is not None:
        c = r.certificate
        lines.append(
            f"verified: {c.pairs_checked} pairs ordered, {c.reads_proved} reads proved, "
            f"{c.reuses} reuses"
        )
        if r.ok:
            lines.append(f"{r.orders} random legal orders: bit-equal to plain NumPy")
    for title, p in r.prices.items():
        cost = f"{p.nbytes:>7} bytes {p.waits:>3} waits {p.seconds * 1e6:>8.1f} us estimated"
        lines.append(f"{cost}  {title}")
    return Text("\n".join(lines))
