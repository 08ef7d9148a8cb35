"""For people who extend ggraph: is an op what its record says, is a plan what its graph means?

from ggraph.testing import check_op, check_plan
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.backends import open_backend
from ggraph.backends.protocol import Backend
from ggraph.backends.sim import Machine, Random, SimBackend, sim_spec
from ggraph.door import checked
from ggraph.errors import GgraphError, InputError
from ggraph.graph import Graph
from ggraph.ops import examples
from ggraph.ops.evaluate import evaluate, to_logical, to_storage
from ggraph.pipeline import Options
from ggraph.session import Session
from ggraph.tensor import OPS, Array, Example, Kind, OpSpec, Tensor


class Differs(GgraphError):
    """What was checked is not what it says it is."""


@dataclass(frozen=True)
class Checked:
    """One example of an op on one device: the largest difference from the reference, relative to
    its largest magnitude, and whether a kernel computed it."""

    op: str
    example: int
    device: str
    error: float
    compiled: bool


@checked
def check_op(name: str, devices: Sequence[str] = ("cpu", "sim0")) -> tuple[Checked, ...]:
    """Run every example of an op on every device, and hold its declarations to the truth.

    Raises Differs where a result has another shape, is further from the reference than the
    example's tolerance, in place of each source that it may replace too; where the reference writes
    into a source that it does not overwrite; or where elements of an `elementwise` op hang on
    others. InputError where no op of that name is registered.
    """
    if name not in OPS:
        raise InputError(f"check_op: no op is named {name!r}")
    spec, found = OPS[name], []
    for i, example in enumerate(spec.examples):
        _keeps_sources(spec, i, example)
        _keeps_elements(spec, i, example)
        found += [_run_example(spec, i, example, device) for device in devices]
    return tuple(found)


def _keeps_sources(spec: OpSpec, i: int, example: Example) -> None:
    arrays = [a.copy() for a in examples.feeds(spec, example).values()]
    for slot, a in enumerate(arrays):
        a.flags.writeable = slot == spec.overwrites
    try:
        result = spec.reference(*arrays, **example.attrs)
    except ValueError as error:
        raise Differs(f"{spec.name}, example {i}: the reference writes: {error}") from None
    wanted = examples.build(spec, example).shape
    if result.shape != wanted:
        raise Differs(f"{spec.name}, example {i}: shape {wanted}, reference {result.shape}")


def _keeps_elements(spec: OpSpec, i: int, example: Example) -> None:
    """Where half of the elements of the sources are others, the rest of the result is the same."""
    y = examples.build(spec, example)
    if not spec.elementwise or not y.size:
        return
    one, two = (examples.feeds(spec, example, seed).values() for seed in (0, 1))
    stays = np.random.default_rng(0).random(y.shape) < 0.5
    pairs = zip(one, two, strict=True)
    mixed = [np.where(stays, a, b) if a.shape == y.shape else a for a, b in pairs]
    with np.errstate(all="ignore"):
        want, got = (spec.reference(*map(np.copy, a), **example.attrs) for a in (one, mixed))
    if not _difference(got[stays], want[stays]) <= example.tolerance:
        raise Differs(f"{spec.name}, example {i}: not elementwise: an element hangs on others")


def _run_example(spec: OpSpec, i: int, example: Example, device: str) -> Checked:
    t, feeds = examples.build(spec, example), examples.feeds(spec, example)
    errors = []
    for over, graph in _graphs(t):
        with np.errstate(all="ignore"):
            want = evaluate(graph, feeds)["y"]
        errors.append(_difference(_run(graph, feeds, {device: open_backend(device)})["y"], want))
        if not errors[-1] <= example.tolerance:
            off = f"off by {errors[-1]:.3g} of the largest"
            raise Differs(f"{spec.name}, example {i} on {device}{over}: {off}")
    return Checked(spec.name, i, device, max(errors), open_backend(device).spec.compiled(t))


def _graphs(t: Tensor) -> Iterator[tuple[str, Graph]]:
    """The op alone; and for each source whose bytes its result may replace, with all others whole
    when the run ends, so that it is this one's that are free."""
    yield "", Graph.of({"y": t})
    slots = t.spec.inplace_ok if t.spec is not None and len(t.sources) > 1 else ()
    for slot in slots:
        others = {s.name: s for i, s in enumerate(t.sources) if i != slot}
        yield f" in place of source {slot}", Graph.of({"y": t, **others})


def _run(
    graph: Graph, feeds: Mapping[str, Array], backends: Mapping[str, Backend]
) -> dict[str, Array]:
    """Logical outputs of one run; feeds are logical, those of states and weights included."""
    session = Session(backends, Options(rewrites=False))
    stored = {t.name: to_storage(feeds[t.name], t) for t in graph if t.is_leaf and t.name in feeds}
    try:
        session.prepare("k", graph, stored)
        for t in graph.leaves(Kind.STATE):
            if t.name in stored:
                session.write_state(t.name, stored[t.name])
        inputs = {n: stored[n] for n in session.inputs("k")}
        found = session.run("k", inputs)
    finally:
        session.close()
    return {t.name: np.array(to_logical(found[t.name], t)) for t in graph.outputs}


def _difference(got: Array, want: Array) -> float:
    if got.shape != want.shape:
        return float("inf")
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if same.all():
        return 0.0
    finite = np.abs(want[np.isfinite(want)])
    with np.errstate(all="ignore"):
        off = np.abs(got.astype(np.float64) - want)[~same].max()
    return float(off / max(finite.max(initial=0.0), 1e-30))


def _same_bits(got: Array, want: Array) -> bool:
    """Of all but NaNs, which are alike."""
    if got.shape != want.shape:
        return False
    bits = (np.where(np.isnan(a), np.nan, a).astype(want.dtype).tobytes() for a in (got, want))
    return next(bits) == next(bits)


@checked
def check_plan(graph: Graph, feeds: Mapping[str, Array], orders: int = 5) -> int:
    """Plan a graph for two simulated accelerators, prove it, and run it in `orders` random legal
    orders: every output must have the bits that NumPy gives. Returns how many orders were run.

    `feeds` are logical values of inputs, weights and states that do not begin as zeros. Raises
    Differs, and what planning raises.
    """
    with np.errstate(all="ignore"):
        want = evaluate(graph, feeds)
    for seed in range(orders):
        machine = Machine(Random(seed))
        specs = [sim_spec("sim0", streams=2), sim_spec("sim1", streams=2)]
        got = _run(graph, feeds, {s.name: SimBackend(s, machine) for s in specs})
        for name, values in got.items():
            if not _same_bits(values, want[name]):
                raise Differs(f"order {seed}: output {name!r} is not what the graph means")
    return orders
