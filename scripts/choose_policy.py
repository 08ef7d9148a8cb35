"""The experiments behind the constants of `ggraph/decode/policy.py` and `prices.py`.

    python scripts/choose_policy.py --record texts     # answers and chains
    python scripts/choose_policy.py --record prices    # by the clock, a minute alone on the machine
    python scripts/choose_policy.py                    # every constant, varied one by one
    python scripts/choose_policy.py HOPE=0.3 ...       # one setting
    python scripts/choose_policy.py --hindsight        # what could be had at most
    python scripts/choose_policy.py --better           # what a head right more often would bring

What is recorded of 40 prompts of our own (bench/prompts/policy.jsonl) with SmolLM2-135M-Instruct
and the head that comes with ggraph: the answers, the head's chain behind each token, and the median
seconds of steps and guesses in real rounds. The replay decodes them with the real loop by a counted
clock (`models.bench.replay`), and prints speed against plain decoding: of the answers one after
another; each alone in a process that has measured nothing yet; cut to 8 to 20 tokens; and cut so
where every guess is wrong.
"""

import argparse
import gzip
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from ggraph.decode import policy as rules
from ggraph.decode import prices
from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.lookup import SuffixDrafter
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
MOST = 8  # tokens of the suffix drafter that hindsight may choose
SHORT = (8, 10, 13, 16, 20)  # tokens that answers are cut to
Shares = dict[tuple[int, int], float]
SWEEPS: dict[str, Sequence[float]] = {
    "BELIEF": (1, 2, 4, 8),
    "FADING": (0.9, 0.95, 0.98, 1.0),
    "CREDIT": (0.3, 0.5, 0.7, 1.0),
    "MOST_CREDIT": (0.5, 0.7, 1.0, 1.5, 2.0, 4.0),
    "MOST_PAUSE": (4, 8, 16, 32),
    "PACE": (0.1, 0.2, 0.4),
    "SLOW": (0.02, 0.05, 0.1),
    "ROW": (0.05, 0.1, 0.2, 0.3),
    "GUESS": (0.05, 0.1, 0.2),
    "FAR": (1.5, 2, 4),
    "MEMORY": (32, 128, 512, 2048),
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


def record(what: str, threads: int, prices: Path | None) -> None:
    """Answers and chains, or prices of the same texts, into the kept file or one of their own."""
    found = read() if what == "prices" else {}
    path = fetch_default(None)
    with closing(load(path, head=head_for(path), threads=threads)) as m:
        if what == "texts":
            texts = [_text(m, p.name, p.text) for p in read_prompts(PROMPTS, 1 << 20)]
            found["texts"] = [asdict(t) for t in texts]
        else:
            some = [Recorded(**t) for t in found["texts"][:4]]
            measured = {**machine(), "threads": threads, "machine": asdict(_machine(m, some))}
            found |= measured
            if prices is not None:
                prices.write_text(json.dumps(measured, indent=2) + "\n")
                return
    KEPT.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


def read() -> dict[str, Any]:
    """What was recorded."""
    found: dict[str, Any] = json.loads(gzip.decompress(KEPT.read_bytes()))
    return found


def _text(m: Loaded, name: str, prompt: str) -> Recorded:
    """One answer, decoded plainly, and what the head guesses at each place."""
    ids, head = m.prompt_ids(prompt), _head(m)
    drafts: list[Draft] = []

    class Every(Fixed):
        """Asks for a chain in each round and verifies nothing."""

        def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
            drafts.append(draft)
            return NOTHING

    answer = _decode(m, ids, Speculation([head], Every(DEEPEST)))
    said = [[round(100 * c) for c in d.chances] for d in drafts]
    right = [_right(d, answer[i:]) for i, d in enumerate(drafts, 1)]
    return Recorded(name, ids, answer, list(zip(right, said, strict=True)))


def _right(draft: Draft, text: Sequence[int]) -> int:
    """How many of a chain's guesses the text goes on with."""
    pairs = enumerate(zip(draft.tokens, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(draft), len(text)))


def _head(m: Loaded) -> EagleDrafter:
    assert m.head is not None, "the model has no head"
    return EagleDrafter(DraftRunner(m.head, m.drafts, m.runner.context, target=m.runner))


def _decode(m: Loaded, ids: Sequence[int], drafts: Speculation) -> list[int]:
    sampler = Sampler(SamplerConfig(temp=0.0), m.model.vocab_size)
    m.engine.reset()
    m.runner.picks = 1  # as greedy text is decoded
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
                _decode(m, text.prompt, Speculation([_head(m)], policy, longest=length))
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
        return _line(found, names)
    finally:
        for n, value in before.items():
            setattr(place[n], n, value)


def _line(found: dict[str, Any], names: Sequence[str]) -> str:
    machine, texts = Machine(**found["machine"]), [Recorded(**t) for t in found["texts"]]
    every = _speeds(texts, machine, names)
    alone = _speeds(texts, machine, names, alone=True)
    short = [_cut(t, n) for n in SHORT for t in texts if len(t.answer) >= n]
    blind = [replace(t, guesses=[(0, said) for _, said in t.guesses]) for t in short]
    blind = [replace(t, answer=range(1 << 20, (1 << 20) + len(t.answer))) for t in blind]
    cut, unforeseen = (
        [*_speeds(t, machine, names), *_speeds(t, machine, names, alone=True)]
        for t in (short, blind)
    )
    return (
        f"mean {statistics.mean(every):.3f}x, median {statistics.median(every):.3f}x, least "
        f"{min(every):.3f}x; alone {statistics.mean(alone):.3f}x, {min(alone):.3f}x; short "
        f"{statistics.mean(cut):.3f}x, {min(cut):.3f}x; unforeseen {min(unforeseen):.3f}x"
    )


def _cut(text: Recorded, tokens: int) -> Recorded:
    return replace(text, answer=text.answer[:tokens], guesses=text.guesses[: tokens - 1])


def _speeds(
    texts: Sequence[Recorded], made: Machine, names: Sequence[str], alone: bool = False
) -> list[float]:
    """Speeds of texts one after another, or each in a process of its own."""
    kept, out = Prices(), []
    for text in texts:
        prices = Prices() if alone else kept
        out.append(speed(play(text, made, Adaptive(prices=prices), names), made))
    return out


@dataclass
class Place:
    """What both drafters guess at one place of an answer: chances, and up to where it is right."""

    suffix: tuple[int, Sequence[float]]
    head: tuple[int, Sequence[float]]


def places(text: Recorded, shares: Shares) -> list[Place]:
    """Those of an answer, but of its last token; `shares` say what the head's chances mean."""
    drafter, out = SuffixDrafter(), []
    drafter.begin(text.prompt[0])
    drafter.observe(text.prompt[1:], None)
    for i in range(len(text.answer) - 1):
        drafter.observe(text.answer[i : i + 1], None)
        draft, rest = drafter.propose(MOST), text.answer[i + 1 :]
        right, said = text.guesses[i] if i < len(text.guesses) else (0, ())
        true = [shares[depth, chance // 10] for depth, chance in enumerate(said)]
        out.append(Place((_right(draft, rest), draft.chances), (right, true)))
    return out


def shares_right(texts: Sequence[Recorded]) -> Shares:
    """By depth and stated tenth, the share of guesses that were right."""
    found: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for right, said in (g for t in texts for g in t.guesses):
        for depth, chance in enumerate(said):
            found[depth, chance // 10] += [depth < right] * (depth <= right)
    return {at: (sum(hits) + 0.5) / (len(hits) + 1) for at, hits in found.items()}


def hindsight(at: Sequence[Place], made: Machine) -> float:
    """The speed of one who knows the text: each round has the drafter and the length that bring the
    whole answer soonest; nobody is asked in vain, and nothing wrong is verified."""
    left = [0.0] * (len(at) + 1)  # seconds from a place on
    for i in reversed(range(len(at))):
        took = [made.step(1) + left[i + 1]]
        prices = ((at[i].suffix, made.lookup, 0.0), (at[i].head, made.question, made.further))
        for (right, _), first, further in prices:
            for n in range(1, min(right, len(at) - i - 1) + 1):
                took.append(first + (n - 1) * further + made.step(n + 1) + left[i + n + 1])
        left[i] = made.host + min(took)
    return len(at) * (made.step(1) + made.host) / left[0]


def informed(at: Sequence[Place], made: Machine, worth: float, hope: float) -> float:
    """The speed of one who knows all prices and what each chance means, but not the text: a token
    is worth so many plain steps, the head is asked where the suffix's draft brings less than
    `hope`, and guesses on while half of a further guess is worth its price."""
    i, seconds, plain = 0, 0.0, made.step(1)
    while i < len(at):
        room, best = len(at) - i - 1, (0.0, 0, 0)
        seconds += made.lookup + made.host
        for asked, (right, chances) in enumerate((at[i].suffix, at[i].head)):
            if asked and (best[0] >= hope or not room):
                break
            seconds += made.question * asked
            path, total = 1.0, 0.0
            for n, chance in enumerate(chances[:room], 1):
                price = made.further * asked + made.step(n + 1) - made.step(n)
                if n > 1 and asked:
                    if path / 2 * worth < price / plain:
                        break
                    seconds += made.further
                path *= chance
                total += path
                best = max(best, (total * worth - made.step(n + 1) / plain + 1, n, right))
        seconds += made.step(best[1] + 1)
        i += min(best[1], best[2]) + 1
    return len(at) * (plain + made.host) / seconds


def print_hindsight(found: dict[str, Any], names: Sequence[str]) -> None:
    """What could be had at most, and what this policy has of it; the same with other prices."""
    now, texts = Machine(**found["machine"]), [Recorded(**t) for t in found["texts"]]
    third = [now.rows[0] + (seconds - now.rows[0]) * 2 / 3 for seconds in now.rows]
    quick = replace(now, question=2e-4, further=1.2e-4)
    variants = {
        "prices as recorded": now, "a question of 0.2 ms": quick,
        "rows a third cheaper": replace(now, rows=third), "both": replace(quick, rows=third),
    }  # fmt: skip
    shares = shares_right(texts)
    every = [places(t, shares) for t in texts]
    for name, made in variants.items():
        known = statistics.mean(hindsight(at, made) for at in every)
        told = max(
            statistics.mean(informed(at, made, worth / 20, hope) for at in every)
            for worth in range(8, 25)
            for hope in (0.05, 0.1, 0.2, 0.4, 0.8)
        )
        has = statistics.mean(_speeds(texts, made, names))
        print(f"{name:>22}: {known:.3f}x knows the text, {told:.3f}x chances, {has:.3f}x this")


def better(texts: Sequence[Recorded], share: float, seed: int) -> list[Recorded]:
    """Texts for whose head a `share` of the first guesses that were wrong are as if right: each is
    what it guessed at some other place, where its first guess was right."""
    drawn = random.Random(seed)
    good = [g for t in texts for g in t.guesses if g[0]]

    def instead(guess: tuple[int, Sequence[int]]) -> tuple[int, Sequence[int]]:
        return guess if guess[0] or drawn.random() >= share else drawn.choice(good)

    return [replace(t, guesses=[instead(g) for g in t.guesses]) for t in texts]


def chains(texts: Sequence[Recorded], length: int) -> float:
    """Tokens a round of greedy chains, the bonus counted."""
    rounds = tokens = 0
    for t in texts:
        i = 0
        while i < len(t.guesses):
            won = min(length, t.guesses[i][0]) + 1
            rounds, tokens, i = rounds + 1, tokens + won, i + won
    return tokens / rounds


def print_better(found: dict[str, Any], names: Sequence[str]) -> None:
    """Speeds of heads that are right more often, by what further rows cost; means of five draws."""
    now, texts = Machine(**found["machine"]), [Recorded(**t) for t in found["texts"]]
    for share in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        heads = [better(texts, share, seed) for seed in range(5 if share else 1)]
        hits = [g[0] > 0 for h in heads for t in h for g in t.guesses]
        speeds = []
        for price in (0.6, 0.8, 1.0):
            rows = [now.rows[0] + (seconds - now.rows[0]) * price for seconds in now.rows]
            made = replace(now, rows=rows)
            mean = statistics.mean(s for h in heads for s in _speeds(h, made, names))
            speeds.append(f"{mean:.3f}x with rows at {price}")
        length = statistics.mean(chains(h, 4) for h in heads)
        print(f"first guesses {statistics.mean(hits):.1%}, chain of 4 {length:.2f}: {speeds}")


def main() -> None:
    """Record, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", nargs="*", help="NAME=VALUE: constants to change")
    parser.add_argument("--record", choices=("texts", "prices"), help="measure anew")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--names", default="suffix,eagle3", help="drafters, in order")
    parser.add_argument("--hindsight", action="store_true", help="what could be had at most")
    parser.add_argument("--better", action="store_true", help="heads that are right more often")
    parser.add_argument("--prices", type=Path, help="another machine's, a JSON file")
    given = parser.parse_args()
    if given.record:
        record(given.record, given.threads, given.prices)
        return
    found, names = read(), given.names.split(",")
    if given.prices:
        found |= json.loads(given.prices.read_text())
    if given.hindsight:
        print_hindsight(found, names)
        return
    if given.better:
        print_better(found, names)
        return
    changed = {n: float(v) for n, v in (pair.split("=") for pair in given.set)}
    print(f"{'as it is' if not changed else given.set}: {evaluate(found, changed, names)}")
    for name, values in SWEEPS.items() if not changed else ():
        for value in values:
            print(f"{name:>10} {value:<6} {evaluate(found, {name: value}, names)}")


if __name__ == "__main__":
    main()
