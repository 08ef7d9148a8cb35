"""Session: one plan per key, weights and states that live on, and clear refusals."""

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.host import HostMemory
from ggraph.backends.protocol import Backend, Memory
from ggraph.backends.sim import Machine, SimBackend, sim_spec
from ggraph.device import HOST
from ggraph.dtype import I32
from ggraph.errors import BackendError, GraphError, InputError, ModelError, PlaceError
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import Array, Kind, Tensor, input, state, weight

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


def test_what_plays_the_hosts_memory_is_asked_for_no_more_than_a_store_has() -> None:
    machine = Machine()
    device = SimBackend(sim_spec("sim0"), machine)
    with Session({"sim0": device, HOST: HostMemory()}) as session:
        assert set(session.backends) == {"sim0"}
        session.prepare("two rows", doubled(2), raw)
        x = np.ones((2, 3), np.float32)
        assert np.array_equal(session.run("two rows", {"x": x})["y"], 2 * x @ WEIGHTS["w"].T)
        session.prepare("counter", counter)
        rows, index = np.ones((1, 2), np.float32), np.array([1], np.int32)
        told = session.run("counter", {"rows": rows, "index": index})["sum"]
        assert told[1].tolist() == [1.5, 1.5]


def test_replay_builds_and_plans_nothing() -> None:
    session, built = cpu_session(), []

    def build() -> Graph:
        built.append(1)
        return doubled(2)

    for i in range(5):
        if "two rows" not in session:
            session.prepare("two rows", build, raw)
        x = np.full((2, 3), i, np.float32)
        out = session.run("two rows", {"x": x})["y"]
        assert np.allclose(out, 2 * x @ WEIGHTS["w"].T)
    assert built == [1]
    assert session.plans_made == 1
    session.close()


def test_nothing_looks_for_cycles_while_a_plan_is_made_and_bound() -> None:
    """Each search walks through all that the process holds; what prepares a plan leaves none."""
    x, w = input("x", (2, 8)), weight("w", (8, 8))
    searched: list[bool] = []

    def build() -> Graph:
        searched.append(gc.isenabled())
        return Graph.of({"y": ops.mul_mat(w, x) + x})

    def weights(t: Tensor) -> Array:
        searched.append(gc.isenabled())
        return np.ones(t.shape, np.float32)

    with Session({"cpu": open_backend("cpu")}) as session:
        session.prepare("as it will be", build, weights)
        was = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            session.prepare("again", build, weights)
            assert gc.collect() == 0, "binding leaves cycles"
            gc.enable()
            session.prepare("a third time", build, weights)
            assert gc.isenabled(), "who had it on finds it so"
        finally:
            (gc.enable if was else gc.disable)()
    assert searched == [False] * 4  # three graphs, one weight


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


@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_a_plan_that_is_forgotten_gives_its_memory_back(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but weights and states; other plans go on, and its key may be another's."""
    sim = SimBackend(sim_spec("sim0"), Machine())
    backend: Any = open_backend("cpu", threads=1) if device == "cpu" else sim
    held, rows = dict[int, Memory](), np.ones((1, 2), np.float32)
    allocate, free = backend.allocate, backend.free

    def allocated(buffer: Any) -> Memory:
        found = allocate(buffer)
        held[id(found)] = found
        return found

    def freed(memory: Memory) -> None:
        free(memory)
        held.pop(id(memory), None)  # a weight may lie in a file

    monkeypatch.setattr(backend, "allocate", allocated)
    monkeypatch.setattr(backend, "free", freed)
    with Session({device: backend}) as session:
        session.prepare("one row", doubled(1), raw)
        feeds = {"rows": rows, "index": np.array([1], np.int32)}
        session.prepare("counter", counter)
        session.run("counter", feeds)
        before = set(held)
        session.prepare(7, doubled(2), raw)
        first = session.run(7, {"x": np.ones((2, 3), np.float32)})["y"]
        assert set(held) > before
        session.forget(7)
        assert set(held) == before and 7 not in session
        with pytest.raises(InputError, match="no plan was prepared for 7; there are"):
            session.run(7, {"x": np.ones((2, 3), np.float32)})
        with pytest.raises(InputError, match="no plan was prepared for 7"):
            session.forget(7)
        assert session.run("counter", feeds)["sum"][1].tolist() == [1.5, 1.5]
        session.prepare(7, doubled(4), lambda t: pytest.fail(f"{t} is there"))
        again = session.run(7, {"x": np.ones((4, 3), np.float32)})["y"]
        assert np.array_equal(again[:2], first)
    assert not held


def test_what_is_not_asked_for_does_not_come_even_where_it_has_no_bytes() -> None:
    none = ops.scale(input("n", (0, 2)), 2.0)
    with cpu_session() as session:
        session.prepare("k", Graph.of({"y": input("x", (2,)) + 1, "none": none}))
        fed = {"x": np.ones(2, np.float32), "n": np.ones((0, 2), np.float32)}
        assert [*session.run("k", fed, ["y"])] == ["y"]
        assert session.run("k", fed, ["none"])["none"].shape == (0, 2)
        assert {*session.run("k", fed)} == {"y", "none"}


def test_outputs_may_be_any_sequence_of_names_and_a_closed_session_says_so() -> None:
    with cpu_session() as session:
        session.prepare("k", Graph.of({"y": input("x", (2,)) + 1, "z": input("x", (2,)) * 2}))
        fed = {"x": np.ones(2, np.float32)}
        assert [*session.run("k", fed, ["z"])] == [*session.run("k", fed, ("z",))] == ["z"]
        with pytest.raises(InputError, match="outputs='z': expected several names"):
            session.run("k", fed, "z")
        with pytest.raises(InputError, match="input 'x' was not fed; fed: 3"):
            session.run("k", {3: fed["x"]})  # type: ignore[dict-item]
    for call in (lambda: session.run("k", fed), lambda: session.prepare("k", doubled(1))):
        with pytest.raises(BackendError, match="the session is closed; open another"):
            call()


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


@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_rows_of_a_state_are_read_and_written(device: str) -> None:
    """In the host's memory itself, and by copies where a device has its own."""
    backends = {device: open_backend(device), "cpu": open_backend("cpu", threads=1, exact=True)}
    session = Session(backends, Options(pins=(f"^memory$={device}",)))
    session.prepare("count", counter, raw)
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    session.write_rows("memory", [3, 1], rows.view(np.uint8))
    assert np.array_equal(session.read_rows("memory", [1, 3]), rows[::-1].copy().view(np.uint8))
    session.touch("memory")  # changes nothing
    feeds = {"rows": np.full((1, 2), 9, np.float32), "index": np.array([0], np.int32)}
    after = np.array([[9, 9], [2, 3], [0, 0], [0, 1]], np.float32)
    assert np.array_equal(session.run("count", feeds)["sum"], after + 0.5)
    held = session.read_rows("memory", range(4))
    held[:] = 0  # a copy
    assert np.array_equal(session.read_state("memory").view(np.float32).reshape(4, 2), after)
    with pytest.raises(InputError, match=r"expected uint8 \[1, 8\] for 1 rows"):
        session.write_rows("memory", [0], rows.view(np.uint8))
    session.close()


class Counting(SimBackend):
    """A simulated device that counts the bytes that the host moves."""

    moved = 0

    def write(self, memory: Memory, offset: int, data: Array) -> None:
        self.moved += data.nbytes
        super().write(memory, offset, data)

    def read(self, memory: Memory, offset: int, nbytes: int) -> Array:
        self.moved += nbytes
        return super().read(memory, offset, nbytes)


def holding(backend: Backend, shape: tuple[int, ...]) -> Session:
    """A session with a state `memory` of this shape on the backend, all zeros."""
    session = Session({backend.spec.name: backend})
    session.prepare("k", Graph.of({"y": ops.scale(state("memory", shape), 1.0, 0.5)}))
    return session


ROWS = st.lists(st.integers(-5, 4), max_size=8)


@given(ROWS, ROWS)
def test_rows_travel_alone_and_the_last_of_two_stays(wrote: list[int], read: list[int]) -> None:
    """As NumPy's, and no other row crosses."""
    backend = Counting(sim_spec("sim0"), Machine())
    with holding(backend, (5, 3, 2)) as session:
        held, before = np.zeros((5, 24), np.uint8), backend.moved
        data = np.arange(len(wrote) * 24, dtype=np.uint8).reshape(-1, 24)
        session.write_rows("memory", wrote, data)
        held[wrote] = data
        assert backend.moved - before == 24 * len({i % 5 for i in wrote})
        assert np.array_equal(session.read_rows("memory", read), held[read])
        assert backend.moved - before == 24 * sum(
            len({i % 5 for i in ids}) for ids in (wrote, read)
        )


@pytest.mark.parametrize("device", ["cpu", "sim0"])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,), (2,)])
def test_states_of_few_axes_and_of_no_bytes_have_rows(device: str, shape: tuple[int, ...]) -> None:
    with holding(open_backend(device), shape) as session:
        rows, size = range(shape[0]), 4 * int(np.prod(shape[1:]))
        session.write_rows("memory", rows, np.ones((len(rows), size), np.uint8))
        assert session.read_rows("memory", rows).shape == (len(rows), size)
        assert session.read_rows("memory", []).shape == (0, size)
        assert session.read_state("memory").all()


@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_a_number_has_no_rows(device: str) -> None:
    with holding(open_backend(device), ()) as session:
        with pytest.raises(InputError, match=r"'memory' is f32\[\]: expected a state with rows"):
            session.read_rows("memory", [0])
        with pytest.raises(InputError, match=r"'memory' is f32\[\]: expected a state with rows"):
            session.write_rows("memory", [], np.zeros((0, 4), np.uint8))


@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_a_scan_is_a_loop_whose_body_is_planned_once(device: str) -> None:
    """States are carried, feeds with one axis more have a place per step, others stay."""
    rng = np.random.default_rng(0)
    xs, u, b = (rng.standard_normal(s).astype(np.float32) for s in ((20, 2, 3), (3, 3), (3,)))
    h = state("h", (2, 3))
    new = ops.tanh(input("x", (2, 3)) + h @ weight("u", (3, 3)) + input("b", (3,)))
    graph = Graph.of({"y": ops.scale(ops.cpy(new, h), 2.0)})
    session = Session({device: open_backend(device), "cpu": open_backend("cpu", exact=True)})
    session.prepare("step", graph, {"u": u})
    found = session.scan("step", {"x": xs, "b": b})["y"]
    held, wanted = np.zeros((2, 3), np.float64), []
    for x in xs:
        held = np.tanh(x + held @ u + b)
        wanted.append(held * 2)
    assert found.shape == (20, 2, 3) and session.plans_made == 1
    assert np.abs(found - wanted).max() < 1e-5
    left = session.read_state("h").view(np.float32).reshape(2, 3)
    assert np.array_equal(left * 2, found[-1])
    again = session.scan("step", {"x": xs[:1], "b": np.tile(b, (1, 1))})["y"]
    assert np.abs(again[0] / 2 - np.tanh(xs[0] + held @ u + b)).max() < 1e-5
    for feeds in ({"x": xs[0], "b": b}, {"x": xs, "b": np.tile(b, (3, 1))}, {"x": xs[:0], "b": b}):
        with pytest.raises(InputError, match="along steps"):
            session.scan("step", feeds)
    for feeds, missing in (({"x": xs}, "b"), ({"b": b}, "x"), ({}, "x")):
        with pytest.raises(InputError, match=f"input '{missing}' was not fed"):
            session.scan("step", feeds)
    with pytest.raises(InputError, match="'x'"):
        session.scan("step", {"x": [[1, 2], [1]], "b": b})  # type: ignore[dict-item]
    session.close()


def test_refusals_name_what_was_expected() -> None:
    session = cpu_session()
    session.prepare("k", lambda: doubled(2), raw)
    with pytest.raises(InputError, match="'x' was not fed"):
        session.run("k", {})
    with pytest.raises(InputError, match=r"expected shape \[2, 3\], got \[3, 2\]"):
        session.run("k", {"x": np.zeros((3, 2), np.float32)})
    with pytest.raises(InputError, match="no plan was prepared for 'other'; there are \\['k'\\]"):
        session.run("other", {})
    with pytest.raises(InputError, match="no state 'nothing'"):
        session.read_state("nothing")
    with pytest.raises(InputError, match="no state 'w'; known: none"):
        session.write_state("w", np.zeros((2, 3), np.float32))  # a weight, and packed long ago
    with pytest.raises(InputError, match="at least one device"):
        Session({})
    for no_key in ([], ([],), {"k": 1}):
        assert no_key not in session  # type: ignore[comparison-overlap]
        with pytest.raises(InputError, match="is no key: expected what a dict takes as one"):
            session.prepare(no_key, lambda: doubled(2), raw)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no plan was prepared for"):
            session.run(no_key, {})  # type: ignore[arg-type]
    session.close()


def test_feeds_are_held_against_one_plan_ahead_of_its_runs() -> None:
    session = cpu_session()
    session.prepare("k", lambda: doubled(2), raw)
    session.prepare("same", lambda: doubled(2), raw)
    session.prepare("counter", counter)
    ones = {"x": np.ones((2, 3), np.float32)}
    ready = session.feeds("k", ones)
    ready.put("x", [[1, 2, 3], [4, 5, 6]])
    for _ in range(2):
        out = session.run("k", ready)["y"]
        assert np.array_equal(out, 2 * np.arange(1.0, 7).reshape(2, 3) @ WEIGHTS["w"].T)
    with pytest.raises(InputError, match="for another plan"):
        session.run("same", ready)
    with pytest.raises(InputError, match="'x' was not fed"):
        session.feeds("k", {})
    with pytest.raises(InputError, match=r"no input is called 'y'; the graph's inputs: x"):
        ready.put("y", ones["x"])
    with pytest.raises(InputError, match=r"expected shape \[2, 3\], got \[3\]"):
        ready.put("x", np.ones(3, np.float32))
    row = session.feeds("counter", {"rows": np.ones((1, 2), np.float32), "index": [1]})
    with pytest.raises(InputError, match=r"indices 4 \.\. 4 leave"):
        row.put("index", [4])
    assert session.run("counter", row)["sum"].sum() == 8 * 0.5 + 2
    session.close()


@pytest.mark.parametrize("other", [(4, 3), (3, 2), (6,), (2, 3, 1)])
def test_a_name_means_one_weight_in_all_plans(other: tuple[int, ...]) -> None:
    """Also where the bytes are as many: what a device makes of a weight is made for its shape."""
    session = cpu_session()
    session.prepare(1, lambda: doubled(1), raw)
    again = Graph.of({"y": weight("w", other) * 2.0})
    with pytest.raises(ModelError, match=r"'w' is weight f32\[.* but weight f32\[2, 3\] on cpu in"):
        session.prepare(2, again, {"w": np.zeros(other, np.float32)})
    kinds = (state("w", (2, 3)), weight("w", (2, 3), I32))
    for t in kinds:
        with pytest.raises(ModelError, match="'w' is"):
            session.prepare(t.kind, Graph.of({"y": ops.cont(t)}), {"w": np.zeros((2, 3), np.int32)})
    assert session.run(1, {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[6.0, 24.0]]
    session.close()


def test_a_known_key_keeps_its_graph() -> None:
    session = cpu_session()
    held = session.prepare("k", doubled(2), raw)
    assert session.prepare("k", lambda: doubled(2), raw) is held is session.plan("k")
    with pytest.raises(InputError, match=r"'k' is prepared with another graph: it has %x: f32\[2"):
        session.prepare("k", lambda: doubled(3), raw)
    with pytest.raises(InputError, match="expected a Graph, got None"):
        session.prepare("new", lambda: None, raw)  # type: ignore[arg-type, return-value]
    assert session.plans_made == 1
    session.close()


@pytest.mark.parametrize("device", ["cpu", "sim0"])
@pytest.mark.parametrize("rewrites", [False, True])
def test_every_output_that_was_asked_for_comes(device: str, rewrites: bool) -> None:
    """One tensor under several names; leaves under names of others; views; the same in a list."""
    x, w, i = input("x", (2, 3)), weight("w", (2, 3)), input("i", (1,), I32)
    z = x + w
    outputs = {
        "a": z, "b": z, "c": z, "d": x, "x": x, "e": w, "f": ops.transpose(z), "g": i,
        "h": state("s", (2, 3)),
    }  # fmt: skip
    graph = Graph.of(outputs)
    assert [t.name for t in graph.outputs if t.is_output] and len(graph.outputs) == len(outputs)
    assert {t.name for t in graph.leaves(Kind.INPUT)} == {"x", "i"}
    session = Session({device: open_backend(device)}, Options(rewrites=rewrites))
    session.prepare(1, graph, WEIGHTS)
    feeds = {"x": np.ones((2, 3), np.float32), "i": np.array([7], np.int32)}
    got, sum_ = session.run(1, feeds), feeds["x"] + WEIGHTS["w"]
    wanted = {
        "a": sum_, "b": sum_, "c": sum_, "d": feeds["x"], "x": feeds["x"], "e": WEIGHTS["w"],
        "f": sum_.T, "g": feeds["i"], "h": np.zeros((2, 3)),
    }  # fmt: skip
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert np.array_equal(got[name], value), name
    for some in (("b",), ("x", "f"), ()):
        few = session.run(1, feeds, some)
        assert set(few) == set(some)
        assert all(np.array_equal(few[name], wanted[name]) for name in some)
    with pytest.raises(InputError, match="no output is called 'w'; the graph's: a, b, c"):
        session.run(1, feeds, ("a", "w"))
    session.close()


NAMES = ("host", "cpu", "sim0", "arena", "add_1", "silu_3", "y.a8", "blk.0", "a b", "%", "\u00fc")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["input", "weight", "state", "result"])
def test_any_name_without_our_marks_works(name: str, kind: str) -> None:
    """Over two devices, so that copies and staging values are made and named."""
    leaves = {"input": input, "weight": weight, "state": state, "result": input}
    t = leaves[kind](name if kind != "result" else "r", (2, 8))
    h = ops.silu(ops.silu(t), name=name if kind == "result" else "")
    graph = Graph.of({"out": (h + ops.mul_mat(weight("v", (8, 8)), t)) + (h + h)})
    session = Session({"sim0": open_backend("sim0"), "cpu": open_backend("cpu", threads=1)},
                      Options(pins=("^v$=cpu", "^out$=sim0")))  # fmt: skip
    values = {t.name: np.full((2, 8), 0.5, np.float32), "v": np.eye(8, dtype=np.float32)}
    session.prepare(1, graph, values)
    fed = {n: values[n] for n in [x.name for x in graph.leaves(Kind.INPUT)]}
    kept = values if kind != "state" else {"v": values["v"]}
    wanted = evaluate(graph, kept)["out"]
    assert np.allclose(session.run(1, fed)["out"], wanted, atol=1e-5)
    session.close()


@pytest.mark.parametrize("name", ["x@host", "y#scratch", "arena@cpu", "x@a8"])
def test_names_with_our_marks_are_refused(name: str) -> None:
    session = cpu_session()
    with pytest.raises(GraphError, match="names with @ or # are the plan's own"):
        session.prepare(1, Graph.of({"y": ops.silu(input(name, (2, 2)))}))
    session.close()


def test_layers_that_match_nothing_are_told() -> None:
    graph = Graph.of({"y": ops.mul_mat(weight("w", (2, 3)), input("x", (1, 3)))})
    backends = {"sim0": open_backend("sim0"), "cpu": open_backend("cpu", threads=1)}
    session = Session(backends, Options(layers={"sim0": 1}))
    with pytest.raises(PlaceError, match=r"no tensor of 'graph' is called blk.N.*layer w belongs"):
        session.prepare(1, graph, WEIGHTS)
    pinned = Session(backends, Options(layers={"sim0": 1}, pins=("^w$=sim0",)))
    pinned.prepare(1, graph, WEIGHTS)
    pinned.close()


def test_a_second_plan_finds_weights_and_states_where_they_are() -> None:
    """Layers place the first plan; the second has no layers at all, only the state."""
    backends = {"sim0": open_backend("sim0"), "cpu": open_backend("cpu", threads=1)}
    session = Session(backends, Options(layers={"sim0": 0, "cpu": 1}))
    rows, index = input("rows", (1, 2)), input("index", (1,), I32)
    cache = state("cache (0)", (4, 2))
    session.prepare("write", Graph.of({"y": ops.scale(
        ops.set_rows(cache, rows, index, name="blk.0.cache"), 2.0)}))  # fmt: skip
    feeds = {"rows": np.ones((1, 2), np.float32), "index": np.array([3], np.int32)}
    assert session.run("write", feeds)["y"].sum() == 4
    where = session.prepare("read", Graph.of({"y": ops.scale(cache, 3.0)})).plan
    assert where.memory.buffers["cache (0)"].device == "cpu"
    assert session.run("read", {})["y"].sum() == 6
    session.close()


BAD_WEIGHTS = {
    "none": None,
    "transposed": np.zeros((3, 2), np.float32).T.reshape(3, 2),
    "flat": np.zeros(6, np.float32),
    "integers of the same size": np.zeros((2, 3), np.int32),
    "halves": np.zeros((2, 3), np.float16),
    "doubles": np.zeros((2, 3)),
    "bytes": np.zeros(24, np.uint8),
    "the other order of bytes": np.zeros((2, 3), ">f4"),
    "words": "weights",
    "a ragged list": [[1.0], [2.0, 3.0]],
    "objects": np.array([[None] * 3] * 2),
}


@pytest.mark.parametrize("what", sorted(BAD_WEIGHTS))
@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_a_weight_is_what_the_graph_says(what: str, device: str) -> None:
    session = Session({device: open_backend(device)})
    with pytest.raises(
        ModelError, match=r"^weight 'w' is f32\[2, 3\]: expected float32 \[2, 3\], got"
    ):
        session.prepare(1, doubled(1), lambda t: BAD_WEIGHTS[what])  # type: ignore[arg-type, return-value]
    session.prepare(1, doubled(1), raw)  # nothing of the failure is left
    assert session.run(1, {"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[6.0, 24.0]]
    session.close()


class Failing:
    """A backend whose call number `at` of those that bring memory in or use it fails."""

    def __init__(self, inner: Any, at: int) -> None:
        self.inner, self.left, self.held = inner, at, set[int]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name == "free":
            return self.free
        if name not in ("allocate", "load", "write", "lower"):
            return found

        def call(*given: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError(name)
            made = found(*given)
            if name in ("allocate", "load"):
                self.held.add(id(made))
            return made

        return call

    def free(self, memory: Any) -> None:
        self.held.remove(id(memory))
        self.inner.free(memory)


@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_a_prepare_that_fails_anywhere_leaves_nothing(device: str) -> None:
    """Its weights stayed, and the next call under the same names took them for its own."""
    s, x = state("s", (2, 2)), input("x", (2, 3))
    one, two = (weight(n, (2, 3)) for n in ("one", "two"))
    graph = Graph.of({"y": ops.mul_mat(one, x) + ops.mul_mat(two, x) + s})
    wrong, right = ({n: np.full((2, 3), v, np.float32) for n in ("one", "two")} for v in (9, 1))
    at = 0
    while True:
        at += 1
        backend = Failing(open_backend(device), at)
        session = Session({device: backend})
        try:
            session.prepare(1, graph, wrong)
        except MemoryError:
            assert not backend.held and 1 not in session
        else:
            break
        session.prepare(1, graph, right)
        found = session.run(1, {"x": np.ones((2, 3), np.float32)})["y"]
        assert found.tolist() == [[6.0, 6.0], [6.0, 6.0]], at
        session.close()
    assert at > 5, "two weights, a state, an arena and a program"


LAYOUTS = {
    "of columns": np.asfortranarray(WEIGHTS["w"]),
    "every second": np.repeat(WEIGHTS["w"], 2, 1)[:, ::2],
    "read-only": np.frombuffer(WEIGHTS["w"].tobytes(), np.float32).reshape(2, 3),
    "backwards": WEIGHTS["w"][::-1, ::-1].copy()[::-1, ::-1],
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("device", ["cpu", "sim0"])
def test_arrays_may_lie_as_they_like(layout: str, device: str) -> None:
    """Weights, feeds and states in any order and with gaps; what is given is never written to."""
    given = LAYOUTS[layout]
    session = Session({device: open_backend(device)})
    s, x, w = state("s", (2, 3)), input("x", (2, 3)), weight("w", (2, 3))
    session.prepare(1, Graph.of({"y": x + w + s + ops.mul(x, s)}), {"w": given})
    session.write_state("s", given)
    wanted = 3 * WEIGHTS["w"] + WEIGHTS["w"] ** 2
    assert np.array_equal(session.run(1, {"x": given})["y"], wanted)
    assert np.array_equal(given, WEIGHTS["w"])
    session.close()


def test_states_are_checked_as_weights_are() -> None:
    session = cpu_session()
    session.prepare(1, counter())
    full = np.arange(8, dtype=np.float32).reshape(4, 2)
    session.write_state("memory", full)
    held = session.read_state("memory")
    bad = (None, full.T, full.reshape(8), full.astype(np.int32), full.astype(np.float16), held[:-1])
    for unfit in bad:
        with pytest.raises(InputError, match=r"^state 'memory' is f32"):
            session.write_state("memory", unfit)  # type: ignore[arg-type]
    session.write_state("memory", held)
    assert np.array_equal(session.read_state("memory").view(np.float32).reshape(4, 2), full)
    session.close()


def test_unknown_devices_are_named() -> None:
    with pytest.raises(BackendError, match="unknown device 'tpu0'"):
        open_backend("tpu0")
