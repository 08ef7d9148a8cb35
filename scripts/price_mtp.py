"""What a model's own draft layer is worth at fixed acceptance, by replay of a text that is known.

    python scripts/price_mtp.py qwen3.5-0.8b.q4_k_m.gguf --threads 2

Weights may be random (scripts/random_model.py): the layer drafts, and its tokens are replaced by
those of the text, so that each is right with a given chance if all before it were. Rounds cost what
they cost; plain decoding takes turns with every setting. Tokens per second, medians.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import Array
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft
from ggraph.decode.policy import Fixed
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from models.bench.cpu import prompt_ids
from models.run.load import Loaded, load

PROMPT = 64  # tokens


class Replayed:
    """Drafts as `inner` does, and says what `text` says: each token right with the chance `p`."""

    def __init__(self, inner: EagleDrafter, text: Sequence[int], p: float, words: int) -> None:
        self.inner, self.text, self.p, self.words = inner, text, p, words
        self.name, self.taps, self.gathers = inner.name, inner.taps, inner.gathers
        self.rng, self.at = np.random.default_rng(0), 0

    def begin(self, first: int) -> None:
        """A new text."""
        self.inner.begin(first)
        self.rng, self.at = np.random.default_rng(0), 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """How far the text is."""
        self.inner.observe(tokens, features)
        self.at += len(tokens)

    def propose(self, limit: int) -> Draft:
        """As many tokens as the layer drafted, the first of them right."""
        count = len(self.inner.propose(limit))
        right = (self.rng.random(count) < self.p).cumprod().astype(bool)
        said = self.text[self.at : self.at + count]
        tokens = [t if r else (t + 1) % self.words for t, r in zip(said, right, strict=False)]
        return Draft.chain(tokens)


def text_of(
    m: Loaded, ids: Sequence[int], new: int, drafts: Speculation
) -> tuple[list[int], float]:
    """The new tokens, and how many came per second behind the first."""
    s = Sampler(SamplerConfig(temp=0.0), m.model.vocab_size)
    m.engine.reset()
    m.engine.ends = frozenset()
    said = m.engine.generate(ids, s.sample, s.accept, limit=new, drafts=drafts)
    found = [next(said)]
    begun = time.perf_counter()
    found += said
    return found, (len(found) - 1) / (time.perf_counter() - begun)


def priced(m: Loaded, ids: list[int], new: int, rounds: int, length: int, p: float) -> str:
    """One line: chains of `length` at acceptance `p` beside plain decoding."""
    plain, _ = text_of(m, ids, new, Speculation())
    assert m.head is not None, m.model.name
    runner = DraftRunner(m.head, m.drafts, m.runner.context, target=m.runner)
    inner = EagleDrafter(runner, name="mtp")
    drafter = Replayed(inner, [*ids, *plain], p, m.model.vocab_size)
    drafts = Speculation([drafter], Fixed(length))
    rates: tuple[list[float], list[float]] = [], []
    for i in range(rounds + 1):
        for with_drafts, kept in zip((Speculation(), drafts), rates, strict=True):
            said, rate = text_of(m, ids, new, with_drafts)
            assert said == plain, "a draft changed the text"
            if i:  # the first round makes plans
                kept.append(rate)
    told = m.engine.statistics
    before, after = (statistics.median(r) for r in rates)
    kept_share = told.accepted / max(told.drafted, 1)
    return (
        f"chain of {length}, each right with {p}: {before:.1f} plain, {after:.1f} with drafts, "
        f"{after / before:.2f}x; {kept_share:.2f} of the drafted tokens kept"
    )


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chains", type=json.loads, default=[1, 2, 3])
    parser.add_argument("--chances", type=json.loads, default=[0.6, 0.8, 0.9])
    asked = parser.parse_args()
    m = load(asked.model, threads=asked.threads, ctx_size=2048, head=asked.model)
    ids = prompt_ids(m, PROMPT)
    for length in asked.chains:
        for p in asked.chances:
            print(priced(m, ids, asked.tokens, asked.rounds, length, p), flush=True)
    m.close()


if __name__ == "__main__":
    main()
