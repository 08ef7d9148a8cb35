"""Options and output that several commands share."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console

from ggraph import InputError
from ggraph.env import MOST_THREADS
from ggraph.errors import CacheWarning, DraftWarning, FormatWarning, printable
from ggraph.lazy import lazy
from ggraph.verify import Rejected

from ..run.fetch import fetch_default
from ..run.hub import fetch_hub, fetch_tower
from ..run.load import Loaded, LoadedEncoder, device_names, load, load_served
from ..run.outputs import write_whole
from ..run.text import argument, utf8

if TYPE_CHECKING:
    from rich import progress
else:
    progress = lazy("rich.progress")

HfRepo = Annotated[
    str | None,
    typer.Option(
        "--hf-repo",
        "-hf",
        metavar="USER/REPO[:TYPE]",
        help="A model of the Hugging Face hub, fetched once.",
    ),
]


def model_named(text: str) -> Path:
    """A path. InputError for an empty one, as a shell's variable without a value is: it would mean
    this folder."""
    if not text:
        raise InputError("the path of a model is empty: expected a GGUF file or a folder")
    return Path(text)


ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        parser=model_named,
        metavar="<path>",
        help="GGUF file or Hugging Face folder; default: SmolLM2-135M-Instruct, fetched once.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, max=MOST_THREADS, help="CPU threads.")
]
Context = Annotated[
    int | None,
    typer.Option(
        "--ctx-size", "-c", help="Context in tokens; 0: all that the model was trained for."
    ),
]
Adapters = Annotated[
    list[Path] | None,
    typer.Option("--lora", help="A LoRA adapter: GGUF file, or PEFT's folder; repeatable."),
]
ScaledAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-scaled", metavar="PATH:NUMBER", help="The same times a number; repeatable."
    ),
]
Devices = Annotated[
    str, typer.Option("--device", help="Devices in order of preference, such as cpu,sim0.")
]
WithProfile = Annotated[
    bool, typer.Option("--profile", help="Answer once more, and show the time of every op.")
]


Images = Annotated[
    list[Path] | None, typer.Option("--image", help="An image before the prompt; repeatable.")
]


@dataclass(frozen=True)
class Prompt:
    """What is asked: an argument, as in llama.cpp an option, or a file."""

    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = None
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The same as an option.")
    ] = None
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file with it.")] = None

    @property
    def text(self) -> str:
        """The prompt. InputError where there is none, or several."""
        given = [x for x in (self.prompt, self.prompt_option, self.file) if x is not None]
        if len(given) != 1:
            raise InputError(f"expected one prompt (PROMPT, -p or -f), got {len(given)}")
        return read_file(self.file) if self.file is not None else read_prompt(str(given[0]))


@dataclass(frozen=True)
class ServedModel:
    """Which model runs where, and how exactly."""

    model: ModelPath = None
    hf_repo: HfRepo = None
    ctx_size: Context = None
    cache_type: Annotated[str, typer.Option(help="Keys and values as f32, f16 or q8_0.")] = "f16"
    cache_type_k: Annotated[str | None, typer.Option("--cache-type-k", "-ctk", hidden=True)] = (
        None  # llama.cpp has two; ggraph keeps both in one type
    )
    cache_type_v: Annotated[str | None, typer.Option("--cache-type-v", "-ctv", hidden=True)] = None
    threads: Threads = None
    device: Devices = "cpu"
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations (slower).")] = False
    lora: Adapters = None
    lora_scaled: ScaledAdapters = None
    mmproj: Annotated[
        Path | None, typer.Option(help="GGUF file with the model's tower for images.")
    ] = None

    def __post_init__(self) -> None:
        kinds = [(t or self.cache_type).lower() for t in (self.cache_type_k, self.cache_type_v)]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"-ctk {self.cache_type_k or self.cache_type} -ctv "
                f"{self.cache_type_v or self.cache_type}: keys and values have one type here; "
                "give both the same, or --cache-type"
            )

    @property
    def path(self) -> Path:
        """Where the model lies, once it is fetched."""
        return model_path(self.model, self.hf_repo)

    def seeing(self) -> Self:
        """The same with the tower that its repository has beside it, fetched."""
        if self.hf_repo is None or self.mmproj is not None:
            return self
        return replace(self, mmproj=fetch_tower(self.hf_repo, note))

    @property
    def how(self) -> dict[str, Any]:
        """How it is loaded, by the names that `load` has, and a replica's options."""
        kind = (self.cache_type_k or self.cache_type).lower()
        return {
            "ctx_size": self.ctx_size, "threads": self.threads, "exact": self.exact,
            "cache_type": kind, "lora": self._adapters, "mmproj": self.mmproj,
        }  # fmt: skip

    @property
    def _adapters(self) -> list[tuple[Path, float]]:
        """Adapters and what each is multiplied by. InputError for what is no number."""
        found = [(path, 1.0) for path in self.lora or ()]
        for text in self.lora_scaled or ():
            path, _, factor = text.rpartition(":")
            try:
                found.append((Path(path), float(factor)))
            except ValueError:
                raise InputError(f"--lora-scaled {text}: expected PATH:NUMBER") from None
        return found

    def load(self, path: Path, head: Path | None = None, **more: Any) -> Loaded:
        """The model at `path`, with a head where given; `more` as `load` has it."""
        return load(path, devices=device_names(self.device), head=head, **self.how, **more)

    def load_served(self, path: Path, head: Path | None, texts: int) -> Loaded | LoadedEncoder:
        """The same, or an encoder that reads up to so many texts a step."""
        return load_served(path, texts, devices=device_names(self.device), head=head, **self.how)


@dataclass(frozen=True)
class ModelOptions(ServedModel):
    """The same, of a model that answers here and now."""

    profile: WithProfile = False

    def load(self, path: Path, head: Path | None = None, **more: Any) -> Loaded:
        """As `ServedModel.load`, able to time every op where that is asked. Where a prompt's steps
        had kernels to compile, those of the rounds come before the answer, rather than amid it."""
        found = super().load(path, head, profile=self.profile, **more)
        found.engine.early = lambda: COMPILING.count > 0
        return found


def terminal(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Text as it is: what files and models are called is no markup, and no code of a picture."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def notes() -> Console:
    """Where everything goes that is not the answer."""
    COMPILING.clear()
    return terminal(stderr=True)


def note(text: str) -> None:
    """A word beside the answer."""
    notes().print(text, style="dim", soft_wrap=True)


def complain(error: BaseException | str) -> None:
    """One line on standard error, never wrapped and never read as markup. What a file or a program
    is called cannot make it two, nor move the cursor; a plan's refusal has lines of its own."""
    said = str(error) if isinstance(error, Rejected) else printable(str(error))
    notes().print(f"ggraph: {said}", markup=False, soft_wrap=True)


def show_warnings() -> None:
    """What ggraph warns of becomes a line of its own; the warnings of others stay as they are."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, (CacheWarning, DraftWarning, FormatWarning)):
            complain(str(message))
        else:
            before(message, category, *place, **more)

    warnings.showwarning = show


@dataclass
class CompilingLine:
    """Says, while the first run on a processor compiles its kernels, which one it is at."""

    count: int = 0
    shown: bool = False  # a line without an end stands on the terminal
    muted: bool = False  # the answer has begun
    late: int = 0  # kernels since

    def __call__(self, name: str) -> None:
        """One line at first; where it is a terminal, it goes on counting in place."""
        self.count += 1
        console, text = notes(), "compiling kernels for this processor"
        if self.muted:
            self.late += 1
            return
        if console.is_terminal:
            line = f"{text} ({self.count}: {name})"[: console.width - 1]
            console.file.write(f"\r\x1b[K\x1b[2m{line}\x1b[0m")
            console.file.flush()
            self.shown = True
        elif self.count == 1:
            note(text)

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self.shown = False

    @property
    def confession(self) -> str:
        """A line for the figures under an answer that had to wait for kernels in its middle."""
        return f"\n{self.late} kernels were compiled behind the first token" if self.late else ""

    def mute(self) -> None:
        """Take the line away for good: from here on the terminal belongs to the answer."""
        self.clear()
        self.muted = True


COMPILING = CompilingLine()


def model_path(given: Path | None, repo: str | None = None) -> Path:
    """The given path, or the model of a repository, or the default model, each fetched with a word
    about it on standard error. InputError where both are named, or what is asked is not there."""
    if given is not None and repo is not None:
        raise InputError(f"-m {given} and -hf {repo}: expected one model")
    if given is not None:
        return given
    if repo is not None:
        return fetch_hub(repo, note)
    with _bar() as report:
        return fetch_default(report)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback; the bar appears with the first report, or a line for each part of the
    work where standard error is no terminal."""
    if not notes().is_terminal:
        told: set[str] = set()

        def tell(what: str, done: int, total: int) -> None:
            if what not in told:
                told.add(what)
                note(f"{what} the default model ({total / 1e6:.0f} MB)")

        yield tell
        return
    said = progress.TextColumn("{task.description}")
    columns = (said, progress.BarColumn(), progress.DownloadColumn())
    with progress.Progress(*columns, console=notes(), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{what} the default model", total=total)
            bar.update(tasks[what], completed=done)

        yield report


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, to be told how many there are of so many."""
    console = notes()
    columns = (progress.TextColumn(what), progress.BarColumn(), progress.MofNCompleteColumn())
    hidden = not console.is_terminal
    with progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def timed(tokens: int, per_second: float) -> str:
    """Tokens and their speed; the first one's is the prompt's, so that one alone has none."""
    count = f"{tokens} token{'' if tokens == 1 else 's'}"
    return f"{count} at {per_second:.1f}/s" if per_second else count


def print_json(value: Any) -> None:
    """One object on one line."""
    COMPILING.clear()
    print(json.dumps(value, ensure_ascii=False))


def apart(written: Path | None, *read: Path | None) -> None:
    """InputError where what is to be written is one of the files that are `read`, or one in a
    folder that is, under whatever name or link: it would be lost. And where it is `-`, by which
    nobody means a file."""
    if written is not None and str(written) == "-":
        raise InputError("cannot write -: expected the name of a file")
    for source in read:
        if written is None or source is None:
            continue
        try:
            inside = list(source.iterdir()) if source.is_dir() else []
            lost = next((f for f in (source, *inside) if _same(written, f)), None)
        except OSError:
            continue  # who reads it will say why that cannot be
        if lost is not None:
            raise InputError(f"cannot write {written}: it is {lost}, which this command needs")


def _same(a: Path, b: Path) -> bool:
    both = a.exists() and b.exists()
    return a.samefile(b) if both else os.path.realpath(a) == os.path.realpath(b)


def write_text(path: Path, text: str) -> None:
    """The text as a file, whole or not at all; InputError where it cannot be written."""
    write_whole(path, text.encode())


def standard_input(most: int = -1) -> bytes:
    """Up to `most` bytes of standard input, or all of it. InputError where it was closed."""
    if sys.stdin is None:
        raise InputError("standard input is closed")
    return sys.stdin.buffer.read(most)


def read_file(path: Path) -> str:
    """A prompt's file. InputError where it cannot be read, or holds nothing, or no text."""
    try:
        return _asked(utf8(path.read_bytes(), str(path)))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`. InputError when there is nothing, or no text."""
    if prompt == "-":
        text = utf8(standard_input(), "standard input")
    else:
        text = argument(prompt, "the prompt")
    return _asked(text)


def _asked(text: str) -> str:
    if not text.strip():
        raise InputError("the prompt is empty")
    return text
