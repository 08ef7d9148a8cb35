"""Pairs of token and expert grouped on the device (src/experts.cu), against NumPy."""

import numpy as np
import pytest
from cuda_kit import DEVICE, bytes_on, need_driver, opened

from ggraph.backends.cuda.lowering import Lowering
from ggraph.tensor import Array

pytestmark = need_driver


def grouped(ids: Array, experts: int, order: int | None = None) -> Array:
    """What `group_pairs` writes: order, starts and active, one behind the other."""
    backend = opened(16, order)
    given, nbytes = bytes_on(backend, ids.nbytes), 4 * (ids.size + 2 * (experts + 2))
    made = bytes_on(backend, nbytes)
    backend.write(given, 0, ids.view(np.uint8))
    low = Lowering(backend)
    at = backend.address(made, 0)
    starts = at + 4 * ids.size
    low.call(
        "group_pairs", (1, 1, 1), 256, ids=backend.address(given, 0), order=at, starts=starts,
        active=starts + 4 * (experts + 2), pairs=ids.size, experts=experts,
    )  # fmt: skip
    for step in low.steps:
        step(backend.driver.stream())
    backend.driver.synchronise()
    found = backend.read(made, 0, nbytes).view(np.int32).copy()
    backend.close()
    return found


def named(ids: Array, experts: int) -> tuple[Array, Array, Array]:
    """The same by NumPy; of `active` what is written."""
    groups = np.where((ids < 0) | (ids >= experts), experts, ids)
    counts = np.bincount(groups, minlength=experts + 1)
    used = np.flatnonzero(counts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return np.argsort(groups, kind="stable"), starts, np.concatenate([[len(used)], used])


@pytest.mark.parametrize("experts", [1, 2, 31, 128, 255, 256, 257, 1024])
@pytest.mark.parametrize("pairs", [1, 8, 31, 33, 255, 256, 257, 1000])
def test_pairs_of_a_group_keep_their_order(pairs: int, experts: int) -> None:
    """All groups, few, and one; ids that do not exist are a group of their own."""
    rng = np.random.default_rng(pairs * experts)
    for low, high in ((-1, experts + 1), (0, min(experts, 3)), (experts - 1, experts)):
        ids = rng.integers(low, high, pairs, np.int32)
        wanted = named(ids, experts)
        for order in (None,) if DEVICE else (0, 1, 7):
            found = np.split(grouped(ids, experts, order), [pairs, pairs + experts + 2])
            found[2] = found[2][: len(wanted[2])]
            assert all(np.array_equal(f, w) for f, w in zip(found, wanted, strict=True)), order
