"""Decoding and prompts on true shapes beside the peers, for the section "Speed" of docs/models.md.

    python scripts/model_speed.py FOLDER --threads 2

FOLDER holds NAME.gguf of `NAMES` (scripts/random_model.py makes them, as q4_k_m). All sides take
turns. The samples are kept in bench/results/models_speed.json, of which the section is made; run it
on a quiet machine: a share below 0.9 is of no use.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone need not be installed

from ggraph import InputError
from models.bench.cpu import CASES, Ours, their_rate
from models.bench.machine import machine
from models.bench.peer import Peer

NAMES = ("qwen3.5-0.8b", "gemma-3-1b", "lfm2-1.2b", "qwen3-moe-3gb")
PEERS = ("ik_llama.cpp", "llama.cpp")
RESULT, PAGE = ROOT / "bench" / "results" / "models_speed.json", ROOT / "docs" / "models.md"
TITLE, BAR = "## Speed", 1.2
CONTEXT = 256  # rows of the cache


def measured(path: Path, threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Of each case and side the rates of the rounds, and the least share of its cores."""
    ours, peers = Ours(path, threads, tokens, CONTEXT), []
    for name in PEERS:
        try:
            peers.append(Peer(path, threads, name=name))
        except InputError as error:
            print(error, flush=True)
    found: dict[str, Any] = {}
    for case in (c for c in CASES if c.name in ("decode at 64", "prompt of 128")):
        rates: dict[str, list[float]] = {"ggraph": [], **{p.name: [] for p in peers}}
        shares = []
        for peer in peers:
            their_rate(peer, case, ours.ids, 2)
        for _ in range(rounds):
            rate, share = ours.rate(case)
            rates["ggraph"].append(rate)
            shares.append(share)
            for peer in peers:
                rate, reply = their_rate(peer, case, ours.ids, tokens)
                rates[peer.name].append(rate)
                shares.append(reply.share)
        found[case.name] = {"rates": rates, "share": min(shares)}
        print(path.stem, case.name, json.dumps(found[case.name]), flush=True)
    for peer in peers:
        peer.close()
    ours.m.close()
    return found


def section() -> str:
    """The section of the page, from the kept samples."""
    kept = json.loads(RESULT.read_text())
    lines = [
        TITLE, "",
        "Random weights of true shapes as Q4_K_M (`scripts/random_model.py`; of Qwen3-30B-A3B 7",
        f"whole layers), tokens/s, {kept['threads']} threads, medians of alternating rounds. The",
        f"bar is {BAR}x the faster peer, the aim 1.6x. `python scripts/model_speed.py FOLDER` on",
        f"{kept['processor']}, {kept['date']}.", "",
        "| shape | row | ggraph | " + " | ".join(PEERS) + " | over the faster | least share |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, cases in kept["shapes"].items():
        for case, told in cases.items():
            rate = {side: statistics.median(r) for side, r in told["rates"].items()}
            best = max(rate[p] for p in PEERS if p in rate)
            sides = [f"{rate[p]:.1f}" if p in rate else "not known there" for p in PEERS]
            over = f"{rate['ggraph'] / best:.2f}x"
            cells = [name, case, f"{rate['ggraph']:.1f}", *sides, over, f"{told['share']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure where a folder is given; write the section."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.folder is not None:
        files = {n: asked.folder / f"{n}.gguf" for n in NAMES}
        shapes = {
            n: measured(f, asked.threads, asked.tokens, asked.rounds) for n, f in files.items()
        }
        told = {**machine(), "threads": asked.threads, "shapes": shapes}
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
    before = PAGE.read_text().split("\n" + TITLE)[0]
    PAGE.write_text(f"{before.rstrip()}\n\n{section()}")


if __name__ == "__main__":
    main()
