"""The QKV fork at full width: the real allocator's numbers, upstream's check, `verify`, `hb`."""

import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from ggraph.alloc import tenants
from ggraph.backends.sim import Simulator
from ggraph.errors import AllocError
from ggraph.hazards.qkv_fork import DEVICE, FORKS, Fork
from ggraph.ops.evaluate import evaluate
from ggraph.plan import MemoryMap, Plan
from ggraph.tensor import Array, Kind
from ggraph.verify import Race, Rejected, races, verify


def write_write_faults(fork: Fork, memory: MemoryMap) -> list[tuple[str, str]]:
    """What upstream's validation of a fork/join region finds: nodes of two branches that write the
    same bytes. Reads are not looked at, and what meets the join's bytes is let off."""

    def meet(a: str, b: str) -> bool:
        one, two = memory.regions[a], memory.regions[b]
        apart = one.offset + one.nbytes <= two.offset or two.offset + two.nbytes <= one.offset
        return one.buffer == two.buffer and not apart

    pairs = [
        (a, b)
        for left, right in combinations(fork.branches.values(), 2)
        for a in left
        for b in right
    ]
    return [(a, b) for a, b in pairs if meet(a, b) and not (meet(a, "attn") or meet(b, "attn"))]


def device_bytes(plan: Plan) -> int:
    """Arena bytes on the device, the host's staging buffers left out."""
    return plan.memory.buffers[f"arena@{DEVICE}"].nbytes


def read_write_races(plan: Plan) -> list[Race]:
    """The races of a plan in which one side reads and the other writes."""
    return [r for r in races(plan) if sum(r.writes) == 1]


def test_g4_has_the_real_allocators_offsets() -> None:
    plan = Fork().plan()
    at = {name: r.offset for name, r in plan.memory.regions.items()}
    assert device_bytes(plan) == 14400
    assert [at[n] for n in ("attn_norm", "q_mul", "k_mul", "v_mul")] == [4160, 8256, 12352, 13376]
    assert {at[f"q_{n}"] for n in ("rms", "norm", "rope")} == {at["attn_norm"]}
    assert {at[f"k_{n}"] for n in ("rms", "norm", "rope")} == {at["q_mul"]} == {at["attn"]}


@pytest.mark.parametrize("name", FORKS)
def test_verify_reports_what_writes_against_writes_overlook(name: str) -> None:
    fork, expected = FORKS[name]
    plan = fork.plan("ggml")
    assert write_write_faults(fork, plan.memory) == []
    assert len(read_write_races(plan)) == expected
    with pytest.raises(Rejected, match=r"race: '.*' and '.*' touch the same bytes"):
        verify(plan)


def test_the_pairs_of_g4_are_those_of_the_two_reused_blocks() -> None:
    """The Q branch on attn_norm, which K and V still read; the K branch on the Q product."""
    plan = Fork().plan("ggml")
    found = {(r.first.text.split()[2], r.second.text.split()[2]) for r in read_write_races(plan)}
    on_norm = {(m, f"q_{n}") for m in ("k_mul", "v_mul") for n in ("rms", "norm", "rope")}
    on_product = {("q_rms", f"k_{n}") for n in ("rms", "norm", "rope")}
    later = {("q_mul", "k_norm"), ("q_mul", "k_rope")}
    assert found == on_norm | on_product | later
    writes = [r for r in races(plan) if all(r.writes)]
    assert len(writes) == 3  # they meet the join's bytes as well, so upstream lets them off


def test_branch_after_branch_is_flagged_by_upstream_too() -> None:
    fork = Fork(interleaved=False)
    assert len(write_write_faults(fork, fork.plan("ggml").memory)) == 6


@pytest.mark.parametrize("name", FORKS)
def test_hb_verifies_on_the_same_streams_and_has_a_price(name: str) -> None:
    fork, _ = FORKS[name]
    plan, serial = fork.plan("hb"), fork.serial("hb")
    assert not races(plan)
    assert verify(plan).certificate.reuses > 0
    assert verify(serial).certificate.peak_bytes <= verify(plan).certificate.peak_bytes
    assert len({c.actor for c in plan.schedule if c.node and c.node.endswith("_mul")}) == 4
    assert "UNORDERED" not in "\n".join(tenants(plan.schedule, plan.memory, "q_rope"))


def test_the_table_of_the_manual_is_what_the_forks_give() -> None:
    text = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
    section = text.split("## Upstream's streams")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?)(?: \(never run so\))? \| (\d.*) \|$", section, re.M)
    shown = {name: [int(n.replace(",", "")) for n in cells.split(" | ")] for name, cells in rows}
    counted = {}
    for name, (fork, _) in FORKS.items():
        ggml, hb, serial = fork.plan("ggml"), fork.plan("hb"), fork.serial("hb")
        races_seen = [len(write_write_faults(fork, ggml.memory)), len(read_write_races(ggml))]
        counted[name] = races_seen + [device_bytes(p) for p in (ggml, hb, serial)]
    assert shown == counted


def test_on_one_stream_upstreams_plan_is_sound() -> None:
    """The fault is the streams', not the allocator's: in list order nothing is lost."""
    verify(Fork().serial("ggml"))


def test_the_fork_computes_what_its_graph_means() -> None:
    fork = Fork(heads=2, kv_heads=1, tokens=3, width=32)
    graph, rng = fork.graph(), np.random.default_rng(0)
    weights = {
        t.name: rng.standard_normal(t.shape).astype(t.dtype.np) for t in graph.leaves(Kind.WEIGHT)
    }
    feed: Mapping[str, Array] = {
        "x": rng.standard_normal((3, 32)).astype(np.float32),
        "pos": np.arange(3, dtype=np.int32),
        "idx": np.arange(3, dtype=np.int64),
    }
    got = Simulator(verify(fork.plan("hb")).plan, weights).run((feed,)).outputs[0]["y"]
    np.testing.assert_array_equal(got, evaluate(graph, {**weights, **feed})["y"])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(AllocError, match="unknown allocator mode 'none'"):
        Fork().plan("none")
