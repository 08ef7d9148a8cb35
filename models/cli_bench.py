"""`ggraph bench`: speed against llama.cpp and against plain decoding. Floor 10."""

import json
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.env import thread_count

from .bench_cpu import CASES, Case, file_of, measure, row
from .bench_machine import machine, peer_version
from .cli_common import ModelPath, Threads, model_path, notes
from .convert import FILE_TYPES
from .peer import MISSING, Peer

bench_app = typer.Typer(
    name="bench", help="Measure speed, as ratios within one run.", no_args_is_help=True
)

Peers = Annotated[str, typer.Option("--peer", help="llama.cpp, or none to leave it out.")]
Out = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")]


@bench_app.command("cpu")
def cpu(
    model: ModelPath = None,
    threads: Threads = None,
    types: Annotated[
        str | None,
        typer.Option(help="File types to measure, such as q4_1,q8_0,f16; default: the file's own."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Alternating rounds per row.")] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens decoded per round.")] = 32,
    only: Annotated[str, typer.Option(help="Only rows whose name contains this text.")] = "",
    peer: Peers = "llama.cpp",
    out: Out = None,
) -> None:
    """Decode, verify 5 rows and read prompts on the CPU, alternating with llama.cpp.

    Files of other types are made from the model once and kept. `share` is the part of its
    cores that each side got and `others` what other processes used: trust a row only where both
    shares are near 1.

    Examples:

      ggraph bench cpu --threads 2

      ggraph bench cpu --types q4_1,q8_0,q4_0,q4_k_m,q6_k,f16 --json cpu.json
    """
    _check_counts(rounds=rounds, tokens=tokens)
    cases = [c for c in CASES if only in c.name]
    if not cases:
        raise InputError(f"--only {only!r}; rows: {', '.join(c.name for c in CASES)}")
    with_peer = _wants_peer(peer)
    source = model_path(model, False)
    names = types.split(",") if types else [None]
    if unknown := [n for n in names if n is not None and n not in FILE_TYPES]:
        raise InputError(f"--types {','.join(unknown)!r}; known: {', '.join(FILE_TYPES)}")
    threads = threads or thread_count()
    result: dict[str, Any] = {
        **machine(), "bench": "cpu", "threads": threads, "rounds": rounds, "tokens": tokens,
        "xllamacpp": peer_version() if with_peer else None, "tables": {},
    }  # fmt: skip
    for name in names:
        path = source if name is None else file_of(name, source, _say)
        rows = _table(path, threads, rounds, tokens, with_peer, cases)
        result["tables"][path.name] = rows
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")


def _table(
    path: Path, threads: int, rounds: int, tokens: int, with_peer: bool, cases: list[Case]
) -> list[dict[str, Any]]:
    """Measure and print the table of one file."""
    plural = "" if threads == 1 else "s"
    print(f"{path.name}, {threads} thread{plural}, medians of {rounds} alternating rounds")
    with closing(Peer(path, threads)) if with_peer else nullcontext() as peer:
        found = measure(path, threads, rounds, tokens, peer, cases)
    rows = [row(c, s) for c, s in found.items()]
    print(f"{'':16} {'ggraph':>9} {'llama.cpp':>9}  {'':8} {'ratio':>6}  share   others")
    for r in rows:
        print(_line(r), flush=True)
    return rows


def _line(r: dict[str, Any]) -> str:
    theirs = f"{r['llama_cpp']:9.1f}" if r["llama_cpp"] else f"{'-':>9}"
    ratio = f"{r['ratio']:5.2f}x" if r["ratio"] else f"{'-':>6}"
    shares = f"{r['our_share']:.2f} " + (f"{r['their_share']:.2f}" if r["their_share"] else "   -")
    others = "unknown" if r["others"] is None else f"{r['others']:.2f} cores"
    starved = r["their_share"] is not None and min(r["their_share"], r["our_share"]) < 0.9
    return (
        f"{r['case']:16} {r['ours']:9.1f} {theirs}  {r['unit']:8} {ratio}  {shares}  {others}"
        + ("  (a side was short of cores: not a fair row)" if starved else "")
    )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"--{name} {value}: expected 1 or more")


def _wants_peer(peer: str) -> bool:
    """Whether to compare with llama.cpp. InputError when it is asked for and absent."""
    if peer not in ("llama.cpp", "none"):
        raise InputError(f"--peer {peer!r}; known: llama.cpp, none")
    if peer == "llama.cpp" and peer_version() is None:
        raise InputError(MISSING)
    return peer == "llama.cpp"


def _say(text: str) -> None:
    notes().print(f"[dim]{text}[/dim]")
