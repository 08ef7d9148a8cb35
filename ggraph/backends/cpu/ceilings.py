"""What this machine can do at most: bytes read and copied, multiply-adds, products of codes.

Kernels that do nothing else, run by the same threads as everything: the ceilings that a profile and
a prompt are held against. Products of 8-bit integers may pass the ceiling of float32 multiply-adds.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph.backends.cpu.codegen.isa import Isa
from ggraph.backends.cpu.codegen.simd import F32X8, I8, I32, I32X8, Kernel, Val, kernel, vec
from ggraph.backends.cpu.codegen.words import fma
from ggraph.backends.cpu.kernels import amx
from ggraph.backends.cpu.kernels.blocks import prefetch
from ggraph.backends.cpu.kernels.dots import Dot
from ggraph.backends.cpu.kernels.places import AHEAD, PLACES
from ggraph.backends.cpu.runtime import copying  # noqa: F401  (registers "copy")
from ggraph.backends.cpu.runtime.pages import LINE
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler, Flat
from ggraph.tensor import Array

STREAMS = 8  # independent sums; enough to hide the latency of a load or a multiply-add
CHUNK = 32 * STREAMS  # bytes that one turn of `stream_read` reads
LARGE = 1 << 28  # bytes: so many that it hardly matters what the caches hold of them
TURNS = 1 << 20
STEPS = 8  # of 32 columns
PRODUCTS = 1 << 33  # of a thread: some hundredths of a second


def _sink(k: Kernel) -> Val:
    """Where this thread leaves its result, so that no work can be left out."""
    return k.arg("sink") + k.thread * LINE


@kernel("x chunks places sink")
def stream_read(k: Kernel) -> None:
    """Read `chunks` times 256 bytes once at each of some places, one behind the other, in turn."""
    x, chunks = k.words("x chunks")
    sums = [k.var(0, I32X8) for _ in range(STREAMS)]
    for i in k.share(chunks):
        for place in k.loop(0, k.arg("places")):
            at = x + (place * chunks + i) * CHUNK
            prefetch(k, at + AHEAD, CHUNK, near=True)
            for s, total in enumerate(sums):
                total.value = total.value ^ k.load(at + s * 32, I32X8)
    for total in sums[1:]:
        sums[0].value = sums[0].value ^ total.value
    k.store(_sink(k), sums[0].value)


@kernel("turns sink")
def peak_fma(k: Kernel) -> None:
    """On every thread `turns` times 8 fused multiply-adds of 8 lanes, all independent."""
    factor = k.load(_sink(k), F32X8)
    sums = [k.var(float(s), F32X8) for s in range(STREAMS)]
    for _ in k.loop(0, k.arg("turns")):
        for total in sums:
            total.value = fma(k, total.value, factor, factor)
    for total in sums[1:]:
        sums[0].value = sums[0].value + total.value
    k.store(_sink(k), sums[0].value)


def chains(isa: Isa) -> int:
    """Independent sums of products: enough to hide their latency, and registers for them."""
    return 12 if isa.dot == "vnni" else 4


def products_per_turn(isa: Isa) -> int:
    """Products of one turn of `peak_products` on one thread."""
    if isa.tiles:
        return len(amx.SUMS) * amx.HEIGHT * amx.HEIGHT * LINE
    return chains(isa) * STEPS * isa.lanes * 4


@kernel("turns codes sink")
def peak_products(k: Kernel) -> None:
    """On every thread `turns` times `products_per_turn` products of 4-bit codes with bytes, and
    their sums, and nothing else: no scales, no unpacking, nothing written."""
    if k.isa.tiles:
        amx.configure(k, LINE, amx.HEIGHT)
        for _ in k.loop(0, k.arg("turns")):
            amx.multiply_all(k)
        amx.release(k)
        return
    t = vec(I8, 4 * k.isa.lanes)
    totals = [k.var(0, vec(I32, k.isa.lanes)) for _ in range(chains(k.isa))]
    for i in k.loop(0, k.arg("turns")):
        at = k.arg("codes") + (i & 1) * LINE  # changes, so that nothing leaves the loop
        dots = [Dot(k, 4) for _ in totals]
        for dot, total in zip(dots, totals, strict=True):
            dot.total = total.value
        rows = [k.load(at + (STEPS + d) * LINE, t) for d in range(len(dots))]
        for step in range(STEPS):
            codes = k.load(at + step * LINE, t)
            for dot, row in zip(dots, rows, strict=True):
                dot.step(codes, row)
        for dot, total in zip(dots, totals, strict=True):
            total.value = dot.result()
    for total in totals[1:]:
        totals[0].value = totals[0].value ^ total.value
    k.store(_sink(k), totals[0].value)


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second of all threads of a pool; a multiply-add counts as two."""

    read: float  # bytes read
    copy: float  # bytes read plus bytes written
    fma: float  # float32 operations
    products: float  # operations on bytes of 4 and of 8 bits


def measure_ceilings(pool: Pool, rounds: int = 5) -> Ceilings:
    """The best of a few rounds, about a tenth of a second."""
    source, half = np.ones(LARGE, np.uint8), LARGE // 2
    sink = _sinks(pool)
    moving = _program(pool, "copy", to=source[half:], at=source, nbytes=half)
    adding = _program(pool, "peak_fma", turns=TURNS, sink=sink)
    operations = TURNS * STREAMS * 8 * 2 * pool.threads
    return Ceilings(
        _read(pool, source, rounds),
        LARGE / _best(pool, moving, rounds),
        operations / _best(pool, adding, rounds),
        2 * products_ceiling(pool, rounds),
    )


def read_ceiling(pool: Pool, rounds: int = 2) -> float:
    """Bytes that all threads read a second, alone."""
    return _read(pool, np.ones(LARGE, np.uint8), rounds)


def products_ceiling(pool: Pool, rounds: int = 2) -> float:
    """Products of 4-bit codes and bytes that all threads make and add up a second, alone."""
    isa = pool.jit.isa
    codes = np.zeros((1 + STEPS + chains(isa)) * LINE, np.uint8)
    turns = PRODUCTS // products_per_turn(isa)
    program = _program(pool, "peak_products", turns=turns, codes=codes, sink=_sinks(pool))
    return turns * products_per_turn(isa) * pool.threads / _best(pool, program, rounds)


def _read(pool: Pool, source: Array, rounds: int) -> float:
    sink = _sinks(pool)
    reads = [
        # Whole pages apart, places would share sets of the nearest cache: one chunk less.
        _program(pool, "stream_read", x=source, chunks=LARGE // CHUNK // n - 1, places=n, sink=sink)
        for n in (1, PLACES)  # as products read, whichever is more on this processor
    ]
    return LARGE / min(_best(pool, reading, rounds) for reading in reads)


def _sinks(pool: Pool) -> Array:
    return np.zeros((pool.threads, LINE), np.uint8)


def launch_seconds(pool: Pool) -> float:
    """What one run of a program costs beside its instructions."""
    empty = Assembler(pool.jit).freeze()
    return float(np.median([_once(pool, empty) for _ in range(200)]))


def _program(pool: Pool, name: str, **values: Any) -> Flat:
    asm = Assembler(pool.jit, stream=True)  # what is read comes from memory, as large weights do
    asm.add(name, **values)
    return asm.freeze()


def _best(pool: Pool, program: Flat, rounds: int) -> float:
    return min(_once(pool, program) for _ in range(rounds))


def _once(pool: Pool, program: Flat) -> float:
    begun = time.perf_counter()
    pool.run(program)
    return time.perf_counter() - begun
