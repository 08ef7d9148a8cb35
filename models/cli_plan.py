"""`ggraph plan`: what would run where, in which bytes, and the proof. Floor 10."""

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ggraph import Graph, InputError, Options, Session, VerifiedPlan, explain
from ggraph.decode.runner import Runner
from ggraph.device import HOST
from ggraph.pipeline import first_draft, run_passes_until
from ggraph.plan import Plan
from ggraph.plan_json import plan_to_json
from ggraph.session import WeightSource
from ggraph.show import graph_dot, plan_summary, plan_text
from ggraph.show_html import plan_html
from ggraph.verify import CounterExample, Rejected

from .cli_common import AsJson, Devices, Threads, device_names, model_path, print_json, write_text
from .load import open_session
from .registry import open_model

MODES = ("hb", "offline", "ggml")


def plan(
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file or folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Token rows of the step.")] = 1,
    context: Annotated[int, typer.Option(help="Cache rows that attention reaches.")] = 256,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", help="Cache rows in all.")] = 1024,
    device: Devices = "cpu",
    pin: Annotated[
        list[str] | None, typer.Option("--pin", "-ot", help="REGEX=DEVICE for tensors.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers per device, such as sim0=10,sim1=20.")
    ] = None,
    streams: Annotated[int, typer.Option(help="Compute streams per device.")] = 1,
    capacity: Annotated[
        str | None, typer.Option(help="Arena bytes per device at most, such as sim0=65536.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Allocator: hb, offline or ggml.")] = "hb",
    threads: Threads = None,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
    explain_tensor: Annotated[
        str | None,
        typer.Option("--explain", metavar="TENSOR", help="Why one tensor lies where it lies."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with all pictures.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the plan for `ggraph verify`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the verified plan of one decoding step: splits, streams, placement, memory, proof."""
    if memory not in MODES:
        raise InputError(f"--memory {memory!r}; known: {', '.join(MODES)}")
    if streams < 1:
        raise InputError(f"--streams {streams}: expected 1 or more")
    options = Options(
        pins=tuple(pin or ()),
        layers=_counts("--layers", "COUNT", layers),
        streams=streams,
        memory=memory,
        capacity=_counts("--capacity", "BYTES", capacity),
    )
    opened = open_model(model_path(model, as_json or dot))
    session = open_session(device_names(device), options, threads=threads)
    with closing(session):
        runner = Runner(opened, session, ctx_size)
        shape = runner.shape(rows, rows, max(rows, context))
        graph = opened.build(shape)
        if dot:
            print(graph_dot(graph))
            return
        verified = _proved(session, graph, opened.weight, html, export)
        if explain_tensor is not None:
            _explain(verified, explain_tensor, as_json)
        elif html is not None:
            write_text(html, plan_html(verified.plan, vars(verified.certificate)))
        elif as_json:
            print_json(plan_summary(verified))
        elif export is None:
            print(plan_text(verified))


def _proved(
    session: Session, graph: Graph, weight: WeightSource, html: Path | None, export: Path | None
) -> VerifiedPlan:
    """The graph's plan, exported if wanted; a refused one too, with a page of its race."""
    try:
        verified = session.prepare("shown", lambda: graph, weight)
    except Rejected as refusal:
        _write_refused(session, graph, refusal.counter_example, html, export)
        raise
    if export is not None:
        write_text(export, json.dumps(plan_to_json(verified.plan)) + "\n")
    return verified


def _write_refused(
    session: Session, graph: Graph, fault: CounterExample, html: Path | None, export: Path | None
) -> None:
    """The plan that `verify` refused, as a page with the race in red and as JSON, where wanted."""
    specs = [b.spec for name, b in session.backends.items() if name != HOST]
    draft = run_passes_until(first_draft(graph, specs, session.options), "verify")
    refused = Plan(draft.schedule, draft.made["allocate"])
    if html is not None:
        facts = {
            "commands": len(draft.schedule.commands),
            "arena bytes": refused.memory.arena_bytes,
        }
        write_text(html, plan_html(refused, facts, fault))
    if export is not None:
        write_text(export, json.dumps(plan_to_json(refused)) + "\n")


def _explain(verified: VerifiedPlan, tensor: str, as_json: bool) -> None:
    found = explain(verified, tensor)
    if as_json:
        print_json(vars(found))
    else:
        print(found)


def _counts(option: str, unit: str, text: str | None) -> dict[str, int]:
    """`sim0=10,sim1=20` as a mapping. InputError for anything else."""
    found: dict[str, int] = {}
    for part in (text or "").split(",") if text else ():
        name, equals, count = part.partition("=")
        if not (name and equals and count.isdecimal()):
            raise InputError(f"{option} {text!r}: expected DEVICE={unit}, separated by commas")
        found[name.strip()] = int(count)
    return found
