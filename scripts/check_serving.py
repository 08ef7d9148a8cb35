"""Random histories of a batch, each text against the same request alone.

    python scripts/check_serving.py --histories 2000
    python scripts/check_serving.py --model SmolLM2-135M-Instruct.Q4_1.gguf --histories 100

Arrivals, prompts with shared beginnings, cancellations, priorities, drafts (chains, trees, those
of a head and of a smaller model), turns that go on with earlier answers, a cache on disk here and
there, and caches so small that texts are sent back: whatever differs is told with its history.
Every third history is one of texts that take the best token and do not draft, which stride. The
tiny models take turns; two are recurrent, and one has a head that drafts blocks.
"""

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from serving_kit import RECURRENT, World, differences, greedy, history
from small_model import TINY, learnable_model, small_model

from ggraph.errors import DraftWarning
from models.run.shipped import head_for

HEAD = TINY / "eagle3_for_llama_tied"


def main() -> None:
    """Count histories until one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: a tiny model, and recurrent ones")
    parser.add_argument("--histories", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--minutes", type=float, help="begin none after this time")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    warnings.simplefilter("error", DraftWarning)  # a mistake of our own drafters
    with tempfile.TemporaryDirectory() as folder:
        path = asked.model or learnable_model(Path(folder))
        head = head_for(path) if asked.model else HEAD
        smaller = path if asked.model else small_model(Path(folder) / "other.gguf")
        worlds = {"tiny": World.of(path, asked.threads, head, smaller)}
        for name in () if asked.model else RECURRENT:
            worlds[name] = World.recurrent(name, Path(folder), asked.threads)
        if not asked.model:
            other = small_model(Path(folder) / "blocks.gguf", source=TINY / "qwen3_qknorm")
            worlds["blocks"] = World.of(other, asked.threads, TINY.parent / "dflash")
    seen: dict[str, Counter[str]] = {name: Counter() for name in worlds}
    begun, wrong, done = time.perf_counter(), 0, 0
    for seed in range(asked.first, asked.first + asked.histories):
        if asked.minutes and time.perf_counter() - begun > 60 * asked.minutes:
            break
        done += 1
        name = list(worlds)[seed % len(worlds)]
        asked_for = history(seed) if seed % 3 else greedy(history(seed))
        for line in differences(worlds[name], asked_for, seen[name]):
            wrong += 1
            print(f"history {seed} of {name}: {line}")
    for name, what in seen.items():
        print(f"{name}: {', '.join(f'{count} {fact}' for fact, count in what.items())}")
    seconds = time.perf_counter() - begun
    print(f"{done} histories: {wrong} texts differ ({seconds:.0f} s)")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
