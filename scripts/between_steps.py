"""What a step takes by what came before it: other steps, questions to the head, or only time.

    python scripts/between_steps.py --rounds 12     # half a minute alone on the machine

Medians and fifth parts of the microseconds of the step's program, SmolLM2-135M-Instruct, two
threads. On a machine whose last cache others share, what a step reads leaves it as time passes.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.rows import Rows
from models.run.fetch import fetch_default
from models.run.load import Loaded, load
from models.run.shipped import head_for

# Steps by their rows; "ask" and "ask 2" are questions for one and two guesses, "wait 300" is time
SEQUENCES: dict[str, list[int | str]] = {
    "one row": [1], "two rows": [2], "three rows": [3], "four rows": [4],
    "all in turn": [1, 2, 3, 4], "behind 300 us": ["wait 300", 1], "1000 us": ["wait 1000", 1],
    "behind a question": ["ask", 1], "and two rows": ["ask", 2],
    "behind two guesses": ["ask 2", 3],
}  # fmt: skip
PAST, TURNS, FIRST = 100, 30, 2  # tokens of the text; turns of a sequence, of which some warm up


class Bench:
    """The model behind a text, and what its last program took."""

    def __init__(self, m: Loaded) -> None:
        assert m.head is not None, "the model has no head"
        self.runner, self.seconds = m.runner, 0.0
        self.runner.picks = 1
        ids = [(7 * i + 100) % 40000 for i in range(PAST)]
        self.runner.text(ids)
        self.head = EagleDrafter(
            DraftRunner(m.head, m.drafts, self.runner.context, target=self.runner)
        )
        slots = np.arange(PAST, dtype=np.int32)[:, None]
        self.head.begin(ids[0])
        self.head.observe(ids[1:], slots[1:])
        self.feature = slots[-1:]
        backend = m.session.backends["cpu"]
        assert isinstance(backend, CpuBackend), backend
        run = backend.pool.run

        def timed(program: object) -> None:
            begun = time.perf_counter()
            run(program)  # type: ignore[arg-type]
            self.seconds = time.perf_counter() - begun

        backend.pool.run = timed  # type: ignore[method-assign]
        self.ask(2)

    def step(self, rows: int) -> float:
        """Microseconds of a step's program."""
        at = range(self.runner.past, self.runner.past + rows)
        self.runner.step(Rows(range(500, 500 + rows), at, at), range(rows))
        return self.seconds * 1e6

    def ask(self, guesses: int) -> None:
        """One more token is read, and so many guessed."""
        self.head.observe([500], self.feature)
        self.head.propose(guesses)
        self.head.runner.past = PAST

    def between(self, what: str) -> None:
        """What comes before a step."""
        kind, _, number = what.partition(" ")
        if kind == "ask":
            self.ask(int(number or 1))
            return
        end = time.perf_counter() + int(number) * 1e-6
        while time.perf_counter() < end:
            pass


def main() -> None:
    """Print a line for each sequence."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    path, took = fetch_default(None), defaultdict[tuple[str, int], list[float]](list)
    with closing(load(path, head=head_for(path), ctx_size=1024, threads=2)) as m:
        bench = Bench(m)
        for _ in range(rounds):
            for name, sequence in SEQUENCES.items():
                for turn in range(TURNS):
                    for part in sequence:
                        if isinstance(part, str):
                            bench.between(part)
                        elif turn < FIRST:
                            bench.step(part)
                        else:
                            took[name, part].append(bench.step(part))
    for (name, rows), values in took.items():
        fifth = sorted(values)[len(values) // 5]
        print(f"{name:18} {rows} rows: {statistics.median(values):6.0f} us, fifth {fifth:6.0f}")


if __name__ == "__main__":
    main()
