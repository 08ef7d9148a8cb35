"""The real session and executor on simulated devices, the host included in the interleaving."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from worlds import (
    CPU,
    SIM0,
    SIM1,
    C,
    E,
    T,
    feeds,
    linear,
    no_reuse,
    schedule_of,
    tiny,
    weights,
)

from ggraph import ops
from ggraph.backends import open_backend
from ggraph.backends.sim import Adversarial, Machine, Random, SimBackend, SimHost, Simulator
from ggraph.device import HOST
from ggraph.dtype import I32
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import input, state

GRAPH = tiny()
WEIGHTS, FEEDS = weights(GRAPH), feeds(GRAPH, 3)
OPTIONS = Options(layers={"sim0": 1, "sim1": 1}, streams=4)


def replayed(session: Session) -> list[bytes]:
    """The outputs of three runs of one prepared plan."""
    session.prepare("tiny", lambda: GRAPH, lambda t: WEIGHTS[t.name])
    found = [session.run("tiny", f)["y"].tobytes() for f in FEEDS]
    session.close()
    return found


def wanted() -> list[bytes]:
    unsplit = Simulator(no_reuse(schedule_of(GRAPH, [CPU])), WEIGHTS).run(FEEDS)
    return [r["y"].tobytes() for r in unsplit.outputs]


@pytest.mark.parametrize("seed", range(8))
def test_a_session_over_three_simulated_devices_is_bit_equal(seed: int) -> None:
    machine = Machine(Random(seed))
    devices = {d.name: SimBackend(d, machine) for d in (SIM0, SIM1, CPU)}
    assert replayed(Session({**devices, HOST: SimHost(machine)}, OPTIONS)) == wanted()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("copies", [1, 2])
def test_runs_that_overlap_are_bit_equal(seed: int, copies: int) -> None:
    machine = Machine(Random(seed))
    devices = {d.name: SimBackend(d, machine) for d in (SIM0, SIM1, CPU)}
    options = replace(OPTIONS, overlap=True, copies=copies)
    assert replayed(Session({**devices, HOST: SimHost(machine)}, options)) == wanted()


def writer() -> Graph:
    """A cache written on a stream of its own, for which the output does not wait."""
    x, slots = input("x", (T, E)), input("slots", (T,), I32)
    y = ops.add(linear(x, "a"), linear(x, "b"))
    written = ops.set_rows(state("cache", (C, E)), linear(x, "c"), slots, name="written")
    return Graph.of({"y": y}, also=[written], name="writer")


def reader() -> Graph:
    """The product of a cache's first rows, on one stream."""
    held = ops.rows(state("cache", (C, E)), 0, T, name="held")
    return Graph.of({"y": linear(held, "r")}, name="reader")


@pytest.mark.parametrize("look", [False, True])
def test_a_session_waits_between_two_plans_whose_runs_overlap(look: bool) -> None:
    """A plan's proof speaks of its own runs: what another plan still does, the session waits for,
    and so it does before the host touches a state."""
    machine = Machine(Adversarial("written", "r"))
    spec = replace(SIM0, copy_streams=0)
    session = Session(
        {"sim0": SimBackend(spec, machine), HOST: SimHost(machine)},
        Options(streams=3, overlap=True),
    )
    found = weights(writer()) | weights(reader())
    for graph in (writer(), reader()):
        session.prepare(graph.name, lambda g=graph: g, lambda t: found[t.name])  # type: ignore[misc]
    feed = {"x": FEEDS[0]["x"], "slots": np.arange(T, dtype=np.int32)}
    session.run("writer", feed)
    held = {"cache": np.zeros((C, E), np.float32)}
    right = evaluate(writer(), {**weights(writer()), **feed, **held})["cache"]
    if look:
        assert session.read_state("cache").tobytes() == right.tobytes()
    y = session.run("reader", {})["y"]
    session.close()
    assert y.tobytes() == evaluate(reader(), {**weights(reader()), "cache": right})["y"].tobytes()


class Capturing(SimBackend):
    """Counts what it is asked to capture."""

    captured, captures = 0, True

    def capture(self, streams: Sequence[int], enqueue: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        return enqueue


@pytest.mark.parametrize("overlap", [False, True])
def test_runs_that_overlap_are_not_captured(overlap: bool) -> None:
    """Captured graphs run one after another and drop waits for the run before: the first run, which
    is not captured yet, would be unordered with the second."""
    machine = Machine(Random(1))
    backend = Capturing(SIM0, machine)
    session = Session({"sim0": backend, HOST: SimHost(machine)}, Options(overlap=overlap))
    assert replayed(session) == wanted()
    assert bool(backend.captured) != overlap and session.replays


def test_devices_by_name_and_the_real_cpu() -> None:
    sims = {name: open_backend(name) for name in ("sim0", "sim1")}
    assert replayed(Session(sims, OPTIONS)) == wanted()
    mixed = {name: open_backend(name) for name in ("sim0", "cpu")}
    split = Options(pins=(r"^head=cpu", r"cache\.1=cpu"), streams=2)
    got = [np.frombuffer(y, np.float32) for y in replayed(Session(mixed, split))]
    for a, b in zip(got, wanted(), strict=True):
        assert np.abs(a - np.frombuffer(b, np.float32)).max() < 1e-4, "other kernels, same meaning"
