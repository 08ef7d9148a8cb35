"""Random products with packed weights, in every variant that this processor can run.

    python scripts/fuzz_products.py --products 5000        # seeds 0 .. 4999
    python scripts/fuzz_products.py --seed 4711            # one product again

A product is any type, any size, any number of rows (often beside the edges of passes), threads,
with a residual or without; activations ordinary or extreme (equal, zeros, one huge value in each
block, subnormals, what is not finite in some rows); weights ordinary, with codes at the ends of
their ranges, or of any bytes, scales too. x, y and the residual end where nothing may be touched.

Held: the bits of the batch are those of each row alone (some rows), of other numbers of threads and
of every variant without tiles, without vectors of 512 bits, without VNNI; rows that are not finite
change no other; where what they mean is finite, gguf's weights in float64 are met.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import gguf
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / d) for d in (".", "tests")]

from cpu_calls import activations, call, call_with, packed_weight, variants
from guard_pages import guarded, is_untouched
from stored_weights import raw_weight

from ggraph import dtype as dt
from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.kernels.tiles import LAYOUTS, Layout, layout_of
from ggraph.dtype import DType
from ggraph.tensor import Array

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 143, 144, 145, 256, 257)
LARGE = 1e30  # sums beyond are not asked to be anything but alike
NEAR = 4e-6  # of the sum of sizes: rounding of float32 in blocks


@dataclass(frozen=True)
class Product:
    """A case; its arrays follow from it."""

    seed: int
    dtype: DType
    n: int
    k: int
    m: int
    threads: int
    rows: str
    weights: str
    residual: bool

    @classmethod
    def of(cls, seed: int) -> "Product":
        """The case of a seed."""
        r = Random(seed)
        dtype = r.choice(list(LAYOUTS))
        unit = max(dtype.block, 32)
        blocks = r.choice((1, 2, 3, 4, 5, 7, 8, 9)) if unit == 32 else r.choice((1, 1, 2, 3))
        m = r.choice(EDGES) if r.random() < 0.6 else r.randint(1, 300)
        n = r.choice((r.randint(1, 100), r.choice((16, 31, 33, 48)), r.randint(500, 560)))
        return cls(
            seed, dtype, n, blocks * unit, m, r.choice((1, 2, 3, 4, 7)), r.choice(ROWS),
            r.choice(WEIGHTS), r.random() < 0.3,
        )  # fmt: skip


MINIMUMS = [d for d, a in LAYOUTS.items() if isinstance(a, Layout) and a.stored_minimum]
ROWS = ("normal", "equal", "zeros", "huge", "tiny", "mixed", "not finite")
WEIGHTS = ("normal", "normal", "ends", "bytes")


def _floats(values: list[float]) -> Array:
    return np.array(values, np.float32)


def rows_of(case: Product) -> Array:
    """x [m, k]."""
    rng = np.random.default_rng(case.seed)
    x = rng.normal(size=(case.m, case.k)).astype(np.float32)
    if case.rows == "equal":
        x[:] = rng.choice(_floats([1, -1, 3e-5, -7e8]), (case.m, 1))
    elif case.rows == "zeros":
        x[:, rng.random(case.k) < 0.9] = 0
        x[rng.random(case.m) < 0.5] = -0.0
    elif case.rows == "huge":
        at = rng.integers(0, 32, case.k // 32) + np.arange(0, case.k, 32)
        x[:, at] = rng.choice(_floats([1e12, -1e12]), (case.m, len(at)))
    elif case.rows == "tiny":
        x *= rng.choice(_floats([1e-36, 1e-38, 1e-40, 1e-44]), (case.m, 1))
    elif case.rows == "mixed":
        x *= np.exp2(rng.integers(-60, 40, (case.m, case.k // 32))).repeat(32, 1).astype(np.float32)
    elif case.rows == "not finite":
        for r in np.flatnonzero(rng.random(case.m) < 0.3):
            at = rng.integers(0, case.k, rng.integers(1, 4))
            x[r, at] = rng.choice(_floats([np.nan, np.inf, -np.inf]), len(at))
    return x


def weight_of(case: Product) -> Array:
    """W's storage [n, row_bytes]."""
    rng = np.random.default_rng(case.seed + 1)
    if case.weights == "normal" or (not case.dtype.is_block and case.weights == "ends"):
        return raw_weight(case.dtype, case.n, case.k, case.seed)
    if case.weights == "ends":
        ends = ([0], [0xFF], [0x80], [0x7F], [0, 0xFF], [0x7F, 0x80])
        return raw_weight(case.dtype, case.n, case.k, case.seed, ends[rng.integers(len(ends))])
    return rng.integers(0, 256, (case.n, case.dtype.row_bytes(case.k)), np.uint8)


@cache
def compilers() -> dict[str, Jit]:
    """The variants, each with kernels of its own."""
    folder = Path(tempfile.mkdtemp())
    return {name: Jit(isa, folder) for name, isa in variants().items()}


def fenced(x: Array) -> Array:
    """The same array, that ends where nobody may read."""
    found = guarded(x.nbytes, 4, at_end=True).view(x.dtype).reshape(x.shape)
    found[:] = x
    return found


def alike(a: Array, b: Array) -> bool:
    """The same bits, or both no number."""
    same = a.view(np.int32) == b.view(np.int32)
    return bool((same | (np.isnan(a) & np.isnan(b))).all())


class Made:
    """A case's arrays, and its kernel with them."""

    def __init__(self, case: Product) -> None:
        self.case = case
        self.raw, x = weight_of(case), rows_of(case)
        with np.errstate(all="ignore"):
            stored, self.meaning = activations(case.dtype, x)
        self.x = fenced(stored)
        self.tiles = packed_weight(case.dtype, self.raw, case.n, case.k)
        rng = np.random.default_rng(case.seed + 2)
        add = rng.normal(size=(case.m, case.n)).astype(np.float32)
        self.add = fenced(add) if case.residual else None
        self.kernel = "matmul_" + layout_of(case.dtype).name

    def product(self, first: int, end: int, threads: int, jit: Jit | None = None) -> Array:
        """Rows first .. end - 1 of y."""
        case, x = self.case, self.x[first:end]
        add = None if self.add is None else self.add[first:end]
        y = guarded((end - first) * case.n * 4, 4, at_end=True)
        row = case.n * 4
        words = {
            "w": self.tiles, "x": x, "y": y, "n": case.n, "k": case.k, "m": end - first,
            "xs": self.x.strides[0], "ys": row, "add": 0 if add is None else add,
            "adds": 0 if add is None else row, "unit": 1 + case.seed % 2,
        }  # fmt: skip
        if jit is None:
            call(self.kernel, threads, **words)
        else:
            call_with(jit, self.kernel, **words)
        assert is_untouched(y), "wrote beside y"
        return y.view(np.float32).reshape(end - first, case.n)

    def wanted(self) -> tuple[Array, Array]:
        """y in float64 and how far it may be off, inf where anything may come."""
        case = self.case
        with np.errstate(all="ignore"):
            if case.dtype is dt.F32:
                w = self.raw.view(np.float32).reshape(-1, case.k)
            else:
                kind = gguf.GGMLQuantizationType(case.dtype.gguf)
                w = gguf.dequantize(self.raw, kind).reshape(-1, case.k)
            wide = w.astype(np.float64)
            right, size = self.meaning @ wide.T, np.abs(self.meaning) @ np.abs(wide).T
            if self.add is not None:
                right, size = right + self.add, size + np.abs(self.add)
            size = size + _apart(case, self.raw, self.meaning)
        return right, np.where(np.isfinite(size) & (size < LARGE), NEAR * size, np.inf)


def _apart(case: Product, raw: Array, meaning: Array) -> Array:
    """Sizes of what is computed on the way and may cancel out: minimums, which are added by
    themselves, and scales of MXFP4 (up to 2 ** 127), by which sums of codes that are 0 are
    multiplied, too."""
    if not case.dtype.is_block:
        return np.zeros((len(meaning), case.n))
    blocks = raw.reshape(case.n, -1, case.dtype.block_bytes)
    if case.dtype is dt.MXFP4:
        most = np.exp2(blocks[..., 0].astype(np.float64) - 124)  # [n, blocks]
    elif case.dtype in MINIMUMS:
        halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float64)
        most = np.abs(halves).sum(-1) * (1 if case.dtype.block == 32 else 64)
    else:
        return np.zeros((len(meaning), case.n))
    x = np.abs(meaning).reshape(len(meaning), -1, case.dtype.block).sum(-1)  # [m, blocks]
    sizes: Array = x @ (most * 32).T
    return sizes


def complaint(case: Product) -> str:
    """What is wrong with a case; nothing when all is right."""
    r, made = Random(case.seed), Made(case)
    whole = made.product(0, case.m, case.threads)
    for i in {0, case.m - 1, r.randrange(case.m), r.randrange(case.m)}:
        if not alike(made.product(i, i + 1, 1)[0], whole[i]):
            return f"row {i} alone has other bits"
    first = r.randrange(case.m)
    end = r.randint(first + 1, case.m)
    if not alike(made.product(first, end, r.choice((1, 2, 3))), whole[first:end]):
        return f"rows {first} to {end} have other bits alone"
    for name, jit in compilers().items():
        if not alike(made.product(0, case.m, 1, jit), whole):
            return f"{name} has other bits"
    right, allowed = made.wanted()
    bounded = np.isfinite(allowed)
    with np.errstate(all="ignore"):
        wrong = bounded & ~(np.abs(whole - right) <= allowed + 1e-30)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        return f"y{list(map(int, at))} is {whole[at]}, expected {right[at]} +- {allowed[at]}"
    lost = np.isnan(made.meaning).any(1) & ~np.isnan(whole).all(1)
    return f"row {np.flatnonzero(lost)[0]} is no number and gave some" if lost.any() else ""


def main() -> int:
    """Run the seeds that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--products", type=int, default=1000, help="number of products")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="only this product")
    asked = parser.parse_args()
    one = asked.seed is not None
    seeds = [asked.seed] if one else range(asked.first, asked.first + asked.products)
    begun, bad = time.perf_counter(), 0
    for seed in seeds:
        case = Product.of(seed)
        if said := complaint(case):
            bad += 1
            print(f"{case}: {said}", flush=True)
    took = time.perf_counter() - begun
    print(
        f"{len(seeds)} products, each in {1 + len(variants())} variants, {bad} wrong, {took:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
