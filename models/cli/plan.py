"""`ggraph plan`: what would run where, in which bytes, and the proof."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ggraph import Graph, InputError, Options, Session, VerifiedPlan, explain
from ggraph.alloc import MODES
from ggraph.arrays import WeightSource
from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner
from ggraph.device import DeviceSpec
from ggraph.pipeline import begin, run_passes_until
from ggraph.plan_json import plan_to_json
from ggraph.serving.encoder import Encoder
from ggraph.show import graph_dot, plan_brief, plan_summary, plan_text
from ggraph.show_html import plan_html
from ggraph.trade import Trade, trade_table
from ggraph.verify import CounterExample, Rejected

from ..registry import Model, open_model
from ..run.load import device_names, open_session
from ..sharded import ShardedModel
from .common import (
    COMPILING,
    AsJson,
    Devices,
    Threads,
    apart,
    model_path,
    print_json,
    terminal,
    write_text,
)

_Pins = Annotated[list[str] | None, typer.Option("--pin", "-ot", help="REGEX=DEVICE for tensors.")]
_Layers = Annotated[str | None, typer.Option(help="Layers per device, such as sim0=10,sim1=20.")]
_Cut = Annotated[
    bool, typer.Option("--cut", help="Cut every matrix over the devices (docs/scale.md).")
]
_Capacity = Annotated[
    str | None, typer.Option(help="Arena bytes per device at most, such as sim0=65536.")
]
_Copies = Annotated[int, typer.Option(help="Rotating slots per input.", min=1)]
_Overlap = Annotated[
    bool, typer.Option("--overlap", help="The next run may begin while this one computes.")
]
_Forced = Annotated[
    list[str] | None,
    typer.Option("--forced-sync", metavar="TENSOR", help="Split and make the host wait here."),
]
_Explained = Annotated[
    str | None,
    typer.Option("--explain", metavar="TENSOR", help="Why one tensor lies where it lies."),
]
_Exact = Annotated[bool, typer.Option("--exact", help="Refuse what approximates.")]
_Full = Annotated[
    bool, typer.Option("--full", help="Also every tensor's placement and region, with causes.")
]
_Trade = Annotated[
    bool, typer.Option("--trade", help="Print bytes against waits and time, per stream count.")
]


def plan(
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file or folder; default: SmolLM2-135M-Instruct.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Token rows of the step.")] = 1,
    context: Annotated[int, typer.Option(help="Cache rows that attention reaches.")] = 256,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", help="Cache rows in all.")] = 1024,
    device: Devices = "cpu",
    pin: _Pins = None,
    layers: _Layers = None,
    cut: _Cut = False,
    streams: Annotated[int, typer.Option(help="Compute streams per device.")] = 1,
    copies: _Copies = 1,
    overlap: _Overlap = False,
    forced_sync: _Forced = None,
    capacity: _Capacity = None,
    memory: Annotated[str, typer.Option(help="Allocator: hb, offline or ggml.")] = "hb",
    exact: _Exact = False,
    threads: Threads = None,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph for Graphviz.")] = False,
    explain_tensor: _Explained = None,
    trade: _Trade = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with all pictures.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the plan for `ggraph verify`.")] = None,
    full: _Full = False,
    as_json: AsJson = False,
) -> None:
    """Plan and prove one decoding step: the verdict, splits and bytes; with --full everything.

    Example: ggraph plan model.gguf --device sim0,cpu --layers sim0=10 --streams 2 --html plan.html

    Example: ggraph plan model.gguf --device sim0,sim1,sim2,sim3 --cut

    Example: ggraph plan model.gguf --device sim0 --trade
    """
    _check(memory, streams, rows, context, ctx_size)
    apart(html, model, export)
    apart(export, model)
    options = Options(
        pins=tuple(pin or ()),
        layers=_counts("--layers", "COUNT", layers),
        streams=streams,
        copies=copies,
        overlap=overlap,
        forced_sync=tuple(forced_sync or ()),
        memory=memory,
        capacity=_counts("--capacity", "BYTES", capacity),
        exact=exact,
    )
    opened, options = _opened(model, ctx_size, device if cut else "", options)
    with closing(_session(device, options, threads)) as session:
        runner = Runner(opened, session, ctx_size)
        graph = opened.build(_shape(runner, rows, context))
        if dot:
            print(graph_dot(graph))
        elif trade:
            _print_trade(trade_table(graph, _specs(session), options), as_json)
        else:
            verified = _proved(session, graph, opened.weight, html, export)
            _print(verified, graph, explain_tensor, html, export, as_json, full)


def _check(memory: str, streams: int, rows: int, context: int, ctx_size: int) -> None:
    """InputError where one of these is out of range."""
    if memory not in MODES:
        raise InputError(f"--memory {memory!r}; known: {', '.join(MODES)}")
    if streams < 1:
        raise InputError(f"--streams {streams}: expected 1 or more")
    if min(rows, context) < 1 or max(rows, context) > ctx_size:
        raise InputError(f"--rows {rows}, --context {context}: expected 1 to {ctx_size} (-c)")


def _shape(runner: Runner, rows: int, context: int) -> StepShape:
    """The bucket of such a step, of an encoder one that reads so many rows of texts."""
    if isinstance(runner.model, Model) and not runner.model.causal:
        return Encoder(runner.model, runner.session, runner.context).shape(rows)
    return runner.shape(rows, rows, max(rows, context))


def _opened(path: Path | None, ctx_size: int, over: str, options: Options) -> tuple[Model, Options]:
    """The model, cut `over` devices where there are any, and options that put its parts there."""
    model = open_model(model_path(path)).reaching(ctx_size)
    if not over:
        return model, options
    parts = ShardedModel.of(model, device_names(over))
    return parts, replace(options, pins=(*options.pins, *parts.sharding.pins))


def _session(device: str, options: Options, threads: int | None) -> Session:
    return open_session(device_names(device), options, threads=threads, exact=options.exact)


def _print(
    verified: VerifiedPlan,
    graph: Graph,
    tensor: str | None,
    html: Path | None,
    export: Path | None,
    as_json: bool,
    full: bool,
) -> None:
    """One tensor's explanation, the page, the plan as JSON, or as text where no file was wanted."""
    COMPILING.clear()
    if tensor is not None:
        _explain(verified, graph, tensor, as_json)
    elif html is not None:
        write_text(html, plan_html(verified.plan, vars(verified.certificate)))
    elif as_json:
        print_json(plan_summary(verified))
    elif export is None:
        print(plan_text(verified) if full else plan_brief(verified))


def _specs(session: Session) -> list[DeviceSpec]:
    return [b.spec for b in session.backends.values()]


def _print_trade(rows: Sequence[Trade], as_json: bool) -> None:
    """Both prices of each way to run the graph: bytes of all arenas, and waits with their time."""
    if as_json:
        print_json([vars(r) for r in rows])
        return
    columns = ("streams", "orderings added", "waits", "arena bytes", "lost to concurrency", "us")
    table = Table(*columns, box=None, pad_edge=False)
    for r in rows:
        counts = (r.streams, r.added, r.waits)
        sizes = (f"{r.nbytes:,}", f"{r.lost_bytes:,}", f"{r.critical_path_s * 1e6:.1f}")
        table.add_row(*map(str, counts), *sizes)
    terminal().print(table)


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
    refused = run_passes_until(begin(graph, _specs(session), session.options), "verify").plan
    if html is not None:
        facts = {
            "commands": len(refused.schedule.commands),
            "arena bytes": refused.memory.arena_bytes,
        }
        write_text(html, plan_html(refused, facts, fault))
    if export is not None:
        write_text(export, json.dumps(plan_to_json(refused)) + "\n")


def _explain(verified: VerifiedPlan, graph: Graph, tensor: str, as_json: bool) -> None:
    found = explain(verified, tensor, given=graph)
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
