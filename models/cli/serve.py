"""`ggraph serve`: the model for other programs, over HTTP."""

import asyncio
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.serving.disk import Disk

from ..registry import Model
from ..run.drafting import smaller_model
from ..run.load import Loaded, LoadedEncoder
from ..run.shipped import head_for
from ..serve.settings import Settings
from .common import COMPILING, AsJson, ServedModel, notes, print_json
from .flat import flat
from .on_ray import RayFlags

Parallel = Annotated[
    int, typer.Option("--parallel", "-np", help="Answers that are computed together.")
]
Queue = Annotated[int, typer.Option(help="Answers that may wait beside those.")]
DraftMax = Annotated[int, typer.Option(help="Most drafted tokens; 0: no drafts.")]
CacheTokens = Annotated[
    int | None,
    typer.Option(help="Tokens that the cache holds, of all texts; default: four contexts."),
]
DiskCache = Annotated[
    Path | None, typer.Option(help="A folder for what the cache forgets; default: none.")
]
Origins = Annotated[list[str] | None, typer.Option(help="A site whose pages may ask; repeatable.")]
Alias = Annotated[
    str, typer.Option(help="What clients are told that the model is called; default: its name.")
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Log what is asked, too.")]
ServedHead = Annotated[
    Path | None, typer.Option(help="Draft head: folder or GGUF; SmolLM2 has one.")
]
ModelDraft = Annotated[
    Path | None, typer.Option("--model-draft", "-md", help="A smaller model to draft with.")
]
KeyFile = Annotated[
    Path | None, typer.Option(help="API keys, one a line, # a comment; default: none is asked.")
]

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
USUAL = re.compile(r"^http:.*:80$|^https:.*:443$")  # the scheme's port, which browsers leave out


@flat
def serve(
    on: ServedModel,
    where: RayFlags,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 8080,
    cache_tokens: CacheTokens = None,
    disk_cache: DiskCache = None,
    disk_cache_mb: Annotated[int, typer.Option(help="MB that the folder may hold.")] = 4096,
    parallel: Parallel = Settings.parallel,
    queue: Queue = Settings.queued,
    draft_max: DraftMax = Settings.draft,
    head: ServedHead = None,
    model_draft: ModelDraft = None,
    no_head: Annotated[bool, typer.Option("--no-head", help="No draft head.")] = False,
    api_key_file: KeyFile = None,
    cors_origin: Origins = None,
    alias: Alias = "",
    log: Annotated[bool, typer.Option("--log", help="A line for each request.")] = False,
    log_prompts: LogPrompts = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model over HTTP, in the dialect of OpenAI's API. Ends after SIGTERM or Ctrl-C, when
    open answers have ended; a second signal ends those.

    Examples:

      ggraph serve

      ggraph serve -m qwen3.gguf --port 9000 --parallel 32 --api-key-file keys.txt

      ggraph serve -m llama.gguf --head llama-eagle3/

      ggraph serve --ray --replicas 3

      curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "Once upon a time"}'
    """
    bounds: dict[str, Any] = {
        "parallel": parallel, "queued": queue, "draft": draft_max, "keys": _keys(api_key_file),
        "origins": _origins(cors_origin or ()), "log_prompts": log_prompts, "alias": alias,
    }  # fmt: skip
    if where.ray and (disk_cache is not None or log):
        raise InputError("--disk-cache and --log are for one server, not for --ray")
    # Before the model is fetched and loaded, which would be for nothing where something is missing
    part = serve_part("ray_serving", "ray") if where.ray else serve_part("server")
    path = on.path
    head = _head(path, head, no_head, model_draft) if draft_max else None
    if where.ray:
        if model_draft is not None:
            raise InputError("--model-draft: replicas on Ray draft without a smaller model")
        options = where.options(on, path, head=head, cache_tokens=cache_tokens, **bounds)
        ready = _ready(alias or path.stem, as_json)
        part.serve_on_ray(options, host, port, where.ray_address, ready)
        return
    settings = Settings(**bounds)
    with closing(on.load_served(path, head, parallel)) as m, _ending():
        beside = _beside(m, on.mmproj, head, disk_cache, disk_cache_mb, model_draft)
        service = serve_part("engine").service_of(m, settings, cache_tokens, *beside)
        ready = _ready(service.name, as_json)
        part.serve(service, host, port, ready, log=log or log_prompts)


def _ready(name: str, as_json: bool) -> Callable[[str], None]:
    """Says where the server is."""

    def ready(address: str) -> None:
        if as_json:
            print_json({"model": name, "url": address})
            sys.stdout.flush()
            return
        COMPILING.clear()
        notes().print(f"ggraph: {name} at {address}", markup=False, soft_wrap=True)

    return ready


def serve_part(name: str, extra: str = "serve") -> Any:
    """A module of `models.serve`. InputError where what it stands on is missing."""
    try:
        return importlib.import_module(f"..serve.{name}", __package__)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("ggraph", "models")):
            raise
        raise InputError(
            f"{error.name} is not installed: pip install 'ggraph-runtime[{extra}]'"
        ) from None


def _beside(
    m: Loaded | LoadedEncoder,
    mmproj: Path | None,
    head: Path | None,
    disk_cache: Path | None,
    disk_cache_mb: int,
    model_draft: Path | None,
) -> tuple[Any, Model | None]:
    """The disk for what the cache forgets, and a smaller model that drafts, where they are named.
    InputError for one of these, a draft head or a tower beside an encoder."""
    given = {
        "--head": head, "--disk-cache": disk_cache, "--model-draft": model_draft,
        "--mmproj": mmproj,
    }  # fmt: skip
    if isinstance(m, LoadedEncoder):
        for option in (name for name, path in given.items() if path is not None):
            raise InputError(f"{option}: {m.model.name} is an encoder, which has no use for it")
        return None, None
    smaller = None if model_draft is None else smaller_model(m, model_draft)
    return _disk(m, disk_cache, disk_cache_mb), smaller


def _disk(m: Loaded, folder: Path | None, most_mb: int) -> Any:
    """What is kept in a folder. InputError where that cannot be used."""
    if folder is None:
        return None
    return Disk(folder, serve_part("identity").of(m), most_mb * 1_000_000)


def _head(path: Path, head: Path | None, none: bool, model_draft: Path | None) -> Path | None:
    """The draft head that was named, or the model's own. InputError where one was named, and none
    was wanted."""
    if none and head is not None:
        raise InputError(f"--no-head and --head {head}: expected one")
    return None if none else head or (None if model_draft else head_for(path))


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """The sites. InputError for what no browser would ever send as one: it would match nothing."""
    for origin in given:
        if origin not in ("*", "null") and (not ORIGIN.fullmatch(origin) or USUAL.search(origin)):
            raise InputError(
                f"--cors-origin {origin!r}: expected SCHEME://HOST or SCHEME://HOST:PORT in small "
                "letters, without a path or the scheme's own port, such as https://example.org"
            )
    return tuple(given)


@contextmanager
def _ending() -> Iterator[None]:
    """What a second Ctrl-C cuts off is no fault for the log."""
    log = logging.getLogger("uvicorn.error")
    log.addFilter(_is_fault)
    try:
        yield
    finally:
        log.removeFilter(_is_fault)


def _is_fault(record: logging.LogRecord) -> bool:
    cut = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cut and not record.getMessage().rstrip().endswith("CancelledError")


def _keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file. InputError where it cannot be read, or holds none."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # a mark is no part of a key
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    words = [line.strip() for line in lines]
    keys = tuple(w for w in words if w and not w.startswith("#"))
    if not keys:
        raise InputError(f"{path} holds no API key")
    return keys
