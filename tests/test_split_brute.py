"""Splits against readings of docs/scheduler.md that know only sets: which copies are made and where
they stand, which order and runs are allowed, what a partial copy is for.

Legend: T token rows, E width, X experts, U experts per token.
"""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, E, T, linear

from ggraph import ops
from ggraph.device import DeviceSpec
from ggraph.dtype import I32
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Placed, Placement
from ggraph.split import split
from ggraph.tensor import Kind, Tensor, input, state, weight

DEVICES = (SIM0, SIM1, CPU)
NAMES = tuple(d.name for d in DEVICES)


def placed(
    graph: Graph, homes: dict[str, str], devices: tuple[DeviceSpec, ...] = DEVICES
) -> Placement:
    """Everything at its root's home, by name; what is not named is on the host."""
    of = {t.name: Placed(homes.get(t.root.name, "cpu"), "by hand") for t in graph}
    return Placement(graph, devices, of)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Sums, products, windows with and without gaps, and overwrites, anywhere."""
    made: list[Tensor] = [input("x", (T, E)), state("s", (T, E))]
    ids, count = input("ids", (T,), I32), draw(st.integers(2, 9))
    last = made[1]  # the newest value of the state

    def operand() -> Tensor:
        """A value, or a window on one, or on a window; [T, E] all the same."""
        t = draw(st.sampled_from(made))
        for _ in range(draw(st.integers(0, 2))):
            kind = draw(st.sampled_from(["flat", "back", "columns"]))
            if kind == "columns":
                t = ops.columns(t, 0, t.shape[1] // 2) if t.shape[1] > 1 else t
            elif kind == "back":
                t = t.T
            elif t.is_contiguous:
                t = t.reshape(t.size)[None] if len(t.shape) == 1 else t.reshape(1, *t.shape)[0]
        return t

    for i in range(count):
        kind = draw(st.sampled_from(["scale", "add", "linear", "set"]))
        a, b = operand(), operand()
        if kind == "set":
            rows = draw(
                st.sampled_from([m for m in made if m.root is not last.root and m.shape == (T, E)])
            )
            last = ops.set_rows(last, rows, ids, name=f"n{i}")
            made = [m for m in made if m.storage is not last.storage]  # old values are gone
            made.append(last)
        elif kind == "add" and a.shape == b.shape:
            made.append(ops.add(a, b, name=f"n{i}"))
        elif kind == "linear" and a.shape == (T, E):
            made.append(linear(a, f"n{i}"))
        else:
            made.append(ops.scale(a, 2.0, name=f"n{i}"))
    kept = [] if last.is_leaf else [last]  # whether or not anything reads it
    graph = Graph.of({f"y{i}": ops.neg(t) for i, t in enumerate(made[-3:])}, also=kept)
    homes = {t.name: draw(st.sampled_from(NAMES)) for t in graph if t.storage is t}
    return placed(graph, {t.name: homes[t.storage.name] for t in graph if not t.is_view})


def looks_at(t: Tensor) -> list[Tensor]:
    """What a view views, and so on to its root."""
    found: list[Tensor] = []
    while t.is_view:
        t = next(s for s in t.sources if s.storage is t.storage)
        found.append(t)
    return found


def expected_copies(p: Placement) -> set[tuple[str, str]]:
    """(tensor, device) of each copy that the documents promise."""
    asked = {
        (s.name, p.of[t.name].device)
        for t in p.graph.nodes
        for s in t.sources
        if p.of[s.root.name].device != p.of[t.name].device
    }
    while True:  # of a window with gaps what it looks at is copied
        more = {(looks_at(p.graph[n])[0].name, d) for n, d in asked if not p.graph[n].is_contiguous}
        if more <= asked:
            break
        asked |= more
    return {
        (n, d)
        for n, d in asked
        if p.graph[n].is_contiguous and not any((v.name, d) in asked for v in looks_at(p.graph[n]))
    }


def is_copy(t: Tensor) -> bool:
    return t.op == "copy"


@given(placements())
def test_the_copies_are_those_that_the_documents_promise(p: Placement) -> None:
    graph = split(p).placement.graph
    copies = [t for t in graph.nodes if is_copy(t)]
    assert {(t.sources[0].name, t.attrs["device"]) for t in copies} == expected_copies(p)
    assert len(copies) == len(expected_copies(p)), "once per device"
    assert all(t.name == f"{t.sources[0].name}@{t.attrs['device']}" for t in copies)


@given(placements())
def test_what_is_copied_keeps_its_value(p: Placement) -> None:
    rng = np.random.default_rng(0)
    feeds = {
        t.name: rng.permutation(T).astype(np.int32)
        if t.dtype is I32
        else rng.standard_normal(t.shape).astype(np.float32)
        for t in p.graph
        if t.is_leaf
    }
    graph = split(p).placement.graph
    heirs = {n: t.name for n, t in p.graph.updates.items()}
    assert {n: t.name for n, t in graph.updates.items()} == heirs
    wanted, got = evaluate(p.graph, feeds), evaluate(graph, feeds)
    assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in wanted.items()}


def before(p: Placement) -> dict[str, set[str]]:
    """What the graph makes each op wait for: its producers, and readers of bytes it overwrites. Who
    reads those from afar reads a copy, which is made in time."""
    found = {t.name: {s.root.name for s in t.sources if not s.root.is_leaf} for t in p.graph.nodes}
    for t in p.graph.nodes:
        if t.overwritten is not None:
            old, here = t.overwritten.root, p.of[t.name].device
            found[t.name] |= {
                r.name
                for r in p.graph.nodes
                if r is not t
                and p.of[r.name].device == here
                and any(s.root is old for s in r.sources)
            }
    return found


def stretch(device: str, done: set[str], p: Placement, waits: dict[str, set[str]]) -> set[str]:
    """All that a device can do by itself after `done`."""
    found: set[str] = set()
    while True:
        more = {
            n
            for n, needs in waits.items()
            if n not in done | found and p.of[n].device == device and needs <= done | found
        }
        if not more:
            return found
        found |= more


@given(placements())
def test_runs_are_as_long_as_the_graph_allows(p: Placement) -> None:
    """The longest first, but for the first of all."""
    waits, done = before(p), set[str]()
    for one in split(p).splits:
        for n in one.nodes:
            assert waits[n] <= done | set(one.nodes[: one.nodes.index(n)]), n
        assert set(one.nodes) == stretch(one.device, done, p, waits)
        others = [len(stretch(d, done, p, waits)) for d in NAMES]
        assert not done or len(one.nodes) == max(others)
        done |= set(one.nodes)
    assert done == set(waits)


def most_runs(done: frozenset[str], p: Placement, waits: dict[str, set[str]]) -> int:
    """Runs to the end, however ties between equally long next runs are broken."""
    nexts = [frozenset(stretch(d, set(done), p, waits)) for d in NAMES]
    longest = max(map(len, nexts))
    return longest and 1 + max(most_runs(done | n, p, waits) for n in nexts if len(n) == longest)


@given(placements())
def test_the_first_run_is_that_of_the_fewest_runs(p: Placement) -> None:
    waits = before(p)
    starts = [s for d in NAMES if (s := stretch(d, set(), p, waits))]
    assert len(split(p).splits) <= min(1 + most_runs(frozenset(s), p, waits) for s in starts)


@given(placements())
def test_a_copy_stands_right_before_its_first_reader_or_what_overwrites_its_source(
    p: Placement,
) -> None:
    s = split(p)
    graph = s.placement.graph
    order = [graph[n] for n in (t.name for t in graph.nodes)]
    for k, c in enumerate(order):
        if is_copy(c):
            old = c.sources[0].root
            wants = {
                t.name
                for t in order
                if any(x.root is c for x in t.sources)
                or (t.overwritten is not None and t.overwritten.root is old)
            }
            first = next(t for t in order if t.name in wants)
            assert first is next(t for t in order[k:] if not is_copy(t)), c.name
    for one in s.splits:
        assert all(is_copy(graph[n]) for n in one.copies_in)
        assert not any(is_copy(graph[n]) for n in one.nodes)


# Partial copies.

U = 2


def experts(count: int, home: str, link: float, launch: float, kind: Kind = Kind.WEIGHT) -> Tensor:
    """The copy that a product on sim0 reads, of experts [count, E, E] at `home`."""
    make = weight if kind is Kind.WEIGHT else state
    w, ids = make("w", (count, E, E)), input("ids", (T, U), I32)
    graph = Graph.of({"y": ops.mul_mat_id(w, input("x", (T, 1, E)), ids)})
    near = replace(SIM0, link_bytes_per_s=link, launch_s=launch)
    p = placed(graph, {"y": "sim0", "w": home}, (near, SIM1, CPU))
    return split(p).placement.graph["w@sim0"]


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_slices_alone_are_copied_where_those_that_stay_outweigh_eight_launches(count: int) -> None:
    """Each of T x U choices, all equally likely, misses an expert."""
    stay = Fraction(count - 1, count) ** (T * U) * count * E * E * 4
    launch = 2.0**-20
    even = float(stay / Fraction(8 * launch))  # the link at which both cost the same
    assert len(experts(count, "cpu", even * 0.999, launch).sources) == 2
    assert len(experts(count, "cpu", even * 1.001, launch).sources) == 1
    assert len(experts(count, "cpu", even * 0.999 * 2, launch / 2).sources) == 2
    if count == 2:  # all of this is powers of two: as much does not outweigh
        assert len(experts(count, "cpu", even, launch).sources) == 1


def test_only_a_host_weight_of_several_slices_is_copied_in_parts() -> None:
    """The host enqueues the copy: of what it does not see it cannot know where slices lie."""
    slow = {"link": 1.0, "launch": 1e-6}
    assert len(experts(2, "cpu", **slow).sources) == 2
    assert len(experts(1, "cpu", **slow).sources) == 1
    assert len(experts(2, "sim1", **slow).sources) == 1
    assert len(experts(2, "cpu", **slow, kind=Kind.STATE).sources) == 1


def read_again(*more: str) -> Graph:
    """Experts w picked from by a product y, and what else reads them: `more`."""
    w, ids = weight("w", (T, U, E)), input("ids", (T, U), I32)
    x = input("x", (T, 1, E))
    reads = {
        "same": lambda: ops.mul_mat_id(w, ops.scale(x, 2.0, name="x2"), ids),
        "whole": lambda: ops.scale(w, 2.0),
        "turned": lambda: ops.scale(w.T, 2.0),
        "flat": lambda: ops.scale(w.reshape(T * U, E), 2.0),
        "operand": lambda: ops.mul_mat_id(weight("v", (T, E, E)), w, ids),
    }
    outputs = {"y": ops.mul_mat_id(w, x, ids)} | {name: reads[name]() for name in more}
    return Graph.of(outputs)


@pytest.mark.parametrize(
    ("more", "sources"),
    [((), 2), (("same",), 2), (("whole",), 1), (("turned",), 1), (("flat",), 1), (("operand",), 1)],
)
def test_whoever_reads_more_than_the_slices_gets_the_whole(
    more: tuple[str, ...], sources: int
) -> None:
    """Through a view, too; and `make_plan` proves it."""
    graph = read_again(*more)
    pins = ("^w$=cpu", *(f"^{t.name}$=sim0" for t in graph.nodes))
    slow = replace(SIM0, link_bytes_per_s=1e3)
    made = make_plan(graph, [slow, CPU], Options(pins=pins)).plan.graph
    assert len(made["w@sim0"].sources) == sources
    copies = [t.name for t in made.nodes if is_copy(t) and t.sources[0].storage.name == "w"]
    assert copies == ["w@sim0"], "no bytes twice"


def test_windows_with_gaps_choose_no_slices_and_windows_are_copied_whole() -> None:
    """The host looks at indices as they lie; a copy in parts speaks of a weight's own slices."""
    w, ids, x = weight("w", (T, E, E)), input("ids", (T, 2 * U), I32), input("x", (T, 1, E))
    near, flat = ops.columns(ids, 0, U), input("flat", (T, U), I32)
    for first in (
        ops.mul_mat_id(w, x, near),
        ops.mul_mat_id(ops.rows(w, 0, 2), x, flat),
        ops.mul_mat_id(ops.rows(w, 0, 2), x, near),
    ):
        graph = Graph.of({"y": first})
        p = placed(graph, {"y": "sim0"}, (replace(SIM0, link_bytes_per_s=1.0), SIM1, CPU))
        copies = [t for t in split(p).placement.graph.nodes if is_copy(t)]
        assert all(len(t.sources) == 1 for t in copies)
        assert any(t.sources[0].storage.name == "w" for t in copies)
