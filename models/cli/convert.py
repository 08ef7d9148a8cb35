"""`ggraph convert` and `ggraph quantize`: checkpoints to GGUF."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ggraph import InputError
from ggraph.formats.gguf import Progress as Report
from ggraph.formats.imatrix import read_importance
from ggraph.text.hf import tokenizer_file

from ..eagle3 import Head
from ..heads.assistant import AssistantHead
from ..heads.dflash import BlockHead
from ..heads.layouts import open_head
from ..heads.mtp import NextHead
from ..registry import Model, open_model
from ..run.convert import (
    FILE_TYPES,
    assistant_to_gguf,
    dflash_to_gguf,
    head_to_gguf,
    model_to_gguf,
    tower_to_gguf,
)
from ..tower_files import tower_of
from .common import apart, counted, note

Weighed = Annotated[
    Path | None,
    typer.Option("--imatrix", help="How much columns count: a file of `imatrix` or of llama.cpp."),
]
Type = Annotated[str, typer.Option("--type", help=f"One of {', '.join(FILE_TYPES)}.")]


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder: a model, or a head.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="GGUF file to write.")],
    target: Annotated[
        Path | None, typer.Option(help="The head's target model; says that SOURCE is a head.")
    ] = None,
    type_name: Type = "f16",
    mmproj: Annotated[
        Path | None, typer.Option(help="GGUF file to write the model's tower for images to.")
    ] = None,
    imatrix: Weighed = None,
) -> None:
    """Write a model, or with --target an EAGLE-3 head or an assistant of Gemma 4, as GGUF. A tower
    for images goes to a file of its own, as llama.cpp has it.

    Examples:

      ggraph convert ./SmolVLM-256M-Instruct --out smolvlm.gguf --mmproj mmproj-smolvlm.gguf

      ggraph convert ./EAGLE3-LLaMA3.1-8B --target llama.gguf --out head.gguf --type q8_0
    """
    type_name = _checked(out, type_name, source, target, imatrix)
    if imatrix is not None and target is not None:
        raise InputError("--imatrix is of a model, not of a head (--target)")
    importance = None if imatrix is None else read_importance(imatrix)
    model = _speaking(source) if target is None else None
    tower = None if model is None else tower_of(model.checkpoint)
    if mmproj is not None:
        _checked(mmproj, type_name, source)
        if tower is None or mmproj == out:
            raise InputError(f"--mmproj {mmproj}: expected another file, and a model with a tower")
    with _bar(out) as report:
        if model is not None:
            model_to_gguf(model, out, type_name, report, importance)
        elif target is not None:
            aim = _speaking(target)
            head = open_head(source, aim)
            if isinstance(head, AssistantHead):
                assistant_to_gguf(head, out, type_name, report)
            elif isinstance(head, BlockHead):
                dflash_to_gguf(head, aim, out, type_name, report)
            elif isinstance(head, Head):
                head_to_gguf(head, aim, out, type_name, report)
            elif isinstance(head, NextHead):
                raise InputError(
                    f"{source} holds the layers that draft itself: leave --target out, and they "
                    "are written with the model"
                )
            else:
                raise InputError(f"{source} is an EAGLE-1 head, for which GGUF has no form")
    _tell(out, type_name)
    if tower is not None and mmproj is not None:
        tower_to_gguf(tower, mmproj, type_name)
        _tell(mmproj, type_name)
    elif tower is not None:
        note(f"{source} has a tower for images, which is not written: --mmproj names its file")


def quantize(
    source: Annotated[Path, typer.Argument(help="GGUF file or folder of a model.")],
    out: Annotated[Path, typer.Argument(help="GGUF file to write.")],
    type_name: Type = "q4_k_m",
    imatrix: Weighed = None,
) -> None:
    """Write a model with its matrices in another type.

    Examples:

      ggraph quantize model-f16.gguf model-q4_k_m.gguf --type q4_k_m

      ggraph quantize model-f16.gguf model-q3_k_m.gguf --type q3_k_m --imatrix model.imatrix.gguf
    """
    type_name = _checked(out, type_name, source, imatrix)
    importance = None if imatrix is None else read_importance(imatrix)
    with _bar(out) as report:
        model_to_gguf(_speaking(source), out, type_name, report, importance)
    _tell(out, type_name)


def _speaking(path: Path) -> Model:
    """The model at `path`, which must have a tokenizer: without one nothing can run the file."""
    model = open_model(path)
    of_file = model.checkpoint.format == "gguf"
    if of_file and "tokenizer.ggml.model" not in model.checkpoint.metadata:
        raise InputError(f"{path} has no tokenizer (tokenizer.ggml.model)")
    if not of_file and tokenizer_file(path) is None:
        raise InputError(f"{path} has no tokenizer (tokenizer.json)")
    return model


def _checked(out: Path, type_name: str, *sources: Path | None) -> str:
    """The type's name as it is known here; llama.cpp's are the same in capitals."""
    if type_name.lower() not in FILE_TYPES:
        raise InputError(f"--type {type_name!r}; known: {', '.join(FILE_TYPES)}")
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"cannot write {out}: no such folder, or it is one")
    apart(out, *sources)
    return type_name.lower()


def _tell(out: Path, type_name: str) -> None:
    """What was written."""
    print(f"{out}: {type_name}, {out.stat().st_size:,} bytes")


@contextmanager
def _bar(out: Path) -> Iterator[Report]:
    with counted(f"writing {out.name}") as count:
        yield lambda name, done, total: count(done, total)
