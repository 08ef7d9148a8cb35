"""Random settings of speculation on random tiny models: no draft ever changes a text.

    python scripts/fuzz_drafts.py --texts 500              # seeds 0 .. 499
    python scripts/fuzz_drafts.py --seed 4711              # one again

A seed draws a golden checkpoint, a context that is just enough or ends amid a draft, a prompt's
length and how it is cut, threads, exact or default products, masks made on the host or the device,
what the graph brings back (logits, the best token, a drawn one), a sampler with or without
penalties, ends amid the text, and drafters: guesses that know the text and hide it in chains and
trees, an EAGLE-3 head (chain or tree), lookup, another model. The text with drafts is the text
without.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from check_identity import Told

from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Adaptive, Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F16, F32
from ggraph.errors import DraftWarning
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.load import open_session

GOLDEN = ROOT / "tests" / "golden"
HEAD = GOLDEN / "tiny" / "eagle3_for_llama_tied"
OTHER = GOLDEN / "tiny" / "llama_tied"
TARGETS = sorted(
    [*(GOLDEN / "tiny2").iterdir(), *(p for p in (GOLDEN / "tiny").iterdir() if p != HEAD)]
)
TREES = [TreeShape(*sizes) for sizes in ((2, 1, 2), (6, 2, 2), (12, 3, 3), (20, 4, 4), (31, 2, 8))]
DRAFTERS = ("told", "told", "lookup", "suffix", "eagle3", "tree", "model")


@cache
def target(path: Path) -> Model:
    """A checkpoint, read once."""
    return open_model(path)


@dataclass(frozen=True)
class Case:
    """What a seed draws."""

    seed: int
    path: Path
    prompt: tuple[int, ...]
    context: int
    batch: int
    threads: int
    exact: bool
    spreads: bool
    picked: str
    config: SamplerConfig
    limit: int
    early: bool
    drafters: tuple[str, ...]
    most: int
    adaptive: bool
    half: bool

    @classmethod
    def of(cls, seed: int) -> "Case":
        """The case of a seed."""
        r = Random(seed)
        path = r.choice(TARGETS)
        length = r.choice((1, 2, 7, 15, 16, 17, 31, 33, 60, 66, 127, 130))
        size = r.choice((6, 320))  # of few tokens texts repeat themselves
        prompt = tuple(r.randrange(3, size) for _ in range(length))
        context = length + r.choice((0, 1, 2, 5, 17, 40, 64))
        temp = r.choice((0.0, 0.0, 0.7, 1.5))
        penal = r.random() < 0.3
        config = SamplerConfig(
            temp=temp, seed=seed, top_k=r.choice((0, 1, 5, 40)), top_p=r.choice((1.0, 0.9)),
            min_p=r.choice((0.0, 0.05)), repeat_penalty=1.2 if penal else 1.0,
            frequency_penalty=r.choice((0.0, 0.4)) if penal else 0.0,
        )  # fmt: skip
        picks = ["logits"]
        if not penal and (temp <= 0 or config.top_k > 1):
            picks.append("best" if temp <= 0 else "draw")
        return cls(
            seed, path, prompt, context, r.choice((512, 512, 16, 7)), r.choice((1, 2)),
            r.random() < 0.5, r.random() < 0.5, r.choice(picks), config,
            r.choice((-1, -1, 1, 2, 13)), r.random() < 0.3,
            tuple(dict.fromkeys(r.sample(DRAFTERS, r.randint(1, 2)))),
            r.choice((1, 2, 4, 7, 15, 20)), r.random() < 0.3, r.random() < 0.5,
        )  # fmt: skip


class Bench:
    """The session of a case, and its texts."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, target(case.path)
        self.session = open_session(threads=case.threads, exact=case.exact)
        self.cache = F16 if case.half else F32
        self.head = None
        if {"eagle3", "tree"} & set(case.drafters):
            self.head = open_head(HEAD, self.model)
        taps = () if self.head is None else self.head.taps
        self.runner = Runner(
            self.model, self.session, case.context, batch=case.batch, cache_dtype=self.cache,
            taps=taps,
        )  # fmt: skip
        self.runner.spreads = case.spreads

    def text(self, drafters: Sequence[Drafter], ends: Sequence[int]) -> tuple[list[int], str, int]:
        """The text, why it ended, and how many of its tokens were drafted."""
        case = self.case
        engine, s = Engine(self.runner, ends), Sampler(case.config, self.model.vocab_size)
        engine.early = lambda: case.early
        engine.reset()
        s.accept_all(case.prompt)
        picks: dict[str, int | Sampler] = {"logits": 0, "best": 1, "draw": s}
        self.runner.picks = picks[case.picked]
        policy = Adaptive(case.most) if case.adaptive else Fixed(case.most)
        found = engine.generate(
            list(case.prompt),
            s.sample,
            s.accept,
            limit=case.limit,
            drafts=Speculation(drafters, policy),
        )
        return list(found), engine.statistics.stopped_by, engine.statistics.accepted

    def made(self, name: str, truth: Sequence[int]) -> Drafter:
        """A drafter, new."""
        case, r = self.case, Random(self.case.seed)
        if name == "told":
            return Told(truth, self.model.vocab_size, r)
        if name in ("lookup", "suffix"):
            return PromptLookup(least=1) if name == "lookup" else SuffixDrafter()
        if name == "model":
            other = target(OTHER).beside("other.")
            return ModelDrafter(Runner(other, self.session, case.context, cache_dtype=F32))
        assert self.head is not None
        runner = DraftRunner(self.head, self.session, case.context, cache_dtype=self.cache)
        tree = r.choice(TREES) if name == "tree" else None
        return EagleDrafter(runner, tree=tree, name=name)


def complaint(case: Case) -> tuple[str, int]:
    """What is wrong with a case, and how many drafted tokens were kept."""
    bench = Bench(case)
    with closing(bench.session):
        plain, why, _ = bench.text((), ())
        ends: tuple[int, ...] = ()
        if case.seed % 3 == 0 and len(plain) > 1:
            ends = (plain[case.seed % len(plain)],)
            plain, why, _ = bench.text((), ends)
        drafters = [bench.made(n, [*case.prompt, *plain]) for n in case.drafters]
        kept = 0
        for again in range(2):
            text, ended, accepted = bench.text(drafters, ends)
            kept += accepted
            if (text, ended) != (plain, why):
                return f"run {again}: {text} ({ended}), plain {plain} ({why})", kept
    return "", kept


def main() -> int:
    """Run the seeds that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=200, help="number of texts")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="only this text")
    asked = parser.parse_args()
    warnings.simplefilter("error", DraftWarning)  # a mistake of our own drafters
    one = asked.seed is not None
    seeds = [asked.seed] if one else range(asked.first, asked.first + asked.texts)
    begun, bad, kept = time.perf_counter(), 0, 0
    for seed in seeds:
        case = Case.of(seed)
        try:
            said, accepted = complaint(case)
        except Exception as error:  # whatever escapes is a finding
            said, accepted = f"{type(error).__name__}: {error}", 0
        kept += accepted
        if said:
            bad += 1
            print(f"{replace(case, path=Path(case.path.name))}: {said}", flush=True)
    took = time.perf_counter() - begun
    print(f"{len(seeds)} texts, {kept} drafted tokens kept, {bad} differ, {took:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
