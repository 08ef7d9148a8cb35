"""Speed of the CPU's products: GMAC/s and GB/s of each packed layout, by number of rows.

    python bench/cpu_kernels.py [--threads 2] [--types q4_1,q8_0]

Whole steps of models are `ggraph bench`'s. On a shared machine trust the ratios, not the figures.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import dtype as dt
from ggraph import env
from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.kernels import attention, cache, elementwise, matmul, pack, quantise  # noqa: F401
from ggraph.backends.cpu.kernels.tiles import FloatLayout, activation_bytes, layout_of, packed_bytes
from ggraph.backends.cpu.runtime.pages import GUARD
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler
from ggraph.dtype import DType
from ggraph.tensor import Array


@dataclass
class Weight:
    """A packed matrix [n, k]."""

    dtype: DType
    n: int
    k: int
    data: Array


def random_weight(pool: Pool, dtype: DType, n: int, k: int) -> Weight:
    """Random codes with scales of 0.01, packed by the pool."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (n, dtype.row_bytes(k)), dtype=np.uint8)
    if dtype.is_block:
        blocks = raw.reshape(-1, dtype.block_bytes)
        blocks[:, :4] = np.array([0.01, -0.05], np.float16).view(np.uint8)
        if dtype is dt.Q6_K:
            blocks[:, -2:] = np.array([0.001], np.float16).view(np.uint8)
    else:
        raw = np.full((n, k), 0.01, dtype.np).view(np.uint8)
    out = np.zeros(packed_bytes(dtype, n, k) + GUARD, np.uint8)
    asm = Assembler(pool.jit)
    asm.add(f"pack_{dtype.name}", raw=raw, out=out, n=n, k=k, row_bytes=raw.strides[0])
    pool.run(asm.freeze())
    return Weight(dtype, n, k, out)


def add_matmul(asm: Assembler, w: Weight, x: Array, y: Array) -> None:
    """y = x . w^T."""
    asm.add(
        "matmul_" + layout_of(w.dtype).name, w=w.data, x=x, y=y, n=w.n, k=w.k, m=len(y),
        xs=x.strides[0], ys=y.strides[0], add=0, adds=0, unit=1,
    )  # fmt: skip


def timed(action: Callable[[], None], repeats: int) -> float:
    """Median seconds of one call."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_kernels(pool: Pool, types: list[str], n: int = 1536 * 16) -> None:
    """One table: rows at once against GMAC/s and GB/s of packed weights with `n` outputs."""
    k = 576
    print(f"{'type':6} " + "".join(f"{m:>6} rows" + " " * 9 for m in (1, 2, 4, 5, 8, 64)))
    for name in types:
        w = random_weight(pool, dt.dtype(name), n, k if dt.dtype(name).block < 256 else 512)
        cells = []
        for m in (1, 2, 4, 5, 8, 64):
            x = np.zeros((m, activation_bytes(w.k)), np.uint8)
            if isinstance(layout_of(w.dtype), FloatLayout):
                x = np.zeros((m, w.k * 4), np.uint8)
            asm = Assembler(pool.jit)
            add_matmul(asm, w, x, np.zeros((m, n), np.float32))
            program = asm.freeze()
            seconds = timed(partial(pool.run, program), 9)
            macs, gb = n * w.k * m / seconds / 1e9, w.data.nbytes / seconds / 1e9
            cells.append(f"{macs:5.0f} GMAC {gb:5.1f} GB")
        print(f"{name:6} " + " ".join(cells), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=env.thread_count())
    parser.add_argument("--types", default="q4_1,q4_0,q5_0,q5_1,q8_0,q4_k,q6_k,f16,f32")
    given = parser.parse_args()
    bench_kernels(Pool(given.threads, host_jit()), given.types.split(","))


if __name__ == "__main__":
    main()
