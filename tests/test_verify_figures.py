"""The numbers beside a verdict: live bytes of a certificate, costs and places of repairs."""

from verify_kit import S0, S1, SIZE, fault, get, plan, proof, run, sync

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.graph import Graph
from ggraph.pipeline import make_plan
from ggraph.plan import Plan
from ggraph.tensor import input, weight
from ggraph.verify import Repair

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


def test_a_fault_without_bytes_names_none() -> None:
    found = fault(plan({"x": 300}, run(S0, "x"), sync(), get("x")))
    assert (found.kind, found.start, found.stop, found.buffer) == ("bounds", 0, 0, "")


def test_an_output_with_gaps_is_brought_to_the_host_as_it_lies() -> None:
    """The copy moves the view's span; the bytes between its rows are moved as well."""
    y = ops.mul_mat(weight("w", (8, 8)), input("x", (3, 8)), name="h")
    graph = Graph.of({"part": ops.columns(y, 0, 4)}, name="gaps")
    plan_ = make_plan(graph, [sim_spec("sim0")])
    assert plan_.certificate.reads_proved > 0
