"""`ggraph perplexity` and `ggraph imatrix`: what a model makes of a text."""

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ggraph import InputError
from ggraph.formats.imatrix import write_importance

from ..run.importance import seen
from ..run.load import Loaded, device_names, load
from ..run.perplexity import Judgement, chunked, judged
from .common import (
    AsJson,
    Devices,
    HfRepo,
    ModelPath,
    Threads,
    apart,
    counted,
    model_path,
    print_json,
    read_file,
)

Text = Annotated[Path, typer.Argument(help="A file of text; the longer, the surer.")]
Size = Annotated[int, typer.Option("--chunk", help="Tokens that are read at a time.", min=2)]
Most = Annotated[int | None, typer.Option("--chunks", help="At most so many of these.", min=1)]


def perplexity(
    text: Text,
    model: ModelPath = None,
    hf_repo: HfRepo = None,
    base: Annotated[
        Path | None,
        typer.Option(help="A model of the same vocabulary, such as the one before quantisation."),
    ] = None,
    chunk: Size = 512,
    chunks: Most = None,
    threads: Threads = None,
    device: Devices = "cpu",
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations (slower).")] = False,
    as_json: AsJson = False,
) -> None:
    """How well a model foretells a text: e to the mean loss of a token, of those that have seen
    half a chunk and more. With --base also how far it is from another model.

    Examples:

      ggraph perplexity wiki.test.raw -m model-q4_k_m.gguf

      ggraph perplexity wiki.test.raw -m model-q4_k_m.gguf --base model-f16.gguf --chunks 50
    """
    path = model_path(model, hf_repo)
    said = read_file(text)

    def opened(which: Path) -> Loaded:
        devices = device_names(device)
        return load(which, ctx_size=chunk, threads=threads, devices=devices, exact=exact)

    with closing(opened(path)) as m:
        parts = chunked(m.tokenizer, said, chunk, chunks)
        with (
            closing(opened(base)) if base is not None else nullcontext() as other,
            counted("chunks") as report,
        ):
            if other is not None and chunked(other.tokenizer, said, chunk, chunks) != parts:
                raise InputError(f"{base} has other tokens for this text than {path}")
            found = judged(m.runner, parts, None if other is None else other.runner, report)
    if as_json:
        print_json(found.told())
    else:
        print("\n".join(_lines(found)))


def imatrix(
    text: Text,
    out: Annotated[Path, typer.Option("--out", "-o", help="GGUF file to write.")],
    model: ModelPath = None,
    hf_repo: HfRepo = None,
    chunk: Size = 512,
    chunks: Most = None,
    threads: Threads = None,
    device: Devices = "cpu",
) -> None:
    """How much each column of a model's matrices counts, seen while it reads a text: for `quantize
    --imatrix`, and for llama.cpp.

    Examples:

      ggraph imatrix calibration.txt -m model-f16.gguf --out model.imatrix.gguf
    """
    path = model_path(model, hf_repo)
    apart(out, path, text)
    said = read_file(text)
    with closing(
        load(path, ctx_size=chunk, threads=threads, devices=device_names(device), exact=True)
    ) as m:
        parts = chunked(m.tokenizer, said, chunk, chunks)
        with counted("chunks") as report, m.another() as session:
            found = seen(m.model, session, parts, report)
    write_importance(out, found, text.name, len(parts), chunk)
    print(f"{out}: {len(found)} matrices, {len(parts)} chunks of {chunk} tokens")


def _lines(found: Judgement) -> Iterator[str]:
    """The figures, a line each."""
    told = found.told()
    tokens = f"{told['tokens']} tokens of {told['chunks']} chunks"
    yield f"perplexity {told['perplexity']:.4f} ± {told['error']:.4f}, {tokens}"
    if "base" in told:
        base, far = told["base"], told["divergence"]
        same = far.pop("same likeliest token")
        own = f"{base['perplexity']:.4f} ± {base['error']:.4f}"
        yield f"of the base {own}, ratio {told['ratio']:.4f}"
        yield "divergence, nats: " + ", ".join(f"{n} {x:.5f}" for n, x in far.items())
        yield f"same likeliest token: {same:.2%}"
