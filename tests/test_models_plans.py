"""Every graph that decoding uses is verified, and a tampered copy of each plan is refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from head_loop import grown, layer, saved, variant

from ggraph.alloc import allocate
from ggraph.backends.cpu import cpu_spec
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.model import StepShape
from ggraph.decode.runner import move_graph
from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.order import order
from ggraph.pipeline import Options, make_plan
from ggraph.place import place
from ggraph.plan import Do, Plan, VerifiedPlan
from ggraph.split import split
from ggraph.verify import CounterExample, examine
from models.heads.layouts import open_head
from models.registry import open_model

TINY = Path(__file__).parent / "golden" / "tiny"
CPU = DeviceSpec("cpu", "cpu", host_visible=True)
FORKED = DeviceSpec("sim0", "sim", streams=4, copy_streams=1)
LLAMA = TINY / "llama_tied"
TARGETS = ("llama_tied", "qwen2_bias", "qwen3_qknorm", "qwen3_moe", "mistral_sliding")


def step(name: str, rows: int, taps: tuple[int, ...] = ()) -> Graph:
    wanted = 1 if rows > 8 else rows
    return open_model(TINY / name).build(StepShape(rows, 256, wanted, 513, taps))


def draft(fed_back: bool, rows: int) -> Graph:
    head = open_head(TINY / "eagle3_for_llama_tied", open_model(TINY / "llama_tied"))
    return head.build(DraftShape(rows, 256, rows, 513, fed_back))


def made(fed_back: bool, rows: int, name: str) -> Graph:
    """A step of a head that is written for this test."""
    weights, options = variant(name)
    if name == "two layers":
        weights["mask_hidden"], options["ptd_token_id"] = grown(5, 1, 192), 310
    with TemporaryDirectory() as folder:
        head = open_head(saved(Path(folder) / "head", weights, options), open_model(LLAMA))
        return head.build(DraftShape(rows, 256, rows, 513, fed_back))


def first_generation(fed_back: bool, rows: int) -> Graph:
    """A step of an EAGLE-1 head."""
    made = layer("layers.0", 20, 64) | {"fc.weight": grown(5, 64, 128)}
    with TemporaryDirectory() as folder:
        head = open_head(saved(Path(folder) / "head", made, {}), open_model(LLAMA))
        return head.build(DraftShape(rows, 256, rows, 513, fed_back))


GRAPHS: dict[str, Callable[[], Graph]] = {
    **{f"{n}, 1 row": lambda n=n: step(n, 1) for n in TARGETS},  # type: ignore[misc]
    **{f"{n}, 5 rows": lambda n=n: step(n, 5) for n in TARGETS},  # type: ignore[misc]
    **{f"llama, {n} rows": lambda n=n: step("llama_tied", n) for n in (2, 3, 4, 8, 32)},  # type: ignore[misc]
    "eagle1, true rows": lambda: first_generation(False, 4),
    "eagle1, fed back": lambda: first_generation(True, 1),
    "llama, prompt of 64": lambda: step("llama_tied", 64),
    "llama, taps": lambda: step("llama_tied", 4, (2, 3)),
    "llama, final tap": lambda: step("llama_tied", 4, (6,)),
    "eagle3 true rows": lambda: draft(False, 4),
    "eagle3 fed back": lambda: draft(True, 1),
    "eagle3 tree level": lambda: draft(True, 8),
    "latent head, true rows": lambda: made(False, 4, "latent"),
    "latent head, fed back": lambda: made(True, 1, "latent, two layers, 3.1"),
    "parallel head, true and masked rows": lambda: made(False, 8, "two layers"),
    "cache move": lambda: move_graph(step("llama_tied", 1), 4, 513),
}


def plans(graph: Graph) -> list[VerifiedPlan]:
    """On one stream, and on four streams of an asynchronous device."""
    return [
        make_plan(graph, [CPU]),
        make_plan(graph, [FORKED, CPU], Options(streams=4)),
        make_plan(graph, [CPU], Options(memory="offline")),
    ]


def swapped(plan: Plan) -> Plan:
    """Two commands of one stream exchanged, of which the second reads what the first writes."""
    commands = list(plan.schedule.commands)
    for i in range(len(commands) - 1, 0, -1):
        first, second = commands[i - 1], commands[i]
        made = {a.value for a in first.writes}
        dependent = any(a.value in made for a in second.reads)
        if dependent and first.do is Do.LAUNCH and first.actor == second.actor:
            commands[i - 1], commands[i] = second, first
            return replace(plan, schedule=replace(plan.schedule, commands=tuple(commands)))
    raise AssertionError("no dependent neighbours")


def collided(plan: Plan) -> Plan:
    """One value moved onto another that the same command reads."""
    owned = {b.name for b in plan.memory.buffers.values() if not b.external}
    regions = dict(plan.memory.regions)
    for c in plan.schedule:
        inside = [a.value for a in c.reads if regions[a.value].buffer in owned and a.stop > a.start]
        for a, b in pairwise(inside):
            fits = regions[a].nbytes <= regions[b].nbytes
            if a != b and regions[a].buffer == regions[b].buffer and fits:
                regions[a] = replace(regions[a], offsets=regions[b].offsets)
                return replace(plan, memory=replace(plan.memory, regions=regions))
    raise AssertionError("no command reads two values of the arena")


def test_on_one_stream_hb_never_needs_more_than_ggml() -> None:
    """The model's graphs, and strictly less wherever a view keeps ggml from working in place."""
    ratios = {}
    for name, build in GRAPHS.items():
        schedule = order(split(place(build(), [CPU])))
        hb, ggml = (allocate(schedule, mode=m).arena_bytes for m in ("hb", "ggml"))
        ratios[name] = hb / ggml
    assert max(ratios.values()) <= 1.0
    steps = [r for name, r in ratios.items() if name.startswith((*TARGETS, "llama"))]
    assert len(steps) >= 15 and max(steps) < 0.9


@pytest.mark.parametrize("name", GRAPHS)
def test_plans_are_verified_and_tampered_copies_refused(name: str) -> None:
    for verified in plans(GRAPHS[name]()):
        certificate = verified.certificate
        assert certificate.reads_proved > 0
        assert certificate.live_bound_bytes <= certificate.peak_bytes
        verdict = examine(swapped(verified.plan))
        assert isinstance(verdict, CounterExample)
        assert verdict.kind in ("stale", "unwritten", "race")
        if name != "cache move":
            verdict = examine(collided(verified.plan))
            assert isinstance(verdict, CounterExample), name


def calls(run: Callable[[], VerifiedPlan]) -> tuple[VerifiedPlan, int]:
    """What `run` makes, and how many functions it called, Python's own among them."""
    count, before = 0, sys.getprofile()

    def called(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        return run(), count
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(("name", "most"), [("tiny/llama_tied", 1650), ("tiny2/gemma3_text", 1500)])
def test_what_a_new_number_of_rows_costs(name: str, most: int) -> None:
    """A step of rows that has not run before waits for its plan. Calls of functions per command,
    from the graph to the proof: no clock can say that apart from noise."""
    model, cpu = open_model(TINY.parent / name), cpu_spec("cpu")

    def planned(rows: int) -> VerifiedPlan:
        return make_plan(model.build(StepShape(rows, 256, rows, 513)), [cpu])

    planned(6)  # meets most of the ops' kernels for the first time
    verified, count = calls(lambda: planned(7))
    commands = len(verified.plan.schedule.commands)
    assert count <= most * commands, f"{count / commands:.0f} calls per command"
