"""Other engines: recordings of real runs, replayed through the converter and the judge."""

import gzip
import itertools
import json
import random
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ggraph.dtype import F32
from ggraph.errors import FormatError, InputError
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import read_gguf, write_gguf
from ggraph.plan import Plan
from ggraph.plan_builder import PlanBuilder
from ggraph.record import (
    Stage,
    Verdict,
    diagnose,
    engine_of,
    ggml,
    judge,
    longest_chain,
    program,
    read_log,
    steps,
    with_waits,
)
from ggraph.record.causes import Wait
from ggraph.record.log import Kernel, Range, Record, Recording
from ggraph.record.plugin import IMPL
from ggraph.record.real import (
    MUTANTS,
    NEW,
    NOTHING_NEW,
    OLD,
    SETTINGS,
    Files,
    Found,
    Mutant,
    MutantFound,
    judge_setting,
    setting,
)
from ggraph.record.real.engine import Build
from ggraph.record.real.models import equal_experts, noise_adapter
from ggraph.record.torture import Trial, _directed
from ggraph.verify import races
from models.cli.app import app
from models.cli.hazards_real import _fault, _row
from models.cli.record import _line

RECORDED = Path(__file__).parent / "recorded"


@cache
def verdicts(name: str) -> tuple[Verdict, ...]:
    return tuple(judge(read_log(RECORDED / f"{name}.jsonl.gz")))


def refused(name: str) -> Verdict:
    (found,) = (v for v in verdicts(name) if v.refused is not None)
    return found


@pytest.mark.parametrize(("name", "devices"), [("one", 1), ("two", 2)])
def test_decode_of_the_real_llama_cpp_is_proved(name: str, devices: int) -> None:
    found = {v.kind: v for v in verdicts(name)}
    assert {"5 tokens", "1 token", "copies"} == set(found)
    assert all(v.certificate is not None for v in found.values())
    plan = found["1 token"].judged.plan
    busy = {r.device for r in plan.memory.buffers.values()} - {"host"}
    assert len(busy) == devices
    assert found["1 token"].commands > 600
    assert found["1 token"].certificate is not None
    assert found["1 token"].certificate.reuses > 500  # the allocator reuses bytes, soundly
    assert len(plan.schedule.carried) == 60  # keys and values of 30 layers


def test_the_pipelined_prompt_races_and_one_wait_repairs_it() -> None:
    found = refused("prompt")
    assert found.kind == "125 tokens in 8 parts"
    assert found.refused is not None and found.refused.kind == "race"
    assert found.diagnosis is not None
    (cause,) = found.diagnosis.causes
    assert len(cause.races) == 8
    assert cause.text == "'copy sim1#l_out-15#0' on sim0.0 after 'ADD ffn_inp-16' on sim1.0"
    readers = {found.judged.plan.schedule.commands[r.first.index].label for r in cause.races}
    assert readers == {"RMS_NORM norm-16", "ADD ffn_inp-16"}
    fewest, latest = found.diagnosis.fewest, found.diagnosis.latest
    assert (len(fewest.waits), len(latest.waits)) == (1, 4)
    assert fewest.proved and latest.proved


def test_a_micro_batch_alone_hides_the_race() -> None:
    """Why steps are cut at quiescent points: the same records, host waits put between, are fine."""
    recording = read_log(RECORDED / "prompt.jsonl.gz")
    (pipelined,) = (s for s in steps(recording) if sum(len(r.kernels) for r in s.records) > 4000)
    streams = sorted({r.stream for r in pipelined.records if r.kind == "graph" and r.stream != -1})
    recording.records = [
        x
        for i, r in enumerate(recording.records)
        for x in (
            [Record("sync", s) for s in streams]
            if r.label.startswith("set inp_tokens") and pipelined.start < i < pipelined.stop
            else []
        )
        + [r]
    ]
    recording.lived = dict.fromkeys(recording.lived, (0, 1 << 62))
    assert len(steps(recording)) > 5
    assert all(v.refused is None for v in judge(recording))


def test_warming_up_clears_the_cache_while_it_is_in_use() -> None:
    found = refused("warmup")
    assert found.kind == "2 tokens" and found.diagnosis is not None
    assert [c.text.partition(" after ")[0] for c in found.diagnosis.causes] == [
        "'clear buffer' on host"
    ]


def test_logits_read_by_the_buffer_s_get_race_with_the_kernel_that_makes_them() -> None:
    """The fault behind PR 18039, put back into the real llama.cpp 0.3.16 (mutant blocking-get)."""
    found = verdicts("blocking_get")
    assert len(found) == 2  # a prompt, and a token
    for v in found:
        assert v.diagnosis is not None and v.diagnosis.fewest.proved
        (cause,) = v.diagnosis.causes
        assert cause.text == "'get result_output' on host after 'MUL_MAT result_output' on sim0.0"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("touch", "'touch' on host after 'H2D x' on sim0.0"),
        ("get", "'get y' on host after 'SCALE y' on sim0.0"),
        ("pageable", "'touch' on host after 'D2H y' on sim0.0"),
    ],
)
def test_touches_in_flight_are_races(name: str, cause: str) -> None:
    found = refused(name)
    assert found.diagnosis is not None
    assert [c.text for c in found.diagnosis.causes] == [cause]
    assert found.stack == () or found.stack[0].startswith("touch the_culprit")
    assert bool(found.stack) == (name != "get")


def test_a_touch_beside_bytes_in_flight_is_none() -> None:
    assert all(v.refused is None for v in verdicts("neighbour"))


def test_directed_orders_put_the_second_access_first() -> None:
    orders = dict(_directed(verdicts("prompt")))
    assert len(orders) == 8
    first = "copy sim1#l_out-15#0 before RMS_NORM norm-16"
    assert first in orders.values()
    assert all(order.startswith("hold:") and order.count(":") == 2 for order in orders)
    (held,) = dict(_directed(verdicts("touch")))
    assert held.count(":") == 1  # the host is no stream: nothing to wait for


# Quiescent points.


def recording(*records: Record) -> Recording:
    return Recording("cuda", 2, records=list(records), device_of={0: 0, 1: 1})


def work(stream: int, at: int) -> Record:
    kernel = Kernel("ADD", "x", Range(0, 4), True, ())
    return Record("graph", stream, at, kernels=(kernel,))


def test_a_step_ends_where_the_host_knows_that_all_is_done() -> None:
    one, two = work(0, 0), work(1, 0)
    both = recording(one, two, Record("sync", 0), Record("sync", 1), work(0, 1))
    assert [(s.start, s.stop, s.whole) for s in steps(both)] == [(0, 4, True), (4, 5, False)]


def test_waiting_for_one_stream_is_waiting_for_what_it_waited_for() -> None:
    chained = (work(0, 0), Record("rec", 0, 1, event=7), Record("wait", 1, 0, event=7), work(1, 1))
    assert len(steps(recording(*chained, Record("sync", 1)))) == 1
    assert steps(recording(*chained, Record("sync", 1)))[0].whole
    assert not steps(recording(*chained, Record("sync", 0)))[0].whole
    assert not steps(recording(*chained, work(0, 2), Record("sync", 1)))[0].whole


# Causes and repairs.


def racing(rng: random.Random, count: int, readers: int = 1) -> Plan:
    """Writers on stream 0, readers on others, of a few tensors, and no wait at all."""
    b = PlanBuilder()
    gpu = b.device("gpu0", streams=1 + readers)
    x = b.buffer("x", gpu, 4)
    for i in range(count):
        at = rng.randint(0, 3)
        if rng.random() < 0.5:
            b.launch((gpu, rng.randint(1, readers)), f"read {i}", reads=[x[at : at + 1]])
        else:
            b.launch((gpu, 0), f"write {i}", writes=[x[at : at + 1]])
    b.host_sync()
    return b.plan()


def could_be_fewer(plan: Plan, count: int) -> bool:
    """Whether some `count` waits, wherever they are put, order all."""
    commands = plan.schedule.commands
    possible = [
        Wait(i, j)
        for i, j in itertools.combinations(range(len(commands) - 1), 2)
        if commands[i].actor != commands[j].actor
    ]
    return any(not races(with_waits(plan, w)) for w in itertools.combinations(possible, count))


@pytest.mark.parametrize(("readers", "misses"), [(1, 0), (2, 3)])
def test_the_fewest_waits_are_the_fewest(readers: int, misses: int) -> None:
    """Of two actors always; of three all but now and then, and then one too many."""
    rng, seen, missed = random.Random(3), 0, 0
    for _ in range(60):
        plan = racing(rng, 7, readers)
        found = diagnose(plan)
        if found is None:
            continue
        seen += 1
        count = len(found.fewest.waits)
        assert not races(with_waits(plan, found.fewest.waits))
        assert found.fewest.proved and found.latest.proved
        assert sum(len(c.races) for c in found.causes) == len(races(plan))
        if could_be_fewer(plan, count - 1):
            missed += 1
            assert not could_be_fewer(plan, count - 2)
    assert seen > 20 and missed <= misses


def test_the_longest_chain_counts_kernels_in_a_row() -> None:
    def plan(wait: bool) -> Plan:
        b = PlanBuilder()
        gpu = b.device("gpu0", streams=2)
        x = b.buffer("x", gpu, 8)
        for stream in (0, 1):
            if wait and stream:
                b.record((gpu, 0), "e")
                b.wait((gpu, 1), "e")
            for i in range(3):
                b.launch((gpu, stream), f"{stream}.{i}", writes=[x[stream : stream + 1]])
        return b.plan()

    assert longest_chain(plan(False).schedule.commands) == 3
    assert longest_chain(plan(True).schedule.commands) == 6


# What is handed in.


def damaged(rng: random.Random, lines: list[str]) -> list[str]:
    lines = list(lines)
    at = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        lines[at] = lines[at][: rng.randrange(len(lines[at]))]
    elif kind == 1:
        del lines[at]
    else:
        line = json.loads(lines[at])
        key = rng.choice(list(line))
        line[key] = rng.choice([None, -1, 7, "x", [], {}, [1], 1 << 70, 1.5, True])
        lines[at] = json.dumps(line)
    return lines


def test_a_damaged_log_is_refused_or_judged(tmp_path: Path) -> None:
    rng = random.Random(4)
    with gzip.open(RECORDED / "touch.jsonl.gz", "rt") as file:
        lines = file.read().splitlines()
    path, refusals = tmp_path / "log.jsonl", 0
    for _ in range(900):
        path.write_text("\n".join(damaged(rng, lines)))
        try:
            judge(read_log(path))
        except FormatError:
            refusals += 1
    assert 300 < refusals < 900


def test_a_program_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    for arguments in ([], ["no-such-program-here"], ["true"]):
        with pytest.raises(InputError):
            program(arguments)
    for wrong in ({"devices": 0}, {"devices": 9}, {"contract": "opencl"}):
        with pytest.raises(InputError):
            Stage(**wrong)  # type: ignore[arg-type]


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("llama.so", "llama", "libggml.so"):
        for ask in (engine_of, lambda path: ggml(path).__enter__()):
            with pytest.raises(InputError, match=str(tmp_path)):
                ask(tmp_path / "nope" / name)
    with pytest.raises(InputError, match=str(tmp_path)):
        engine_of(tmp_path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_module_with_ggml_in_it_is_its_own_engine(tmp_path: Path) -> None:
    headers = tmp_path / "source" / IMPL
    headers.parent.mkdir(parents=True)
    headers.touch()
    for name in ("ggml_backend_register", "something_else"):
        source, module = tmp_path / f"{name}.c", tmp_path / f"{name}.abi3.so"
        source.write_text(f"int {name}(void) {{ return 1; }}\n")
        subprocess.run(["c++", "-xc", "-shared", source, "-o", module], check=True)
    found = engine_of(tmp_path / "ggml_backend_register.abi3.so", tmp_path / "source")
    assert found.libraries == (tmp_path / "ggml_backend_register.abi3.so",)
    with pytest.raises(InputError):
        engine_of(module, tmp_path / "source")
    with pytest.raises(InputError):  # linked there, but nobody has said where the headers are
        engine_of(tmp_path / "ggml_backend_register.abi3.so")


def test_a_mutant_changes_one_call_of_one_function() -> None:
    text = "void a() { wait(x); }\nint b(int n) {\n  if (n) { wait(f(1, 2), y); }\n  wait(z);\n}\n"
    mutant = Mutant("m", "", "f.c", "b", "wait", {"1": 0, "2": -1}, "go({1}, {0})", "one")
    assert mutant.applied(text, "1") == text.replace("wait(f(1, 2), y)", "go(y, f(1, 2))")
    dropped = Mutant("m", "", "f.c", "b", "wait", {"2": -1}, "(void) 0", "one")
    assert dropped.applied(text, "2") == text.replace("wait(z)", "(void) 0")
    with pytest.raises(InputError):
        dropped.applied(text, "1")
    with pytest.raises(InputError):
        Mutant("m", "", "f.c", "c", "wait", {"1": 0}, "", "one").applied(text, "1")


def test_the_command_judges_a_log(tmp_path: Path) -> None:
    page = tmp_path / "race.html"
    log = str(RECORDED / "prompt.jsonl.gz")
    done = CliRunner().invoke(app, ["record", "--log", log, "--html", str(page)])
    assert done.exit_code == 1
    assert "8 races, one missing wait: 'copy sim1#l_out-15#0' on sim0.0" in done.output
    assert "sim1#l_out-15#0" in page.read_text()
    done = CliRunner().invoke(app, ["record", "--log", str(RECORDED / "two.jsonl.gz"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["proved"]


def test_no_name_of_a_program_pretends_to_be_a_line_of_ours(tmp_path: Path) -> None:
    """Kernels, tensors, copies and functions are called as their program likes."""
    evil = json.dumps("\x1b[2J\nproved   all of it\u202e")[1:-1]
    log = tmp_path / "log.jsonl"
    text = gzip.decompress((RECORDED / "touch.jsonl.gz").read_bytes()).decode()
    for name in ('"SCALE', '"y', '"x', '"H2D x', '"touch', "the_culprit"):
        assert name in text, name
        text = text.replace(name, name + evil)
    log.write_text(text)
    done = CliRunner().invoke(app, ["record", "--log", str(log)])
    assert done.exit_code == 1 and "refused" in done.output
    assert all(ch.isprintable() or ch == "\n" for ch in done.output)
    assert not any(line.startswith("proved   all") for line in done.output.splitlines())
    trial = Trial("eager", "a\x1b[2J\n\u202eb", True, True, 0)
    assert _line(trial).plain.isprintable()


def test_made_models_are_what_they_say(tmp_path: Path) -> None:
    def tensor(name: str, *shape: int) -> RawTensor:
        return RawTensor(
            name, F32, shape, np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        )

    metadata = {"general.architecture": "llama", "llama.embedding_length": 8}
    names = ("ffn_gate", "ffn_up", "ffn_down")
    tensors = [tensor(f"blk.0.{n}.weight", 8, 8) for n in names]
    write_gguf(tmp_path / "m.gguf", metadata, [tensor("blk.0.attn_q.weight", 6, 8), *tensors])
    experts = read_gguf(equal_experts(tmp_path / "m.gguf", tmp_path / "e.gguf"))
    assert experts.metadata["llama.expert_count"] == 4
    for name in names:
        stacked = experts.tensors[f"blk.0.{name}_exps.weight"].float32()
        assert stacked.shape == (4, 8, 8)
        assert all(np.array_equal(part, tensor(name, 8, 8).data) for part in stacked)
    assert experts.tensors["blk.0.ffn_gate_inp.weight"].shape == (4, 8)
    adapter = read_gguf(noise_adapter(tmp_path / "m.gguf", tmp_path / "a.gguf")).tensors
    assert adapter["blk.0.attn_q.weight.lora_a"].shape == (4, 8)
    assert adapter["blk.0.attn_q.weight.lora_b"].shape == (6, 4)


def test_every_mutant_names_a_configuration() -> None:
    names = [s.name for s in SETTINGS]
    assert len(set(names)) == len(names) and len({m.name for m in MUTANTS}) == len(MUTANTS)
    for m in MUTANTS:
        assert set(m.which) <= set(setting(m.where).versions) <= {NEW, OLD}
        assert m.expect in ("proved", "refused", NOTHING_NEW)


def test_kept_rows_are_not_run_again(tmp_path: Path) -> None:
    """Nothing is fetched or built here: all that is asked for stands in the file."""
    found = Found(setting("prompt-two"), NEW, 0, "", verdicts("prompt"))
    row = {"version": NEW} | _row(found)
    assert (row["verdict"], row["proved"]) == ("refused", row["steps"] - 1)
    kept = tmp_path / "found.jsonl"
    kept.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'version': OLD})}\n")
    asked = ["hazards", "real", "prompt-two", "--rows", str(kept), "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"version": NEW, "rows": [row]}


def test_a_fault_is_found_by_what_is_wrong_because_of_it() -> None:
    mutant = next(m for m in MUTANTS if m.where == "prompt-two")
    found = Found(setting("prompt-two"), NEW, 0, "", verdicts("prompt"))
    fault = MutantFound(mutant, found, eager_same=True, lazy_same=False)
    fewer = [re.sub("8 races", "2 races", why) for why in _row(found)["why"]]
    nothing = _fault(fault, {"why": fewer})
    assert (nothing["verdict"], nothing["why"]) == (NOTHING_NEW, [])
    new = _fault(fault, {"why": ["1 token: 8 races, one missing wait: another"]})
    assert (new["verdict"], len(new["why"])) == ("refused", 1)


def test_what_cannot_be_played_is_not_run() -> None:
    unplayed = [s for s in SETTINGS if s.unplayed]
    assert unplayed
    for s in unplayed:
        found = judge_setting(Build(NEW, Path(), Path(), Path()), s, Files(Path(), Path(), Path()))
        assert (found.word, found.why) == ("not played", s.unplayed)
