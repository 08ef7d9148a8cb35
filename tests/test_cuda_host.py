"""The stand-in for a GPU is as strict as a GPU: what CUDA refuses or leaves undefined is seen."""

import numpy as np
import pytest
from cuda_host import SIDE_BY_SIDE, Fault, HostDriver, compiled, entry_of, need_compiler

from ggraph.backends.cuda.driver import Product
from ggraph.errors import BackendError
from ggraph.tensor import Array

pytestmark = need_compiler
SOURCE = """
#include "pieces.cuh"
KERNEL wide_load(const u8* x, float* y, int at) {
  float v[8];
  f32::eight(x + at, v);
  y[threadIdx.x] = v[threadIdx.x % 8];
}
KERNEL one_place(const u8* x, float* y, int at) { y[threadIdx.x] = (float)x[at]; }
KERNEL one_write(const u8* x, u8* y, int at) {
  if (threadIdx.x == 0) y[at] = 1;
}
KERNEL neighbour(const u8* x, float* y, int shift) {
  SHARED float held[64];
  held[threadIdx.x] = (float)threadIdx.x;
  y[threadIdx.x] = held[(threadIdx.x + 64 + shift) % 64];
}
KERNEL left_over(const u8* x, float* y, int at) {
  SHARED float held[64];
  y[threadIdx.x] = held[threadIdx.x];
  held[threadIdx.x] = 1.0f;
}
KERNEL outside_array(const u8* x, float* y, int at) {
  float held[4] = {};
  held[threadIdx.x % (unsigned)at] = 1.0f;
  y[threadIdx.x] = held[0];
}
KERNEL unset(const u8* x, float* y, int at) {
  float held[4];
  y[threadIdx.x] = held[threadIdx.x % (unsigned)at];
}
KERNEL mirrored(const u8* x, float* y, int at) {
  SHARED float held[32];
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  const float other = y[at - 1 - i];
  held[threadIdx.x ^ 1] = other;
  __syncthreads();
  y[i] = held[threadIdx.x ^ 1] + (float)i;
}
KERNEL some_wait(const u8* x, float* y, int at) {
  if ((int)threadIdx.x < at) __syncthreads();
  else __syncthreads();
}
KERNEL half_a_warp(const u8* x, float* y, int at) {
  if ((int)threadIdx.x % 32 >= at) return;
  y[threadIdx.x] = warp_sum(1.0f);
}
KERNEL diverged(const u8* x, float* y, int at) {
  float v = 1.0f;
  if ((int)threadIdx.x % 32 < at) v += SHUFFLE_XOR(v, 1);
  else v += SHUFFLE_XOR(v, 1) + 1.0f;  // on a line of its own
  y[threadIdx.x] = v;
}
KERNEL copied(const u8* x, float* y, int at) {
  SHARED Quad held[64];
  copy_16((u8*)&held[threadIdx.x] + at % 16, x);
  if (at < 16) copies_done();
  y[threadIdx.x] = bits_to_float(held[threadIdx.x].w[0]);
}
"""


def run(
    kernel: str, at: int, order: int = 0, nbytes: int = 96, driver: HostDriver | None = None
) -> Array:
    """64 floats that two warps write from `nbytes` given bytes."""
    driver = driver or HostDriver(alignment=16, order=order)
    stream = driver.stream()
    x, y = driver.allocate(nbytes), driver.allocate(256)
    function = (kernel, entry_of(compiled("strict", SOURCE), kernel))
    args = [np.array(a).tobytes() for a in (np.int64(x), np.int64(y), np.int32(at))]
    driver.launch(function, (1, 1, 1), 64, args, stream)
    found = np.empty(64, np.float32)
    driver.copy(found.ctypes.data, y, 256, stream)
    driver.synchronise()
    for address in (x, y):
        driver.free(address)
    return found


def test_loads_of_sixteen_bytes_must_be_aligned() -> None:
    run("wide_load", 16)
    for at in (4, 8, 17):
        with pytest.raises(Fault, match="wide_load: undefined: alignment"):
            run("wide_load", at)


def test_no_byte_outside_a_buffer_may_be_read_or_written() -> None:
    for at in (0, 95):
        run("one_place", at)
    for at in (96, 4000):
        with pytest.raises(Fault, match="one_place: access outside all buffers"):
            run("one_place", at)
    with pytest.raises(Fault, match="access outside"):
        run("one_place", -1, driver=HostDriver(at_end=False))
    for at in (-1, -100):  # on the buffer's own page
        with pytest.raises(Fault, match="bytes around a buffer of 256 were overwritten"):
            run("one_write", at)
    found = run("one_place", 5)  # and the driver goes on
    assert (found == 255).all(), "what nobody wrote is poison"


@pytest.mark.parametrize("shift", [1, -1])
def test_a_missing_barrier_shows_in_one_order_or_another(shift: int) -> None:
    """Reads of a thread that comes later show in ascending order, of one before in descending."""
    wanted = (np.arange(64) + shift) % 64
    wrong = [int((run("neighbour", shift, order) != wanted).sum()) for order in (0, 1, 2, 3)]
    assert wrong[0 if shift == 1 else 1] >= 63, "NaN where nobody has written yet"
    assert min(wrong[2:]) > 10
    assert (run("neighbour", shift, 2) != run("neighbour", shift, 3)).any(), "by seed"


@pytest.mark.parametrize("order", [0, 1, 2, SIDE_BY_SIDE])
def test_blocks_follow_one_another_or_run_side_by_side(order: int) -> None:
    """Each with its own shared memory and barrier. All read what is later overwritten if they run
    at once; else a block finds what an earlier one has written, until there is no room for all."""
    driver = HostDriver(alignment=16, order=order)
    function = ("mirrored", entry_of(compiled("strict", SOURCE), "mirrored"))
    stream = driver.stream()
    for count in (64, 2048):  # two blocks, and more than have room
        y = driver.allocate(4 * count)
        values = np.zeros(count, np.float32)
        driver.copy(y, values.ctypes.data, values.nbytes, stream)
        args = [np.array(a).tobytes() for a in (np.int64(y), np.int64(y), np.int32(count))]
        driver.launch(function, (count // 32, 1, 1), 32, args, stream)
        driver.copy(values.ctypes.data, y, values.nbytes, stream)
        driver.synchronise()
        driver.free(y)
        at_once = np.arange(count, dtype=np.float32)
        assert (values == at_once).all() == (order == SIDE_BY_SIDE and count == 64), count


def test_shared_memory_and_variables_begin_as_garbage() -> None:
    for _ in range(2):
        assert np.isnan(run("left_over", 0)).all()
    assert (run("unset", 4) != 0).all()


def test_indices_stay_within_arrays() -> None:
    run("outside_array", 4)
    with pytest.raises(Fault, match="outside_array: undefined"):
        run("outside_array", 5)


def test_copies_into_shared_memory_arrive_when_they_are_waited_for() -> None:
    driver = HostDriver(alignment=16, order=0)
    assert np.isnan(run("copied", 16)).all(), "not before"
    x, y = driver.allocate(16), driver.allocate(256)
    given, found = np.full(4, 3.0, np.float32), np.empty(64, np.float32)
    stream = driver.stream()
    driver.copy(x, given.ctypes.data, 16, stream)
    function = ("copied", entry_of(compiled("strict", SOURCE), "copied"))
    args = [np.array(a).tobytes() for a in (np.int64(x), np.int64(y), np.int32(0))]
    driver.launch(function, (1, 1, 1), 64, args, stream)
    driver.copy(found.ctypes.data, y, 256, stream)
    driver.synchronise()
    assert (found == 3).all()
    with pytest.raises(Fault, match="copied: a copy that is not aligned"):
        run("copied", 4)


def test_barriers_and_shuffles_are_reached_together() -> None:
    run("some_wait", 64)
    with pytest.raises(Fault, match="some_wait: threads meet at different barriers"):
        run("some_wait", 32)
    run("half_a_warp", 32)
    with pytest.raises(Fault, match=r"a warp that is not whole|not reached"):
        run("half_a_warp", 16)
    with pytest.raises(Fault, match="diverged: threads meet at different barriers"):
        run("diverged", 16)


def multiplied(driver: HostDriver, rank: int = 0, **changed: int | str) -> None:
    """A product of 4 rows, 6 outputs in rows of 8, 5 columns, run; places of `changed` are offsets
    in one buffer, in which each operand has 256 bytes."""
    base, stream = driver.allocate(1280), driver.stream()
    given = {"w": 0, "x": 256, "y": 512, "n": 6, "m": 4, "k": 5, "row": 8, "kind": "f16",
             "rest": 768, "space": 1024, "space_bytes": 256, **changed}  # fmt: skip
    places = {what: base + given[what] for what in ("w", "x", "y", "rest", "space")}
    driver.product(Product(**{**given, **places}), rank)(stream)
    driver.synchronise()
    driver.free(base)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"rest": 512}, ""),
        ({"row": 6}, ""),
        ({"row": 5}, "no product of the library's"),
        ({"m": 0}, "no product of the library's"),
        ({"rest": 512 + 32}, "y and rest of a product overlap"),
        ({"rest": 512 - 32}, "y and rest of a product overlap"),
        ({"w": 512 + 4}, "w and y of a product overlap"),
        ({"x": 768, "rest": 256}, ""),
        ({"space": 768, "rest": 1024}, ""),
        ({"space": 768}, "rest and space of a product overlap"),
        ({"space_bytes": 257}, "a product's space leaves its buffer"),
        ({"w": -16}, "a product's w leaves its buffer"),
        ({"space": 1024 + 16, "space_bytes": 16}, "space of a product not aligned"),
        ({"x": 257}, "x of a product not aligned"),
        ({"y": 514}, "y of a product not aligned"),
    ],
    ids=str,
)
def test_products_keep_to_what_the_library_asks_for(
    changed: dict[str, int | str], why: str
) -> None:
    for rank in (0, 1):
        if not why:
            multiplied(HostDriver(), rank, **changed)
            continue
        with pytest.raises(Fault, match=why):
            multiplied(HostDriver(), rank, **changed)


def test_an_algorithm_is_asked_for_before_a_capture() -> None:
    """As cuBLASLt of CUDA 13.3 has it; and there are two of them."""
    driver = HostDriver()
    with pytest.raises(BackendError, match="none of rank 2"):
        multiplied(driver, 2)
    driver.begin_capture(driver.stream())
    with pytest.raises(BackendError, match="during a capture"):
        multiplied(driver)
