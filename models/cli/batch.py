"""`ggraph batch`: a file of requests, answered line by line."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..run.load import load
from .common import (
    AsJson,
    Context,
    Devices,
    ModelPath,
    Threads,
    device_names,
    model_path,
    notes,
    print_json,
)
from .serve import CacheTokens, Parallel, serve_part

EXAMPLES = """Examples:

  ggraph batch in.jsonl out.jsonl

  ggraph batch in.jsonl out.jsonl -m qwen3.gguf --parallel 32

A line of in.jsonl:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {..}}
"""


def batch(
    requests: Annotated[Path, typer.Argument(help="Requests, as of OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(help="Where the answers go, or go on.")],
    model: ModelPath = None,
    ctx_size: Context = None,
    cache_tokens: CacheTokens = None,
    cache_type: Annotated[str, typer.Option(help="Keys and values as f32, f16 or q8_0.")] = "f16",
    parallel: Parallel = 16,
    draft_max: Annotated[int, typer.Option(help="Most drafted tokens; 0: no drafts.")] = 8,
    threads: Threads = None,
    device: Devices = "cpu",
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations (slower).")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests, many at once. Killed at any time, the same command goes on: each
    request gets one line, in the order in which they are done."""
    job = serve_part("job")
    lines = job.read_requests(requests)
    settings = serve_part("settings").Settings(parallel=parallel, draft=draft_max)
    devices, begun = device_names(device), time.perf_counter()
    options: dict[str, Any] = {"ctx_size": ctx_size, "threads": threads, "exact": exact}
    with job.Results.opened(answers, lines) as results:
        before = len(results.done)
        if before < len(lines):
            path, kind = model_path(model), cache_type.lower()
            with closing(load(path, devices=devices, cache_type=kind, **options)) as m:
                service = serve_part("engine").Service(m, settings, cache_tokens)
                with _bar(len(lines), before) as tell:
                    asyncio.run(_run(service, lines, results, tell))
        done = len(results.done)
    seconds = time.perf_counter() - begun
    facts = {"requests": len(lines), "before": before, "now": done - before, "seconds": seconds}
    if as_json:
        print_json(facts)
    else:
        notes().print(f"{facts['now']} answers in {seconds:.1f} s, {before} were there before")


batch.__doc__ = f"{batch.__doc__}\n\n{EXAMPLES}"


async def _run(service: Any, lines: Any, results: Any, tell: Callable[[Any], None]) -> None:
    inside = serve_part("inside").Inside(serve_part("app").make_app(service))
    replicas = serve_part("going_on").GoingOn(inside.ask)
    async with inside.life():
        await serve_part("job").run(lines, results, replicas, service.settings.parallel, tell)


def _bar(total: int, before: int) -> Any:
    """What is told of each answer, as a bar on a terminal."""
    console = notes()
    if not console.is_terminal:
        return nullcontext(lambda line: None)
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("answers", total=total, completed=before)
    return _shown(progress, lambda line: progress.advance(task))


@contextmanager
def _shown(progress: Progress, tell: Callable[[Any], None]) -> Iterator[Callable[[Any], None]]:
    with progress:
        yield tell
