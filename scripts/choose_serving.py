"""The experiments behind `GROWTH` of `ggraph/serving/batch.py` and `MIXED_WANTED` of `steps.py`.

    python scripts/choose_serving.py             # room that each text is left when another begins
    python scripts/choose_serving.py --wanted    # buckets of rows with logits

Random requests to a batch of a tiny model, counted and not timed, so that a busy machine does not
matter. Prompts have 20 to 99 tokens and answers 10 to 119; of 16 texts at most one comes every six
steps, of more sooner. Costs are in rows: a step costs `CUT` of them beside its own, logits a share
of one by the model.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from small_model import learnable_model

from ggraph import Array
from ggraph.serving import batch as batches
from ggraph.serving.batch import Batch
from ggraph.serving.memory import Memory
from ggraph.serving.pieces import CUT, MIXED_ROWS, mixed_bucket
from ggraph.serving.steps import ListRunner, Ready, Row
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from models.run.load import Loaded, load

CONTEXT, SLOTS = 256, 4096
REQUESTS, SEEDS = 100, 4
GROWTHS = 1, 4, 8, 16, 24, 32, 64
CACHES = 300, 600, 1000  # slots; a text takes 120 of them in the mean
WANTED = ((1, 256), (1, 16, 256), (1, 16, 64, 256), (1, 4, 16, 64, 256), (1, *MIXED_ROWS))
SHARES = 0.075, 0.27  # logits of a row: the 8B shape, and the 1B's as SmolLM2-135M's


class Counting(ListRunner):
    """A runner that notes the rows of its steps, and how many of them want logits."""

    def __init__(self, m: Loaded) -> None:
        super().__init__(m.model, m.session, SLOTS, CONTEXT)
        self.made: list[tuple[int, int]] = []

    def ready(self, rows: Sequence[Row], *given: object, **named: object) -> Ready:
        """Note it."""
        self.made.append((len(rows), sum(r.wanted for r in rows)))
        return super().ready(rows, *given, **named)  # type: ignore[arg-type]


def best(logits: Array) -> int:
    """The token of the greatest logit; asked step by step, so that none is made ahead."""
    return int(logits.argmax())


def played(m: Loaded, slots: int, texts: int, seed: int) -> tuple[Counting, Batch]:
    """All requests of a seed, answered in a cache of so many slots."""
    runner, r = Counting(m), np.random.default_rng(seed)
    batch, sent, step = Batch(runner, Limits(texts=texts)), 0, 0
    batch.memory, pause = Memory(slots), max(1, 96 // texts)
    while sent < REQUESTS or not batch.idle:
        while sent < REQUESTS and (sent * pause <= step or batch.idle):
            prompt = r.integers(0, m.model.vocab_size, int(r.integers(20, 100))).tolist()
            batch.submit(Request(tuple(prompt), Plain(best), int(r.integers(10, 120))))
            sent += 1
        batch.step()
        step += 1
    return runner, batch


def print_growth(m: Loaded) -> None:
    """A line for each cache and room."""
    before = batches.GROWTH
    for slots in CACHES:
        for batches.GROWTH in GROWTHS:
            found = [played(m, slots, 16, seed) for seed in range(SEEDS)]
            made = [step for runner, _ in found for step in runner.made]
            rows, back = sum(n for n, _ in made), sum(b.counters.preempted for _, b in found)
            cost = rows + CUT * len(made)
            print(f"{slots:>5} slots, {batches.GROWTH:>2} each: {len(made)} steps of {rows} rows, "
                  f"{back} times sent back; cost {cost}", flush=True)  # fmt: skip
    batches.GROWTH = before


def print_wanted(m: Loaded) -> None:
    """A line for each number of texts and choice of buckets."""
    for texts in (4, 16, 64):
        found = [played(m, SLOTS, texts, seed)[0].made for seed in range(SEEDS)]
        mixed = [step for made in found for step in made if step[0] != step[1]]
        every = [step for made in found for step in made]
        for buckets in WANTED:
            plans = len(MIXED_ROWS) * sum(b < 2 * texts for b in buckets)
            line = f"{texts:>3} texts, {buckets}, {plans} plans: logits made / wanted "
            made = sum(min(mixed_bucket(n), next(b for b in buckets if b >= w)) for n, w in mixed)
            line += f"{made / sum(w for _, w in mixed):.2f}; of the cost of all steps "
            spare = made - sum(w for _, w in mixed)
            costs = [sum(n + CUT + s * w for n, w in every) for s in SHARES]
            shares = (f"{100 * s * spare / c:.1f} %" for s, c in zip(SHARES, costs, strict=True))
            print(line + ", ".join(shares), flush=True)


def main() -> None:
    """Print the one table or the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wanted", action="store_true", help="buckets of rows with logits")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        m = load(learnable_model(Path(folder)), ctx_size=CONTEXT, threads=1)
        with closing(m):
            (print_wanted if given.wanted else print_growth)(m)


if __name__ == "__main__":
    main()
