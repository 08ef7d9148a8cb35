"""Plans whose declarations do not compute their graph are refused, whatever their order."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import with_commands

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import F32, I32
from ggraph.graph import Graph
from ggraph.ops.copies import copy
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Access, Actor, Command, Do, Placement, Plan, Schedule, Splits
from ggraph.tensor import Tensor, input, weight
from ggraph.verify import CounterExample, examine
from ggraph.verify.steps import step_faults
from ggraph.verify.wiring import _merged, _origins, wiring_faults

CPU = DeviceSpec("cpu", "cpu", host_visible=True)
SIM = sim_spec("sim0")
N = 4 * 16 * 4  # bytes of a tensor [4, 16]

Edit = Callable[[Command], Command]


def linear(name: str, x: Tensor) -> Tensor:
    return ops.mul_mat(weight(f"{name}.weight", (16, x.shape[-1])), x, name=name)


def two_devices() -> Plan:
    """a on sim0 -> copied -> b on cpu, half of a as well -> c; x and z are staged for sim0."""
    x, z = input("x", (4, 16)), input("z", (4, 16))
    a = linear("a", ops.add(x, z, name="s"))
    part = ops.narrow(a, 0, 2, 2, name="part")  # [2, 16], the last two rows
    b, c = linear("b", a), linear("c", part)
    graph = Graph.of({"y": b, "w": c}, name="two devices")
    pins = ("^(s|a|x|z)$=sim0", "^(y|w|b|c)$=cpu")
    return make_plan(graph, [SIM, CPU], Options(pins=pins)).plan


PLAN = two_devices()


def edited(match: Callable[[Command], bool], edit: Edit) -> Plan:
    """PLAN with every command that matches changed; at least one does."""
    assert any(match(c) for c in PLAN.schedule), [str(c) for c in PLAN.schedule]
    return with_commands(PLAN, [edit(c) if match(c) else c for c in PLAN.schedule])


def without(match: Callable[[Command], bool]) -> Plan:
    assert any(match(c) for c in PLAN.schedule), [str(c) for c in PLAN.schedule]
    return with_commands(PLAN, [c for c in PLAN.schedule if not match(c)])


def does(do: Do, node: str) -> Callable[[Command], bool]:
    return lambda c: c.do is do and c.node == node


def no_reads(c: Command) -> Command:
    return replace(c, reads=())


def half_read(c: Command) -> Command:
    return replace(c, reads=tuple(replace(a, stop=a.stop - 4) for a in c.reads))


def half_written(c: Command) -> Command:
    return replace(c, writes=tuple(replace(a, stop=a.stop - 4) for a in c.writes))


def from_z(c: Command) -> Command:
    return replace(c, reads=(Access("z@host", 0, N),))


def faults(p: Plan) -> list[str]:
    return [f.message for f in wiring_faults(p)]


def late(c: Command) -> Command:
    return replace(c, writes=tuple(replace(a, start=a.start + 1) for a in c.writes))


CASES: list[tuple[str, Plan, str]] = [
    (
        "a write declared too late",
        edited(does(Do.LAUNCH, "a"), late),
        f"writes {N} bytes of 'a' without declaring it",
    ),
    (
        "an undeclared read",
        edited(does(Do.LAUNCH, "a"), no_reads),
        f"reads bytes [0, {N}) of 's' without declaring it",
    ),
    (
        "a read declared too short",
        edited(does(Do.LAUNCH, "a"), half_read),
        f"reads bytes [0, {N}) of 's' without declaring it",
    ),
    (
        "a write declared too short",
        edited(does(Do.LAUNCH, "a"), half_written),
        f"writes {N} bytes of 'a' without declaring it",
    ),
    (
        "an output read in part",
        edited(does(Do.HOST_READ, "y"), half_read),
        f"does not read the {N} bytes of output 'y'",
    ),
    (
        "an input staged from another",
        edited(does(Do.COPY, "x"), from_z),
        "host_write for 'x' moves x@host[0:256], bytes of another",
    ),
    ("no work", without(does(Do.LAUNCH, "a")), "no command computes 'a'"),
    ("no answer", without(does(Do.HOST_READ, "w")), "the host never reads output 'w'"),
]


@pytest.mark.parametrize(("p", "text"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_refused(p: Plan, text: str) -> None:
    assert any(text in message for message in faults(p)), faults(p)
    verdict = examine(p)
    assert isinstance(verdict, CounterExample) and verdict.kind == "declaration", str(verdict)


def test_the_plan_itself_is_wired_right() -> None:
    assert faults(PLAN) == []
    assert not isinstance(examine(PLAN), CounterExample)


def node_copy() -> Command:
    """The copy of a to the cpu's memory, or the first hop of it."""
    return next(c for c in PLAN.schedule if c.do is Do.COPY and c.node and c.node.startswith("a@"))


def test_a_copy_node_must_get_its_sources_bytes() -> None:
    moved = node_copy()
    wrong = edited(lambda c: c is moved, lambda c: replace(c, reads=(Access("s", 0, N),)))
    found = faults(wrong)
    assert any("does not get the bytes of 'a'" in m for m in found), found
    assert any("bytes of another" in m for m in found), found
    assert f"no command computes '{moved.node}'" in faults(without(lambda c: c is moved))


def test_bytes_may_be_moved_in_pieces_by_several_commands() -> None:
    """Cut anywhere, they still fit; but each command moves one range to one."""
    moved = node_copy()
    (r,), (w,) = moved.reads, moved.writes
    cut = replace(
        moved,
        reads=(replace(r, stop=100), replace(r, start=100)),
        writes=(replace(w, stop=60), replace(w, start=60)),
    )
    both = examine(edited(lambda c: c is moved, lambda _: cut))
    assert isinstance(both, CounterExample) and "copy of 2 ranges to 2: one is" in both.message
    halves = [
        replace(moved, reads=(replace(r, stop=128),), writes=(replace(w, stop=128),)),
        replace(moved, reads=(replace(r, start=128),), writes=(replace(w, start=128),)),
    ]
    commands = [h for c in PLAN.schedule for h in (halves if c is moved else [c])]
    assert faults(with_commands(PLAN, commands)) == []
    crossed = [
        replace(h, writes=other.writes) for h, other in zip(halves, halves[::-1], strict=True)
    ]
    commands = [h for c in PLAN.schedule for h in (crossed if c is moved else [c])]
    assert any("does not get the bytes of 'a'" in m for m in faults(with_commands(PLAN, commands)))
    assert faults(with_commands(PLAN, [c for c in commands if c is not crossed[1]]))


def test_copies_in_a_circle_come_to_an_end() -> None:
    moved = node_copy()
    back = replace(moved, node=None, label="back", reads=moved.writes, writes=moved.reads)
    circle = with_commands(PLAN, [*PLAN.schedule.commands, back])
    assert isinstance(examine(circle), CounterExample)
    assert isinstance(faults(circle), list)


def test_a_read_in_pieces_with_a_gap_is_no_read_of_the_whole() -> None:
    (kept,) = [c for c in PLAN.schedule if does(Do.LAUNCH, "a")(c)]
    others = [a for a in kept.reads if a.value != "s"]

    def read(*edges: tuple[int, int]) -> list[str]:
        reads = (*others, *(Access("s", *e) for e in edges))
        return faults(edited(does(Do.LAUNCH, "a"), lambda c: replace(c, reads=reads)))

    assert read((128, N), (0, 64), (64, 128)) == []
    assert read((0, 100), (64, N)) == []
    assert read((0, 64), (68, N)) != []


# Partial copies: only the slices that a product picks come across.


def experts(chosen: bool, user: Callable[[Tensor, Tensor], Tensor]) -> Plan:
    """A plan by hand in which `table` [X, 4, 16] is copied to sim0, in part where `chosen`."""
    x, ids = input("x", (2, 1, 16)), input("ids", (2, 1), I32)
    table = weight("table", (8, 4, 16))
    moved = copy(table, "sim0", used=ids if chosen else None, name="table@sim0")
    graph = Graph.of({"y": user(moved, ops.scale(x, 1.5, name="xs"))}, name="experts")
    return Plan(Schedule(Splits(Placement(graph, (SIM, CPU), {}), ()), {}, ()), PLAN.memory)


def launches(p: Plan) -> list[str]:
    """What the wiring says of launches that read and write all they should, and of copies."""
    commands = []
    for t in p.graph:
        reads = tuple(Access(s.root.name, a, b) for s in t.sources for a, b in s.byte_ranges())
        do = Do.COPY if t.op == "copy" else Do.LAUNCH
        by = t.sources[1].name if t.op == "copy" and len(t.sources) > 1 else None
        if do is Do.COPY:
            reads = reads[:1]
        if not (t.is_leaf or t.is_view):
            write = (Access(t.name, 0, t.nbytes),)
            made = Command(do, Actor("sim0"), t.name, t.name, reads, write, chosen_by=by)
            commands.append(made)
    return [m for m in faults(with_commands(p, commands)) if "slices" in m or "chosen" in m]


def picked(table: Tensor, x: Tensor) -> Tensor:
    ids = next(s for s in (table.sources[1:] or (input("ids", (2, 1), I32),)))
    return ops.mul_mat_id(table, x, ids, name="y")


def other_ids(table: Tensor, x: Tensor) -> Tensor:
    return ops.mul_mat_id(table, x, input("ids2", (2, 1), I32), name="y")


def whole(table: Tensor, x: Tensor) -> Tensor:
    return ops.scale(table, 2.0, name="y")


def viewed(table: Tensor, x: Tensor) -> Tensor:
    return ops.scale(table.reshape(8, 64), 2.0, name="y")


def changed_ids(table: Tensor, x: Tensor) -> Tensor:
    """Other indices, made from the right ones by an operation of one source."""
    there = ops.cast(ops.cast(table.sources[1], F32, name="real"), I32, name="back")
    return ops.mul_mat_id(table, x, there, name="y")


@pytest.mark.parametrize("user", [other_ids, whole, viewed, changed_ids])
def test_only_the_slices_that_were_picked_may_be_read(user: object) -> None:
    found = launches(experts(True, user))  # type: ignore[arg-type]
    assert found == ["reads slices of 'table@sim0' that its partial copy need not bring"]


def test_picked_slices_and_whole_copies_may_be_read() -> None:
    assert launches(experts(True, picked)) == []
    for user in (picked, other_ids, whole, viewed):
        assert launches(experts(False, user)) == []


def copied_ids(table: Tensor, x: Tensor) -> Tensor:
    there = copy(table.sources[1], "sim0", name="ids@sim0")
    return ops.mul_mat_id(table, x, there, name="y")


def test_the_same_indices_on_another_device_are_the_same() -> None:
    assert launches(experts(True, copied_ids)) == []


def test_a_part_is_chosen_by_the_graphs_own_indices() -> None:
    p = experts(True, picked)
    table = p.graph["table@sim0"]
    reads, writes = (Access("table", 0, table.nbytes),), (Access(table.name, 0, table.nbytes),)
    for wrong in (None, "x"):
        c = Command(Do.COPY, Actor("sim0"), "c", table.name, reads, writes, chosen_by=wrong)
        text = f"a copy chosen by {wrong!r} for 'table@sim0', which 'ids' chooses"
        assert text in faults(with_commands(p, [c]))


def test_an_input_is_staged_in_one_buffer() -> None:
    """Each half that the host writes is part of the input, neither is all of it; an executor feeds
    a tensor at once."""
    graph = Graph.of({"y": ops.scale(input("x", (4, 16)), 2.0, name="y")}, name="halves")
    one, two = Access("one", 0, N // 2), Access("two", 0, N // 2)
    whole, y = (Access("x", 0, N),), (Access("y", 0, N),)
    host, stream = Actor("host"), Actor("sim0")
    commands = [
        Command(Do.HOST_WRITE, host, "one", "x", (), (one,)),
        Command(Do.HOST_WRITE, host, "two", "x", (), (two,)),
        Command(Do.COPY, stream, "x", "x", (one,), (replace(whole[0], stop=N // 2),)),
        Command(Do.COPY, stream, "x", "x", (two,), (replace(whole[0], start=N // 2),)),
        Command(Do.LAUNCH, stream, "y", "y", whole, y),
        Command(Do.HOST_READ, host, "y", "y", y),
    ]
    schedule = Schedule(Splits(Placement(graph, (SIM,), {}), ()), {}, tuple(commands))
    p = Plan(schedule, PLAN.memory)
    assert faults(p) == ["the host never writes input 'x'"]
    assert [f.message for f in step_faults(p)] == [
        "host_write of 'x' in ranges of [128] bytes, expected one of 256",
        "host_write of 'x' in ranges of [128] bytes, expected one of 256",
    ]
    joined = Command(Do.COPY, stream, "x", "x", (one, two), whole)
    found = [f.message for f in step_faults(with_commands(p, [joined]))]
    assert found == ["copy of 2 ranges to 1: one is moved, to one"]
    foreign = Command(Do.HOST_WRITE, host, "three", "x", (), (Access("three", 0, 4),))
    assert "host_write for 'x' moves three[0:4], bytes of another" in faults(
        with_commands(p, [foreign, *commands])
    )


MOVES = st.dictionaries(
    st.sampled_from("abc"),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from("abcd"), st.integers(0, 5)),
        max_size=4,
    ),
)


@given(MOVES, st.sampled_from("abc"), st.integers(0, 7), st.integers(0, 8))
def test_bytes_are_traced_to_where_they_first_were(
    drawn: dict[str, list[tuple[int, int, str, int]]], value: str, start: int, size: int
) -> None:
    """Byte by byte, through copies of copies, until one has come back to a value on its way."""
    moves: dict[str, list[tuple[int, int, str, int]]] = {}
    for name, found in drawn.items():
        for first, count, source, begin in sorted(found):  # no byte is written twice
            if first >= max((stop for _, stop, _, _ in moves.get(name, [])), default=0):
                moves.setdefault(name, []).append((first, first + count, source, begin))

    def origin(name: str, at: int, passed: tuple[str, ...]) -> tuple[str, int]:
        for first, stop, source, begin in moves.get(name, []) if name not in passed else []:
            if first <= at < stop:
                return origin(source, begin + at - first, (*passed, name))
        return name, at

    pieces = [*_origins([Access(value, start, start + size)], moves)]
    found_bytes = [(name, at) for name, first, stop in pieces for at in range(first, stop)]
    assert found_bytes == [origin(value, at, ()) for at in range(start, start + size)]
    joined = _merged(pieces)
    assert [(n, at) for n, a, b in joined for at in range(a, b)] == found_bytes
    assert all(one[::2] != two[:2] for one, two in pairwise(joined))


def test_bytes_that_two_copies_shift_are_traced_to_where_they_were() -> None:
    """A part out of the middle goes through a buffer at another place, and on to its reader."""
    a, part = input("a", (4, 16)), 2 * 64  # bytes of two rows of four
    node = copy(ops.narrow(a, 0, 1, 2, name="part"), "sim0", name="moved")
    graph = Graph.of({"y": ops.scale(node, 2.0, name="y")}, name="shift")
    stream = Actor("sim0")

    def moves(start: int) -> list[str]:
        commands = [
            Command(Do.COPY, stream, "one", "moved", (Access("a", 64, 64 + part),),
                    (Access("mid", 32, 32 + part),)),
            Command(Do.COPY, stream, "two", "moved", (Access("mid", start, start + part),),
                    (Access("moved", 0, part),)),
        ]  # fmt: skip
        schedule = Schedule(Splits(Placement(graph, (SIM,), {}), ()), {}, tuple(commands))
        return [m for m in faults(Plan(schedule, PLAN.memory)) if "bytes of" in m]

    assert moves(32) == []
    assert moves(28) == [m for m in moves(28) if "'moved'" in m] != []
