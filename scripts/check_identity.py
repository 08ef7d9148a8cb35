"""Byte identity on a real model: the text is the same with and without speculation.

    python scripts/check_identity.py [--prompts 40] [--tokens 128] [--threads 2]
                                     [--kinds eagle3,latent,...] [--json OUT]

SmolLM2 with 8-bit activations, greedy and seeded sampling, first turns of MT-bench. Each prompt is
decoded plainly and with every drafter; the draft length runs through 1 to 8 and the tree through 8
to 32 nodes from prompt to prompt. Heads are random (seeded), so that most of their guesses are
wrong; the smaller model is SmolLM2's first six layers. Prints one line per prompt, and ends with
status 1 if anything differed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from random_heads import HEADS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph.decode.draft import Drafter
from ggraph.decode.draft_text import ModelDrafter
from ggraph.decode.eagle import DraftRunner, EagleDrafter, TreeShape
from ggraph.decode.length import Fixed
from ggraph.decode.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.parallel import ParallelDrafter
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculate import Speculator
from models.eagle3 import Head
from models.fetch import fetch_default
from models.load import Loaded, load

PROMPTS = Path(__file__).parent.parent / "bench" / "data" / "eval" / "mt_bench.jsonl"
Made = dict[str, tuple[Sequence[Drafter], int]]


def from_text(m: Loaded, length: int, nodes: int) -> Made:
    """Drafters that need no head: the text itself, and a smaller model, alone and staged."""
    cut = replace(m.model, config=replace(m.model.config, num_hidden_layers=6))
    runner = Runner(cut.beside("small."), m.session, m.runner.context)
    return {
        f"suffix {length}": ([SuffixDrafter()], length),
        f"lookup {9 - length}": ([PromptLookup()], 9 - length),
        f"model {length}": ([ModelDrafter(runner)], length),
        f"model with lookup {length}": ([ModelDrafter(runner, inner=PromptLookup())], length),
    }


def in_turn(m: Loaded, length: int, nodes: int) -> Made:
    """A head whose guesses are made one after another: chain, tree, and behind another drafter."""
    assert m.head is not None, "the model was loaded without a head"
    runner = DraftRunner(m.head, m.session, m.runner.context)
    return {
        f"chain {length}": ([EagleDrafter(runner)], length),
        f"tree {nodes}": ([EagleDrafter(runner, tree=TreeShape(nodes, 3, 4))], nodes - 1),
        f"suffix, chain {length}": ([SuffixDrafter(), EagleDrafter(runner)], length),
    }


def in_parallel(m: Loaded, length: int, nodes: int) -> Made:
    """A head that guesses everything in one step."""
    assert isinstance(m.head, Head) and m.head.masked is not None, "the head has no masked row"
    runner = DraftRunner(m.head, m.session, m.runner.context)
    return {f"parallel {length}": ([ParallelDrafter(runner, m.head.masked)], length)}


KINDS: dict[str, Callable[[Loaded, int, int], Made]] = {
    "text": from_text, "eagle3": in_turn, "latent": in_turn, "eagle1": in_turn,
    "parallel": in_parallel,
}  # fmt: skip


def text(
    m: Loaded, ids: list[int], temp: float, limit: int, made: tuple[Sequence[Drafter], int] | None
) -> list[int]:
    """One generation, with or without drafters."""
    s = Sampler(SamplerConfig(temp=temp, seed=1234), m.model.vocab_size)
    s.accept_all(ids)
    m.engine.reset()
    if made is None:
        return list(m.engine.generate(ids, s.sample, s.accept, limit=limit))
    spec = Speculator(m.engine, made[0], Fixed(made[1]))
    return list(spec.generate(ids, s.sample, s.accept, limit=limit))


def check(m: Loaded, kind: str, prompt: str, i: int, limit: int) -> tuple[list[str], int]:
    """What differs for one prompt, and how many generations were compared."""
    ids, different, count = m.prompt_ids(prompt), [], 0
    for temp in (0.0, 0.8):
        plain = text(m, ids, temp, limit, None)
        made = KINDS[kind](m, 1 + i % 8, (8, 12, 16, 24, 32)[i % 5])
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
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()][: given.prompts]
    begun, failures, compared = time.time(), [], 0
    for kind in given.kinds.split(","):
        head = HEADS[kind](Path(tempfile.mkdtemp()) / kind) if kind in HEADS else None
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
