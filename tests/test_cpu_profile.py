"""The profile: the same bytes, every launch counted, and ceilings that are physical."""

from typing import Any

import numpy as np
import pytest

from ggraph import Graph, Session, dtypes, input, open_backend, ops, weight
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.ceilings import launch_seconds, measure_ceilings
from ggraph.backends.cpu.profile import OpTime
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.formats.quants import quantize


def session(profile: bool) -> tuple[Session, CpuBackend]:
    backend = open_backend("cpu", threads=2, profile=profile)
    assert isinstance(backend, CpuBackend)
    rng = np.random.default_rng(3)
    a = quantize(rng.standard_normal((96, 64)).astype(np.float32), dtypes.Q8_0)
    arrays: dict[str, Any] = {"a": a, "b": rng.standard_normal((64, 96)).astype(np.float32)}
    x = input("x", (3, 64))
    hidden = ops.silu(ops.mul_mat(weight("a", (96, 64), dtypes.Q8_0), x))
    coarse = ops.cast(hidden, dtypes.Q8_0)  # has no kernel: NumPy computes it
    y = x + ops.mul_mat(weight("b", (64, 96)), hidden)
    graph = Graph.of({"y": y, "coarse": coarse})
    made = Session({"cpu": backend})
    made.prepare("step", lambda: graph, lambda t: arrays[t.name])
    return made, backend


def test_a_profiled_run_gives_the_same_bytes_and_counts_every_launch() -> None:
    feeds = {"x": np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32)}
    plain, _ = session(False)
    timed, backend = session(True)
    assert backend.profile is not None
    want = plain.run("step", feeds)
    assert not backend.profile.times
    for turn in (False, True, True, False):
        backend.profile.on = turn
        got = timed.run("step", feeds)
        assert all((got[k] == want[k]).all() for k in want)
    found = backend.profile.times
    names = {name for name, _ in found}
    assert {"mul_mat q8_0 64>96", "cast 96 (NumPy)"} <= names
    assert all(rows == 3 for _, rows in found)
    assert all(len(t.times) == 2 for t in found.values())
    product = found["mul_mat q8_0 64>96", 3]
    assert product.flops == 2 * 3 * 64 * 96
    assert product.nbytes > 96 * 64, "the weights cross memory"
    for s in (plain, timed):
        s.close()


def test_a_disturbed_call_does_not_count_more_than_its_like() -> None:
    assert OpTime(1, 1, [0.001, 0.001, 5.0]).seconds == pytest.approx(0.003)


@pytest.mark.parametrize("threads", [1, 2])
def test_ceilings_are_finite_and_launches_cost_little(threads: int) -> None:
    pool = Pool(threads)
    top = measure_ceilings(pool, rounds=2)
    assert 1e8 < top.read < 1e13
    assert 1e8 < top.copy < 1e13
    assert 1e8 < top.fma < 1e14
    assert 1e8 < top.products < 1e17
    assert 0 < launch_seconds(pool) < 1
    pool.close()
