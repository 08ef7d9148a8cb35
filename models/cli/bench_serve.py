"""`ggraph bench serve`: a server under many clients, beside llama.cpp's."""

import json
import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.env import thread_count

from ..bench.install import built
from ..bench.machine import machine
from ..bench.serve import Load, measure, our_printer, our_server, peer_server, printed
from ..registry import open_model
from .common import ModelPath, Threads, apart, model_path, note, write_text

PEER_CONTEXT = 256  # slots of llama.cpp's cache for each client, at least
SERVER, BUILD = "llama-server", "ggraph bench install llama.cpp --server"
Side = Callable[[Load, int], dict[str, Any]]  # what is measured for a load and a seed


def bench_serve(
    model: ModelPath = None,
    threads: Threads = None,
    clients: Annotated[str, typer.Option(help="Numbers of clients.")] = "1,4,8,16",
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 40,
    shared: Annotated[int, typer.Option(help="First tokens that all prompts share.")] = 0,
    new: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Alternating rounds; the table has medians.")] = 3,
    draft_max: Annotated[int, typer.Option(help="Most drafted tokens of ours; 0: none.")] = 0,
    peer: Annotated[
        str | None, typer.Option("--peer", help="llama.cpp's server: a program's name or path.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file.")
    ] = None,
) -> None:
    """Tokens per second of all clients together, the time to the first token and between tokens.

    Both servers run at once and are asked in turn, with the same prompts; `generate` is what who
    reads the command's output hears of one text at a time.

    Example: ggraph bench serve --peer llama-server --clients 1,8,64
    """
    path, count = model_path(model), thread_count() if threads is None else threads
    apart(out, path)
    numbers, binary = _numbers(clients), None if peer is None else _binary(peer)
    most, room = max(numbers), max(PEER_CONTEXT, prompt + new)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        vocabulary = open_model(path).vocab_size
        own = stack.enter_context(our_server(path, count, min(64, most), draft_max))
        sides: dict[str, Side] = {"ggraph": partial(measure, own, vocabulary)}
        if binary is not None:
            other = stack.enter_context(peer_server(binary, path, count, most, room))
            sides["llama.cpp"] = partial(measure, other, vocabulary)
        if 1 in numbers:
            printer = stack.enter_context(our_printer(path, count))
            one: dict[str, Side] = {**sides, "generate": partial(printed, printer, vocabulary)}
        for number in numbers:
            wanted = Load(number, prompt, new, shared)
            asked = one if number == 1 else sides
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
            for seed in range(rounds):
                for name, side in asked.items():
                    found[name].append(side(wanted, seed))
            rows += [{"side": name, **_median(f)} for name, f in found.items()]
            for row in rows[-len(asked) :]:
                print(_line(row), flush=True)
    if out is not None:
        write_text(out, json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        note(f"wrote {out}")


def _numbers(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() and 1 <= int(p) <= 256 for p in parts):
        raise InputError(f"--clients {text!r}: expected numbers from 1 to 256, such as 1,8,64")
    return [int(p) for p in parts]


def _binary(name: str) -> str:
    """A program on the path, or the server that was built here."""
    own = built("llama.cpp") if name == SERVER else None
    found = shutil.which(name) or (None if own is None else own.server)
    if found is None:
        raise InputError(f"--peer {name}: no such program (`{BUILD}` builds {SERVER})")
    return found


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: statistics.median(r[k] for r in rows) for k in rows[0]}


def _line(r: dict[str, Any]) -> str:
    return (
        f"{r['side']:10} {r['clients']:4.0f} clients {r['tokens_per_second']:8.1f} tokens/s   "
        f"first token {1e3 * r['first_token_p50']:7.0f} ms (p95 {1e3 * r['first_token_p95']:7.0f})"
        f"   between {1e3 * r['between_p50']:6.1f} ms (p95 {1e3 * r['between_p95']:6.1f})"
    )
