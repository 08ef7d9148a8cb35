"""Gated delta nets and state spaces by kernels: one call finds on its way what another asks for."""

from typing import Any

import numpy as np
import pytest
from cpu_calls import call
from test_cpu_short_conv import behind_a_guard

from ggraph import Graph, Session, input, open_backend, ops, state
from ggraph.backends.cpu.lowering.carried import NETS
from ggraph.dtype import I32
from ggraph.ops.recurrent import DELTA_NET, DELTA_NET_NEXT
from ggraph.tensor import Array

HEADS, GROUPS, D = 4, 2, 18  # columns of V are whole vectors beside each other, or eight
UNKNOWN = -7.0  # what nobody has written


class Net:
    """A step of some texts' rows; `course` says which follow which."""

    def __init__(
        self, seed: int, slots: int, m: int, v: int, course: dict[str, Array], corrects: bool = True
    ) -> None:
        rng = np.random.default_rng(seed)
        self.corrects = corrects
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

    def found(self, ends: Array | int = 0, change: Array | int = 0) -> Array:
        """What q finds in each row; `ends` and `change` are written to."""
        y = behind_a_guard(np.full((self.m, HEADS, self.v), UNKNOWN))
        known = {"ends": ends, "change": change}
        self._call(
            NETS[self.corrects][0], state=self.state, q=self.q, qs=GROUPS * D * 4, y=y, **known
        )
        return y

    def after(self, ends: Array | int = 0, change: Array | int = 0) -> Array:
        """The states that texts end in."""
        held = behind_a_guard(self.state)
        self._call(NETS[self.corrects][1], state=held, y=held, ends=ends, change=change)
        return held

    def as_text(self, t: int) -> Array:
        """What row t finds where it and its forerunners are all of the step."""
        path = [t]
        while (before := int(self.course["parents"][path[0]])) >= 0:
            path = [before, *path]
        parents = np.arange(len(path)) - 1
        parents[0] = before
        own = {**self.course, "parents": parents}
        alone = Net(0, self.slots, len(path), self.v, own, self.corrects)
        alone.state, alone.log = self.state, self.log
        alone.rows, alone.q = behind_a_guard(self.rows[path]), behind_a_guard(self.q[path])
        found: Array = alone.found()[-1]
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


@pytest.mark.parametrize("v", [8, 24, 64, 80, 96, 128])
@pytest.mark.parametrize(("slots", "m"), [(1, 1), (1, 2), (1, 30), (3, 30), (2, 9)])
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
def test_where_texts_end_is_found_on_the_way(
    v: int, slots: int, m: int, chains: bool, corrects: bool
) -> None:
    for seed in range(6):
        rows = course(np.random.default_rng(seed), slots, m, chains)
        step = Net(seed, slots, m, v, rows, corrects)
        ends = behind_a_guard(np.full(step.state.shape, UNKNOWN))
        y, after = step.found(ends), step.after()
        assert np.array_equal(step.after(ends), after), "the same bits as by a walk of its own"
        assert np.array_equal(step.found(), y), "and nothing else changes by it"
        stays = (step.course["past"] != 0) & (step.course["replay"][:, 0] < 0)
        stays &= step.course["certain"] < 0
        assert (ends[stays] == UNKNOWN).all() and (ends[~stays] != UNKNOWN).all()
        for t in range(0, m, 5):
            assert np.array_equal(step.as_text(t), y[t]), "a node has the bits of a text"
        given = [
            np.array(a) for a in (step.state, step.log, step.rows, step.q, *step.course.values())
        ]
        wanted = DELTA_NET.reference(*given, corrects=corrects)
        end = DELTA_NET_NEXT.reference(*given[:3], *given[4:], corrects=corrects)
        assert np.allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
        assert np.allclose(after, end, rtol=1e-4, atol=1e-4 * np.abs(end).max())


@pytest.mark.parametrize("v", [24, 128])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(("slots", "own"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_a_row_s_change_is_all_that_the_next_state_needs(
    v: int, corrects: bool, slots: int, own: int, replayed: bool, begun: bool, certain: bool
) -> None:
    """Where that row is all that is new; else the state is walked to as ever. Other slots go on by
    what they replay, or from their beginning."""
    replay, past = np.full((slots, 2), 1, np.int32), np.arange(slots, dtype=np.int32) % 2
    replay[own], past[own] = (3, 4) if replayed else (-1, 4), begun
    ends = np.full(slots, -1, np.int32)
    ends[own] = 0 if certain else -1
    rows = {"parents": np.array([-1 - own], np.int32), "replay": replay, "past": past}
    step = Net(7, slots, 1, v, {**rows, "certain": ends}, corrects)
    change = behind_a_guard(np.full((HEADS, v), UNKNOWN))
    y, after = step.found(change=change), step.after()
    assert np.array_equal(step.found(), y)
    assert (change != UNKNOWN).all()
    assert np.array_equal(step.after(change=change), after)
    used = np.array_equal(step.after(change=behind_a_guard(change + 1)), after)
    assert used == (replayed or not begun or not certain), "the change is taken where it can be"


@pytest.mark.parametrize("corrects", [False, True])
def test_only_what_is_computed_alike_is_shared(corrects: bool) -> None:
    """A net and what another one leaves of the same sources."""
    shapes = {"state": (1, 2, 4, 8), "log": (3, 24), "rows": (4, 24)}
    sources = [*(input(n, shape) for n, shape in shapes.items() if n != "state")]
    course = [input(n, s, I32) for n, s in {"p": (4,), "r": (1, 2), "b": (1,), "c": (1,)}.items()]
    q, held = input("q", (4, 1, 4)), state("state", shapes["state"])
    found = ops.delta_net(held, *sources, q, *course, corrects=corrects)
    after = ops.delta_net_next(held, *sources, *course, corrects=not corrects)
    rng = np.random.default_rng(5)
    given = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in (*sources, q)}
    given |= dict(zip("prbc", (np.arange(4) - 1, [[-1, 0]], [0], [3]), strict=True))
    feeds = {n: np.asarray(v, np.float32 if n in (*shapes, "q") else np.int32)
             for n, v in given.items()}  # fmt: skip
    with Session({"cpu": open_backend("cpu", threads=1)}) as session:
        session.prepare("both", Graph.of({"found": found, "after": after}))
        got = session.run("both", feeds)
    arrays = [np.zeros(shapes["state"], np.float32), *(feeds[t.name] for t in (*sources, *course))]
    end = DELTA_NET_NEXT.reference(*arrays, corrects=not corrects)
    assert np.allclose(got["after"], end, rtol=1e-4, atol=1e-4 * np.abs(end).max())
