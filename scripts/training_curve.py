"""The learning curve of a head as a picture, from logs of `train-eagle3`.

    python scripts/training_curve.py LOG.jsonl [LOG.jsonl ...] --out CURVE.svg

Logs follow one another: the tokens of a later one count from the end of the one before.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]

from growth import plot

APART = 1.125


def points(logs: Sequence[Path]) -> dict[int, float]:
    """Accepted length by thousands of tokens seen: points an eighth apart, and the last one."""
    found: list[tuple[int, float]] = []
    before = 0
    for log in logs:
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        tested = [e for e in entries if "accepted_length" in e]
        found += [((before + e["tokens"]) // 1000, e["accepted_length"]) for e in tested]
        before += tested[-1]["tokens"]
    kept = [found[-1]]
    for n, value in reversed(found[:-1]):
        if n * APART < kept[-1][0]:
            kept.append((n, value))
    return dict(reversed(kept))


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    title = "Tokens per round on held-out texts, chains of 3 drafts"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        plot(title, "thousands of tokens seen", points(given.logs), "bonus counted")
    )


if __name__ == "__main__":
    main()
