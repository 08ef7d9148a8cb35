"""Short convolutions over many rows of a text: what comes out, and what is read for it."""

from typing import Any

import numpy as np
import pytest
from cpu_calls import call
from guard_pages import guarded

from ggraph import Graph, Options, Session, input, open_backend, ops, state, weight
from ggraph.backends.cpu.kernels.courses import MAX_ROWS
from ggraph.dtype import I32
from ggraph.tensor import Array

ROWS = (1, 2, 3, 4, 15, 16, 17, 33, 100, MAX_ROWS + 1)


def behind_a_guard(values: Any, kind: type = np.float32) -> Array:
    """The same numbers, right behind a page that nobody may touch."""
    given = np.asarray(values, kind)
    found = guarded(given.nbytes, 4, at_end=False).view(kind).reshape(given.shape)
    found[:] = given
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize(("taps", "n"), [(2, 7), (4, 70), (8, 33)])
def test_a_text_of_many_rows(rows: int, begun: int, taps: int, n: int) -> None:
    rng = np.random.default_rng(rows)
    state = behind_a_guard(rng.normal(size=(1, taps - 1, n)))
    x, w = behind_a_guard(rng.normal(size=(rows, n))), behind_a_guard(rng.normal(size=(taps, n)))
    # two rows of the log became text before: the course is the state, they, then x
    log, replay = behind_a_guard(rng.normal(size=(3, n))), [[2, 0, -1]]
    whole = np.concatenate([state[0] * begun, log[[2, 0]], x]).astype(np.float64)
    given = {
        "state": state, "log": log, "x": x, "xs": n * 4,
        "parents": behind_a_guard(np.arange(rows) - 1, np.int32),
        "replay": behind_a_guard(replay, np.int32), "past": behind_a_guard([begun], np.int32),
        "slots": 1, "m": rows, "n": n, "taps": taps, "r": 3, "limit": 3,
    }  # fmt: skip
    y = behind_a_guard(np.zeros((rows, n)))
    call("ssm_conv", w=w, y=y, **given)
    first = len(whole) - rows - taps + 1
    want = sum(w[j].astype(np.float64) * whole[first + j :][:rows] for j in range(taps))
    bound = sum(np.abs(w[j] * whole[first + j :][:rows]) for j in range(taps))
    assert (np.abs(y - want) <= 1e-6 * bound).all()
    certain = behind_a_guard([rows - 1], np.int32)
    call("ssm_conv_next", y=state, certain=certain, **given)
    assert np.array_equal(state[0], whole[len(whole) - taps + 1 :])


def test_branches_of_a_tree_see_their_own_forerunners() -> None:
    """Rows in any order that puts parents first, over several turns of rows."""
    rng, rows, taps, n = np.random.default_rng(0), 70, 4, 40
    parents = np.array([-1, *(rng.integers(max(0, i - 20), i) for i in range(1, rows))], np.int32)
    x, w = (rng.normal(size=(size, n)).astype(np.float32) for size in (rows, taps))
    state, log, y = np.ones((1, taps - 1, n), np.float32), np.zeros((1, n), np.float32), 0 * x
    call(
        "ssm_conv", state=state, log=log, x=x, xs=n * 4, w=w, y=y, parents=parents, m=rows,
        n=n, taps=taps, replay=np.full((1, 1), -1, np.int32), past=np.ones(1, np.int32), slots=1,
        r=1, limit=1,
    )  # fmt: skip
    for t in range(rows):
        path, at = [], t
        while at >= 0:
            path, at = [x[at], *path], int(parents[at])
        seen = np.concatenate([state[0], path])[-taps:].astype(np.float64)
        assert np.allclose(y[t], (seen * w).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, MAX_ROWS, MAX_ROWS + 1, 1100])
def test_steps_of_any_length_have_the_kernel_and_the_bits_of_short_ones(rows: int) -> None:
    """No length of a step leaves rows to NumPy, whose bits are others."""
    rng, n, taps, last = np.random.default_rng(1), 9, 4, min(rows, 5)
    x, w = (rng.normal(size=(size, n)).astype(np.float32) for size in (rows, taps))

    def convolved(given: Array) -> Array:
        held, log = state("conv", (1, taps - 1, n)), state("log", (2, n))
        feeds = {
            "x": given, "parents": np.arange(len(given), dtype=np.int32) - 1,
            "replay": np.array([[-1]], np.int32), "past": np.zeros(1, np.int32),
        }  # fmt: skip
        course = [input(name, feeds[name].shape, I32) for name in ("parents", "replay", "past")]
        y = ops.ssm_conv(held, log, input("x", given.shape), weight("w", w.shape), *course)
        cpu = {"cpu": open_backend("cpu", threads=1)}
        with Session(cpu, options=Options(strict=True)) as session:
            session.prepare("step", Graph.of({"y": y}), lambda _: w)
            return session.run("step", feeds)["y"]

    assert np.array_equal(convolved(x)[:last], convolved(x[:last]))
