"""`run_hazard`: a bad plan refused and seen to corrupt, a fixed plan proved and run.

The expected values come from `ggraph.ops.evaluate`, which knows no plan. Corruption is looked for
on the simulator, under the order that runs the second command of the counter-example before the
first wherever a legal order can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.backends.sim import Adversarial, Order, Random, Simulated, Simulator, Timed
from ggraph.backends.sim.orders import Runnable
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.hazards.corpus import Hazard, plan_of
from ggraph.hazards.report import Corruption, HazardReport, Price
from ggraph.ops.evaluate import evaluate
from ggraph.orderings import wait_count
from ggraph.plan import Certificate, Plan
from ggraph.tensor import Array, Kind
from ggraph.verify import CounterExample, examine

IDS = 8  # integer inputs are distinct numbers below it
Values = Mapping[str, Array]


class Relentless(Adversarial):
    """Adversarial in every run: holds `first` back whenever something else may go on."""

    def choose(self, ready: Sequence[Runnable], may_stop: bool) -> Runnable | None:
        """Anything but `first`, as long as there is a choice."""
        free = [e for e in ready if e.label != self.first]
        if not free and may_stop:
            return None
        return min(free or ready, key=lambda e: e.seq)


@dataclass(frozen=True, eq=False)
class Data:
    """Seeded weights, one feed per run, and what every output must be in every run."""

    weights: Values
    feeds: tuple[Values, ...]
    expected: tuple[Values, ...]


def run_hazard(hazard: Hazard, seed: int = 0, orders: int = 1000) -> HazardReport:
    """Everything that the corpus claims of one hazard, done. `orders` random legal orders of the
    fixed plan are run. Raises InputError for a negative number of orders or seed."""
    if orders < 0 or seed < 0:
        raise InputError(f"orders {orders} and seed {seed} must not be negative")
    data = data_of(hazard, seed)
    failures: list[str] = []
    bad = plan_of(hazard, hazard.bad) if hazard.bad is not None else None
    verdict = examine(bad) if bad is not None else None
    example = verdict if isinstance(verdict, CounterExample) else None
    corruption = _corrupt(hazard, bad, example, data) if bad is not None else None
    failures += _judged(hazard, bad, example, corruption)
    fixed = plan_of(hazard, hazard.fixed)
    proof = examine(fixed)
    if isinstance(proof, CounterExample):
        failures.append(f"the fixed plan is refused: {proof}")
    else:
        failures += _survives(hazard, fixed, data, seed, orders)
    return HazardReport(
        hazard,
        seed,
        orders,
        example,
        corruption,
        proof if isinstance(proof, Certificate) else None,
        _prices(hazard, bad, fixed, data),
        tuple(failures),
    )


def data_of(hazard: Hazard, seed: int) -> Data:
    """Weights and feeds by seed, and the outputs by NumPy, states carried from run to run."""
    graph = hazard.build()
    rng = np.random.default_rng([seed, hazard.row])
    weights = {
        t.name: (rng.standard_normal(t.shape) / np.sqrt(t.shape[-1])).astype(t.dtype.np)
        for t in graph.leaves(Kind.WEIGHT)
    }
    feeds = tuple(_feed(graph, rng) for _ in range(hazard.runs))
    states: Values = {}
    expected: list[Values] = []
    for feed in feeds:
        found = evaluate(graph, {**weights, **feed, **states})
        states = {name: found[name] for name in graph.updates}
        expected.append({t.name: found[t.name] for t in graph.outputs})
    return Data(weights, feeds, tuple(expected))


def _feed(graph: Graph, rng: "np.random.Generator") -> dict[str, Array]:
    found: dict[str, Array] = {}
    for t in graph.leaves(Kind.INPUT):
        if t.dtype.is_float:
            found[t.name] = rng.standard_normal(t.shape).astype(t.dtype.np)
        else:
            found[t.name] = rng.permutation(IDS)[: t.size].reshape(t.shape).astype(t.dtype.np)
    return found


def adversary(example: CounterExample | None, bad: Plan) -> tuple[Order, str]:
    """The adversarial order for a counter-example; wrong in every order needs none."""
    if example is None or example.kind != "race" or not example.first or not example.second:
        return Timed(), "as timed by the device's rates"
    commands = bad.schedule.commands
    first, then = commands[example.first.index].label, commands[example.second.index].label
    return Relentless(first, then), f"{then!r} before {first!r}"


def labels(example: CounterExample, plan: Plan) -> tuple[str, str]:
    """Labels of the two commands of a counter-example; "" where it has none."""
    commands = plan.schedule.commands
    first, second = example.first, example.second
    return (
        commands[first.index].label if first else "",
        commands[second.index].label if second else "",
    )


def _corrupt(
    hazard: Hazard, bad: Plan, example: CounterExample | None, data: Data
) -> Corruption | None:
    """The first output that the bad plan gets wrong, under the adversarial order."""
    order, title = adversary(example, bad)
    got = Simulator(bad, data.weights).run(data.feeds, order)
    agreement = _agreement(got, data) if hazard.agreement else None
    for run, (wanted, outputs) in enumerate(zip(data.expected, got.outputs, strict=True)):
        for name, right in wanted.items():
            wrong = _bits(outputs[name]) != _bits(right)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                return Corruption(
                    title,
                    name,
                    run,
                    int(wrong.sum()),
                    right.size,
                    at,
                    float(right[at]),
                    float(outputs[name][at]),
                    str(got.faults[0]) if got.faults else "",
                    agreement,
                    got.timeline,
                )
    return None


def _bits(values: Array) -> Array:
    """Elements as integers, so that NaN equals NaN of the same bits."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _agreement(got: Simulated, data: Data) -> float:
    """Share of rows, over all runs, whose best draft token is that of the right logits."""
    pairs = zip(got.outputs, data.expected, strict=True)
    same = [o["logits"].argmax(-1) == e["logits"].argmax(-1) for o, e in pairs]
    return float(np.mean(same))


def _judged(
    hazard: Hazard,
    bad: Plan | None,
    example: CounterExample | None,
    corruption: Corruption | None,
) -> list[str]:
    """What is not as expected of the bad plan."""
    if bad is None or hazard.expected is None:
        return []
    if example is None:
        return ["the bad plan is accepted"]
    failures = []
    found = (example.kind, *labels(example, bad))
    wanted = (hazard.expected.kind, hazard.expected.first, hazard.expected.second)
    if found != wanted:
        failures.append(f"expected counter-example {wanted}, got {found}")
    if corruption is None:
        failures.append("no output of the bad plan is wrong under the adversarial order")
    return failures


def _survives(hazard: Hazard, fixed: Plan, data: Data, seed: int, orders: int) -> list[str]:
    """The first random order of the fixed plan that changes a bit, if any does."""
    simulator = Simulator(fixed, data.weights)
    wanted = _packed(data.expected)
    for k in range(orders):
        got = simulator.run(data.feeds, Random(seed * 1_000_003 + k))
        if got.faults or _packed(got.outputs) != wanted:
            fault = f": {got.faults[0]}" if got.faults else ""
            return [f"{hazard.id}: order {k} of the fixed plan gives other bits{fault}"]
    return []


def _packed(outputs: Sequence[Values]) -> list[dict[str, bytes]]:
    return [{name: a.tobytes() for name, a in run.items()} for run in outputs]


def _prices(hazard: Hazard, bad: Plan | None, fixed: Plan, data: Data) -> dict[str, Price]:
    """Bytes, waits and estimated seconds of each plan of the hazard."""
    found = {} if bad is None else {"bad": price(bad, data)}
    found["fixed"] = price(fixed, data)
    for title, recipe in hazard.others.items():
        found[title] = price(plan_of(hazard, recipe), data)
    return found


def price(plan: Plan, data: Data) -> Price:
    """What a plan costs: arena bytes, waits per run, virtual seconds of all runs."""
    seconds = Simulator(plan, data.weights).run(data.feeds, Timed()).seconds
    return Price(plan.memory.arena_bytes, wait_count(plan.schedule), seconds)


def timelines(hazard: Hazard, seed: int = 0) -> dict[str, Simulated]:
    """Simulations to draw: "bad" under its adversarial order, "fixed" as timed."""
    data = data_of(hazard, seed)
    found: dict[str, Simulated] = {}
    if hazard.bad is not None:
        bad = plan_of(hazard, hazard.bad)
        verdict = examine(bad)
        order, _ = adversary(verdict if isinstance(verdict, CounterExample) else None, bad)
        found["bad"] = Simulator(bad, data.weights).run(data.feeds, order)
    fixed = Simulator(plan_of(hazard, hazard.fixed), data.weights)
    found["fixed"] = fixed.run(data.feeds, Timed())
    return found


__all__ = ["Data", "adversary", "data_of", "labels", "price", "run_hazard", "timelines"]
