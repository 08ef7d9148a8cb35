"""Byte identity on a real model: the text is the same with and without speculation.

    python scripts/check_identity.py [--prompts 40] [--tokens 128] [--threads 2] [--json OUT]

SmolLM2 with 8-bit activations, greedy and seeded sampling, first turns of MT-bench. Each prompt is
decoded plainly and with every drafter; the draft length runs through 1 to 8 and the tree through 8
to 32 nodes from prompt to prompt. The EAGLE-3 head is random (seeded), so that most of its guesses
are wrong. Prints one line per prompt and ends with status 1 at the first difference.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from check_llama_head import random_head

from ggraph.decode.draft import Drafter
from ggraph.decode.eagle import DraftRunner, EagleDrafter, TreeShape
from ggraph.decode.length import Fixed
from ggraph.decode.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculate import Speculator
from models.fetch import fetch_default
from models.load import Loaded, load

PROMPTS = Path(__file__).parent.parent / "bench" / "data" / "eval" / "mt_bench.jsonl"


def drafters(m: Loaded, i: int) -> dict[str, tuple[Sequence[Drafter], int]]:
    """Every drafter with the length or tree of prompt i."""
    assert m.head is not None, "the model was loaded without a head"
    chain = DraftRunner(m.head, m.session, m.runner.context)
    length, nodes = 1 + i % 8, (8, 12, 16, 24, 32)[i % 5]
    tree = EagleDrafter(chain, tree=TreeShape(nodes, 3, 4))
    return {
        f"suffix {length}": ([SuffixDrafter()], length),
        f"lookup {9 - length}": ([PromptLookup()], 9 - length),
        f"eagle3 chain {length}": ([EagleDrafter(chain)], length),
        f"eagle3 tree {nodes}": ([tree], nodes - 1),
        f"suffix, eagle3 {length}": ([SuffixDrafter(), EagleDrafter(chain)], length),
    }


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


def check(m: Loaded, prompt: str, i: int, limit: int) -> list[str]:
    """Names of the combinations that differ for one prompt."""
    ids = m.prompt_ids(prompt)
    different = []
    for temp in (0.0, 0.8):
        plain = text(m, ids, temp, limit, None)
        for name, made in drafters(m, i).items():
            if text(m, ids, temp, limit, made) != plain:
                different.append(f"{name} at temperature {temp}")
    return different


def main() -> None:
    """Run all prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    head = random_head(Path(tempfile.mkdtemp()) / "head")
    m = load(fetch_default(), threads=given.threads, ctx_size=2048, head=head)
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()][: given.prompts]
    begun, failures = time.time(), []
    for i, row in enumerate(rows):
        different = check(m, row["turns"][0], i, given.tokens)
        failures += [f"prompt {i}: {d}" for d in different]
        print(f"{i + 1}/{len(rows)} {len(different)} differences", flush=True)
    result = {
        "prompts": len(rows), "tokens": given.tokens, "threads": given.threads,
        "generations": len(rows) * 12, "differences": failures,
        "seconds": round(time.time() - begun, 1), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
