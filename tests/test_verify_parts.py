"""Nothing is read of a partial copy but the slices that it moves, by whomever and wherever."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from plan_strategies import plan_of, with_commands

from ggraph import ops
from ggraph.alloc import allocate
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import I32
from ggraph.graph import Graph
from ggraph.order import order
from ggraph.plan import (
    HOST_ACTOR,
    Access,
    Actor,
    Buffer,
    Command,
    Do,
    Placed,
    Placement,
    Plan,
    Region,
    Split,
    Splits,
    Value,
)
from ggraph.plan_json import plan_from_json, plan_to_json
from ggraph.tensor import Tensor, input, weight
from ggraph.verify import Certificate, CounterExample, examine

SIM, CPU = sim_spec("sim0"), DeviceSpec("cpu", "cpu", host_visible=True)
IDS, W, X = input("ids", (2, 1), I32), weight("w", (8, 4, 16)), input("x", (2, 1, 16))


def planned(home: str = "cpu", **outs: Tensor) -> Plan:
    """The graph of these outputs by hand: inputs on the CPU, as is the weight unless `home` says
    otherwise, and what a copy brings to sim0, with all that is made of it, there."""
    graph = Graph.of(outs)
    where: dict[str, str] = {"w": home}
    for t in graph.nodes:
        sources = {where.get(s.name, "cpu") for s in t.sources}
        found = t.attrs["device"] if t.op == "copy" else "sim0" if "sim0" in sources else "cpu"
        where[t.name] = str(found)
    placed = {t.name: Placed(where.get(t.name, "cpu"), "hand") for t in graph}
    split = Split(0, "sim0", tuple(t.name for t in graph.nodes))
    schedule = order(Splits(Placement(graph, (SIM, CPU), placed), (split,)))
    return Plan(schedule, allocate(schedule))


def part(name: str, device: str = "sim0", source: Tensor = W) -> Tensor:
    return ops.copy(source, device, used=IDS, name=name)


def picked(table: Tensor) -> Tensor:
    """What the indices that chose the part pick of it."""
    ids = ops.copy(IDS, "sim0", name="ids@sim0")
    x = ops.copy(X, "sim0", name="x@sim0")
    return ops.mul_mat_id(table, x, ids, name="g")


def output() -> Plan:
    """The output itself is brought in part."""
    return planned("sim0", y=part("y", "cpu"))


def seen() -> Plan:
    """The output is a view of what was brought in part."""
    return planned("sim0", y=part("c", "cpu").reshape(8, 64))


def whole_of_part() -> Plan:
    """A whole copy of what was brought in part."""
    return planned(y=ops.copy(part("c"), "cpu"))


@pytest.mark.parametrize("made", [output, seen, whole_of_part])
def test_what_was_brought_in_part_is_not_read_whole(made: Callable[[], Plan]) -> None:
    verdict = examine(made())
    assert isinstance(verdict, CounterExample)
    assert verdict.kind == "declaration" and "its partial copy need not bring" in verdict.message


def both() -> Plan:
    """The same weight twice on the device, in part for one output and whole for another."""
    whole = ops.copy(W, "sim0", name="b")
    p = planned(y=picked(part("a")), z=ops.scale(whole, 2.0))
    assert isinstance(examine(p), Certificate), str(examine(p))
    return p


def test_a_copy_for_another_tensor_does_not_take_its_bytes_from_a_part() -> None:
    """Both are the weight's bytes, but what comes by way of the part is only some of them."""
    p = both()
    late = [c for c in p.schedule if c.do is Do.COPY and c.node == "b"]
    others = [c for c in p.schedule if c not in late]
    first = 1 + next(i for i, c in enumerate(others) if c.chosen_by is not None)
    by_way_of = [replace(c, reads=(Access("a", 0, W.nbytes),)) for c in late]
    verdict = examine(with_commands(p, [*others[:first], *by_way_of, *others[first:]]))
    assert isinstance(verdict, CounterExample)
    assert verdict.message == "reads slices of 'a' that its partial copy need not bring"


def test_a_partial_copy_fills_no_other_tensor() -> None:
    """It would be that tensor's only copy: one of no bytes stands in for its own."""
    commands = []
    for c in both().schedule:
        if c.do is Do.COPY and c.node == "b":
            c = replace(c, reads=(Access("w", 0, 0),), writes=(Access("b", 0, 0),))
        commands.append(c)
        if c.chosen_by is not None:
            commands.append(replace(c, writes=(Access("b", 0, W.nbytes),)))
    verdict = examine(with_commands(both(), commands))
    assert isinstance(verdict, CounterExample)
    assert verdict.message == "a copy chosen by 'ids' for 'a' writes 'b'"


def test_slices_go_on_by_the_same_indices() -> None:
    """On to a second buffer, in equal slices, they are the same slices."""
    p = planned(y=picked(part("c", source=part("a"))))
    assert isinstance(examine(p), Certificate), str(examine(p))
    fewer = part("c", source=part("a").reshape(4, 8, 16))  # as many bytes, larger slices
    assert "partial copy need not bring" in str(examine(planned(y=picked(fewer))))


# Without a graph: nothing is known of a launch but what it declares.

DEVICE = DeviceSpec("g", "sim", alignment=16)
STREAM = Actor("g")


def without_graph(*users: Command) -> Plan:
    """`table`, in part by `ids`, to g; `ids` too; then the users. `w` lies on g from the start."""
    commands = [
        Command(Do.HOST_WRITE, HOST_ACTOR, "feed", "ids", (), at("ids")),
        looked("ids"),
        moved("part", "table", "ids"),
        moved("ids@g", "ids"),
        *users,
        Command(Do.HOST_SYNC, HOST_ACTOR, "end"),
    ]
    used = dict.fromkeys(a.value for c in commands for a in (*c.reads, *c.writes))
    homes = dict.fromkeys(("table", "ids", "ids2", "back"), "host")
    lasting = ("table", "w", "ids2")
    values = [Value(n, homes.get(n, "g"), at(n)[0].stop, initial=n in lasting) for n in used]
    regions = {v.name: Region(v.device, (i * 64,), v.nbytes) for i, v in enumerate(values)}
    buffers = [Buffer(n, n, 1024, 16) for n in ("host", "g")]
    return plan_of([DEVICE], values, commands, buffers, regions)


def looked(value: str, node: str = "ids") -> Command:
    return Command(Do.HOST_READ, HOST_ACTOR, "look", node, at(value))


def at(name: str) -> tuple[Access, ...]:
    return (Access(name, 0, 16 if name.startswith("ids") else 64),)


def moved(into: str, out: str, chosen_by: str | None = None) -> Command:
    return Command(Do.COPY, STREAM, into, into, at(out), at(into), chosen_by=chosen_by)


def made(*reads: str, out: str = "y") -> Command:
    declared = tuple(a for name in reads for a in at(name))
    return Command(Do.LAUNCH, STREAM, out, out, declared, at(out))


def half(c: Command, start: int) -> Command:
    """Only these 32 bytes of what a copy writes, from as many of what it reads."""
    span = {"start": start, "stop": start + 32}
    return replace(c, reads=(replace(c.reads[0], **span),), writes=(replace(c.writes[0], **span),))


def cut(c: Command, name: str, start: int, stop: int, *others: str) -> Command:
    """Only these bytes of what a command touches of a value, and of others."""
    reads, writes = (
        tuple(replace(a, start=start, stop=stop) if a.value in (name, *others) else a for a in side)
        for side in (c.reads, c.writes)
    )
    return replace(c, reads=reads, writes=writes)


PAIR = replace(moved("z", "w"), reads=(*at("ids"), *at("w")), writes=(*at("ids3@g"), *at("z")))
OTHERS = (looked("ids2", "others"), moved("ids2@g", "ids2"))
TWICE = (*OTHERS, half(moved("v", "table", "ids"), 0), half(moved("v", "table", "others"), 32))
AGAIN = (looked("ids2"), moved("ids2@g", "ids2"))

SOUND: dict[str, tuple[Command, ...]] = {
    "with the indices": (made("part", "ids@g"),),
    "with a copy of their copy": (moved("ids3@g", "ids@g"), made("part", "ids3@g")),
    "with what their copy was made of": (moved("ids3@g", "ids"), made("part", "ids3@g")),
    "moved on as it came": (moved("y", "part", "ids"),),
    "moved on after another look": (looked("ids"), moved("y", "part", "ids")),
    "with some of the indices": (cut(made("part", "ids@g"), "ids@g", 0, 8),),
    "the indices alone": (made("ids@g"),),
    "in two parts, with the indices of both": (*TWICE, made("v", "ids@g", "ids2@g")),
    "beside a copy of nothing": (replace(moved("y", "w"), reads=(), writes=()), made("w")),
}
UNSOUND: dict[str, tuple[Command, ...]] = {
    "alone": (made("part"),),
    "copied whole": (moved("back", "part"),),
    "after another value": (made("w", "part"),),
    "with what a kernel made of the indices": (made("ids@g", out="ids3@g"), made("part", "ids3@g")),
    "with a part of the indices": (moved("ids3@g", "ids", "ids"), made("part", "ids3@g")),
    "with none of the indices": (cut(made("part", "ids@g"), "ids@g", 0, 0),),
    "with indices that the host has not read": (
        cut(looked("ids"), "ids", 0, 8),
        moved("more", "table", "ids"),
        made("more", "ids@g"),
    ),
    "with half of a copy, the rest another's": (
        cut(moved("ids3@g", "ids"), "ids3@g", 0, 8, "ids"),
        cut(made(out="ids3@g"), "ids3@g", 8, 16),
        made("part", "ids3@g"),
    ),
    "with indices of which the host has read some beside others": (
        replace(looked("ids"), reads=(*at("ids"), Access("ids2", 0, 8))),
        moved("ids2@g", "ids2"),
        moved("more", "table", "ids"),
        made("more", "ids@g", "ids2@g"),
    ),
    "with the first of many indices": (
        looked("table"),
        moved("more", "table", "ids"),
        replace(moved("ids3@g", "table"), reads=(Access("table", 0, 16),)),
        made("more", "ids3@g"),
    ),
    "with indices that are a part of what they came to": (
        replace(moved("w", "ids"), writes=(Access("w", 0, 16),)),
        cut(made("part", "w"), "w", 0, 16),
    ),
    "with what one copy moves beside the indices": (PAIR, made("part", "z")),
    "in two parts, with the indices of the second": (*TWICE, made("v", "ids2@g")),
    "in two parts, with the indices of the first": (*TWICE, made("v", "ids@g")),
    "with what the host read later under that name": (*AGAIN, made("part", "ids2@g")),
    "moved on by what the host read later under that name": (*AGAIN, moved("y", "part", "ids")),
}


@pytest.mark.parametrize("case", [*SOUND, *UNSOUND])
def test_a_reader_of_a_part_reads_the_indices_too(case: str) -> None:
    users = (SOUND | UNSOUND)[case]
    p = plan_from_json(json.dumps(plan_to_json(without_graph(*users))))
    verdict = examine(p)
    assert isinstance(verdict, Certificate) == (case in SOUND), str(verdict)
    if case in UNSOUND:
        assert "that its partial copy need not bring" in str(verdict)


@pytest.mark.parametrize("chosen_by", ["ids", None])
def test_a_state_that_a_partial_copy_left_is_not_whole_in_the_next_run(
    chosen_by: str | None,
) -> None:
    """Which slices came was chosen by the indices of the run before."""
    p = without_graph(made("s"), moved("s.new", "table", chosen_by))
    values = {n: replace(v, initial=v.initial or n == "s") for n, v in p.schedule.values.items()}
    values["s.new"] = replace(values["s.new"], same_as="s")
    regions = {**p.memory.regions, "s.new": p.memory.regions["s"]}
    schedule = replace(p.schedule, values=values, carried={"s": "s.new"})
    verdict = examine(Plan(schedule, replace(p.memory, regions=regions)))
    if chosen_by is None:
        assert isinstance(verdict, Certificate), str(verdict)
    else:
        assert "reads slices of 's' that its partial copy need not bring" in str(verdict)


def test_what_is_kept_is_not_brought_in_part() -> None:
    p = without_graph(made("part", "ids@g"))
    values = {n: replace(v, kept=n == "part") for n, v in p.schedule.values.items()}
    verdict = examine(replace(p, schedule=replace(p.schedule, values=values)))
    assert "slices of 'part', which must be whole when the run ends" in str(verdict)


def test_a_part_of_a_part_chosen_by_others_is_no_part_of_it() -> None:
    look = Command(Do.HOST_READ, HOST_ACTOR, "look", "others", at("ids"))
    verdict = examine(without_graph(look, moved("y", "part", "others")))
    assert "its partial copy need not bring" in str(verdict)
