"""`ggraph bench`: speed against llama.cpp and against plain decoding."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.env import thread_count

from ..bench.cpu import CASES, file_of, fitting, measure
from ..bench.install import ORIGINS, built, home_of, install
from ..bench.machine import machine, peer_version
from ..bench.peer import MISSING, NOT_BUILT, Peer
from ..bench.rounds import row
from ..bench.spec import FLOOR, Answer, outcome, parse_setting, read_prompts
from ..bench.spec import measure as measure_drafts
from ..run.convert import FILE_TYPES
from ..run.load import load
from ..run.shipped import DATA, head_for
from .bench_serve import bench_serve
from .common import Context, ModelPath, Threads, apart, model_path, note, write_text
from .draft import Head

bench_app = typer.Typer(
    name="bench",
    help="Measure speed, as ratios within one run.",
    no_args_is_help=True,
    add_completion=False,
)

Peers = Annotated[
    str, typer.Option("--peer", help="Such as llama.cpp,ik_llama.cpp; or none to leave them out.")
]
Limit = Annotated[int, typer.Option(help="Prompts, the same number from each group.", min=1)]
Minutes = Annotated[
    float | None, typer.Option(help="Start no further prompt after so many minutes.")
]
DraftPeer = Annotated[
    str, typer.Option("--peer", help="llama.cpp: let it draft 4 tokens with the same GGUF head.")
]
Out = Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")]


bench_app.command("serve")(bench_serve)


@bench_app.command("cpu")
def cpu(
    model: ModelPath = None,
    threads: Threads = None,
    types: Annotated[
        str | None,
        typer.Option(help="File types to measure, such as q4_1,q8_0,f16; default: the file's own."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Alternating rounds per row.", min=1)] = 5,
    tokens: Annotated[int, typer.Option(help="Tokens decoded per round.", min=1)] = 32,
    only: Annotated[str, typer.Option(help="Only rows whose name contains this text.")] = "",
    peer: Peers = "llama.cpp",
    out: Out = None,
) -> None:
    """Decode, verify 5 rows and read prompts on the CPU, alternating with other engines.

    Peers run in processes of their own, built for this processor by `ggraph bench install`; the
    ratio is that over the fastest of a row. llama.cpp that was not built is xllamacpp's; one
    that refuses a file says so and is left out. Files of other types are made from the model once
    and kept. `share` is the part of its cores that each side got and `others` what other processes
    used: trust a row only where both shares are near 1.

    Examples:

      ggraph bench cpu --threads 2 --peer llama.cpp,ik_llama.cpp

      ggraph bench cpu --types q4_1,q8_0,q4_0,q4_k_m,q6_k,f16 --json cpu.json
    """
    cases = [c for c in CASES if only in c.name]
    if not cases:
        raise InputError(f"--only {only!r}; rows: {', '.join(c.name for c in CASES)}")
    with_peers = _peer_names(peer)
    source = model_path(model)
    apart(out, source)
    names = types.lower().split(",") if types else [None]
    if unknown := [n for n in names if n is not None and n not in FILE_TYPES]:
        raise InputError(f"--types {','.join(unknown)!r}; known: {', '.join(FILE_TYPES)}")
    threads = threads or thread_count()
    result: dict[str, Any] = {
        **machine(), "bench": "cpu", "threads": threads, "rounds": rounds, "tokens": tokens,
        "peers": {}, "tables": {},
    }  # fmt: skip
    for name in names:
        path = source if name is None else file_of(name, source, note)
        held = fitting(path, cases, tokens)
        if left := [c.name for c in cases if c not in held]:
            note(f"{path.name}: its context is too short for {', '.join(left)}")
        _print_heads(path, threads, rounds, with_peers)
        rows: list[dict[str, Any]] = []
        result["tables"][path.name] = rows
        for case, measured, versions in measure(
            path, threads, rounds, tokens, with_peers, held, report=note
        ):
            rows.append(row(case.name, case.unit, measured))
            print(_line(rows[-1], with_peers), flush=True)
            result["peers"] |= versions
            if out is not None:
                write_text(out, json.dumps(result, indent=1) + "\n")


def _print_heads(path: Path, threads: int, rounds: int, names: Sequence[str]) -> None:
    plural = "" if threads == 1 else "s"
    print(f"{path.name}, {threads} thread{plural}, medians of {rounds} alternating rounds")
    heads = "".join(f" {n:>13}" for n in names)
    print(f"{'':16} {'ggraph':>9}{heads}  {'':8} {'over fastest':>12} by cpu  share   others")


def _line(r: dict[str, Any], names: Sequence[str]) -> str:
    rates = {name: p["rate"] for name, p in r["peers"].items()}
    theirs = "".join(f" {rates[n]:13.1f}" if n in rates else f" {'-':>13}" for n in names)
    ratio = f"{r['ratio']:11.2f}x" if r["ratio"] else f"{'-':>12}"
    busy = f" {r['busy_ratio']:5.2f}x" if r["busy_ratio"] else f" {'-':>6}"
    shares = f"{r['our_share']:.2f} " + (f"{r['their_share']:.2f}" if r["their_share"] else "   -")
    others = "unknown" if r["others"] is None else f"{r['others']:.2f} cores"
    starved = r["their_share"] is not None and min(r["their_share"], r["our_share"]) < 0.9
    return (
        f"{r['case']:16} {r['ours']:9.1f}{theirs}  {r['unit']:8} {ratio}{busy}  {shares}  {others}"
        + ("  (a side was short of cores: not a fair row)" if starved else "")
    )


@bench_app.command("install")
def install_peer(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(ORIGINS)}.")],
    source: Annotated[
        Path | None, typer.Option(help="A checkout that is there already; else it is fetched.")
    ] = None,
    build: Annotated[
        Path | None, typer.Option(help="Its folder for cmake; default: build in the checkout.")
    ] = None,
    server: Annotated[
        bool, typer.Option("--server", help="Its server too, for `ggraph bench serve`.")
    ] = False,
) -> None:
    """Build another engine for this very processor, to measure beside it.

    Needs cmake and a C++ compiler, for ik_llama.cpp git too; openvino is a wheel (270 MB). Kept in
    the folder bench/peers of the cache (`GGRAPH_CACHE`); remove that to be rid of it. With
    `GGRAPH_VECTORS=avx2` in the environment, here as in what measures, no side has 512 bits.

    Examples:

      ggraph bench install llama.cpp

      ggraph bench install llama.cpp --server

      ggraph bench install ik_llama.cpp --source ../ik_llama.cpp
    """
    made = install(name, source, build, note, server=server)
    print(f"{name} {made.version}: {home_of(name)}")


WITH_HEAD = "suffix+eagle3,suffix,eagle3,eagle3:4,eagle3:16/4/4"
WITHOUT_HEAD = "suffix,suffix:4"
PROMPTS = DATA / "prompts.jsonl"  # a dozen that come with ggraph


@bench_app.command("spec")
def spec(
    model: ModelPath = None,
    head: Head = None,
    settings: Annotated[
        str | None,
        typer.Option(help="NAMES, NAMES:LENGTH or NAMES:TOTAL/DEPTH/K, comma-separated."),
    ] = None,
    prompts: Annotated[
        Path, typer.Option(help="Lines of JSON with `category` and `turns`.")
    ] = PROMPTS,
    limit: Limit = 20,
    tokens: Annotated[int, typer.Option("--n-predict", "-n", help="New tokens each.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds per prompt, between plain runs.", min=1)] = 5,
    close_rounds: Annotated[
        int, typer.Option(help="Most further rounds, until the side of 0.97x is clear.")
    ] = 0,
    minutes: Minutes = None,
    peer: DraftPeer = "none",
    threads: Threads = None,
    ctx_size: Context = None,
    out: Out = None,
) -> None:
    """Drafts against plain decoding, greedy, prompt by prompt; the texts must be equal.

    Settings: drafters joined by +; alone the length adapts, `:4` is a chain of 4 and `:16/4/4`
    a tree of 16 nodes, depth 4, 4 per expansion. The status is 1 when a text differs. `plain
    against itself` is what plain decoding makes by the same rule: mean, least, prompts under 0.97x.

    Examples:

      ggraph bench spec --settings suffix,suffix:4 --limit 60

      ggraph bench spec --head head.gguf --settings eagle3,eagle3:4,eagle3:16/4/4,suffix+eagle3
    """
    path = model_path(model)
    head = head_for(path) if head is None else head
    apart(out, path, head, prompts)
    with_head = WITH_HEAD.replace("eagle3", "mtp") if head == path else WITH_HEAD
    given = settings or (WITHOUT_HEAD if head is None else with_head)
    ways = [parse_setting(s, head is not None) for s in given.split(",")]
    if (with_peer := _wants_peer(peer)) and (head is None or head.suffix != ".gguf"):
        raise InputError("--peer llama.cpp needs --head with a GGUF file, which both engines read")
    asked = read_prompts(prompts, limit)
    threads = threads or thread_count()
    result: dict[str, Any] = {
        **machine(), "bench": "spec", "threads": threads, "rounds": rounds,
        "close_rounds": close_rounds, "new_tokens": tokens, "prompts": prompts.stem,
        "head": head.name if head is not None else None,
    }  # fmt: skip
    with (
        closing(load(path, ctx_size=ctx_size, threads=threads, head=head)) as m,
        closing(Peer(path, threads, m.runner.context, head)) if with_peer else nullcontext() as p,
    ):
        found = measure_drafts(m, asked, ways, tokens, rounds, close_rounds, p)
        answers = list(_told(found, len(asked), minutes))
    result |= {"asked": len(asked), **outcome(answers, ways)}
    if out is not None:
        write_text(out, json.dumps(result, indent=1) + "\n")
    if not _print_result(result):
        raise typer.Exit(1)


def _told(answers: Iterator[Answer], count: int, minutes: float | None) -> Iterator[Answer]:
    """Each answer, with a line about it on standard error, until time is up."""
    end = time.monotonic() + 60 * minutes if minutes is not None else math.inf
    for i, answer in enumerate(answers, 1):
        note(f"{i}/{count} {_brief(answer)}")
        yield answer
        if time.monotonic() > end and i < count:
            note(f"time is up after {i} of {count} prompts")
            return


def _print_result(result: dict[str, Any]) -> bool:
    """Print every table; whether all texts were equal."""
    for name, table in result["tables"].items():
        _print_drafts(name, table)
    if (theirs := result.get("llama_cpp")) is not None:
        print(
            f"\nllama.cpp {theirs['tokens_per_second']:.1f} tokens/s, "
            f"{theirs['acceptance_rate']:.1%} of its drafted tokens kept (chain of 4)"
        )
    return all(t["all"]["identical"] for t in result["tables"].values())


def _brief(a: Answer) -> str:
    ways = " ".join(f"{name} {f.ratio:.2f}x" for name, f in a.settings.items())
    return f"{a.prompt.group} {a.prompt.name}: {len(a.tokens)} tokens, {ways}"


def _print_drafts(name: str, table: dict[str, dict[str, Any]]) -> None:
    print(f"\n{name}")
    print(
        f"{'':16} {'prompts':>7} {'plain':>7} {'drafts':>7}  tokens/s {'mean':>6} {'reading':>7} "
        f"{'least':>6} {'<' + str(FLOOR):>6} {'accepted':>8} {'rate':>6}"
        f"  plain against itself  text"
    )
    for group, r in table.items():
        print(
            f"{group:16} {r['prompts']:7} {r['plain_tokens_per_second']:7.1f} "
            f"{r['tokens_per_second']:7.1f}           {r['mean_speedup']:5.2f}x "
            f"{r['mean_speedup_with_reading']:6.2f}x "
            f"{r['least_speedup']:5.2f}x {r['below_floor']:6} {r['acceptance_length']:8.2f} "
            f"{r['acceptance_rate']:6.1%}  {_speed(r['plain_against_itself_mean']):>6} "
            f"{_speed(r['plain_against_itself_least']):>6} "
            f"{r['plain_against_itself_below_floor']:6}  "
            + ("identical" if r["identical"] else "DIFFERENT")
        )


def _speed(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _peer_names(peer: str) -> list[str]:
    """The engines to compare with. InputError for one that is unknown or absent."""
    names = [] if peer == "none" else peer.split(",")
    if unknown := [n for n in names if n not in ORIGINS]:
        raise InputError(f"--peer {','.join(unknown)!r}; known: {', '.join(ORIGINS)}, none")
    for name in names:
        if built(name) is None and (name != "llama.cpp" or peer_version() is None):
            raise InputError(MISSING if name == "llama.cpp" else NOT_BUILT.format(name))
    return names


def _wants_peer(peer: str) -> bool:
    """Whether to compare with llama.cpp. InputError when it is asked for and absent."""
    if peer not in ("llama.cpp", "none"):
        raise InputError(f"--peer {peer!r}; known: llama.cpp, none")
    if peer == "llama.cpp" and peer_version() is None:
        raise InputError(MISSING)
    return peer == "llama.cpp"
