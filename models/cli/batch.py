"""`ggraph batch`: a file of requests, answered line by line."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..serve.settings import Settings
from .common import AsJson, ServedModel, apart, notes, print_json
from .flat import flat
from .on_ray import RayFlags
from .serve import CacheTokens, DraftMax, Parallel, serve_part


@flat
def batch(
    requests: Annotated[Path, typer.Argument(help="Requests, as of OpenAI's batches.")],
    answers: Annotated[Path, typer.Argument(help="Where the answers go, or go on.")],
    on: ServedModel,
    where: RayFlags,
    cache_tokens: CacheTokens = None,
    parallel: Parallel = Settings.parallel,
    draft_max: DraftMax = Settings.draft,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests, many at once. Killed at any time, the same command goes on: each
    request gets one line, in the order in which they are done.

    Examples:

      ggraph batch in.jsonl out.jsonl

      ggraph batch in.jsonl out.jsonl -m qwen3.gguf --parallel 32

      ggraph batch in.jsonl out.jsonl --ray --replicas 4

    A line of in.jsonl:

      {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {..}}
    """
    apart(answers, requests, on.model)
    job, begun = serve_part("job"), time.perf_counter()
    part = serve_part("ray_serving", "ray") if where.ray else serve_part("engine")
    lines = job.read_requests(requests)
    bounds: dict[str, Any] = {"parallel": parallel, "draft": draft_max}
    with job.Results.opened(answers, lines) as results:
        before = len(results.done)
        if before < len(lines):
            with _bar(len(lines), before) as tell:
                if where.ray:
                    options = where.options(on, on.path, cache_tokens=cache_tokens, **bounds)
                    with part.replicas_on_ray(options, where.ray_address, answers) as all_of_them:
                        asyncio.run(job.run(lines, results, *all_of_them, tell))
                else:
                    settings = Settings(**bounds)
                    with closing(on.load_served(on.path, None, parallel)) as m:
                        service = part.service_of(m, settings, cache_tokens)
                        asyncio.run(_run(service, lines, results, tell))
        done = len(results.done)
    seconds = time.perf_counter() - begun
    facts = {"requests": len(lines), "before": before, "now": done - before, "seconds": seconds}
    if as_json:
        print_json(facts)
    else:
        notes().print(f"{facts['now']} answers in {seconds:.1f} s, {before} were there before")


async def _run(service: Any, lines: Any, results: Any, tell: Callable[[Any], None]) -> None:
    inside = serve_part("inside").Inside(serve_part("app").make_app(service))
    going_on = serve_part("going_on")
    replicas = going_on.GoingOn(inside.ask, going_on.ALONE)
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
