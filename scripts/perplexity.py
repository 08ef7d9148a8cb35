"""Perplexity of held text: 8-bit activations against float32 ones and against llama.cpp.

    python scripts/perplexity.py [MODEL] [--windows 64] [--peer none] [--json OUT]

Windows of 256 tokens from the articles of Spec-Bench's summarization part, scored as `ggraph
perplexity` does: every scored token has seen more than half a window. llama.cpp (through xllamacpp)
reads the same ids and gives the log-probability of the next token one step at a time. Ends with
status 1 when a ratio is further than 0.5 % from 1.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from models.bench.peer import LogprobPeer
from models.run.fetch import fetch_default
from models.run.load import load
from models.run.perplexity import Judgement, chunked, judged

ARTICLES = Path(__file__).parent.parent / "bench" / "data" / "eval" / "spec_bench.jsonl"
WINDOW = 256
LISTED = 1000  # most likely tokens that llama.cpp lists before it is asked for all
WITHIN = 0.005


def theirs(peer: LogprobPeer, ids: Sequence[int], vocabulary: int) -> Iterator[float]:
    """The same from llama.cpp; a token far down the list costs a second, longer answer."""
    for at in range(WINDOW // 2 + 1, WINDOW):
        for listed in (LISTED, vocabulary):
            probs = dict(peer.logprobs(ids[:at], 1, listed, keep=True).raw["probs"])
            if ids[at] in probs:
                yield probs[ids[at]]
                break
        else:
            sys.exit(f"llama.cpp lists no chance for token {ids[at]}")


def score_ours(path: Path, count: int, threads: int, exact: bool) -> tuple[Judgement, Any]:
    """What our engine makes of the windows, and these."""
    rows = [json.loads(line) for line in ARTICLES.read_text().splitlines()]
    text = "\n\n".join(r["turns"][0] for r in rows if r["category"] == "summarization")
    with closing(load(path, threads=threads, ctx_size=WINDOW, exact=exact)) as m:
        parts = chunked(m.tokenizer, text, WINDOW, count)
        return judged(m.runner, parts), (parts, m.model.vocab_size)


def score_theirs(path: Path, parts: list[list[int]], vocabulary: int, threads: int) -> float:
    """Perplexity of llama.cpp over the same windows."""
    with closing(LogprobPeer(path, threads, 512)) as peer:
        logs = []
        for i, ids in enumerate(parts):
            logs += list(theirs(peer, ids, vocabulary))
            print(f"llama.cpp: {i + 1}/{len(parts)} windows", file=sys.stderr)
        return math.exp(-float(np.mean(logs)))


def main() -> None:
    """Score and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", choices=("llama.cpp", "none"), default="llama.cpp")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    path = given.model or fetch_default()
    found: dict[str, float] = {}
    judgement, (parts, vocabulary) = score_ours(path, given.windows, given.threads, False)
    found["8-bit activations"] = judgement.losses.perplexity
    print(f"8-bit activations  {found['8-bit activations']:.4f}", flush=True)
    judgement, _ = score_ours(path, given.windows, given.threads, True)
    found["float32"] = judgement.losses.perplexity
    print(f"float32            {found['float32']:.4f}", flush=True)
    if given.peer == "llama.cpp":
        found["llama.cpp"] = score_theirs(path, parts, vocabulary, given.threads)
        print(f"llama.cpp          {found['llama.cpp']:.4f}", flush=True)
    ratios = {n: found["8-bit activations"] / v for n, v in found.items() if v is not None}
    del ratios["8-bit activations"]
    for name, ratio in ratios.items():
        print(f"8-bit over {name}: {ratio:.5f} ({ratio - 1:+.3%})")
    if given.json:
        result = {
            "model": path.name, "windows": judgement.chunks,
            "scored_tokens": len(judgement.losses.each),
            "perplexity": found, "ratios": ratios, "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(abs(r - 1) <= WITHIN for r in ratios.values()) else 1)


if __name__ == "__main__":
    main()
