"""The runner: `ggraph COMMAND`, also `python -m models COMMAND`.

One place turns every deliberate error into one line on stderr and a non-zero exit status: 2 for
input that cannot be served, 1 for a check that failed, 130 after Ctrl-C.
"""

import io
import os
import sys
from typing import Annotated

import typer

from ggraph import GgraphError, __version__
from ggraph.backends.cpu.jit import WATCHERS

from .bench import bench_app
from .common import CompilingLine, complain, notes, show_warnings
from .convert import convert, quantize
from .eagle3 import eagle3
from .generate import generate
from .hazards import hazards_app
from .plan import plan
from .train import train_eagle3
from .verify import verify

app = typer.Typer(
    name="ggraph",
    help="Run language models through memory plans that are proved before they run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(plan)
app.command()(verify)
app.command()(eagle3)
app.command()(convert)
app.command()(quantize)
app.command()(train_eagle3)
app.add_typer(hazards_app)
app.add_typer(bench_app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ggraph {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models through memory plans that are proved before they run."""


def main() -> None:
    """Entry point: run a command and end with its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    show_warnings()
    WATCHERS.append(CompilingLine(notes()))
    try:
        app()
    except GgraphError as error:
        complain(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()  # the reader went away: `ggraph plan | head`
        sys.exit(0)
    except (OSError, MemoryError) as error:
        _drop_output()
        complain(error if str(error) else MemoryError("out of memory"))
        sys.exit(1)


def _drop_output() -> None:
    """Send what is still buffered nowhere, lest the flush at exit fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
