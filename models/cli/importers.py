"""`ggraph import`: what other compilers have planned, as plan JSON for `ggraph verify`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ggraph import InputError
from ggraph.plan import Plan
from ggraph.plan_json import MAX_TEXT_BYTES, plan_to_json
from ggraph.record.executorch import plan_from_executorch
from ggraph.record.iree import plan_from_iree

from .common import apart, write_text

import_app = typer.Typer(
    name="import",
    help="Turn other compilers' plans into JSON for `ggraph verify`.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to write it; default: standard output.")
]


@import_app.command()
def iree(
    dump: Annotated[Path, typer.Argument(help="What iree-compile prints (docs/other_engines.md).")],
    function: Annotated[str | None, typer.Option(help="Default: the first that executes.")] = None,
    out: Out = None,
) -> None:
    """Import IREE's stream dialect, as printed before bindings are fused.

    Example: ggraph import iree dump.mlir | ggraph verify -
    """
    apart(out, dump)
    _write(plan_from_iree(_read(dump).decode(errors="replace"), function), out)


@import_app.command()
def executorch(
    program: Annotated[Path, typer.Argument(help="A .pte file.")],
    method: Annotated[str | None, typer.Option(help="Default: the first.")] = None,
    branches: Annotated[
        str, typer.Option(help="Which way the method goes: t or f for each condition in turn.")
    ] = "",
    out: Out = None,
) -> None:
    """Import the memory plan of an ExecuTorch program; of one that branches, a path.

    Example: ggraph import executorch model.pte | ggraph verify -

    Example: ggraph import executorch model.pte --branches tf | ggraph verify -
    """
    if not {*branches} <= {"t", "f"}:
        raise InputError(f"--branches {branches!r}: t or f for each condition in turn")
    apart(out, program)
    _write(plan_from_executorch(_read(program), method, [b == "t" for b in branches]), out)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if len(found) > MAX_TEXT_BYTES:
        raise InputError(f"{path} has more than {MAX_TEXT_BYTES} bytes")
    return found


def _write(plan: Plan, out: Path | None) -> None:
    text = json.dumps(plan_to_json(plan))
    if out is None:
        sys.stdout.write(text + "\n")
    else:
        write_text(out, text)
