"""Gated delta nets by kernels: one call finds on its way what another asks for."""

from typing import Any

import numpy as np
import pytest
from cpu_calls import call
from test_cpu_short_conv import behind_a_guard

from ggraph.ops.recurrent import DELTA_NET, DELTA_NET_NEXT
from ggraph.tensor import Array

HEADS, GROUPS, D = 4, 2, 18  # columns of V are whole vectors beside each other, or eight
UNKNOWN = -7.0  # what nobody has written


class Net:
    """A step of some texts' rows; `course` says which follow which."""

    def __init__(self, seed: int, slots: int, m: int, v: int, course: dict[str, Array]) -> None:
        rng = np.random.default_rng(seed)
        width = GROUPS * D + HEADS * v + 2 * HEADS
        self.m, self.v, self.slots, self.width = m, v, slots, width
        self.state = behind_a_guard(rng.normal(size=(slots, HEADS, D, v)))
        self.log, self.rows = (behind_a_guard(rng.normal(size=(n, width)) / 3) for n in (5, m))
        self.q = behind_a_guard(rng.normal(size=(m, GROUPS, D)))
        self.course = {name: behind_a_guard(a, np.int32) for name, a in course.items()}

    def _call(self, kernel: str, **given: Any) -> None:
        sizes = {
            "slots": self.slots, "m": self.m, "heads": HEADS, "groups": GROUPS, "d": D, "v": self.v,
            "width": self.width, "r": self.course["replay"].shape[1], "limit": len(self.log),
        }  # fmt: skip
        call(kernel, log=self.log, rows=self.rows, **self.course, **sizes, **given)

    def found(self, ends: Array | int) -> Array:
        """What q finds in each row; `ends` is written to."""
        y = behind_a_guard(np.full((self.m, HEADS, self.v), UNKNOWN))
        self._call("delta_net", state=self.state, q=self.q, y=y, ends=ends)
        return y

    def after(self, ends: Array | int) -> Array:
        """The states that texts end in."""
        held = behind_a_guard(self.state)
        self._call("delta_net_next", state=held, y=held, ends=ends)
        return held

    def as_text(self, t: int) -> Array:
        """What row t finds where it and its forerunners are all of the step."""
        path = [t]
        while (before := int(self.course["parents"][path[0]])) >= 0:
            path = [before, *path]
        parents = np.arange(len(path)) - 1
        parents[0] = before
        alone = Net(0, self.slots, len(path), self.v, {**self.course, "parents": parents})
        alone.state, alone.log = self.state, self.log
        alone.rows, alone.q = behind_a_guard(self.rows[path]), behind_a_guard(self.q[path])
        found: Array = alone.found(0)[-1]
        return found


def course(rng: np.random.Generator, slots: int, m: int, chains: bool) -> dict[str, Array]:
    """Trees of some texts, rows of which and of the log became text, as may be."""
    parents = np.empty(m, np.int32)
    for t in range(m):
        last = t - 1 if chains and t % 7 else rng.integers(-slots, t)
        parents[t] = last if last or t else -1
    replay = rng.integers(-1, 5, (slots, 3))
    past, certain = rng.integers(0, 2, slots), rng.integers(-1, m, slots)
    return {"parents": parents, "replay": replay, "past": past, "certain": certain}


@pytest.mark.parametrize("v", [8, 24, 64, 128])
@pytest.mark.parametrize(("slots", "m"), [(1, 1), (1, 2), (1, 30), (3, 30), (2, 9)])
@pytest.mark.parametrize("chains", [False, True])
def test_where_texts_end_is_found_on_the_way(v: int, slots: int, m: int, chains: bool) -> None:
    for seed in range(6):
        net = Net(seed, slots, m, v, course(np.random.default_rng(seed), slots, m, chains))
        ends = behind_a_guard(np.full(net.state.shape, UNKNOWN))
        y, after = net.found(ends), net.after(0)
        assert np.array_equal(net.after(ends), after), "the same bits as by a walk of its own"
        assert np.array_equal(net.found(0), y), "and nothing else changes by it"
        stays = (net.course["past"] != 0) & (net.course["replay"][:, 0] < 0)
        stays &= net.course["certain"] < 0
        assert (ends[stays] == UNKNOWN).all() and (ends[~stays] != UNKNOWN).all()
        for t in range(0, m, 5):
            assert np.array_equal(net.as_text(t), y[t]), "a node has the bits of a text"
        given = [np.array(a) for a in (net.state, net.log, net.rows, net.q, *net.course.values())]
        wanted, end = DELTA_NET.reference(*given), DELTA_NET_NEXT.reference(*given[:3], *given[4:])
        assert np.allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
        assert np.allclose(after, end, rtol=1e-4, atol=1e-4 * np.abs(end).max())
