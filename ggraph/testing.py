"""For people who extend ggraph: is an op what its record says, is a plan what its graph means?

from ggraph.testing import check_op, check_plan
"""

from collections.abc import Mapping, Sequence
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
from ggraph.tensor import OPS, Array, Example, Kind, OpSpec


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
    example's tolerance, or where the reference writes into a source that it does not overwrite.
    InputError where no op of that name is registered.
    """
    if name not in OPS:
        raise InputError(f"check_op: no op is named {name!r}")
    spec, found = OPS[name], []
    for i, example in enumerate(spec.examples):
        _keeps_sources(spec, i, example)
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


def _run_example(spec: OpSpec, i: int, example: Example, device: str) -> Checked:
    t = examples.build(spec, example)
    graph, feeds = Graph.of({"y": t}), examples.feeds(spec, example)
    with np.errstate(all="ignore"):
        want = evaluate(graph, feeds)["y"]
    backend = open_backend(device)
    got = _run(graph, feeds, {device: backend})["y"]
    error = _difference(got, want)
    if not error <= example.tolerance:
        raise Differs(f"{spec.name}, example {i} on {device}: off by {error:.3g} of the largest")
    return Checked(spec.name, i, device, error, backend.spec.compiled(t))


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
