"""The numbers beside a verdict: live bytes of a certificate, costs and places of repairs."""

from dataclasses import replace

from verify_kit import S0, S1, SIZE, copy, fault, get, plan, proof, put, run, sync

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.graph import Graph
from ggraph.pipeline import make_plan
from ggraph.plan import Buffer, MemoryMap, Plan, Region
from ggraph.tensor import input, weight
from ggraph.verify import Repair, races
from ggraph.verify.report import CONTEXT, neighbourhood

HALF = SIZE // 2


def bound(p: Plan) -> int:
    return proof(p).live_bound_bytes


def test_a_result_in_place_of_a_dying_source_needs_no_bytes_of_its_own() -> None:
    work = run(S0, "x"), run(S0, "y", "x"), sync(), get("y")
    replaces = {"may_replace": ("x",)}
    assert bound(plan({"x": 0, "y": 0}, *work, y=replaces)) == SIZE
    assert bound(plan({"x": 0, "y": 32}, *work, y=replaces)) == SIZE, "whether it does so or not"
    assert bound(plan({"x": 0, "y": 32}, *work)) == 2 * SIZE


def test_only_the_part_of_a_source_that_dies_is_saved() -> None:
    late = run(S0, "z", f"x:0:{HALF}", "y")
    work = run(S0, "x"), run(S0, "y", "x"), late, sync(), get("z")
    p = plan({"x": 0, "y": 32, "z": 64}, *work, y={"may_replace": ("x",)})
    assert bound(p) == HALF + 2 * SIZE, "half of x, y and z at once"


def test_of_two_sources_that_die_only_one_is_replaced() -> None:
    work = run(S0, "w"), run(S0, "x"), run(S0, "y", "w", "x"), sync(), get("y")
    p = plan({"w": 0, "x": 32, "y": 0}, *work, y={"may_replace": ("w", "x")})
    assert bound(p) == 2 * SIZE


def test_bytes_cost_and_waits_cost() -> None:
    dear = Repair("a", nbytes=1 << 20), Repair("b", waits=2), Repair("c", seconds=1e-3)
    assert all(r.cost_s > Repair("nothing").cost_s == 0 for r in dear)
    assert Repair("a", nbytes=2).cost_s == 2 * Repair("a", nbytes=1).cost_s
    assert Repair("b", waits=4).cost_s == 2 * Repair("b", waits=2).cost_s
    assert 1e-6 < Repair("b", waits=1).cost_s < 1e-5, "a few microseconds"


def test_a_producer_that_comes_late_is_named_with_its_places() -> None:
    """x is read by command 1 and made by command 2 of every run, on another stream."""
    first = run(S0, "u"), run(S0, "y", "x"), run(S1, "x", seconds=3e-6), sync(), get("y"), get("u")
    found = fault(plan({"u": 0, "x": 32, "y": 64}, *first))
    (repair,) = found.repairs
    assert (repair.after, repair.before) == (2, 1)
    assert str(repair) == "enqueue 'x' before 'y' and wait for it (1 wait, up to 3.0 us later)"
    same = run(S0, "u"), run(S0, "y", "x"), run(S0, "x", seconds=3e-6), sync(), get("y"), get("u")
    (repair,) = fault(plan({"u": 0, "x": 32, "y": 64}, *same)).repairs
    assert (repair.waits, repair.seconds) == (0, 0.0), "one queue: nothing to wait for"


def test_what_one_command_shows_it_shows_in_the_first_run() -> None:
    found = fault(plan({"x": 0}, run(S0, "x"), run(S0, "x:0:99")))
    assert found.kind == "declaration" and found.first is not None
    assert (found.first.index, found.first.iteration, found.second) == (1, 0, None)


def test_bytes_count_from_the_first_touch_to_the_last_of_many() -> None:
    """x is touched by three commands on the same bytes; w only by the first, u by the last."""
    body = run(S0, "x w"), run(S0, "y", "x"), run(S0, "u", "x", "y"), sync(), get("u")
    assert bound(plan({"x": 0, "w": 32, "y": 64, "u": 96}, *body)) == 3 * SIZE
    early = run(S0, "x w z"), run(S0, "y", "x"), run(S0, "u", "x"), sync(), get("u")
    places = {"x": 0, "w": 32, "y": 64, "u": 96, "z": 128}
    assert bound(plan(places, *early)) == 3 * SIZE, "x with all that is made beside it"


def test_what_is_there_before_the_first_run_counts_from_the_first_command() -> None:
    body = run(S0, "w v"), run(S0, "y", "x"), sync(), get("y")
    places = {"x": 0, "w": 32, "v": 64, "y": 96}
    assert bound(plan(places, *body, x={"initial": True})) == 3 * SIZE


def test_what_overwrites_a_value_needs_no_bytes_of_its_own() -> None:
    body = run(S0, "x"), run(S0, "y", "x"), sync(), get("y")
    assert bound(plan({"x": 0, "y": 0}, *body, y={"same_as": "x"})) == SIZE


def test_a_result_saves_nothing_of_a_source_on_another_device() -> None:
    body = put("hx"), copy(S0, "y", "hx"), sync()
    here = bound(plan({"hx": 0, "y": 0}, *body))
    assert bound(plan({"hx": 0, "y": 0}, *body, y={"may_replace": ("hx",)})) == here == 2 * SIZE


def test_a_fault_without_bytes_names_none() -> None:
    found = fault(plan({"x": 300}, run(S0, "x"), sync(), get("x")))
    assert (found.kind, found.start, found.stop, found.buffer) == ("bounds", 0, 0, "")


def test_an_output_with_gaps_is_brought_to_the_host_as_it_lies() -> None:
    """The copy moves the view's span; the bytes between its rows are moved as well."""
    y = ops.mul_mat(weight("w", (8, 8)), input("x", (3, 8)), name="h")
    graph = Graph.of({"part": ops.columns(y, 0, 4)}, name="gaps")
    plan_ = make_plan(graph, [sim_spec("sim0")])
    assert plan_.certificate.reads_proved > 0


def test_no_more_is_saved_than_is_born_or_dies() -> None:
    """x dies where half of y and all of u are born: only the half of y lies on x."""
    work = run(S0, "x"), run(S0, f"y:0:{HALF} u", "x"), sync(), get("u")
    p = plan({"x": 0, "y": 32, "u": 64}, *work, y={"may_replace": ("x",)})
    assert bound(p) == 2 * SIZE
    dies = run(S0, f"x:0:{HALF}"), run(S0, "y u", f"x:0:{HALF}"), sync(), get("u")
    p = plan({"x": 0, "y": 32, "u": 64}, *dies, y={"may_replace": ("x",)})
    assert bound(p) == 2 * SIZE


def test_a_kept_value_counts_to_the_end_unless_it_is_carried_on() -> None:
    """What follows is another value's, whose bytes are counted where that one is written."""
    work = run(S0, "k"), run(S0, "x"), run(S0, "y", "x"), sync(), get("y")
    kept = plan({"k": 0, "x": 32, "y": 64}, *work, k={"kept": True})
    assert bound(kept) == 3 * SIZE
    assert bound(plan({"k": 0, "x": 32, "y": 64}, *work)) == 2 * SIZE
    traits = {"s": {"initial": True}, "k": {"kept": True, "same_as": "s"}}
    heir = plan({"s": 0, "k": 0, "x": 32, "y": 64}, *work, carried={"s": "k"}, **traits)
    assert bound(heir) == 3 * SIZE


def test_a_callers_buffer_is_not_counted() -> None:
    p = plan({"w": 0, "y": 32}, run(S0, "y", "w"), sync(), get("y"))
    regions = {**p.memory.regions, "w": Region("theirs", (0,), SIZE)}
    buffers = {**p.memory.buffers, "theirs": Buffer("theirs", "d", SIZE, 16, external=True)}
    w = replace(p.schedule.values["w"], external=True, initial=True)
    schedule = replace(p.schedule, values={**p.schedule.values, "w": w})
    assert bound(replace(p, schedule=schedule, memory=MemoryMap("hb", buffers, regions))) == SIZE


def test_one_stream_loses_nothing_to_concurrency_and_several_never_less_than_nothing() -> None:
    one = plan({"x": 0, "y": 32}, run(S0, "x"), run(S0, "y", "x"), sync(), get("y"))
    assert proof(one).peak_bytes > bound(one) and proof(one).concurrency_bytes == 0
    both = plan({"x": 0, "y": 32}, run(S0, "x"), run(S1, "y"), sync(), get("x"), get("y"))
    full = {"mem": Buffer("mem", "d", 2 * SIZE, 16), "host": Buffer("host", "host", 0, 16)}
    tight = replace(both, memory=replace(both.memory, buffers=full))
    assert proof(tight).peak_bytes == bound(tight) == 2 * SIZE
    assert proof(tight).concurrency_bytes == 0


def test_a_race_names_the_earlier_command_first_wherever_its_bytes_begin() -> None:
    """The earlier one begins further up; both write."""
    p = plan({"x": 16, "y": 0}, run(S0, "x"), run(S1, "y"))
    first = races(p)[0]
    assert (first.first.index, first.second.index, first.values) == (0, 1, ("x", "y"))
    assert (first.start, first.stop) == (16, 32)
    before = run(S0, "z"), run(S0, "z"), run(S0, "z")
    for places in ({"x": 16, "y": 0, "z": 64}, {"x": 0, "y": 16, "z": 64}):
        found = races(plan(places, *before, run(S0, "x"), run(S1, "y")))[0]
        assert (found.first.index, found.second.index, found.values) == (3, 4, ("x", "y"))


def test_a_command_that_reads_what_it_makes_is_not_told_to_come_before_itself() -> None:
    found = fault(plan({"x": 0}, run(S0, "x", "x"), sync()))
    assert (found.kind, found.values, found.repairs) == ("unwritten", ("x",), ())


def test_the_neighbourhood_has_so_many_commands_on_either_side_and_no_more() -> None:
    commands = [run(S0, f"v{i}") for i in range(4 * CONTEXT)]
    middle, start = 2 * CONTEXT, 0
    numbers = [int(line[4:9]) for line in neighbourhood(commands, middle).splitlines()]
    assert numbers == list(range(middle - CONTEXT, middle + CONTEXT + 1))
    numbers = [int(line[4:9]) for line in neighbourhood(commands, start).splitlines()]
    assert numbers == list(range(CONTEXT + 1))


def test_every_byte_of_a_kept_value_must_outlive_the_run() -> None:
    """Its first byte alone, or its last, is written over by another value."""
    for spoiled in ("y:0:1", f"y:{SIZE - 1}:{SIZE}"):
        p = plan({"k": 0, "y": 0}, run(S0, "k"), run(S0, spoiled), sync(), k={"kept": True})
        found = fault(p)
        assert (found.kind, found.values) == ("stale", ("k", "y"))


def test_every_pair_of_commands_is_a_race_of_its_own() -> None:
    """Two readers of one value against one writer, and one reader against two writers."""
    shared = {"x": 0, "y": 0, "u": 64, "v": 96}
    two_readers = run(S0, "x"), sync(), run(S0, "u", "x"), run(S0, "v", "x"), run(S1, "y"), sync()
    assert {(r.first.index, r.second.index) for r in races(plan(shared, *two_readers))} == {
        (2, 4),
        (3, 4),
    }
    two_writers = run(S0, "x"), sync(), run(S0, "u", "x"), run(S1, "y"), run(S1, "y"), sync()
    assert {(r.first.index, r.second.index) for r in races(plan(shared, *two_writers))} == {
        (2, 3),
        (2, 4),
    }
