"""The experiments behind `PART` and `LONGEST_LOOP` of `ggraph/decode/draft/eagle.py`.

    python scripts/choose_reading.py                   # how many rows a head reads at once
    python scripts/choose_reading.py -m FILE --head FOLDER
    python scripts/choose_reading.py --loops           # what planning chains as one plan takes

By default with SmolLM2-135M-Instruct and the head that comes with ggraph. Of each such number:
seconds until the plans are there behind a prompt of 200 tokens, how many those are, and the least
milliseconds of reading prompts and rows that came while nobody asked (others use the machine);
every one in turn in each round, in a session of its own. Of loops: seconds of planning a chain,
and of planning all that are no longer, as `warm` does.
"""

import argparse
import sys
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from ggraph.decode.draft import eagle
from ggraph.decode.draft.eagle import WINDOW, EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from models.run.fetch import fetch_default
from models.run.load import Loaded, load
from models.run.shipped import head_for

PAST, LONGEST = 200, 8  # tokens of the prompt, most of a draft: the default
CHOICES = 8, 16, 32, 64
PROMPTS, WAITING = (20, 45, 128), (12, 20, 40, 60)
LOOPS = (1, 2, 4, 8, 12, 16, 32, 63)


def opened(given: argparse.Namespace) -> tuple[Loaded, DraftRunner]:
    """The model with the head's runner, which has no plan yet."""
    path = fetch_default(None) if given.model is None else given.model
    head = head_for(path) if given.head is None else given.head
    m = load(path, head=head, threads=given.threads, ctx_size=512)
    assert m.head is not None, "the model has no head"
    return m, DraftRunner(m.head, m.drafts, m.runner.context, target=m.runner)


def milliseconds(drafter: EagleDrafter, count: int, prompt: bool) -> float:
    """Of reading so many true rows, of a prompt or behind one."""
    drafter.begin(1)
    if not prompt:
        told(drafter, 0, PAST)
        drafter.read()
    told(drafter, 0 if prompt else PAST, count)
    begun = time.perf_counter()
    if prompt:
        drafter.read()
    else:
        drafter.propose(0)
    return 1e3 * (time.perf_counter() - begun)


def told(drafter: EagleDrafter, first: int, count: int) -> None:
    """The text goes on, by tokens whose features lie in these slots."""
    slots = np.arange(first, first + count, dtype=np.int32)[:, None]
    drafter.observe([5] * count, slots)


def print_parts(given: argparse.Namespace) -> None:
    """A line for each number of rows."""
    before = eagle.PART
    warm: dict[int, tuple[float, int]] = {}
    took: dict[tuple[int, bool, int], list[float]] = defaultdict(list)
    for _ in range(given.rounds):
        for part in CHOICES:
            eagle.PART = part
            m, runner = opened(given)
            with closing(m):
                drafter = EagleDrafter(runner, window=WINDOW)
                m.runner.text([5] * (PAST + WINDOW + 1))  # the features are there
                made, begun = m.drafts.plans_made, time.perf_counter()
                drafter.warm(PAST, LONGEST)
                seconds = time.perf_counter() - begun
                least = min(seconds, warm[part][0]) if part in warm else seconds
                warm[part] = least, m.drafts.plans_made - made
                for _ in range(10):
                    for prompt, counts in ((True, PROMPTS), (False, WAITING)):
                        for count in counts:
                            ms = milliseconds(drafter, count, prompt)
                            took[part, prompt, count].append(ms)
    eagle.PART = before
    for part in CHOICES:
        seconds, plans = warm[part]
        prompts, behind = (
            ", ".join(f"{n}: {min(took[part, p, n]):.2f}" for n in counts)
            for p, counts in ((True, PROMPTS), (False, WAITING))
        )
        print(f"{part:>3} rows: {plans} plans in {seconds:.2f} s; ms of prompts {prompts}; of rows "
              f"that waited {behind}")  # fmt: skip


def print_loops(given: argparse.Namespace) -> None:
    """A line for each length of a chain."""
    m, runner = opened(given)
    with closing(m):
        runner.ready(1, 1, PAST, fed_back=True)  # the head's weights are there
        runner.chained(3, PAST)  # and its kernels compiled
        whole = 0.0
        for steps in range(1, LOOPS[-1] + 1):
            begun = time.perf_counter()
            runner.chained(steps, PAST + (steps == 3))
            whole += (took := time.perf_counter() - begun)
            if steps in LOOPS:
                print(f"{steps:>3} steps: {took:.2f} s, all up to that {whole:.1f} s", flush=True)


def main() -> None:
    """Print the one table or the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.loops:
        print_loops(given)
    else:
        print_parts(given)


if __name__ == "__main__":
    main()
