"""Large copies by all threads: every byte, nothing beside, feeds and results however they lie."""

import numpy as np
import pytest

from ggraph import Graph, Session, input, open_backend, ops, state
from ggraph.backends.cpu.runtime.copying import SHARED, Copier
from ggraph.backends.cpu.runtime.pool import Pool

SIDE = 333  # a side of SIDE * 2 by SIDE floats is no multiple of a line, and larger than SHARED


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_byte_and_none_beside(threads: int) -> None:
    pool = Pool(threads)
    copy = Copier(pool)
    source = np.random.default_rng(1).integers(1, 255, 70_000, dtype=np.uint8)
    for nbytes in (0, 1, 63, 64, 255, 256, 257, 4096, 65_537):
        for start in (0, 1, 37):
            target = np.zeros(nbytes + 80, np.uint8)
            copy(target[start:].ctypes.data, source[start:].ctypes.data, nbytes)
            assert np.array_equal(target[start : start + nbytes], source[start : start + nbytes])
            assert not target[:start].any() and not target[start + nbytes :].any()
    pool.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_large_feeds_and_results_however_they_lie(threads: int) -> None:
    rows = np.random.default_rng(2).standard_normal((2 * SIDE, SIDE)).astype(np.float32)
    assert rows.nbytes > SHARED
    layouts = {
        "plain": rows,
        "columns first": np.asfortranarray(rows),
        "every second": np.repeat(rows, 2, 1)[:, ::2],
        "read-only": np.frombuffer(rows.tobytes(), np.float32).reshape(rows.shape),
        "float64": rows.astype(np.float64),
    }
    session = Session({"cpu": open_backend("cpu", threads=threads)})
    x = input("x", rows.shape)
    turned = ops.cont(x.T)
    session.prepare("k", Graph.of({"y": x * 2.0, "z": turned, "part": turned[3:, 7:]}))
    before = session.run("k", {"x": -rows})
    for given in layouts.values():
        found = session.run("k", {"x": given})
        assert np.array_equal(found["y"], rows * 2) and np.array_equal(found["z"], rows.T)
        assert np.array_equal(found["part"], rows.T[3:, 7:])
    assert np.array_equal(before["y"], rows * -2), "results are the caller's own"
    session.close()


def test_states_of_any_size_come_back() -> None:
    s, x = state("s", (SIDE * 2, SIDE)), input("x", (SIDE,))
    session = Session({"cpu": open_backend("cpu", threads=2)})
    session.prepare("k", Graph.of({"y": (s * x).sum(1)}))
    held = np.random.default_rng(3).standard_normal(s.shape).astype(np.float32)
    session.write_state("s", held)
    assert np.array_equal(session.read_state("s").view(np.float32).reshape(s.shape), held)
    assert session.run("k", {"x": np.ones(SIDE, np.float32)})["y"].shape == (SIDE * 2,)
    session.close()
