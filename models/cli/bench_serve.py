"""`ggraph bench serve`: a server under many clients, beside llama.cpp's."""

import json
import shutil
import statistics
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.env import thread_count

from ..bench.machine import machine
from ..bench.serve import Load, measure, our_server, peer_server
from ..run.load import load
from .common import ModelPath, Threads, model_path, notes, write_text

PEER_CONTEXT = 256  # slots of llama.cpp's cache for each client, at least


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

    Both servers run at once and are asked in turn, with the same prompts.

    Example: ggraph bench serve --peer llama-server --clients 1,8,64
    """
    path, count = model_path(model), thread_count() if threads is None else threads
    numbers = _numbers(clients)
    with closing(load(path, threads=1)) as m:
        ends = {str(t): -100.0 for t in m.tokenizer.eos_ids}
        vocabulary = m.model.vocab_size
    most = max(numbers)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {"ggraph": stack.enter_context(our_server(path, count, min(64, most), draft_max))}
        if peer is not None:
            urls["llama.cpp"] = stack.enter_context(_peer(peer, path, count, most, prompt + new))
        for number in numbers:
            wanted = Load(number, prompt, new, shared)
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
            for seed in range(rounds):
                for name, url in urls.items():
                    bias = ends if name == "ggraph" else {}
                    found[name].append(measure(url, wanted, bias, vocabulary, seed))
            rows += [{"server": name, **_median(f)} for name, f in found.items()]
            for row in rows[-len(urls) :]:
                print(_line(row), flush=True)
    if out is not None:
        write_text(out, json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        notes().print(f"[dim]wrote {out}[/dim]")


def _numbers(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() and 1 <= int(p) <= 256 for p in parts):
        raise InputError(f"--clients {text!r}: expected numbers from 1 to 256, such as 1,8,64")
    return [int(p) for p in parts]


def _peer(
    name: str, path: Path, threads: int, clients: int, tokens: int
) -> AbstractContextManager[str]:
    binary = shutil.which(name)
    if binary is None:
        raise InputError(f"--peer {name}: no such program (llama.cpp builds it as llama-server)")
    return peer_server(binary, path, threads, clients, max(PEER_CONTEXT, tokens))


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {k: statistics.median(r[k] for r in rows) for k in rows[0]}


def _line(r: dict[str, Any]) -> str:
    return (
        f"{r['server']:10} {r['clients']:4.0f} clients {r['tokens_per_second']:8.1f} tokens/s   "
        f"first token {1e3 * r['first_token_p50']:7.0f} ms (p95 {1e3 * r['first_token_p95']:7.0f})"
        f"   between {1e3 * r['between_p50']:6.1f} ms (p95 {1e3 * r['between_p95']:6.1f})"
    )
