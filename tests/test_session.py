"""Session: one plan per key, weights and states that live on, and clear refusals."""

import numpy as np
import pytest

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.dtype import F32, I32
from ggraph.errors import BackendError, InputError, ModelError
from ggraph.graph import Graph
from ggraph.session import Session
from ggraph.tensor import Array, Tensor, input, state, weight

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}


def raw(t: Tensor) -> Array:
    return WEIGHTS[t.name]


def doubled(rows: int) -> Graph:
    x = input("x", (rows, 3))
    return Graph.of({"y": ops.mul_mat(weight("w", (2, 3)), x + x)})


def counter() -> Graph:
    """A state of four rows; each run writes one row and reads all."""
    rows, index = input("rows", (1, 2)), input("index", (1,), I32)
    new = ops.set_rows(state("memory", (4, 2)), rows, index)
    return Graph.of({"sum": ops.scale(new, 1.0, 0.5)})


def cpu_session() -> Session:
    return Session({"cpu": open_backend("cpu", threads=1, exact=True)})


def test_replay_builds_and_plans_nothing() -> None:
    session, built = cpu_session(), []

    def build() -> Graph:
        built.append(1)
        return doubled(2)

    for i in range(5):
        session.prepare("two rows", build, raw)
        x = np.full((2, 3), i, np.float32)
        out = session.run("two rows", {"x": x})["y"]
        assert np.allclose(out, 2 * x @ WEIGHTS["w"].T)
    assert built == [1]
    assert session.plans_made == 1
    session.close()


def test_plans_share_weights_and_states() -> None:
    session, asked = cpu_session(), []

    def source(t: Tensor) -> Array:
        asked.append(t.name)
        return raw(t)

    for rows in (1, 2, 3):
        session.prepare(rows, lambda rows=rows: doubled(rows), source)  # type: ignore[misc]
        assert session.run(rows, {"x": np.ones((rows, 3), np.float32)})["y"].shape == (rows, 2)
    assert asked == ["w"]
    session.close()


def test_a_state_keeps_its_value_from_run_to_run() -> None:
    session = cpu_session()
    session.prepare("count", counter, raw)
    expected = np.zeros((4, 2), np.float32)
    for i, row in ((1, 5.0), (3, 7.0), (1, -2.0)):
        expected[i] = row
        feeds = {"rows": np.full((1, 2), row, np.float32), "index": np.array([i], np.int32)}
        assert np.array_equal(session.run("count", feeds)["sum"], expected + 0.5)
    held = session.read_state("memory").view(np.float32).reshape(4, 2)
    assert np.array_equal(held, expected)
    session.write_state("memory", np.zeros((4, 2), np.float32))
    feeds = {"rows": np.ones((1, 2), np.float32), "index": np.array([0], np.int32)}
    assert session.run("count", feeds)["sum"].sum() == 2 + 8 * 0.5
    session.close()


def test_refusals_name_what_was_expected() -> None:
    session = cpu_session()
    session.prepare("k", lambda: doubled(2), raw)
    with pytest.raises(InputError, match="'x' was not fed"):
        session.run("k", {})
    with pytest.raises(InputError, match=r"expected shape \[2, 3\], got \[3, 2\]"):
        session.run("k", {"x": np.zeros((3, 2), np.float32)})
    with pytest.raises(InputError, match="no plan was prepared"):
        session.run("other", {})
    with pytest.raises(InputError, match="no state 'nothing'"):
        session.read_state("nothing")
    with pytest.raises(InputError, match="expected 24 bytes"):
        session.write_state("w", np.zeros(1, np.uint8))
    with pytest.raises(InputError, match="at least one device"):
        Session({})
    session.close()


def test_a_weight_cannot_change_its_size_between_plans() -> None:
    session = cpu_session()
    session.prepare(1, lambda: doubled(1), raw)
    wide = Graph.of({"y": ops.mul_mat(weight("w", (4, 3), F32), input("x", (1, 3)))})
    with pytest.raises(ModelError, match="'w' is 48 bytes"):
        session.prepare(2, lambda: wide, raw)
    session.close()


def test_unknown_devices_are_named() -> None:
    with pytest.raises(BackendError, match="unknown device 'tpu0'"):
        open_backend("tpu0")
