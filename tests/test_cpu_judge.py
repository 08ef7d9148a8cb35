"""The judge of flat programs, the footprints that it goes by, and the bytes beside operands."""

import faulthandler
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_calls import sum_of
from program_kit import apart, block, cases, executor, fed, mutated, planned, run_parts

from ggraph import ops
from ggraph.account import accounts
from ggraph.backends.cpu import CpuBackend
from ggraph.backends.cpu import backend as cpu_room
from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.backend import CpuProgram
from ggraph.backends.cpu.codegen.simd import BARRIER, HEADER_WORDS, KERNELS
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.footprints import RULES, rule_of
from ggraph.backends.cpu.lowering.judge import Ground, judge
from ggraph.backends.cpu.runtime.program import Assembler, Flat
from ggraph.backends.protocol import Launch
from ggraph.backends.sim import Machine, SimBackend, sim_spec
from ggraph.device import Need
from ggraph.errors import BackendError, PlanError
from ggraph.execute import Executor
from ggraph.graph import Graph
from ggraph.pipeline import make_plan
from ggraph.plan import _SEAL, MemoryMap, Plan, Region, VerifiedPlan
from ggraph.tensor import OPS, Array, Kind, Tensor, input
from ggraph.verify import examine

NOT_IN_PROGRAMS = ("pack_", "pool_", "peak_", "stream_", "numpy_", "ahead_", "copy")
Judged = list[tuple[Flat, list[Ground]]]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    """What the judge is given from now on, as programs that can run."""
    found: Judged = []

    def watch(code: Array, names: Any, grounds: Any) -> int:
        grounds = list(grounds)
        found.append((Flat(code, tuple(names), ()), grounds))
        return judge(code, names, grounds)

    monkeypatch.setattr(cpu_room, "judge", watch)
    return found


def bound(graph: Graph, backend: CpuBackend, given: dict[str, Array]) -> Executor:
    verified = make_plan(graph, [backend.spec])
    return executor(verified, backend, given)


def inputs(graph: Graph, given: dict[str, Array]) -> dict[str, Array]:
    return {t.name: given[t.name] for t in graph.leaves(Kind.INPUT)}


def test_every_kernel_that_a_program_may_hold_has_a_footprint() -> None:
    names = [n for n in KERNELS if not n.startswith(NOT_IN_PROGRAMS)]
    assert len(names) > 60 and not [n for n in names if rule_of(n) is None]


class Asked(dict[str, int]):
    """The words of a call; those that it does not have are noted."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(names, 256))
        self.missing = set[str]()

    def __missing__(self, name: str) -> int:
        self.missing.add(name)
        return 256


def test_a_footprint_asks_for_words_that_its_kernel_has() -> None:
    """A rule that outlived its kernel, or whose kernel was given other words, says nothing true."""
    wrong, families = dict[str, set[str]](), set[str]()
    for name, spec in KERNELS.items():
        found = rule_of(name)
        if found is not None:
            rule, variant = found
            families.add(name.removesuffix(variant))
            words = Asked(a for a, is_number in spec.words.items() if not is_number)
            touched = {patch.argument for patch in rule(words, variant)}
            if strange := words.missing | (touched - set(words)):
                wrong[name] = strange
    assert not wrong
    assert set(RULES) - families <= {"nest_"}  # those are made when somebody asks for them


def test_any_order_of_the_threads_gives_the_same_bits() -> None:
    """Between two barriers each thread may be anywhere: first to last and last to first agree."""
    backend = open_cpu("cpu", threads=1)
    usual = backend.pool.run
    turns = (range, lambda n: range(n - 1, -1, -1))
    orders = [
        lambda f, n=threads, t=turn: run_parts(f, n, t) for threads in (2, 4, 7) for turn in turns
    ]
    count = 0
    for title, graph, given in cases():
        verified, results = make_plan(graph, [backend.spec]), []
        for run in (usual, *orders):
            held = executor(verified, backend, given)  # states begin as zeros each time
            backend.pool.run = run  # type: ignore[method-assign]
            results.append(held.run(inputs(graph, given)))
        for name, value in results[0].items():
            for other in results[1:]:
                assert np.array_equal(value, other[name], equal_nan=True), f"{title}: {name}"
        count += 1
    assert count > 100
    backend.pool.run = usual  # type: ignore[method-assign]
    backend.close()


def _goes_wrong(run: Callable[[], Array], wanted: Array) -> bool:
    """Whether a run in a child process gives other numbers, or dies of an address it made up."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        os._exit(0 if np.array_equal(run(), wanted) else 1)
    return os.waitpid(child, 0)[1] != 0


def test_a_dropped_barrier_is_refused_and_gives_other_numbers(judged: Judged) -> None:
    backend, graph = open_cpu("cpu", threads=1), block()
    given = fed(graph)
    held = bound(graph, backend, given)
    wanted = held.run(inputs(graph, given))["y"]
    flat, grounds = judged[0]
    refused = corrupt = 0
    for i in np.flatnonzero(flat.code[:, 1] & BARRIER):

        def drop(code: Array, i: int = i) -> None:
            code[i, 1] &= ~BARRIER

        worse = mutated(flat, drop)
        try:
            judge(worse.code, worse.names, grounds)
        except PlanError as e:
            assert "nothing orders" in str(e)
            refused += 1
        else:
            continue
        for threads in (2, 3, 5):
            backend.pool.run = lambda f, w=worse, t=threads: run_parts(  # type: ignore[method-assign,misc]
                w, t, lambda n: range(n - 1, -1, -1)
            )
            if _goes_wrong(lambda: held.run(inputs(graph, given))["y"], wanted):
                corrupt += 1
                break
    sys.stdout.write(f"{refused} dropped barriers refused, {corrupt} of them do harm\n")
    assert refused >= 10 and corrupt >= refused // 2
    backend.close()


def test_an_instruction_that_goes_one_row_further_is_refused(judged: Judged) -> None:
    backend, graph = open_cpu("cpu", threads=1), block()
    bound(graph, backend, fed(graph))
    flat, grounds = judged[0]
    tried = 0
    for i, name in enumerate(flat.names):
        for argument in ("m", "n", "limit", "heads"):
            if argument not in KERNELS[name].args:
                continue
            at = HEADER_WORDS + KERNELS[name].args.index(argument)
            if argument == "limit" and not name.startswith("set_rows"):
                continue  # rows in order need no limit

            def grow(code: Array, i: int = i, at: int = at) -> None:
                code[i, at] += 64

            worse = mutated(flat, grow)
            with pytest.raises(PlanError, match=r"which the plan does not give it|while other"):
                judge(worse.code, worse.names, grounds)
                pytest.fail(f"{name} with {argument} + 64 was accepted")
            tried += 1
    assert tried > 30
    backend.close()


def test_addresses_that_the_plan_does_not_give_are_refused(judged: Judged) -> None:
    """Each address of each instruction moved by a page, and by one element."""
    backend, graph = open_cpu("cpu", threads=1), block()
    bound(graph, backend, fed(graph))
    flat, grounds = judged[0]
    tried = 0
    for i, name in enumerate(flat.names):
        rule = rule_of(name)
        assert rule is not None
        values = dict(zip(KERNELS[name].args, flat.code[i, HEADER_WORDS:].tolist(), strict=False))
        numbers = {k: v for k, v in values.items() if ":" not in k}
        for patch in rule[0](numbers, rule[1]):
            if not patch.base or patch.argument == "w":  # behind packed tiles there is room
                continue
            at = HEADER_WORDS + KERNELS[name].args.index(patch.argument)
            worse = mutated(flat, lambda code, i=i, at=at: code.__setitem__((i, at), 1 << 20))  # type: ignore[misc]
            with pytest.raises(PlanError, match="which the plan does not give it"):
                judge(worse.code, worse.names, grounds)
            tried += 1
    assert tried > 30
    backend.close()


def test_parts_of_one_instruction_are_judged() -> None:
    """A product over its own rows, a rotation onto rows that are shifted by one, a sum in place."""
    backend = open_cpu("cpu", threads=1)
    room = np.zeros((9, 32), np.float32)
    at = int(room.ctypes.data)
    whole = Ground("all", 0, 1, ((at, at + room.nbytes),), ((at, at + room.nbytes),))
    for start, fine in ((0, True), (128, False), (64, False)):
        asm = Assembler(backend.pool.jit)
        rows = {"y": (at + start, 128), "a": (at, 128), "b": (at + 4 * 128, 128)}
        name, words = sum_of(4, 32, **rows)
        asm.add(name, **words)
        flat = asm.freeze()
        if fine:
            judge(flat.code, flat.names, [whole])
        else:
            with pytest.raises(PlanError, match="while other threads use it"):
                judge(flat.code, flat.names, [whole])
    backend.close()


def test_a_plan_for_another_device_has_no_bytes_and_is_refused() -> None:
    graph = block()
    backend = open_cpu("cpu", threads=1)
    other = make_plan(graph, [open_cpu("cpu", threads=1, exact=True).spec])
    with pytest.raises(BackendError, match="the plan has no bytes for 'rows'"):
        executor(other, backend, fed(graph))
    backend.close()


def moved(verified: VerifiedPlan, value: str, onto: str) -> Plan:
    """The plan with the bytes of one value laid over those of another."""
    memory, schedule = verified.plan.memory, verified.plan.schedule
    regions = dict(memory.regions)
    region = regions[onto]
    regions[value] = Region(region.buffer, region.offsets, regions[value].nbytes)
    return Plan(schedule, MemoryMap(memory.mode, memory.buffers, regions, memory.causes))


def test_overlapping_scratch_is_refused_and_corrupts_on_sim() -> None:
    """Bytes beside operands are values like any other: laid over an operand, a result, or what a
    later launch still needs, `verify` refuses them, and a machine that runs them goes wrong."""

    def needs(t: Tensor) -> tuple[Need, ...]:
        if t.op != "mul_mat":
            return ()
        return Need("room", 128), Need("list", 128, (1,))

    spec = sim_spec("sim0", needs=needs, copy_streams=0)
    x, w = input("x", (4, 8)), ops.scale(input("v", (8, 8)), 2.0, name="w")
    h = ops.mul_mat(w, x, name="h")
    s = ops.scale(h, 3.0, name="s")
    g = ops.mul_mat(ops.scale(w, 1.5, name="u"), x, name="g")
    graph = Graph.of({"y": ops.add(s, g)})
    verified = make_plan(graph, [spec])
    given = {"x": np.ones((4, 8), np.float32), "v": np.ones((8, 8), np.float32)}
    assert "x#list.0" in verified.plan.schedule.values

    def outcome(plan: VerifiedPlan) -> Array:
        backend = SimBackend(spec, Machine())
        try:
            return Executor(plan, {"sim0": backend}, {}).run(given)["y"]
        finally:
            backend.close()

    wanted = outcome(verified)
    for value, onto in (("h#room", "h"), ("h#room", "x"), ("g#room", "s"), ("x#list.0", "s"),
                        ("g#room", "x#list.0")):  # fmt: skip
        worse = moved(verified, value, onto)
        assert hasattr(examine(worse), "kind"), f"{value} on {onto} was accepted"
        forged = VerifiedPlan(worse, verified.certificate, seal=_SEAL)
        assert not np.array_equal(outcome(forged), wanted), f"{value} on {onto} did no harm"


def test_what_a_launch_needs_must_be_declared() -> None:
    backend = open_cpu("cpu", threads=1)
    verified = make_plan(block(), [backend.spec])
    schedule = verified.plan.schedule
    for i, c in enumerate(schedule.commands):
        for kind in ("reads", "writes"):
            for a in getattr(c, kind):
                if "#" not in a.value:
                    continue
                less = replace(c, **{kind: tuple(b for b in getattr(c, kind) if b != a)})
                commands = (*schedule.commands[:i], less, *schedule.commands[i + 1 :])
                plan = replace(verified.plan, schedule=replace(schedule, commands=commands))
                assert hasattr(examine(plan), "kind"), f"{c} without {a}"
    backend.close()


@pytest.mark.parametrize("form", ["end", "start"])
def test_no_kernel_touches_a_byte_outside_its_buffers(form: str) -> None:
    """Each value between two pages that nobody may touch, for every op with a kernel."""
    kit = Path(__file__).parent / "program_kit.py"
    done = subprocess.run(
        [sys.executable, str(kit), form],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    last = done.stdout.splitlines()[-1:] or ["nothing"]
    assert done.returncode == 0, f"{last}, rc {done.returncode}: {done.stderr[-800:]}"
    assert int(last[0].removeprefix("cases ")) > 500


def test_guard_pages_find_a_kernel_that_goes_one_row_further() -> None:
    kit = Path(__file__).parent / "program_kit.py"
    command = [sys.executable, str(kit), "end", "one row further"]
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=path)
    assert done.returncode < 0, f"rc {done.returncode}: {done.stdout[-300:]}"


def test_nothing_is_allocated_while_a_program_runs() -> None:
    """NumPy tells tracemalloc of its arrays: a run makes none but the results."""
    backend, graph = open_cpu("cpu", threads=2), block(rows=8)
    given = fed(graph)
    verified = make_plan(graph, [backend.spec])
    held = executor(verified, backend, given)
    fresh = inputs(graph, given)
    held.run(fresh)
    backend.allocate = None  # type: ignore[method-assign,assignment]
    tracemalloc.start()
    for _ in range(3):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = held.run(fresh)["y"]
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak < result.nbytes + 8192, f"{peak} bytes were allocated in a run"
    tracemalloc.stop()


@pytest.mark.parametrize("exact", [False, True])
def test_what_numpy_computes_is_named_before(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning says what has no kernel, and what tables programs bring along, as lowering finds."""
    backend, count = open_cpu("cpu", threads=1, exact=exact), 0
    lower, programs = backend.lower, list[CpuProgram]()
    keep, tables = Lowering.constant, list[Array]()

    def lowered(launches: Sequence[Launch]) -> CpuProgram:
        programs.append(lower(launches))
        return programs[-1]

    def kept(low: Lowering, values: Array) -> Array:
        tables.append(values)
        return keep(low, values)

    monkeypatch.setattr(backend, "lower", lowered)
    monkeypatch.setattr(Lowering, "constant", kept)
    products = ("mul_mat", "mul_mat_add", "mul_mat_id", "get_rows")
    for title, graph, given in cases(products if exact else [n for n in OPS if n != "copy"]):
        programs.clear(), tables.clear()
        verified = make_plan(graph, [backend.spec])
        held = executor(verified, backend, given)
        left = sorted(n for p in programs for n in p.fallbacks)
        spec = backend.spec
        computed = [t for t in verified.plan.graph if not (t.is_leaf or t.is_view)]
        told = sorted(t.name for t in computed if not spec.compiled(t))
        assert told == left, title
        assert accounts(verified.plan)[0].constants == sum(t.nbytes for t in tables), title
        count += bool(left)
        held.close()
    assert count > (0 if exact else 20)
    backend.close()


def test_apart_is_a_sound_plan_too(judged: Judged) -> None:
    backend, graph = open_cpu("cpu", threads=2), block()
    given = fed(graph)
    wanted = bound(graph, backend, given).run(inputs(graph, given))["y"]
    got = executor(apart(planned(graph, backend)), backend, given).run(inputs(graph, given))["y"]
    assert np.array_equal(got, wanted) and len(judged) == 2
    backend.close()
