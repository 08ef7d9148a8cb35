"""Memory and file pages that are got ready before somebody asks."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from stored_weights import raw_weight
from test_cpu_pages import resident

from ggraph import Graph, Session, dtypes, input, open_backend, ops, weight
from ggraph.backends.cpu import backend as backend_module
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.lowering.packing import Packer
from ggraph.backends.cpu.runtime.ahead import Ahead
from ggraph.backends.cpu.runtime.pages import HUGE, PAGE, Shelf
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.errors import PlanError
from ggraph.formats.checkpoint import RawTensor
from ggraph.tensor import Array

asks = pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="nobody to ask for pages")


def done(ahead: Ahead) -> None:
    """Wait until everything is ready."""
    for thread in ahead._crew:
        thread.join()


@asks
def test_memory_is_there_and_keeps_what_others_write_meanwhile() -> None:
    memory, ahead = Shelf().expect(8 * HUGE), Ahead(host_jit())
    ahead.touch(memory)
    for i in range(0, memory.nbytes, PAGE):  # the very bytes that are touched
        memory[i] = i // PAGE % 251
    done(ahead)
    assert resident(memory.ctypes.data, memory.nbytes // PAGE) == memory.nbytes // PAGE
    assert (memory[::PAGE] == np.arange(memory.nbytes // PAGE) % 251).all()
    memory[::PAGE] = 0
    assert not memory.any()


@asks
def test_a_stop_leaves_the_front_as_it_is() -> None:
    memory, ahead = Shelf().expect(1 << 31), Ahead(host_jit())  # which takes a while
    ahead.touch(memory)
    ahead.stop()
    assert not ahead._crew
    assert resident(memory.ctypes.data, 4) == 0


@asks
def test_a_file_is_read_though_nobody_looks(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "data", (1 << 22) + 7
    content = np.random.default_rng(1).bytes(nbytes)
    path.write_bytes(content)
    with path.open("rb") as f:
        held = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    ahead, window = Ahead(host_jit()), np.frombuffer(held, np.uint8)[5:]
    ahead.ask(window)
    done(ahead)
    assert window.tobytes() == content[5:]
    assert resident(window.ctypes.data - 5, nbytes // PAGE) == nbytes // PAGE
    ahead.ask(np.ones(9, np.uint8))  # no file: nothing happens
    done(ahead)


def tensors(path: Path) -> list[RawTensor]:
    """Two matrices, experts and a vector in a mapped file."""
    shapes = {"a": (40, 256), "b": (64, 512), "x": (3, 16, 256), "v": (256,)}
    raws = {n: raw_weight(dtypes.Q4_K, int(np.prod(s[:-1])), s[-1]) for n, s in shapes.items()}
    path.write_bytes(b"".join(r.tobytes() for r in raws.values()))
    with path.open("rb") as f:
        held = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    found, at = [], 0
    for name, raw in raws.items():
        data = np.frombuffer(held, np.uint8, raw.size, at).reshape(*shapes[name][:-1], -1)
        found.append(RawTensor(name, dtypes.Q4_K, shapes[name], data))
        at += raw.size
    return found


def test_more_than_the_machine_has_is_not_expected() -> None:
    """Who runs such a model is told when it is packed, and who only looks at it is not."""
    pool = Pool(2)
    packer, row = Packer(pool, exact=False), np.zeros((1, 4), np.float32)
    huge = np.broadcast_to(row, (1 << 40, 4))
    packer.expect([RawTensor("w", dtypes.F32, huge.shape, huge)])
    assert not packer._ahead._crew
    assert packer.shelf.take(100).nbytes == 100
    packer.close()
    pool.close()


@pytest.mark.parametrize("exact", [False, True])
def test_room_is_expected_for_all_matrices_and_no_more(tmp_path: Path, exact: bool) -> None:
    pool = Pool(2)
    packer, taken = Packer(pool, exact), list[Array]()
    given = tensors(tmp_path / "w")
    packer.expect(given)
    done(packer._ahead)
    piece = packer.shelf._piece
    for w in given[:3]:
        rows = int(np.prod(w.shape[:-1]))
        tiles = -(-w.shape[-2] // (32 if exact else 16)) * (rows // w.shape[-2])
        each = 32 * w.shape[-1] * 4 if exact else 16 * w.shape[-1] // 256 * 148
        taken.append(packer.shelf.take(tiles * each))
    assert packer.shelf._piece is piece, "everything lies on the piece that was expected"
    assert piece.nbytes < sum(a.nbytes for a in taken) + 2 * HUGE
    packer.close()
    pool.close()


def test_one_thread_is_one_thread(tmp_path: Path) -> None:
    for threads, most in ((1, 0), (2, 1)):
        backend = open_backend("cpu", threads=threads)
        assert isinstance(backend, CpuBackend)
        backend.expect(tensors(tmp_path / str(threads)))
        crew = backend._packer._ahead._crew
        assert sum("touch" in t.name for t in crew) == most
        backend.close()
        assert not crew


def test_a_session_with_several_devices_expects_nothing(tmp_path: Path) -> None:
    """Nobody knows where a weight will go."""
    cpu, sim = open_backend("cpu", threads=2), open_backend("sim0")
    session = Session({"sim0": sim, "cpu": cpu})
    session.expect(tensors(tmp_path / "w"))
    assert isinstance(cpu, CpuBackend)
    assert not cpu._packer._ahead._crew
    session.close()


def test_weights_of_a_program_that_was_given_up_are_packed_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their places are known from then on: nobody would ask for their bytes again."""
    w, x = np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([[10, 1]])
    graph = Graph.of({"y": ops.mul_mat(weight("w", (3, 2)), input("x", (1, 2)))})
    session = Session({"cpu": open_backend("cpu", threads=2)})

    def refuse(*given: object) -> None:
        raise PlanError("not this time")

    with monkeypatch.context() as patch:
        patch.setattr(backend_module, "judge", refuse)
        with pytest.raises(PlanError, match="not this time"):
            session.prepare("k", graph, {"w": w})
    session.prepare("k", graph, {"w": w})
    assert (session.run("k", {"x": x})["y"] == x @ w.T).all()
    session.close()
