"""The experiments behind the constants of `ggraph/decode/policy.py` and `prices.py`.

    python scripts/choose_policy.py --record texts     # answers and chains
    python scripts/choose_policy.py --record prices    # by the clock, a minute alone on the machine
    python scripts/choose_policy.py                    # every constant, varied one by one
    python scripts/choose_policy.py HOPE=0.3 ...       # one setting

What is recorded of 40 prompts of our own (bench/prompts/policy.jsonl) with SmolLM2-135M-Instruct
and the head that comes with ggraph: the answers, the head's chain behind each token, and the median
seconds of steps and guesses in real rounds. The replay decodes them with the real loop by a counted
clock (`models/bench/replay.py`), and prints mean, median and least speed against plain decoding,
and how many of the prompts with 20 tokens or more are below 0.97x and 0.90x.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from ggraph.decode import policy as rules
from ggraph.decode import prices
from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.policy import Adaptive, Fixed
from ggraph.decode.prices import Prices
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from models.bench.machine import machine
from models.bench.replay import Machine, Recorded, play, speed
from models.bench.spec import read_prompts
from models.run.fetch import fetch_default
from models.run.load import Loaded, load
from models.run.shipped import head_for

PROMPTS = ROOT / "bench" / "prompts" / "policy.jsonl"
KEPT = ROOT / "bench" / "results" / "policy.json.gz"
NEW, DEEPEST = 128, 6  # tokens of an answer, guesses of a recorded chain
SWEEPS: dict[str, Sequence[float]] = {
    "BELIEF": (1, 2, 4, 8),
    "FADING": (0.9, 0.95, 0.98, 1.0),
    "HOPE": (0.1, 0.2, 0.4),
    "MOST_PAUSE": (4, 8, 16, 32),
    "PACE": (0.1, 0.2, 0.4),
    "SLOW": (0.02, 0.05, 0.1),
    "ROW": (0.1, 0.2, 0.3),
    "GUESS": (0.05, 0.1, 0.2),
}


@dataclass(frozen=True)
class Watching(Fixed):
    """A fixed length that notes the seconds of its steps and guesses."""

    steps: list[tuple[int, float]] = field(default_factory=list)
    guesses: list[tuple[int, float]] = field(default_factory=list)

    def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
        """All of it."""
        self.guesses.append((len(draft), seconds))
        return draft

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Note the step."""
        self.steps.append((len(draft) + 1, seconds))


def record(what: str, threads: int) -> None:
    """Answers and chains, or prices of the same texts, into the kept file."""
    found = read() if what == "prices" else {}
    path = fetch_default(None)
    with closing(load(path, head=head_for(path), threads=threads)) as m:
        if what == "texts":
            texts = [_text(m, p.name, p.text) for p in read_prompts(PROMPTS, 1 << 20)]
            found["texts"] = [asdict(t) for t in texts]
        else:
            some = [Recorded(**t) for t in found["texts"][:4]]
            found |= {**machine(), "threads": threads, "machine": asdict(_machine(m, some))}
    KEPT.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))


def read() -> dict[str, Any]:
    """What was recorded."""
    found: dict[str, Any] = json.loads(gzip.decompress(KEPT.read_bytes()))
    return found


def _text(m: Loaded, name: str, prompt: str) -> Recorded:
    """One answer, decoded plainly, and what the head guesses at each place."""
    ids, head = m.prompt_ids(prompt), _head(m, 0)
    chains: list[list[tuple[int, float]]] = []

    class Every(Fixed):
        """Asks for a chain in each round and verifies nothing."""

        def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
            chances = [round(c, 3) for c in draft.chances]
            chains.append(list(zip(draft.tokens, chances, strict=True)))
            return NOTHING

    answer = _decode(m, ids, Speculation([head], Every(DEEPEST)))
    return Recorded(name, ids, answer, chains)


def _head(m: Loaded, length: int) -> EagleDrafter:
    assert m.head is not None, "the model has no head"
    return EagleDrafter(DraftRunner(m.head, m.drafts, m.runner.context))  # type: ignore[arg-type]


def _decode(m: Loaded, ids: Sequence[int], drafts: Speculation) -> list[int]:
    sampler = Sampler(SamplerConfig(temp=0.0), m.model.vocab_size)
    m.engine.reset()
    return list(m.engine.generate(ids, sampler.sample, sampler.accept, limit=NEW, drafts=drafts))


def _machine(m: Loaded, texts: Sequence[Recorded]) -> Machine:
    """Medians over real rounds of every length, each text with each in turn."""
    steps: dict[int, list[float]] = defaultdict(list)
    guesses: dict[int, list[float]] = defaultdict(list)
    hosts: list[float] = []
    for again in range(4):
        for text in texts:
            for length in (0, 1, 2, 3, 4, 5, 6, 7):
                policy = Watching(length)
                _decode(m, text.prompt, Speculation([_head(m, length)], policy, longest=length))
                for rows, seconds in policy.steps[1:] if again else ():
                    steps[rows].append(seconds)
                for count, seconds in policy.guesses[1:] if again else ():
                    guesses[count].append(seconds)
                done = m.engine.statistics
                hosts.append(done.host_seconds / max(1, done.rounds))
    at = {rows: statistics.median(seconds) for rows, seconds in steps.items()}
    asked = {n: statistics.median(seconds) for n, seconds in guesses.items()}
    further = (asked[4] - asked[1]) / 3
    return Machine(
        [at[n] for n in range(1, 9)], asked[1], further, further / 8, 3e-5,
        statistics.median(hosts),
    )  # fmt: skip


def evaluate(found: dict[str, Any], changed: dict[str, float], names: Sequence[str]) -> str:
    """The speeds under some constants, as a line."""
    place = {n: (rules if hasattr(rules, n) else prices) for n in changed}
    before = {n: getattr(place[n], n) for n in changed}
    for n, value in changed.items():
        setattr(place[n], n, value)
    try:
        speeds = _speeds(found, names)
    finally:
        for n, value in before.items():
            setattr(place[n], n, value)
    long = [s for tokens, s in speeds if tokens >= 20]
    every = [s for _, s in speeds]
    return (
        f"mean {statistics.mean(every):.3f}x, median {statistics.median(every):.3f}x, least "
        f"{min(every):.3f}x ({min(long):.3f}x), below 0.97x {sum(s < 0.97 for s in long)}, "
        f"below 0.90x {sum(s < 0.9 for s in every)}"
    )


def _speeds(found: dict[str, Any], names: Sequence[str]) -> list[tuple[int, float]]:
    made, kept = Machine(**found["machine"]), Prices()
    out = []
    for text in found["texts"]:
        recorded = Recorded(**text)
        done = play(recorded, made, Adaptive(prices=kept), names)
        out.append((done.new_tokens, speed(done, made)))
    return out


def main() -> None:
    """Record, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", nargs="*", help="NAME=VALUE: constants to change")
    parser.add_argument("--record", choices=("texts", "prices"), help="measure anew")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--names", default="suffix,eagle3", help="drafters, in order")
    given = parser.parse_args()
    if given.record:
        record(given.record, given.threads)
        return
    found, names = read(), given.names.split(",")
    changed = {n: float(v) for n, v in (pair.split("=") for pair in given.set)}
    print(f"{'as it is' if not changed else given.set}: {evaluate(found, changed, names)}")
    for name, values in SWEEPS.items() if not changed else ():
        for value in values:
            print(f"{name:>10} {value:<6} {evaluate(found, {name: value}, names)}")


if __name__ == "__main__":
    main()
