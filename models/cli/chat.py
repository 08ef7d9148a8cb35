"""`ggraph chat`: a conversation in the terminal."""

import locale
import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from importlib import import_module
from select import select
from termios import FIONREAD
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from ggraph import GgraphError, InputError

from ..images import read_images
from ..run.generation import Drafting, Generation
from ..run.load import Loaded, with_images
from ..run.text import argument, utf8
from .common import COMPILING, Images, ModelOptions, complain, note, terminal, timed
from .draft import DraftFlags, speculation_line
from .flat import flat
from .generate import NPredict, SamplerFlags
from .interrupt import answering

HELP = (
    "/image FILE shows one with the next line, /reset forgets the conversation, /stats tells of "
    "the last answer, /quit ends; Ctrl-C stops an answer"
)
IMAGE = "/image "
WAY = "/reset forgets the conversation, -c at the start gives more"


@dataclass
class Talk:
    """A conversation with a model. `system` stands before everything that is said."""

    m: Loaded
    sampler: SamplerFlags
    drafting: Drafting | None
    limit: int
    system: str | None
    console: Console
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)  # in the order of the messages
    waiting: list[bytes] = field(default_factory=list)  # to be shown with the next one
    last: Generation | None = None

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.images, self.last = [], None

    def say(self, text: str) -> None:
        """Have the model answer, as it comes; what a Ctrl-C leaves of it counts as said."""
        shown, self.waiting = self.waiting, []
        self.messages.append({"role": "user", "content": with_images(text, len(shown))})
        self.images += shown
        said, run = list[str](), None
        with answering() as state:
            try:
                self.last = run = self._asked()
                for piece, drafted in _pieces(run, self.drafting):
                    COMPILING.mute()
                    said.append(piece)
                    self.console.print(Text(piece, "green" if drafted else ""), end="")
                    self.console.file.flush()
                state.done()
            except KeyboardInterrupt:
                self.console.print(" (stopped)", style="dim", end="")
            except GgraphError:
                self.messages.pop()
                del self.images[len(self.images) - len(shown) :]
                raise
        self.console.print()
        self.messages.append({"role": "assistant", "content": "".join(said)})
        if run is not None and run.stopped == "context":
            most = self.m.runner.context
            note(f"the answer was cut: the context of {most} tokens is full ({WAY})")

    def _asked(self) -> Generation:
        """What was said, to be answered. InputError where it does not fit the context any more."""
        ids, most = self.m.chat_ids(self.messages, self.images), self.m.runner.context
        lines = [m for m in self.messages if m["role"] == "user"]
        if len(ids) > most and len(lines) > 1:
            raise InputError(f"this makes {len(ids)} tokens, but the context holds {most} ({WAY})")
        return Generation(self.m, ids, self.sampler.config, self.limit)

    def figures(self) -> str:
        """How long the last answer took, and what drafts brought."""
        if self.last is None:
            return "nothing was said yet"
        s, drafts = self.last.statistics, self.last.speculation
        return (
            f"prompt {s.prompt_tokens} tokens at {s.prompt_per_second:.0f}/s · answer "
            f"{timed(s.new_tokens, s.decode_per_second)}"
            + (f"\n{speculation_line(drafts)}" if drafts is not None else "")
            + COMPILING.confession
        )


def _pieces(run: Generation, drafting: Drafting | None) -> Iterator[tuple[str, bool]]:
    """The answer's pieces, and whether each was drafted: then one more came in the same round."""
    held, round_ = "", 0
    for piece in run.run(drafting):
        now = run.rounds[-1] if run.rounds else 0
        if held:
            yield held, now == round_ > 0
        held, round_ = piece, now
    if held:
        yield held, False


@flat
def chat(
    on: ModelOptions,
    sampler: SamplerFlags,
    drafts: DraftFlags,
    n_predict: NPredict = -1,
    system: Annotated[
        str | None, typer.Option("--system", "-sys", help="System message of the chat.")
    ] = None,
    image: Images = None,
) -> None:
    """Talk to a model; drafted tokens that were kept are green. A line that begins with / is a
    command: /image FILE, /reset, /stats, /quit.

    Examples:

      ggraph chat

      ggraph chat -m qwen3.gguf --system "Answer in one sentence." --draft suffix
    """
    system = None if system is None else argument(system, "--system")
    path = on.path
    head = drafts.head_of(path)
    drafting = drafts.drafting(head, True, path)
    console = terminal(soft_wrap=True)
    shown = read_images(image or ())
    on = on.seeing() if shown else on
    with closing(on.load(path, head, device_draft=drafts.device_draft)) as m:
        talk = Talk(m, sampler, drafting, n_predict, system, console)
        talk.waiting = shown
        if sys.stdin is not None and sys.stdin.isatty():
            note(f"{m.model.name} · {HELP}")
        for line in _lines():
            if line == "/quit":
                return
            _answered(talk, line)


def _answered(talk: Talk, line: str) -> None:
    """Obey a command, or have the model answer; a refusal is one line, and the talk goes on."""
    if line == "/reset":
        talk.reset()
    elif line == "/stats":
        note(talk.figures())
    elif line.startswith("/") and not line.startswith(IMAGE):
        note(HELP)
    elif line:
        try:
            said = argument(line, "the line")
            if said.startswith(IMAGE):
                talk.waiting += read_images([said.removeprefix(IMAGE).strip()])
            else:
                talk.say(said)
        except GgraphError as error:
            complain(error)


def _lines() -> Iterator[str]:
    """What the user says, until the end of the input; a Ctrl-C at the prompt ends it too."""
    if sys.stdin is None:
        raise InputError("standard input is closed")
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            yield utf8(raw, "standard input").strip()
        return
    _editable()
    while not _ended(sys.stdin):
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _ended(stdin: TextIO) -> bool:
    """Whether the end of the input was typed while an answer was written. The terminal then has
    something to read that is 0 bytes long; readline, which reads keys, takes it for another key."""
    if not select([stdin], [], [], 0)[0]:
        return False
    count = ioctl(stdin, FIONREAD, bytes(4))
    return not any(count) and not os.read(stdin.fileno(), 1)


def _editable() -> None:
    """Have lines edited, and what was said before at the arrows, where the locale lets readline
    take letters beyond ASCII for letters; Python may have been built without it."""
    if locale.getencoding().lower() == "utf-8":
        with suppress(ImportError):
            import_module("readline").parse_and_bind("tab: self-insert")
