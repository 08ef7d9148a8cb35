"""Pages of packed weights: given back, read again from the file, and nothing else touched."""

import ctypes
import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ggraph.backends.cpu.pages import (
    HUGE,
    LINE,
    PAGE,
    PIECE,
    Shelf,
    drop_map,
    drop_pages,
    mapping_of,
)


@pytest.fixture
def mapped(tmp_path: Path) -> mmap.mmap:
    path = tmp_path / "data"
    path.write_bytes(np.arange(4 * PAGE, dtype=np.uint32).view(np.uint8).tobytes()[: 4 * PAGE])
    with path.open("rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize(
    ("first", "nbytes", "pages"),
    [(0, 4 * PAGE, 4), (1, 3 * PAGE, 2), (PAGE - 1, 2, 0), (5, PAGE, 0), (PAGE, 2 * PAGE + 7, 2)],
)
def test_only_whole_pages_go_and_the_bytes_stay(
    mapped: mmap.mmap, first: int, nbytes: int, pages: int
) -> None:
    window = np.frombuffer(mapped, np.uint8, nbytes, first).reshape(1, -1)[0]
    before = window.copy()
    dropped = drop_pages(window)
    assert dropped == (pages * PAGE if hasattr(mmap, "MADV_DONTNEED") else 0)
    assert (window == before).all()


def test_memory_that_is_no_read_only_map_is_left_alone(tmp_path: Path) -> None:
    own = np.ones(4 * PAGE, np.uint8)
    assert drop_pages(own) == 0
    assert mapping_of(own) is None
    private = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    private[:] = 7
    assert drop_pages(private) == 0
    assert (private == 7).all()


def test_a_map_is_forgotten_whole_and_read_again(mapped: mmap.mmap) -> None:
    window = np.frombuffer(mapped, np.uint8, PAGE, PAGE)
    before = window.copy()
    drop_map(window)
    drop_map(before)  # ordinary memory is left alone
    assert (window == before).all()


def test_arrays_of_a_shelf_are_zero_aligned_and_apart() -> None:
    shelf = Shelf()
    sizes = [1, LINE, 100_000, PIECE, 5, PIECE + 3, 7]
    arrays = [shelf.take(n) for n in sizes]
    ends = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays)
    assert [a.nbytes for a in arrays] == sizes
    assert all(a.ctypes.data % LINE == 0 and not a[:9].any() for a in arrays)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))
    for i, a in enumerate(arrays):
        a[-1] = i + 1
    assert [int(a[-1]) for a in arrays] == list(range(1, len(sizes) + 1))


def resident(address: int, pages: int) -> int:
    """How many of the pages from `address` on are in memory."""
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * PAGE), found) == 0
    return sum(x & 1 for x in found)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="pages cannot be given back")
def test_what_a_huge_page_holds_beyond_the_last_array_is_given_back() -> None:
    shelf = Shelf()
    held = shelf.take(3 * PAGE + 1)
    held[:] = 7
    shelf.trim()
    assert resident(held.ctypes.data, HUGE // PAGE) == 4
    later = shelf.take(PAGE)
    assert not later.any() and (held == 7).all()
    later[:] = 8
    assert (held == 7).all()
