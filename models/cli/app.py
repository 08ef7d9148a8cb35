"""The runner: `ggraph COMMAND`, also `python -m models COMMAND`.

One place turns every deliberate error into one line on stderr and a non-zero exit status: 2 for
input that cannot be served, 1 for a check that failed, 130 after Ctrl-C, 143 after SIGTERM. A
reader that goes away (`ggraph plan --full | head`) is no error.
"""

import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ggraph import GgraphError, InputError, __version__
from ggraph.backends.cpu.codegen.jit import WATCHERS

from ..door import open_arch_file
from .common import COMPILING, complain, show_warnings
from .interrupt import STATUS, ending

# Each command's module and name within it. A module is imported when its command is asked for:
# all of them together take as long as the rest of a start.
COMMANDS = {
    "generate": "generate:generate",
    "chat": "chat:chat",
    "serve": "serve:serve",
    "batch": "batch:batch",
    "plan": "plan:plan",
    "verify": "verify:verify",
    "record": "record:record",
    "torture": "record:torture",
    "eagle3": "eagle3:eagle3",
    "convert": "convert:convert",
    "quantize": "convert:quantize",
    "imatrix": "judge:imatrix",
    "perplexity": "judge:perplexity",
    "train-eagle3": "train:train_eagle3",
    "hazards": "hazards:hazards_app",
    "import": "importers:import_app",
    "bench": "bench:bench_app",
}


class Command(TyperCommand):
    """A command, to which `-ngl` is no `-n gl`: llama.cpp's options have several letters."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The values of its options. What is none, or an option of one letter that is none, may be
        another option's name."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's, which typer brings under names of its own
            unknown, message = getattr(error, "option_name", None), getattr(error, "message", "")
            for a in given:
                named = a[:2] == unknown or repr(a[2:]) in message
                if named and re.fullmatch("-[a-z]{2}[a-z-]*", a):
                    ctx.fail(f"No such option: {a}")
            raise


def flowing(text: str | None) -> str:
    """Help with a line for each paragraph, which a terminal breaks where it ends; what is
    indented stays as it is."""
    parts = (text or "").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in parts)


class Commands(TyperGroup):
    """The commands; what they print may be wanted by nobody any more."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands.update(names)  # for help and for suggestions

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """One command, whose module is imported now."""
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        found = getattr(import_module(f".{module}", __package__), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cls=Command)(found)
            found = alone
        command = get_command(found)
        for c in (command, *getattr(command, "commands", {}).values()):
            c.help = flowing(c.help)
        return command

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command that was named, to the end of its output."""
        try:
            done = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
            return done
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit from None


app = typer.Typer(
    name="ggraph",
    cls=Commands,
    help="Run language models through memory plans that are proved before they run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ggraph {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    arch_file: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file with an architecture of yours (docs/architectures.md)."),
    ] = None,
) -> None:
    """Run language models through memory plans that are proved before they run."""
    for path in arch_file or ():
        open_arch_file(path)


def main() -> None:
    """Entry point: run a command and end with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    show_warnings()
    WATCHERS.append(COMPILING)
    try:
        with ending():
            app()
    except GgraphError as error:
        complain(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(STATUS)
    except (OSError, MemoryError) as error:
        _drop_output()
        complain(error if str(error) else MemoryError("out of memory"))
        sys.exit(1)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        complain(InputError("the system starts no further thread: try --threads 1"))
        sys.exit(1)


def _drop_output() -> None:
    """Send what is still buffered nowhere, lest the flush at exit fail once more."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
