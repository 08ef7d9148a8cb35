"""`verify` against every execution of many small random plans, sound ones with their mutants.

    nice python scripts/deep_verify.py [--plans 20000] [--seed 0]

Prints verdicts by origin, and how often the two disagree (a miss: an unsound plan was certified; a
false alarm: a sound one was refused). Exits with 1 if they ever do. What brute force has no notion
of (alignment) counts as refused by both; plans with too many states are left out and counted.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from plan_brute import TooLarge, brute
from plan_strategies import mutants, random_plan

from ggraph.plan import Plan
from ggraph.verify import CounterExample, examine

STATES = 20_000  # at most, per plan
STATIC = ("alignment", "bounds", "capacity", "declaration")


@dataclass
class Tally:
    """Verdicts by origin and kind; disagreements; states that were visited."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[tuple[str, str, Plan]] = field(default_factory=list)
    states: int = 0
    too_large: int = 0

    def judge(self, origin: str, plan: Plan) -> bool:
        """Compare the two on one plan; whether `verify` certified it."""
        verdict = examine(plan)
        kind = verdict.kind if isinstance(verdict, CounterExample) else "certified"
        if kind not in STATIC:
            try:
                outcome = brute(plan, limit=STATES)
            except TooLarge:
                self.too_large += 1
                return False
            self.states += outcome.states
            if (kind == "certified") != outcome.is_sound:
                self.wrong.append((origin, str(verdict), plan))
        self.verdicts[origin, kind] += 1
        return kind == "certified"

    def report(self, seconds: float) -> None:
        """The table, and the first disagreement."""
        for (origin, kind), n in sorted(self.verdicts.items()):
            print(f"{origin:<24} {kind:<12} {n:>7}")
        misses = sum("Certificate" in verdict for _, verdict, _ in self.wrong)
        print(f"{self.verdicts.total()} plans, {self.states} states, {seconds:.0f} s")
        print(f"left out, more than {STATES} states: {self.too_large}")
        print(f"misses {misses}, false alarms {len(self.wrong) - misses}")
        for origin, verdict, plan in self.wrong[:1]:
            print(f"\n{origin}: {verdict}", *plan.schedule, plan.memory.regions, sep="\n")


def main() -> int:
    """Judge until enough plans have been seen."""
    parser = argparse.ArgumentParser(description="verify against brute force")
    parser.add_argument("--plans", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    tally, begun, r = Tally(), time.perf_counter(), random.Random(wanted.seed)
    while tally.verdicts.total() < wanted.plans:
        plan = random_plan(r)
        if tally.judge("random", plan):
            for name, mutant in mutants(plan, r):
                tally.judge(name, mutant)
    tally.report(time.perf_counter() - begun)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
