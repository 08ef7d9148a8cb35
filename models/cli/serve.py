"""`ggraph serve`: the model for other programs, over HTTP."""

import importlib
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError

from ..run.load import load
from .common import (
    COMPILING,
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

EXAMPLES = """Examples:

  ggraph serve

  ggraph serve -m qwen3.gguf --port 9000 --parallel 32 --api-key-file keys.txt

  curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time"}'
"""
Parallel = Annotated[
    int, typer.Option("--parallel", "-np", help="Answers that are computed together.")
]
CacheTokens = Annotated[
    int | None,
    typer.Option(help="Tokens that the cache holds, of all texts; default: four contexts."),
]


def serve(
    model: ModelPath = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8080,
    ctx_size: Context = None,
    cache_tokens: CacheTokens = None,
    cache_type: Annotated[str, typer.Option(help="Keys and values as f32, f16 or q8_0.")] = "f16",
    parallel: Parallel = 16,
    queue: Annotated[int, typer.Option(help="Answers that may wait beside those.")] = 256,
    draft_max: Annotated[int, typer.Option(help="Most drafted tokens; 0: no drafts.")] = 8,
    threads: Threads = None,
    device: Devices = "cpu",
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations (slower).")] = False,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with one API key a line; default: none is asked.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may ask; repeatable.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="A line for each request.")] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log what is asked, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model over HTTP, in the dialect of OpenAI's API. Ends after SIGTERM or Ctrl-C, when
    open answers have ended; a second signal ends those."""
    part = _serve_part
    settings = part("settings").Settings(
        parallel=parallel,
        queued=queue,
        draft=draft_max,
        keys=_keys(api_key_file),
        origins=tuple(cors_origin or ()),
        log_prompts=log_prompts,
    )
    options: dict[str, Any] = {"ctx_size": ctx_size, "threads": threads, "exact": exact}
    devices, kind = device_names(device), cache_type.lower()
    with closing(load(model_path(model), devices=devices, cache_type=kind, **options)) as m:
        slots = 4 * m.runner.context if cache_tokens is None else cache_tokens
        service = part("engine").Service(m, settings, slots)

        def ready(address: str) -> None:
            if as_json:
                print_json({"model": m.model.name, "url": address})
                sys.stdout.flush()
                return
            COMPILING.clear()
            notes().print(f"ggraph: {m.model.name} at {address}", markup=False, soft_wrap=True)

        part("server").serve(service, host, port, ready, log=log or log_prompts)


serve.__doc__ = f"{serve.__doc__}\n\n{EXAMPLES}"


def _serve_part(name: str) -> Any:
    """A module of `models.serve`. InputError where what it stands on is missing."""
    try:
        return importlib.import_module(f"..serve.{name}", __package__)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("ggraph", "models")):
            raise
        raise InputError(
            f"{error.name} is not installed: pip install 'ggraph-runtime[serve]'"
        ) from None


def _keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file. InputError where it cannot be read, or holds none."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise InputError(f"{path} holds no API key")
    return keys
