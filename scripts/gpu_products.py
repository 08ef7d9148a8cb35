"""The section `few` of `gpu_check.py`: products of few rows, apart from all else of a step."""

from functools import partial
from itertools import chain
from typing import Any

import gpu_models
import numpy as np
from gpu_correct import Found, opened
from gpu_speed import PLENTY, seconds_of

from ggraph import dtypes, ops
from ggraph.backends.cuda import CudaBackend, Driver
from ggraph.backends.cuda.lower import RULES
from ggraph.backends.cuda.lowering import Lowering
from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.dtype import DType
from ggraph.plan import Actor, Buffer, Command, Do
from ggraph.tensor import input, weight

TYPES: tuple[str, ...] = (
    "q4_k", "q6_k", "q8_0", "q4_0", "bf16", "iq1_m", "iq2_xxs", "iq3_s", "nvfp4"
)  # fmt: skip
SHAPES: tuple[tuple[int, int], ...] = (
    (28672, 4096),
    (4096, 4096),
    (4096, 14336),
)  # outputs and columns: Llama-3.1-8B's
ROWS: tuple[int, ...] = (1, 5, 8, 20, 60)
LEAST = 0.02  # seconds of a batch: there are many


def measure_few(driver: Driver, quick: bool) -> Found:
    """Microseconds of a product, and the bytes of its weights a second, by type, shape and rows.
    Rows are in the product's own form before; weights lie side by side in PLENTY bytes and take
    turns within a graph, so that no cache holds them."""
    types, shapes, rows, size = TYPES, SHAPES, ROWS, PLENTY
    if quick:
        types, shapes, rows, size = ("q4_0", "bf16"), ((48, 96),), (1, 20), 1 << 16
    backend = opened(driver)
    held = backend.allocate(Buffer("weights", "cuda0", size, 256))
    found = {}
    for name in types:
        dtype = dtypes.dtype(name)
        backend.write(held, 0, np.resize(gpu_models.tile(dtype), size))
        for n, k in shapes:
            for m in rows:
                seconds = _seconds(backend, held, size, dtype, (n, k, m), quick)
                nbytes = n * dtype.row_bytes(k)
                found[f"{name} {n}x{k} {m}"] = [1e6 * seconds, nbytes / seconds]
    backend.close()
    return {"ok": True, "us_and_bytes_per_s": found}


def _seconds(
    backend: CudaBackend,
    held: Memory,
    size: int,
    dtype: DType,
    of: tuple[int, int, int],
    quick: bool,
) -> float:
    n, k, m = of
    driver, stream = backend.driver, backend.stream(0)
    w, x = weight("w", (n, k), dtype), input("x", (m, k))
    y = ops.mul_mat(w, x, name="y")
    values = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    (need,) = backend.spec.needs(y)
    rooms = {
        name: backend.allocate(Buffer(name, "cuda0", nbytes, 256))
        for name, nbytes in (("x", x.nbytes), ("y", y.nbytes), ("rows", need.nbytes))
    }
    backend.write(rooms["x"], 0, values.reshape(-1).view(np.uint8))

    def steps(at: int, ready: bool) -> list[Any]:
        low = Lowering(backend)
        sources = Ref(w, held, at), Ref(x, rooms["x"], 0)
        scratch = {need.key: Scratch("rows", rooms["rows"], 0, need.nbytes, ready)}
        command = Command(Do.LAUNCH, Actor("cuda0", 0), "y", "y")
        RULES["mul_mat"].emit(low, Launch(command, Ref(y, rooms["y"], 0), sources, scratch))
        return low.steps

    for step in steps(0, ready=False):  # rows in their form, and kernels loaded
        step(stream)
    driver.synchronise()
    each = -(-w.nbytes // 256) * 256
    turns = [steps(at, ready=True) for at in range(0, size - each + 1, each)]
    driver.begin_capture(stream)
    for step in chain.from_iterable(turns):
        step(stream)
    graph = driver.end_capture(stream)
    launch = partial(driver.launch_graph, graph, stream)
    timing = seconds_of(launch, driver.synchronise, quick, least=LEAST)
    for memory in rooms.values():
        backend.free(memory)
    return float(timing.median) / len(turns)
