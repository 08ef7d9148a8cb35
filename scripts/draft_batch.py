"""What drafts bring in a batch: tokens per second of several texts together, side by side.

    python scripts/draft_batch.py --texts 1,4,8 --rounds 5

Prompts are those that come with ggraph, answers greedy; sides take turns, the table has medians.
Without HTTP: what is measured is the batch.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ggraph.decode.draft.lookup import SuffixDrafter
from ggraph.decode.draft.tree import Drafter
from ggraph.decode.policy import Adaptive
from ggraph.decode.speculation import Speculation
from ggraph.serving.batch import Batch
from ggraph.serving.heads import HeadDrafter, ListHead
from ggraph.serving.prices import SharedPrices
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from models.run.drafting import goes_on
from models.run.fetch import fetch_default
from models.run.load import Loaded, load
from models.run.shipped import head_for

SIDES: dict[str, tuple[str, ...]] = {"none": (), "suffix": ("suffix",), "head": ("suffix", "head")}


def request(m: Loaded, ids: list[int], new: int, batch: Batch, names: tuple[str, ...]) -> Request:
    """One text with drafters of its own."""
    voice = Plain(lambda logits: int(np.argmax(logits)))
    if not names:
        return Request(ids, voice, new)
    policy = Adaptive(prices=SharedPrices(batch.prices))
    made: list[Drafter] = [
        SuffixDrafter() if n == "suffix" else HeadDrafter(n, goes_on(policy, n)) for n in names
    ]
    return Request(ids, voice, new, drafts=Speculation(made, policy))


def run(
    m: Loaded, batch: Batch, prompts: list[list[int]], new: int, side: str
) -> tuple[float, float]:
    """Tokens per second, and accepted tokens per step and text."""
    begun, before = time.perf_counter(), batch.counters.accepted
    steps = batch.counters.steps
    for ids in prompts:
        batch.submit(request(m, ids, new, batch, SIDES[side]))
    while not batch.idle:
        batch.step()
    seconds, accepted = time.perf_counter() - begun, batch.counters.accepted - before
    return len(prompts) * new / seconds, accepted / (batch.counters.steps - steps) / len(prompts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", default="1,4,8")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    path = asked.model or fetch_default()
    m = load(path, threads=asked.threads, head=head_for(path))
    lines = (ROOT / "models" / "data" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [m.prompt_ids(json.loads(line)["turns"][0]) for line in lines]
    runner = ListRunner(m.model, m.session, 4 * m.runner.context, m.runner.context)
    guessers = []
    if m.head is not None:
        guessers = [ListHead(m.head, m.drafts, runner.slots, runner.context)]
    batch = Batch(runner, Limits(texts=16), m.prices, guessers)
    for make in batch.plans():
        make()
    for count in map(int, asked.texts.split(",")):
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for i in range(asked.rounds + 1):
            at = i * count % len(prompts)
            chosen = (prompts[at:] + prompts[:at] + prompts)[:count]
            for side in SIDES:
                figures = run(m, batch, chosen, asked.new, side)
                found[side] += [figures] if i else []
        base = [f[0] for f in found["none"]]
        for side, rounds in found.items():
            ratio = statistics.median(f[0] / b for f, b in zip(rounds, base, strict=True))
            speed, kept = (statistics.median(f[i] for f in rounds) for i in (0, 1))
            print(f"{count:3} texts {side:7} {speed:7.1f} tokens/s, {ratio:.3f}x, {kept:.2f} kept")
    m.close()


if __name__ == "__main__":
    main()
