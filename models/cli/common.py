"""Options and output that several commands share."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from ggraph import InputError
from ggraph.errors import CacheWarning

from ..run.fetch import fetch_default
from ..run.load import Loaded, load
from ..run.text import argument, utf8

ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        help="GGUF file or Hugging Face folder; default: SmolLM2-135M-Instruct, fetched once.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads.")]
Context = Annotated[int | None, typer.Option("--ctx-size", "-c", help="Context in tokens.")]
Devices = Annotated[
    str, typer.Option("--device", help="Devices in order of preference, such as cpu,sim0.")
]
WithProfile = Annotated[
    bool, typer.Option("--profile", help="Answer once more, and show the time of every op.")
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model runs where, and how exactly."""

    model: ModelPath = None
    ctx_size: Context = None
    cache_type: Annotated[str, typer.Option(help="Keys and values as f32, f16 or q8_0.")] = "f16"
    threads: Threads = None
    device: Devices = "cpu"
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations (slower).")] = False
    profile: WithProfile = False

    def load(self, path: Path, head: Path | None, device_draft: str | None) -> Loaded:
        """The model at `path`, with a head and a device of its own for drafts where given."""
        return load(
            path,
            ctx_size=self.ctx_size,
            threads=self.threads,
            devices=device_names(self.device),
            device_draft=device_draft,
            head=head,
            exact=self.exact,
            profile=self.profile,
            cache_type=self.cache_type,
        )


def notes() -> Console:
    """Where everything goes that is not the answer."""
    return Console(stderr=True, highlight=False)


def complain(error: BaseException) -> None:
    """One line on standard error, never wrapped and never read as markup."""
    notes().print(f"ggraph: {error}", markup=False, soft_wrap=True)


def show_warnings() -> None:
    """What ggraph warns of becomes a line of its own; the warnings of others stay as they are."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, CacheWarning):
            notes().print(f"ggraph: {message}", markup=False, soft_wrap=True)
        else:
            before(message, category, *place, **more)

    warnings.showwarning = show


@dataclass
class CompilingLine:
    """Says, while the first run on a processor compiles its kernels, which one it is at."""

    console: Console
    count: int = 0

    def __call__(self, name: str) -> None:
        """One line at first; where it is a terminal, it goes on counting in place."""
        self.count += 1
        text = "first run on this processor: compiling kernels, which are kept"
        if self.console.is_terminal:
            self.console.print(f"[dim]{text} ({self.count}: {name})[/dim]\x1b[K", end="\r")
        elif self.count == 1:
            self.console.print(f"[dim]{text}[/dim]", soft_wrap=True)


def model_path(given: Path | None, quiet: bool) -> Path:
    """The given path, or the default model with a progress bar while it is fetched."""
    if given is not None:
        return given
    with _bar(quiet) as report:
        return fetch_default(report)


@contextmanager
def _bar(quiet: bool) -> Iterator[Any]:
    """A progress callback; the bar appears with the first report."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=notes(), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(f"{what} the default model", total=total)
            progress.update(tasks[what], completed=done)

        yield report


def device_names(text: str) -> list[str]:
    """Names from a comma-separated list. InputError when it is empty."""
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise InputError(f"--device {text!r} names no device")
    return names


def print_json(value: Any) -> None:
    """One object on one line."""
    print(json.dumps(value, ensure_ascii=False))


def write_text(path: Path, text: str) -> None:
    """The text as a file. InputError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`. InputError when there is nothing, or no text."""
    if prompt == "-":
        text = utf8(sys.stdin.buffer.read(), "standard input")
    else:
        text = argument(prompt, "the prompt")
    if not text.strip():
        raise InputError("the prompt is empty")
    return text
