"""Byte identity on a real model: the text is the same with and without speculation.

    python scripts/check_identity.py [--prompts 40] [--tokens 128] [--threads 2]
                                     [--kinds told,eagle3,latent,...] [--head HEAD] [--json OUT]

SmolLM2 with 8-bit activations, greedy and seeded sampling, first turns of MT-bench. Each prompt is
decoded plainly and with every drafter; the draft length runs through 1 to 8 and the tree through 8
to 32 nodes from prompt to prompt. Heads are random (seeded), so that most of their guesses are
wrong, but for one given with --head (kind `trained`); the smaller model is SmolLM2's first six
layers; `told` knows the text and hides it among wrong nodes of its trees, so that much is accepted
from everywhere in them. Prints one line per prompt, and ends with status 1 if anything differed.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from random_heads import HEADS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import Array
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.parallel import ParallelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import ROOT, Draft, Drafter
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.errors import DraftWarning
from models.eagle3 import Head
from models.run.fetch import fetch_default
from models.run.load import Loaded, load

PROMPTS = Path(__file__).parent.parent / "bench" / "data" / "eval" / "mt_bench.jsonl"
Made = dict[str, tuple[Sequence[Drafter], int]]


@dataclass(eq=False)
class Told:
    """Knows the text, and hides its next tokens in a tree of wrong ones."""

    truth: Sequence[int]
    vocabulary: int
    random: Random
    name: str = "told"
    taps: tuple[int, ...] = ()
    length: int = 0

    def begin(self, first: int) -> None:
        """A new text."""
        self.length = 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """The text went on."""
        self.length += len(tokens)

    def propose(self, limit: int) -> Draft:
        """Half of the nodes hang from a random earlier one; the others go on with the text."""
        left = list(self.truth[self.length : self.length + limit])
        tokens: list[int] = []
        parents: list[int] = []
        before = ROOT
        while len(tokens) < limit:
            parent = before if left and self.random.random() < 0.5 else None
            if parent is None:
                parents.append(self.random.randrange(-1, len(tokens)))
                tokens.append(self.random.randrange(self.vocabulary))
            else:
                before = len(tokens)
                parents.append(parent)
                tokens.append(left.pop(0))
        return Draft(tuple(tokens), tuple(parents))


def told(m: Loaded, length: int, nodes: int, truth: Sequence[int]) -> Made:
    """The text itself, hidden in trees."""
    return {
        f"told {n}": ([Told(truth, m.model.vocab_size, Random(n))], n)
        for n in (length, nodes, 32 - length)
    }


def from_text(m: Loaded, length: int, nodes: int, truth: Sequence[int]) -> Made:
    """Drafters that need no head: the text itself, and a smaller model, alone and staged."""
    left_out = tuple(f"blk.{i}." for i in range(6, m.model.layer_count))
    held = {n: t for n, t in m.model.catalogue.items() if not n.startswith(left_out)}
    config = replace(m.model.config, num_hidden_layers=6)
    cut = replace(m.model, config=config, catalogue=held)
    runner = Runner(cut.beside("small."), m.session, m.runner.context)
    return {
        f"suffix {length}": ([SuffixDrafter()], length),
        f"lookup {9 - length}": ([PromptLookup()], 9 - length),
        f"model {length}": ([ModelDrafter(runner)], length),
        f"model with lookup {length}": ([ModelDrafter(runner, inner=PromptLookup())], length),
    }


def in_turn(m: Loaded, length: int, nodes: int, truth: Sequence[int]) -> Made:
    """A head whose guesses are made one after another: chain, tree, and behind another drafter."""
    assert m.head is not None, "the model was loaded without a head"
    runner = DraftRunner(m.head, m.session, m.runner.context, target=m.runner)
    return {
        f"chain {length}": ([EagleDrafter(runner)], length),
        f"tree {nodes}": ([EagleDrafter(runner, tree=TreeShape(nodes, 3, 4))], nodes - 1),
        f"suffix, chain {length}": ([SuffixDrafter(), EagleDrafter(runner)], length),
    }


def in_parallel(m: Loaded, length: int, nodes: int, truth: Sequence[int]) -> Made:
    """A head that guesses everything in one step."""
    assert isinstance(m.head, Head) and m.head.masked is not None, "the head has no masked row"
    runner = DraftRunner(m.head, m.session, m.runner.context)
    return {f"parallel {length}": ([ParallelDrafter(runner, m.head.masked)], length)}


KINDS: dict[str, Callable[[Loaded, int, int, Sequence[int]], Made]] = {
    "told": told, "text": from_text, "trained": in_turn, "eagle3": in_turn, "latent": in_turn,
    "eagle1": in_turn, "parallel": in_parallel,
}  # fmt: skip


def text(
    m: Loaded, ids: list[int], temp: float, limit: int, made: tuple[Sequence[Drafter], int] | None
) -> list[int]:
    """One generation, with or without drafters."""
    s = Sampler(SamplerConfig(temp=temp, seed=1234), m.model.vocab_size)
    s.accept_all(ids)
    m.engine.reset()
    drafts = None if made is None else Speculation(made[0], Fixed(made[1]))
    return list(m.engine.generate(ids, s.sample, s.accept, limit=limit, drafts=drafts))


def check(m: Loaded, kind: str, prompt: str, i: int, limit: int) -> tuple[list[str], int]:
    """What differs for one prompt, and how many generations were compared."""
    ids, different, count = m.prompt_ids(prompt), [], 0
    for temp in (0.0, 0.8):
        plain = text(m, ids, temp, limit, None)
        made = KINDS[kind](m, 1 + i % 8, (8, 12, 16, 24, 32)[i % 5], [*ids, *plain])
        for name, drafters in made.items():
            count += 1
            if text(m, ids, temp, limit, drafters) != plain:
                different.append(f"prompt {i}: {kind} {name} at temperature {temp}")
    return different, count


def main() -> None:
    """Run all prompts with one kind of drafter after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(k for k in KINDS if k != "trained"))
    parser.add_argument("--head", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("error", DraftWarning)  # a mistake of our own drafters
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()][: given.prompts]
    failures: list[str] = []
    begun, compared = time.time(), 0
    for kind in given.kinds.split(",") + ["trained"] * (given.head is not None):
        head = given.head if kind == "trained" else None
        head = HEADS[kind](Path(tempfile.mkdtemp()) / kind) if kind in HEADS else head
        m = load(fetch_default(), threads=given.threads, ctx_size=2048, head=head)
        for i, row in enumerate(rows):
            different, count = check(m, kind, row["turns"][0], i, given.tokens)
            failures, compared = failures + different, compared + count
            print(f"{kind} {i + 1}/{len(rows)} {len(different)} differences", flush=True)
        m.close()
    result = {
        "prompts": len(rows), "tokens": given.tokens, "threads": given.threads,
        "kinds": given.kinds, "compared": compared, "differences": failures,
        "seconds": round(time.time() - begun, 1), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
