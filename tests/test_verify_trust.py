"""Plans that lie: every field that an executor acts on is held against the graph, not believed.

Each forgery is made of a sound plan. It is refused; and where the lie is one of meaning, an
executor that is made to run it all the same (the seal is broken here on purpose) gives other
numbers than NumPy, or finds bytes that nobody wrote: the check is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from plan_strategies import with_commands, with_regions, with_value

from ggraph import ops
from ggraph.backends.cpu import cpu_spec
from ggraph.backends.sim import Machine, SimBackend, SimHost, sim_spec
from ggraph.device import HOST, RESULT, Need
from ggraph.dtype import I64, Q8_0
from ggraph.errors import BackendError, GraphError
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.ops.evaluate import evaluate
from ggraph.pipeline import Options, make_plan
from ggraph.plan import _SEAL, HOST_ACTOR, Access, Actor, Command, Do, Plan, Region, VerifiedPlan
from ggraph.tensor import Array, Kind, Tensor, input, state, weight
from ggraph.verify import CounterExample, examine
from ggraph.verify.derived import _overwriting, replaceable
from ggraph.verify.rooms import room_faults
from ggraph.verify.steps import step_faults

E = 8
SIM0, SIM1 = sim_spec("sim0"), sim_spec("sim1", peer_bytes_per_s=0.0)
RUNS = 3


def linear(name: str, x: Tensor) -> Tensor:
    return ops.mul_mat(weight(f"{name}.w", (E, E)), x, name=name)


def step() -> Graph:
    """h = x W, y = h + h V, and h's rows go to a cache of which y2 reads all."""
    x, ids = input("x", (2, E)), input("ids", (2,), I64)
    h = linear("h", x)
    y = ops.mul_mat_add(weight("v", (E, E)), h, h, name="y")
    cached = ops.set_rows(state("cache", (4, E)), y, ids, name="cached")
    seen = ops.scale(cached, 0.5, name="seen")
    return Graph.of({"y2": linear("y2", seen), "z": linear("z", y)}, name="step")


GRAPH = step()
PLAN = make_plan(GRAPH, [SIM0], Options(rewrites=False)).plan
SPLIT = make_plan(GRAPH, [SIM0, SIM1], Options(rewrites=False, pins=("^(y2|z)$=sim1",))).plan


def numbers(graph: Graph, seed: int = 0) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """Weights, and a feed per run."""
    rng = np.random.default_rng(seed)

    def fill(t: Tensor) -> Array:
        if t.dtype is I64:
            return rng.permutation(4)[: t.size].astype(np.int64)
        return rng.standard_normal(t.shape).astype(np.float32)

    weights = {t.name: fill(t) for t in graph.leaves(Kind.WEIGHT)}
    return weights, [{t.name: fill(t) for t in graph.leaves(Kind.INPUT)} for _ in range(RUNS)]


def wanted(graph: Graph) -> list[dict[str, Array]]:
    """What NumPy makes of every run, states carried over."""
    weights, feeds = numbers(graph)
    states: Mapping[str, Array] = {}
    found = []
    for feed in feeds:
        out = evaluate(graph, {**weights, **states, **feed})
        states = {s: out[s] for s in graph.updates}
        found.append({t.name: out[t.name] for t in graph.outputs})
    return found


def executed(plan: Plan, proof: Plan) -> list[dict[str, Array]]:
    """What an executor makes of a plan under the certificate of another one."""
    certificate = examine(proof)
    assert not isinstance(certificate, CounterExample), str(certificate)
    machine = Machine()
    specs = plan.schedule.splits.placement.devices
    backends = {d.name: SimBackend(d, machine) for d in specs} | {HOST: SimHost(machine)}
    weights, feeds = numbers(proof.graph)
    external = {}
    for b in plan.memory.buffers.values():
        if b.external:
            external[b.name] = backends[b.device].allocate(b)
            raw = weights.get(b.name, np.zeros(b.nbytes, np.uint8))
            backends[b.device].write(external[b.name], 0, raw)
    executor = Executor(VerifiedPlan(plan, certificate, seal=_SEAL), backends, external)
    return [executor.run(f) for f in feeds]


def corrupts(plan: Plan, proof: Plan) -> bool:
    try:
        got = executed(plan, proof)
    except (BackendError, GraphError, KeyError, ValueError):
        return True  # bytes that nobody wrote, indices out of poison, memory that nobody brought
    right = wanted(proof.graph)
    return any(
        name not in g or not np.allclose(g[name], r[name], rtol=1e-5)
        for g, r in zip(got, right, strict=True)
        for name in r
    )


@pytest.mark.parametrize("plan", [PLAN, SPLIT], ids=["one device", "two"])
def test_the_plans_themselves_give_the_right_numbers(plan: Plan) -> None:
    assert not corrupts(plan, plan)


@dataclass(frozen=True)
class Forgery:
    """A lie in `plan`, what `verify` says of it, and whether an executor is misled by it."""

    name: str
    plan: Plan
    forge: Callable[[Plan], Plan]
    says: str
    misleads: bool = True


def edit(p: Plan, match: Callable[[Command], bool], change: Callable[[Command], Command]) -> Plan:
    assert any(map(match, p.schedule)), [str(c) for c in p.schedule]
    return with_commands(p, [change(c) if match(c) else c for c in p.schedule])


def drop(p: Plan, *matches: Callable[[Command], bool]) -> Plan:
    assert all(any(map(m, p.schedule)) for m in matches)
    return with_commands(p, [c for c in p.schedule if not any(m(c) for m in matches)])


def does(do: Do, node: str) -> Callable[[Command], bool]:
    return lambda c: c.do is do and c.node == node


def traits(p: Plan, name: str, **changes: object) -> Plan:
    return with_value(p, replace(p.schedule.values[name], **changes))  # type: ignore[arg-type]


def over(p: Plan, name: str, source: str) -> Plan:
    """Value `name` lies on the bytes of `source`."""
    return with_regions(p, {name: replace(p.memory.regions[source])})


def apart(p: Plan, name: str) -> Plan:
    """Value `name` lies behind everything else of its device's arena."""
    size, home = p.schedule.values[name].nbytes, p.schedule.values[name].device
    b = next(b for b in p.memory.buffers.values() if b.device == home and not b.external)
    start = -(-b.nbytes // b.alignment) * b.alignment
    buffers = {**p.memory.buffers, b.name: replace(b, nbytes=start + size)}
    moved = replace(p, memory=replace(p.memory, buffers=buffers))
    return with_regions(moved, {name: Region(b.name, (start,), size)})


def residual(p: Plan) -> Plan:
    return over(traits(p, "y", may_replace=("h",)), "y", "h")


def no_heir(p: Plan) -> Plan:
    schedule = replace(p.schedule, carried={"cache": "cache"})
    return apart(traits(replace(p, schedule=schedule), "cached", same_as=None), "cached")


def never_written(p: Plan) -> Plan:
    bare = drop(p, does(Do.HOST_WRITE, "x"), does(Do.COPY, "x"))
    return traits(bare, "x", initial=True)


def staged_for_ever(p: Plan) -> Plan:
    return traits(drop(p, does(Do.HOST_WRITE, "x")), "x@host", initial=True)


def nameless_launch(p: Plan) -> Plan:
    """`z` computed first of all, from what it does not say that it reads."""
    (z,) = [c for c in p.schedule if does(Do.LAUNCH, "z")(c)]
    others = [c for c in p.schedule if c is not z]
    return with_commands(p, [replace(z, node=None, reads=()), *others])


def by_label(p: Plan) -> Plan:
    """`y` read in the place of `z`, by the label alone."""
    return edit(p, does(Do.HOST_READ, "z"), lambda c: replace(c, node=None, label="y2"))


def two_ranges(p: Plan) -> Plan:
    """The copy of the input as two halves: an executor moves the first one."""

    def halves(c: Command) -> Command:
        (r,), (w,) = c.reads, c.writes
        half = r.stop // 2
        return replace(
            c,
            reads=(replace(r, stop=half), replace(r, start=half)),
            writes=(replace(w, stop=half), replace(w, start=half)),
        )

    return edit(p, does(Do.COPY, "x"), halves)


def fed_behind(p: Plan) -> Plan:
    """The host feeds an input in two halves: an executor puts all of it at each."""

    def halves(c: Command) -> Sequence[Command]:
        if not does(Do.HOST_WRITE, "x")(c):
            return [c]
        (w,) = c.writes
        half = w.stop // 2
        return [
            replace(c, writes=(replace(w, **edge),)) for edge in ({"stop": half}, {"start": half})
        ]

    return with_commands(p, [part for c in p.schedule for part in halves(c)])


def fed_late(p: Plan) -> Plan:
    """The host writes an input where the run ends: for the next run, so to speak."""
    moved = [c for c in p.schedule if does(Do.HOST_WRITE, "x")(c)]
    left = [c for c in p.schedule if c not in moved]
    return with_commands(p, [*left, *moved])


def moved_not_computed(p: Plan) -> Plan:
    """`y`, which is to be computed, is a copy of `h`."""
    h = Access("h", 0, p.schedule.values["h"].nbytes)
    return edit(p, does(Do.LAUNCH, "y"), lambda c: replace(c, do=Do.COPY, reads=(h,)))


def fed_from_scratch(p: Plan) -> Plan:
    """The indices are copied from the supposed scratch of a launch, which no host writes."""
    ids, h = (next(filter(does(*k), p.schedule)) for k in ((Do.COPY, "ids"), (Do.LAUNCH, "h")))
    spare = replace(p.schedule.values["ids"], name="spare", slots=1)
    made = with_regions(with_value(p, spare), {"spare": p.memory.regions["ids"]})
    extra = Access("spare", 0, spare.nbytes)
    wider = replace(h, writes=(*h.writes, extra))
    late = replace(ids, actor=h.actor, reads=(extra,))
    commands = [c for c in p.schedule if c is not ids and not does(Do.HOST_WRITE, "ids")(c)]
    at = commands.index(h)
    return apart(with_commands(made, [*commands[:at], wider, late, *commands[at + 1 :]]), "spare")


def foreign_result(p: Plan) -> Plan:
    """`h` claims to compute `y` as well, which nobody then does."""
    y = Access("y", 0, p.schedule.values["y"].nbytes)
    return edit(
        drop(p, does(Do.LAUNCH, "y")),
        does(Do.LAUNCH, "h"),
        lambda c: replace(c, writes=(*c.writes, y)),
    )


def borrowed_buffer(p: Plan) -> Plan:
    """One weight lies in another one's buffer."""
    return with_regions(p, {"v": replace(p.memory.regions["h.w"])})


def in_the_arena(p: Plan) -> Plan:
    return apart(traits(p, "v", external=False), "v")


def replaced_state(p: Plan) -> Plan:
    """The cache's next value put over a weight, which no op overwrites."""
    return over(traits(p, "cached", same_as="v"), "cached", "v")


def two_recorders(p: Plan) -> Plan:
    first = next(c for c in p.schedule if c.do is Do.RECORD)
    other = Actor("sim1" if first.actor.device == "sim0" else "sim0")
    mark = Command(Do.RECORD, other, "again", event=first.event)
    return with_commands(p, [mark, *p.schedule.commands])


def double_sync(p: Plan) -> Plan:
    """The host waits for a mark and, says the command too, for a stream on which nothing runs."""
    nothing = Actor("sim0", 3)
    mark = Command(Do.RECORD, Actor("sim1"), "end", event="end")
    double = Command(Do.HOST_SYNC, HOST_ACTOR, "end", event="end", waits_for=nothing)
    return with_commands(p, [mark, double, *p.schedule.commands])


def misaligned(p: Plan) -> Plan:
    buffers = {
        n: replace(b, alignment=16) if b.device == "sim0" else b
        for n, b in p.memory.buffers.items()
    }
    return replace(p, memory=replace(p.memory, buffers=buffers))


FORGERIES = (
    Forgery("in place over an operand", PLAN, residual, "'y' may not replace 'h'"),
    Forgery("a state without an heir", PLAN, no_heir, "'cached' lies on None"),
    Forgery("an input that nobody writes", PLAN, never_written, "but initial=True"),
    Forgery("staging that nobody writes", PLAN, staged_for_ever, "'x@host' is no tensor"),
    Forgery("a launch by its label", PLAN, nameless_launch, "launch of None, which is no tensor"),
    Forgery("a read by its label", PLAN, by_label, "host_read of None, which is no tensor"),
    Forgery("a copy of two ranges", PLAN, two_ranges, "copy of 2 ranges to 2"),
    Forgery("an input fed in halves", PLAN, fed_behind, "in ranges of [32] bytes", False),
    Forgery(
        "a host write moved behind its readers",
        PLAN,
        fed_late,
        "finds bytes that nobody has written",
    ),
    Forgery("a copy for a computation", PLAN, moved_not_computed, "which is not its result"),
    Forgery("scratch for an input", PLAN, fed_from_scratch, "which mul_mat does not need"),
    Forgery("another's result", PLAN, foreign_result, "launch of 'h' writes y[0:64]"),
    Forgery("a weight in another's buffer", PLAN, borrowed_buffer, "no place for it"),
    Forgery("a weight in the arena", PLAN, in_the_arena, "no place for it"),
    Forgery("an overwrite of nothing", PLAN, replaced_state, "'cached' lies on 'v'"),
    Forgery("one event of two devices", SPLIT, two_recorders, "is recorded on ", False),
    Forgery("a sync for two things", SPLIT, double_sync, "host_sync for 'end' and for", False),
    Forgery("less alignment than asked", PLAN, misaligned, "is aligned to 16, sim0 needs", False),
)


@pytest.mark.parametrize("f", FORGERIES, ids=lambda f: f.name)
def test_a_lie_is_refused_and_would_have_misled(f: Forgery) -> None:
    forged = f.forge(f.plan)
    verdict = examine(forged)
    assert isinstance(verdict, CounterExample), "accepted"
    assert f.says in str(verdict), str(verdict)
    if f.misleads:
        assert corrupts(forged, f.plan), "the executor gives the right numbers all the same"


@pytest.mark.parametrize(
    ("do", "node", "says"),
    [
        (Do.LAUNCH, "h.w", "launch of 'h.w', which nothing computes"),
        (Do.LAUNCH, "view", "launch of 'view', which nothing computes"),
        (Do.HOST_WRITE, "z", "host_write of 'z': the host writes inputs"),
        (Do.HOST_WRITE, "h.w", "host_write of 'h.w': the host writes inputs"),
        (Do.HOST_WRITE, "cache", "host_write of 'cache': the host writes inputs"),
        (Do.COPY, "h.w", "copy of 'h.w' writes h.w[0:256], which is not its result"),
        (Do.COPY, "cache", "copy of 'cache' writes cache[0:128], which is not its result"),
        (Do.HOST_READ, "y", "host_read of 'y' in ranges of [] bytes, expected one of 32"),
        (Do.HOST_READ, "none", "host_read of 'none' in ranges of [4] bytes, expected one of 0"),
    ],
)
def test_a_command_is_of_a_tensor_with_which_it_can_be_done(do: Do, node: str, says: str) -> None:
    """Nobody computes a leaf or a view, and the host writes inputs alone."""
    x = input("x", (2, E))
    h = linear("h", x)
    y, none = ops.scale(ops.narrow(h, 1, 2, 4, name="view"), 2.0), ops.scale(ops.rows(h, 0, 0), 2.0)
    kept = ops.set_rows(state("cache", (4, E)), h, input("ids", (2,), I64))
    graph = Graph.of({"z": h, "y": y, "none": none, "kept": kept})
    p = make_plan(graph, [SIM0], Options(rewrites=False)).plan
    assert not list(step_faults(p))
    nbytes = {"y": 0, "none": 4}.get(node, p.graph[node].nbytes)
    accesses = (Access(p.graph[node].root.name, 0, nbytes),) if nbytes else ()
    reads = accesses if do in (Do.HOST_READ, Do.COPY) else ()
    writes = accesses if do is not Do.HOST_READ else ()
    actor = Actor("sim0") if do in (Do.LAUNCH, Do.COPY) else HOST_ACTOR
    forged = Command(do, actor, "forged", node, reads, writes)
    found = [f.message for f in step_faults(with_commands(p, [*p.schedule.commands, forged]))]
    assert any(says in m for m in found), found


def test_tensors_of_no_bytes_and_views_from_further_on_are_fed_and_fetched() -> None:
    """The host writes nothing of an empty input; an output may begin anywhere in its root."""
    x, empty = input("x", (4, E)), input("empty", (0, E))
    last = ops.narrow(linear("h", x), 0, 2, 2)
    graph = Graph.of({"y": last, "all": ops.concat([x, empty], axis=0)})
    for spec in (SIM0, cpu_spec("cpu")):
        p = make_plan(graph, [spec], Options(rewrites=False)).plan
        assert {c.node for c in p.schedule if c.do is Do.HOST_READ} == {"y", "all"}
        feed = Command(Do.HOST_WRITE, HOST_ACTOR, "feed", "empty")
        for q in (p, with_commands(p, [feed, *p.schedule.commands])):
            assert not isinstance(examine(q), CounterExample), str(examine(q))
    shifted = edit(PLAN, does(Do.HOST_WRITE, "x"), lambda c: replace(
        c, writes=tuple(replace(a, start=4, stop=a.stop + 4) for a in c.writes)))  # fmt: skip
    assert any("from their value's first byte" in f.message for f in step_faults(shifted))


# What a launch needs beside operands: by the device's word, not by the plan's.


def packed() -> Plan:
    """Two products of one input with weights in blocks: its rows in 8 bits are made once."""
    x = input("x", (2, 32))
    a, b = (ops.mul_mat(weight(n, (32, 32), Q8_0), x, name=n + "x") for n in "ab")
    graph = Graph.of({"y": ops.add(a, b, name="y")}, name="packed")
    return make_plan(graph, [cpu_spec("cpu")], Options(rewrites=False)).plan


def bare(p: Plan, node: str) -> Plan:
    """The launch of `node` without what it touches beside tensors."""

    def tensors_only(accesses: Sequence[Access]) -> tuple[Access, ...]:
        return tuple(a for a in accesses if "#" not in a.value)

    def change(c: Command) -> Command:
        return replace(c, reads=tensors_only(c.reads), writes=tensors_only(c.writes))

    return edit(p, does(Do.LAUNCH, node), change)


def short(p: Plan) -> Plan:
    def halved(a: Access) -> Access:
        return replace(a, stop=a.stop // 2) if "#" in a.value else a

    return with_commands(
        p,
        [
            replace(c, reads=tuple(map(halved, c.reads)), writes=tuple(map(halved, c.writes)))
            for c in p.schedule
        ],
    )


def filled_by_the_host(p: Plan) -> Plan:
    """Rows that a launch is to have made are what the host has written for the input."""
    (rows,) = [v for n, v in p.schedule.values.items() if "#" in n]
    put = Command(Do.HOST_WRITE, HOST_ACTOR, "put", "x", (), (Access(rows.name, 0, rows.nbytes),))
    return with_commands(p, [put, *bare(p, "ax").schedule])


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda p: bare(p, "ax"), "launch of 'ax' has no 96 bytes of 'x#rows.0', which mul_mat"),
        (lambda p: bare(p, "bx"), "launch of 'bx' has no 96 bytes"),
        (short, "launch of 'ax' has no 96 bytes"),
        (filled_by_the_host, "host_write of 'x' in ranges of [96] bytes, expected one of 256"),
    ],
)
def test_a_launch_has_what_its_kernel_needs(forge: Callable[[Plan], Plan], says: str) -> None:
    plan = packed()
    assert not isinstance(examine(plan), CounterExample)
    verdict = examine(forge(plan))
    assert isinstance(verdict, CounterExample) and says in str(verdict), str(verdict)


OFFER, OWN, SHARED = "y#offer.0", "y#own", "x#shared.0"


def beside(reads: Mapping[str, int], writes: Mapping[str, int]) -> list[str]:
    """What is said of a product that offers 64 bytes of its result, needs as many of its own and
    shares some of its source, and that declares so many bytes of each value beside operands."""
    needs = Need("offer", 64, (RESULT,)), Need("own", 64), Need("shared", 64, (1,))
    spec = sim_spec("sim0", needs=lambda t: needs if t.op == "mul_mat" else ())
    graph = Graph.of({"y": linear("y", input("x", (2, E)))}, name="beside")
    p = make_plan(graph, [spec], Options(rewrites=False)).plan
    more, made = (tuple(Access(n, 0, size) for n, size in side.items()) for side in (reads, writes))

    def named(c: Command) -> Command:
        return replace(c, reads=(*c.reads, *more), writes=(*c.writes, *made))

    return [f.message for f in room_faults(edit(bare(p, "y"), does(Do.LAUNCH, "y"), named))]


@pytest.mark.parametrize(
    ("reads", "writes", "missing"),
    [
        ({}, {OWN: 64, SHARED: 64}, []),
        ({SHARED: 64}, {OWN: 64}, []),
        ({SHARED: 64, "x": 64}, {OWN: 64, OFFER: 64}, []),
        ({OWN: 64}, {SHARED: 64}, [OWN]),
        ({}, {OWN: 32, SHARED: 32, OFFER: 32}, [OFFER, OWN, SHARED]),
        ({SHARED: 96}, {OWN: 96}, [OWN, SHARED]),
        ({}, {}, [OWN, SHARED]),
    ],
)
def test_bytes_beside_operands_are_declared_in_full(
    reads: dict[str, int], writes: dict[str, int], missing: list[str]
) -> None:
    assert beside(reads, writes) == [
        f"launch of 'y' has no 64 bytes of {name!r}, which mul_mat needs" for name in missing
    ]


def test_a_launch_touches_nothing_beside_what_it_needs() -> None:
    full, says = (
        {OWN: 64, SHARED: 64},
        "launch of 'y' touches {}[0:64], which mul_mat does not need",
    )
    assert beside({}, full | {"z#own": 64}) == [says.format("z#own")]
    assert beside({"x@host": 64}, full) == [says.format("x@host")]


# In place: the record of the op decides, whatever the plan says.


def value_of(build: Callable[[Tensor, Tensor], Tensor]) -> frozenset[str]:
    """What the result over two computed tensors [E, E] may replace, by its record."""
    a, b = linear("a", input("x", (E, E))), linear("b", input("x2", (E, E)))
    return replaceable(build(a, b))


def test_which_sources_a_result_may_replace() -> None:
    w = weight("w", (E, E))
    assert value_of(ops.add) == {"a", "b"}
    assert value_of(lambda a, b: ops.add(a, a)) == {"a"}
    assert value_of(lambda a, b: ops.add(a, a.T)) == frozenset()
    assert value_of(lambda a, b: ops.add(a.T, a.T)) == frozenset()
    assert value_of(lambda a, b: ops.add(a.reshape(E * E), b.reshape(E * E))) == {"a", "b"}
    assert value_of(lambda a, b: ops.add(a, ops.rows(a, 0, 1))) == frozenset()
    assert value_of(lambda a, b: ops.mul_mat(w, a)) == frozenset()
    assert value_of(lambda a, b: ops.mul_mat_add(w, a, b)) == {"b"}
    assert value_of(lambda a, b: ops.mul_mat_add(w, a, a)) == frozenset()
    assert value_of(lambda a, b: ops.mul_mat_add(a, b, a)) == frozenset()
    assert value_of(lambda a, b: ops.soft_max(a)) == {"a"}
    assert value_of(lambda a, b: ops.soft_max(a, a)) == frozenset()
    assert value_of(lambda a, b: ops.swiglu(a, a)) == {"a"}
    assert value_of(lambda a, b: ops.where(a, a, b)) == {"a", "b"}
    assert value_of(lambda a, b: ops.where(a, b, ops.rows(a, 0, 1))) == {"b"}
    assert value_of(lambda a, b: ops.where(a, a, a.T)) == frozenset()
    assert value_of(lambda a, b: ops.where(a.T, a, a)) == frozenset()


def test_a_record_may_name_more_sources_than_a_tensor_has() -> None:
    """A chain of elementwise operations may work in place over any of those that it has."""
    a = linear("a", input("x", (E, E)))
    made = make_plan(Graph.of({"y": ops.scale(ops.silu(a), 2.0)}), [cpu_spec("cpu")])
    (chain,) = [t for t in made.plan.graph if t.op == "chain"]
    assert chain.spec is not None and len(chain.spec.inplace_ok) > len(chain.sources) == 1
    assert replaceable(chain) == {"a"}


def test_an_overwritten_tensor_is_read_by_no_other_source() -> None:
    """Rows of a cache that are put into other rows of it: the kernel would read what it wrote."""
    cache, ids = state("c", (4, E)), input("ids", (2,), I64)
    seen = ops.rows(cache, 0, 2)
    with pytest.raises(GraphError, match="shows bytes of %c, which set_rows overwrites"):
        ops.set_rows(cache, seen, ids)
    fair = ops.set_rows(cache, input("r", (2, E)), ids, name="moved")
    moved = replace(fair, sources=(cache, seen, ids))  # as nobody can write it
    assert list(_overwriting(replace(fair, sources=(cache, ops.rows(cache, 0, 0), ids)))) == []
    graph = Graph.of({"y": ops.scale(moved, 2.0)})
    with pytest.raises(Exception, match=r"'moved' overwrites 'c' and reads it as another"):
        make_plan(graph, [SIM0])


def test_an_op_that_overwrites_a_part_is_refused_though_no_builder_makes_one() -> None:
    """Of a root, from its beginning, its end or between; or of more than there is."""
    old, small = state("old", (8, E)), state("small", (4, E))
    y = ops.set_rows(old, input("x", (2, E)), input("ids", (2,), I64))
    assert list(_overwriting(y)) == []
    for part in (old[0:4], old[4:8], old[2:6]):
        forged = replace(y, sources=(part, *y.sources[1:]), shape=part.shape)
        assert list(_overwriting(forged)) == ["overwrites a part of 'old'"]
    forged = replace(y, sources=(small, *y.sources[1:]))
    assert list(_overwriting(forged)) == ["overwrites a part of 'small'"]
