"""Pages of packed weights: given back, read again from the file, and nothing else touched."""

import ctypes
import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ggraph import weight
from ggraph.backends.cpu.lowering import packing
from ggraph.backends.cpu.lowering.packing import Packer
from ggraph.backends.cpu.runtime.pages import HUGE, LINE, PAGE, PIECE, Shelf, drop_map, read_pages
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.host import HostMemory
from ggraph.backends.protocol import Memory, Ref
from ggraph.plan import Buffer
from ggraph.tensor import Array


@pytest.fixture
def mapped(tmp_path: Path) -> mmap.mmap:
    path = tmp_path / "data"
    path.write_bytes(np.arange(4 * PAGE, dtype=np.uint32).view(np.uint8).tobytes()[: 4 * PAGE])
    with path.open("rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize(
    ("first", "nbytes", "pages"),
    [(0, 4 * PAGE, 4), (1, 3 * PAGE, 3), (PAGE - 1, 2, 1), (5, PAGE, 1), (PAGE, 2 * PAGE + 7, 3)],
)
def test_pages_that_were_read_are_whole_and_those_before_go_too(
    mapped: mmap.mmap, first: int, nbytes: int, pages: int
) -> None:
    """What lies behind `data` is not read yet; what lies before was, and is mapped again."""
    file = np.frombuffer(mapped, np.uint8)
    known = hasattr(mmap, "MADV_DONTNEED")
    assert read_pages(file[first : first + nbytes]) == (
        file.ctypes.data if known else file.ctypes.data + pages * PAGE, pages * PAGE * known
    )  # fmt: skip
    assert read_pages(file[:100])[1] == 0, "no whole page"


def test_only_a_huge_page_before_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(HUGE + 8 * PAGE))
    with path.open("rb") as f:
        held = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    file = np.frombuffer(held, np.uint8)
    at, _ = read_pages(file[HUGE + 4 * PAGE :])
    assert at == file.ctypes.data + 4 * PAGE


def test_memory_that_is_no_read_only_map_is_left_alone() -> None:
    assert read_pages(np.ones(4 * PAGE, np.uint8))[1] == 0
    private = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    private[:] = 7
    private.flags.writeable = False  # whoever has the map may write, and did
    assert read_pages(private)[1] == 0
    drop_map(private)
    assert (private == 7).all()


def test_a_state_takes_the_memory_that_its_rows_need() -> None:
    """A cache has a state for each layer, of which a short text fills the first rows."""
    memory = HostMemory().allocate(Buffer("cache", "cpu", 8 * HUGE, LINE)).handle
    for piece in memory.reshape(8, HUGE):
        piece[PAGE] = 1
    assert resident(memory.ctypes.data, memory.nbytes // PAGE) == 8 and not memory[0]


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


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="nobody tells what is resident")
def test_packing_keeps_little_of_the_file_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is packed piece by piece: the file's pages of the whole would come atop of all else
    where the largest comes last. The pieces make the bytes that one does."""
    n, k, row = 4000, 16384, 16384 // 32 * 34  # 70 MB of Q8_0; the last piece has an odd end
    path = tmp_path / "w"
    path.write_bytes(np.random.default_rng(1).bytes(n * row))
    with path.open("rb") as f:
        held = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    file = np.frombuffer(held, np.uint8)
    memory = Memory(Buffer("w", "cpu", 0, n * row), file)
    ref, pool, seen = Ref(weight("w", (n, k), "q8_0"), memory, 0), Pool(2), list[int]()
    pool.jit.prepare(["pack_q8_0", "pack_piece"])  # LLVM is no part of this
    given_back = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    @given_back
    def watched(at: int, nbytes: int, advice: int) -> int:
        seen.append(mapped_bytes())
        return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), advice))

    def packed() -> Array:
        packer = Packer(pool, exact=False)
        found = packer.weight(ref).data
        packer.finish()
        return found

    before = mapped_bytes()
    with monkeypatch.context() as patch:
        address = ctypes.cast(watched, ctypes.c_void_p).value
        patch.setattr(packing, "madvise", lambda advice: address)
        pieces = packed()
    assert len(seen) > 15
    whole = packing.SLICE + HUGE  # a piece in huge pages, as the system maps files
    assert max(seen) - before <= 2 * whole, (before, seen)  # one for each thread
    assert mapped_bytes() - before < 1 << 20
    monkeypatch.setattr(packing, "SLICE", 2 * n * row)
    assert (pieces == packed()).all()
    pool.close()


def mapped_bytes() -> int:
    """What is in memory of all files that this process maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("RssFile:")) << 10
