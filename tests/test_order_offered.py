"""What a launch offers of its result (`Need.of` RESULT): who gets it, what a proof says."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from plan_strategies import with_commands

from ggraph import ops
from ggraph.device import RESULT, DeviceSpec, Need
from ggraph.graph import Graph
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Tensor, input, weight
from ggraph.verify import CounterExample, examine


def needs(t: Tensor) -> tuple[Need, ...]:
    if t.op == "mul_mat":
        return (Need("parts", t.sources[1].nbytes, (1,), flat=True),)
    return (Need("parts", t.nbytes, (RESULT,), flat=True),) if t.op == "rms_norm" else ()


def planned(y: Tensor, streams: int = 1) -> Plan:
    spec = DeviceSpec("d", "sim", streams=streams, launch_s=0, needs=needs)
    return make_plan(
        Graph.of({y.name or "y": y}), [spec], Options(rewrites=False, streams=streams)
    ).plan


def products(x: Tensor) -> Tensor:
    """Two products of a norm, one of them through a view that shows all of it."""
    n = ops.rms_norm(x, name="n")
    flat = n.reshape(4, 8)
    a = ops.mul_mat(weight("w", (4, 16)), n, name="a")  # [2, 4]
    b = ops.mul_mat(weight("v", (2, 8)), flat, name="b")  # [4, 2]
    return ops.add(a, b.reshape(2, 4))


def beside(p: Plan, mark: str = "#parts") -> dict[str, tuple[list[str], list[str]]]:
    """Of each launch what it reads and what it writes beside tensors, of names with `mark`."""
    return {
        c.node or "": tuple(  # type: ignore[misc]
            [a.value for a in held if mark in a.value] for held in (c.reads, c.writes)
        )
        for c in p.schedule
        if c.do is Do.LAUNCH
    }


def test_what_is_offered_is_made_once_where_it_is_made() -> None:
    found = beside(planned(products(input("x", (2, 16)))))
    assert found["n"] == ([], ["n#parts.0"])
    assert found["a"] == found["b"] == (["n#parts.0"], [])


def test_what_nobody_needs_is_not_given() -> None:
    y = ops.scale(ops.rms_norm(input("x", (2, 16)), name="n"), 2.0)
    assert beside(planned(y))["n"] == ([], [])


def test_what_is_asked_for_behind_what_nobody_needs_is_given() -> None:
    def more(t: Tensor) -> tuple[Need, ...]:
        return (*needs(t), Need("scratch", 64)) if t.op == "rms_norm" else needs(t)

    y = ops.scale(ops.rms_norm(input("x", (2, 16)), name="n"), 2.0)
    plan = make_plan(
        Graph.of({"y": y}), [DeviceSpec("d", "sim", needs=more)], Options(rewrites=False)
    ).plan
    found = [a.value for c in plan.schedule if c.node == "n" for a in c.writes if "#" in a.value]
    assert len(found) == 1 and found[0].startswith("n#scratch")


def test_a_part_of_a_result_is_no_result() -> None:
    """Of a view that shows half of it the product makes its own."""
    half = ops.rows(ops.rms_norm(input("x", (2, 16)), name="n"), 0, 1)
    found = beside(planned(ops.mul_mat(weight("w", (4, 16)), half, name="a")))
    assert found["n"] == ([], []) and len(found["a"][1]) == 1


def test_another_stream_makes_its_own() -> None:
    found = beside(planned(products(input("x", (2, 16))), streams=2))
    written = {name for _, writes in found.values() for name in writes}
    assert written == {"n#parts.0", "n#parts.1"}
    assert not found["b"][0] or not found["a"][0]


def changed(p: Plan, node: str, change: Callable[[Access], Access | None]) -> Plan:
    """The plan with another declaration of what a launch touches beside tensors."""

    def edit(c: Command) -> Command:
        if c.do is not Do.LAUNCH or c.node != node:
            return c
        kept = (tuple(b for a in held if (b := change(a)) is not None)
                for held in (c.reads, c.writes))  # fmt: skip
        reads, writes = kept
        return replace(c, reads=reads, writes=writes)

    return with_commands(p, [edit(c) for c in p.schedule])


def no_parts(a: Access) -> Access | None:
    return None if "#parts" in a.value else a


def half_of_them(a: Access) -> Access:
    return replace(a, stop=a.stop // 2) if "#parts" in a.value else a


@pytest.mark.parametrize(
    ("node", "change", "says"),
    [
        ("n", no_parts, "n#parts.0"),  # a product reads what nobody has filled
        ("n", half_of_them, "launch of 'n' has no 128 bytes of 'n#parts.0'"),
        ("a", no_parts, "launch of 'a' has no 128 bytes of 'n#parts.0'"),
    ],
)
def test_a_proof_wants_what_is_read_to_be_made(
    node: str, change: Callable[[Access], Access | None], says: str
) -> None:
    plan = planned(products(input("x", (2, 16))))
    assert not isinstance(examine(plan), CounterExample)
    verdict = examine(changed(plan, node, change))
    assert isinstance(verdict, CounterExample) and says in str(verdict), str(verdict)
