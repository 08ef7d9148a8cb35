"""The hole in upstream's check of concurrent streams, counted; and what closing it costs.

    python scripts/upstream_hole.py [--pairs]

On the fork of Q, K and V of a Qwen3 layer, in upstream's interleaved order, with upstream's
allocator (`ggml` mode): what the write/write check of llama.cpp reports, what `verify` reports, and
the bytes of a plan of the same streams that is sound (`hb` mode). Exits with 1 if a count differs
from the one measured with the real allocator, or a plan gets the wrong verdict.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ggraph.errors import PlanError
from ggraph.hazards.qkv_fork import (
    FORKS,
    Fork,
    device_bytes,
    read_write_races,
    write_write_faults,
)
from ggraph.verify import verify

COLUMNS = ("upstream's check", "verify", "measured", "ggml B", "hb B", "price", "one stream")


def is_verified(fork: Fork, memory: str) -> bool:
    """Whether `verify` certifies the fork's plan in an allocator mode."""
    try:
        verify(fork.plan(memory))
    except PlanError:
        return False
    return True


def row(fork: Fork, expected: int) -> tuple[list[int], bool]:
    """The numbers of one line, and whether they are as they should be."""
    bad, hb, serial = fork.plan("ggml"), fork.plan("hb"), fork.serial("hb")
    flagged, found = write_write_faults(fork, bad.memory), read_write_races(bad)
    sizes = [device_bytes(p) for p in (bad, hb, serial)]
    numbers = [len(flagged), len(found), expected, *sizes[:2], sizes[1] - sizes[0], sizes[2]]
    right = not flagged and len(found) == expected
    return numbers, right and not is_verified(fork, "ggml") and is_verified(fork, "hb")


def main() -> int:
    """The table, and with `--pairs` each unordered pair of the first line."""
    parser = argparse.ArgumentParser(description="what write/write validation overlooks")
    parser.add_argument("--pairs", action="store_true", help="list the pairs of the first fork")
    given = parser.parse_args()
    print(f"{'fork':<22}" + "".join(f"{c:>18}" for c in COLUMNS))
    wrong = 0
    for name, (fork, expected) in FORKS.items():
        numbers, right = row(fork, expected)
        wrong += not right
        print(f"{name:<22}" + "".join(f"{n:>18,}" for n in numbers))
    if given.pairs:
        fork = next(iter(FORKS.values()))[0]
        print(*read_write_races(fork.plan("ggml")), sep="\n")
    print("`hb` plans of the same streams: verified" if not wrong else f"{wrong} lines are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
