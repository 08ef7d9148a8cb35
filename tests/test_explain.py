"""`explain`: what each pass said of a tensor, where its bytes are, and why they may be there."""

import pytest

from ggraph import Explanation, Graph, InputError, Options, explain, input, make_plan, ops, weight
from ggraph.backends.cpu import cpu_spec
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.dtype import Q8_0
from ggraph.hazards.qkv_fork import Fork
from ggraph.plan import Plan

CPU = DeviceSpec("cpu", "cpu", host_visible=True)


def chain() -> Graph:
    """x -> a -> b -> view -> y, each in need of bytes of its own."""
    x = input("x", (4, 16))
    a = ops.mul_mat(weight("w.a", (16, 16)), x, name="a")
    b = ops.mul_mat(weight("w.b", (16, 16)), a, name="b")
    half = ops.narrow(b, 1, 8, 8, name="half")
    return Graph.of({"y": ops.mul_mat(weight("w.y", (16, 8)), half, name="c")}, name="chain")


def test_every_pass_has_its_word() -> None:
    plan = make_plan(chain(), [CPU], Options(pins=("b=cpu",)))
    found = explain(plan, "b")
    assert list(found.passes) == ["graph", "place", "split", "order", "allocate"]
    assert found.passes["graph"].startswith("%b: f32[4, 16] = mul_mat(%w.b, %a)")
    assert found.passes["place"] == "cpu: pin b=cpu"
    assert found.passes["split"] == "0 on cpu, 3 nodes from a"
    assert found.passes["order"] == "command 2 of 6, launch on cpu.0"
    assert found.passes["allocate"].endswith("mode hb: program order, best fit")
    assert (found.split, found.stream, found.device, found.nbytes) == (0, "cpu.0", "cpu", 256)
    region = plan.plan.memory.regions["b"]
    assert (found.buffer, found.offsets) == (region.buffer, region.offsets)


def test_the_previous_tenant_is_proved_to_be_done() -> None:
    plan = make_plan(chain(), [CPU])
    assert plan.plan.memory.regions["x"].offset == plan.plan.memory.regions["b"].offset
    text = str(explain(plan, "b"))
    assert "after %x: commands 1 launch a -> 2 launch b" in text
    assert text.splitlines()[0] == "b" and "bytes" in text.splitlines()


def test_a_view_is_explained_by_its_root() -> None:
    plan = make_plan(chain(), [CPU])
    view, root = explain(plan, "half"), explain(plan, "b")
    assert view.value == "b" and "a view of %b" in view.passes["graph"]
    assert view.offsets == (root.offsets[0] + 32,)
    assert view.tenants == root.tenants


def test_staging_copies_and_leaves_have_less_to_say() -> None:
    plan = make_plan(chain(), [sim_spec("sim0")])
    staged = explain(plan, "x@host")
    assert staged.passes["graph"] == "%x@host is a buffer of the plan's own, no tensor"
    assert "place" not in staged.passes and staged.stream == "host" and staged.split is None
    kept = explain(plan, "w.a")
    assert kept.passes["order"] == "no command writes it" and kept.stream == ""
    assert kept.passes["allocate"].endswith("external: the caller owns the buffer")
    assert kept.tenants == ("these bytes have no other tenant",)


def test_copies_between_devices_belong_to_a_split() -> None:
    plan = make_plan(chain(), [sim_spec("sim0"), CPU], Options(pins=("a=cpu", "b=sim0")))
    name = next(t.name for t in plan.plan.graph if t.name.startswith("a@"))
    found = explain(plan, name)
    assert found.split is not None and "copy on sim0" in found.passes["order"]


def test_what_list_order_leaves_open_is_said() -> None:
    """Each tenant that nothing orders has its line, though later ones lie on the same bytes."""
    found = explain(Fork().plan("ggml"), "q_rms")
    open_lines = [t for t in found.tenants if t.startswith("UNORDERED")]
    assert len(open_lines) == 1 and "%attn_norm" in open_lines[0]
    assert "launch k_mul and" in open_lines[0] and open_lines[0].endswith("launch q_rms")
    assert found.passes["allocate"].endswith("mode ggml: block of sim0, chunk 0 (A4 to A6)")
    assert not [t for t in explain(Fork().plan("hb"), "q_rms").tenants if "UNORDERED" in t]


def test_plans_verified_or_not_are_explained_alike() -> None:
    verified = make_plan(chain(), [CPU])
    assert isinstance(verified.plan, Plan)
    assert explain(verified, "y") == explain(verified.plan, "y")
    assert isinstance(explain(verified, "y"), Explanation)


def test_of_what_rewriting_left_out_the_first_behind_it_is_named() -> None:
    x = input("x", (2, 64))
    w = {n: weight(n, (64, 64), Q8_0) for n in ("gate.w", "up.w", "down.w")}
    normed = ops.mul(ops.rms_norm(x, name="rms"), weight("norm.w", (64,)), name="norm")
    gate, up = (ops.mul_mat(w[f"{n}.w"], normed, name=n) for n in ("gate", "up"))
    down = ops.mul_mat(w["down.w"], ops.swiglu(gate, up, name="act"), name="down")
    graph = Graph.of({"y": ops.add(x, down, name="sum")})
    plan = make_plan(graph, [cpu_spec("cpu")])
    held = {t.name for t in plan.plan.graph}
    for name, behind in (("rms", "norm@a8"), ("norm", "norm@a8"), ("gate", "act@a8"),
                         ("up", "act@a8"), ("act", "act@a8"), ("down", "y")):  # fmt: skip
        assert name not in held and behind in held
        with pytest.raises(InputError) as caught:
            explain(plan, name, given=graph)
        told = f"no tensor {name!r} in this plan, which was rewritten; the first behind it is"
        assert str(caught.value) == f"{told} {behind!r}"
    assert explain(plan, "act@a8", given=graph) == explain(plan, "act@a8")
    with pytest.raises(InputError, match="is it 'act@a8' or"):
        explain(plan, "act@a", given=graph)


@pytest.mark.parametrize("name", ["hlaf", "", "nothing like it"])
def test_an_unknown_tensor_is_one_clear_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        explain(make_plan(chain(), [CPU]), name)
    text = str(caught.value)
    assert text.startswith(f"no tensor {name!r} in this plan")
    assert ("is it 'half'?" in text) == (name == "hlaf")
