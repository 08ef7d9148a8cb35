"""Random functions of rows: a row has the same bits whatever stands beside it.

    python scripts/fuzz_rows.py --functions 2000           # seeds 0 .. 1999, on the CPU
    python scripts/fuzz_rows.py --functions 200 --device cuda

Each function (products of all weight types, gated units, norms, heads, experts; see
tests/row_kit.py) runs for 200 rows (64 on the CUDA stand-in, which rounds more rows otherwise), and
then for the first 1, 2, 5, .. of them.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / d) for d in (".", "tests")]

from cuda_host import HostDriver
from row_kit import Function, complaint

from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.backends.protocol import Backend

MOST = {"cpu": 200, "cuda": 64}
COUNTS = (2, 3, 5, 8, 15, 16, 17, 33, 63, 64, 65, 66, 127, 128, 129, 144)


def cpu(seed: int) -> Callable[[], dict[str, Backend]]:
    """A CPU with some threads, exact or as by default."""
    r = Random(seed)
    exact = r.random() < 0.3
    return lambda: {"cpu": open_backend("cpu", threads=r.choice((1, 2, 3)), exact=exact)}


def cuda(seed: int) -> Callable[[], dict[str, Backend]]:
    """The stand-in of a GPU, and a CPU for what it has no kernels for."""

    def opened() -> dict[str, Backend]:
        driver = HostDriver()
        device = CudaBackend(cuda_spec("cuda0", driver), driver, False, Events())
        return {"cuda0": device, "cpu": open_backend("cpu", threads=1, exact=True)}

    return opened


def main() -> int:
    """Run the seeds that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", type=int, default=500, help="number of functions")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--device", choices=tuple(MOST), default="cpu")
    asked = parser.parse_args()
    begun, bad, opened = time.perf_counter(), 0, {"cpu": cpu, "cuda": cuda}[asked.device]
    most = MOST[asked.device]
    known = [m for m in COUNTS if m < most]
    for seed in range(asked.first, asked.first + asked.functions):
        counts = (1, *Random(seed).sample(known, 3))
        if said := complaint(Function(seed, most), counts, opened(seed)):
            bad += 1
            print(said, flush=True)
    print(f"{asked.functions} functions, {bad} differ, {time.perf_counter() - begun:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
