"""What a recording says is all judged: no access is left out, and an address is one byte."""

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ggraph.errors import InputError
from ggraph.record import Engine, Program, Recording, Stage, Verdict, judge, program, read_log
from ggraph.record.plugin import NATIVE
from ggraph.record.run import Run
from ggraph.record.torture import Outcome, Trial
from models.cli import record
from models.cli.app import app

BASE, OWN = 1 << 40, 1 << 41  # where a device's buffer lies, and the program's own memory


class Log:
    """A log by hand: one device unless told otherwise, a buffer, and a stream on each device."""

    def __init__(self, devices: int = 1) -> None:
        self.lines: list[dict[str, object]] = []
        self.add("begin", version=1, devices=devices, contract="metal", api=2)
        for d in range(devices):
            self.add("stream", be=d, dev=d)
            self.alloc(d, BASE + (d << 20), dev=d)

    def add(self, kind: str, **rest: object) -> None:
        self.lines.append({"t": kind, **rest})

    def alloc(self, number: int, base: int, dev: int = 0) -> None:
        self.add("alloc", buf=number, host=0, dev=dev, base=base, n=1 << 16)

    def kernel(self, *nodes: list[object], stream: int = 0) -> None:
        """One graph of these nodes."""
        number = len(self.lines)
        self.add("nodes", id=number, nodes=list(nodes))
        self.add("graph", be=stream, id=number)

    def download(self, source: int, target: int, nbytes: int) -> None:
        self.add("copy", be=0, what="D2H y", src=source, dst=target, n=nbytes)

    def recording(self, folder: Path) -> Recording:
        path = folder / "log.jsonl"
        path.write_text("\n".join(map(json.dumps, self.lines)))
        return read_log(path)

    def verdict(self, folder: Path) -> Verdict:
        (found,) = judge(self.recording(folder))
        return found


def causes(v: Verdict) -> list[str]:
    return [c.text for c in v.diagnosis.causes] if v.diagnosis is not None else []


@pytest.mark.parametrize("target", [(OWN, 512), (OWN + 256, 512), (OWN + 511, 1), (OWN - 8, 2048)])
def test_a_range_that_lies_partly_in_what_a_copy_writes_meets_it(
    target: tuple[int, int], tmp_path: Path
) -> None:
    for synced in (False, True):
        log = Log()
        log.download(BASE, OWN, 512)
        if synced:
            log.add("sync", be=0)
        log.add("host", what="get z", r=[BASE + 4096, target[1]], w=list(target))
        log.add("sync", be=0)
        if synced:  # the step ends at the first wait
            assert all(v.refused is None for v in judge(log.recording(tmp_path)))
        else:
            assert causes(log.verdict(tmp_path)) == ["'get z' on host after 'D2H y' on sim0.0"]


def test_a_range_beside_what_a_copy_writes_does_not(tmp_path: Path) -> None:
    log = Log()
    log.download(BASE, OWN, 512)
    log.add("host", what="get z", r=[BASE + 4096, 512], w=[OWN + 512, 512])
    log.add("host", what="get z", r=[BASE + 4096, 512], w=[OWN - 512, 512])
    log.add("sync", be=0)
    assert log.verdict(tmp_path).refused is None


def test_a_kernel_of_the_processor_over_part_of_a_copy_meets_it(tmp_path: Path) -> None:
    log = Log()
    log.download(BASE, OWN, 512)
    log.kernel(["ADD", "sum", [OWN + 256, 1024], 1, [[OWN + 256, 1024, "sum", -1]]], stream=-1)
    log.add("sync", be=0)
    assert causes(log.verdict(tmp_path)) == ["'cpu ADD sum' on host after 'D2H y' on sim0.0"]


def test_a_kernel_of_a_device_in_the_program_s_memory_counts(tmp_path: Path) -> None:
    log = Log()
    log.kernel(["SQR", "y", [OWN, 512], 1, [[BASE, 512, "x", -1]]])
    log.add("host", what="set y", w=[OWN, 4])
    log.add("sync", be=0)
    assert causes(log.verdict(tmp_path)) == ["'set y' on host after 'SQR y' on sim0.0"]


@pytest.mark.parametrize("change", ["alloc", "free"])
def test_a_buffer_that_comes_or_goes_renames_nothing(change: str, tmp_path: Path) -> None:
    """Two pieces of the program's memory: the one below is a buffer's by the second access."""
    log = Log()
    low, high = OWN, OWN + (1 << 20)
    if change == "free":
        log.alloc(7, low)
    log.download(BASE, high, 512)
    log.add("free", buf=7) if change == "free" else log.alloc(7, low)
    log.download(BASE, low, 512)
    log.add("host", what="get z", w=[high, 512])
    log.add("sync", be=0)
    assert causes(log.verdict(tmp_path)) == ["'get z' on host after 'D2H y' on sim0.0"]


def test_memory_that_is_freed_while_a_device_uses_it_races_with_that(tmp_path: Path) -> None:
    for waits in (False, True):
        log = Log(devices=2)
        log.kernel(["SQR", "y", [BASE, 512], 1, [[BASE + 512, 512, "x", -1]]])
        log.kernel(["SQR", "z", [BASE + (1 << 20), 512], 1, []], stream=1)
        if waits:
            log.add("sync", be=0)
        log.add("free", buf=0)
        log.add("sync", be=0)
        log.add("sync", be=1)
        wanted = [] if waits else ["'free buffer0' on host after 'SQR y' on sim0.0"]
        assert causes(log.verdict(tmp_path)) == wanted


def test_a_buffer_that_nothing_uses_any_more_may_be_freed(tmp_path: Path) -> None:
    log = Log()
    for number in (1, 2):
        log.kernel(["SQR", "y", [BASE, 512], 1, []])
        log.add("sync", be=0)
        log.alloc(number, OWN)
        log.add("free", buf=number)
    (found,) = judge(log.recording(tmp_path))
    assert (found.count, found.refused) == (2, None)


@pytest.mark.parametrize("synced", [False, True])
def test_a_copy_into_memory_that_is_gone_is_a_race(synced: bool, tmp_path: Path) -> None:
    """It is told when the copy runs: while the host waits for it, or before another call."""
    log = Log()
    log.download(BASE, OWN, 8192)
    log.alloc(1, BASE + (1 << 20))
    log.add("sync", be=0)
    log.add("lost", at=OWN, n=8192)
    if not synced:
        log.lines[-2:] = log.lines[:-3:-1]
    log.alloc(2, BASE + (2 << 20))
    log.download(BASE + (1 << 20), BASE + (2 << 20), 64)
    log.add("sync", be=0)
    recording = log.recording(tmp_path)
    gone, right = judge(recording)
    assert recording.lost == 1
    assert causes(gone) == ["'memory is given back' on host after 'D2H y' on sim0.0"]
    assert right.refused is None
    assert set(right.judged.plan.memory.buffers) == {"buffer1@sim0", "buffer2@sim0"}


def node(op: str, at: int, *sources: int, view: bool) -> list[object]:
    """A node on 512 bytes of the first buffer, from sources of 512 bytes."""
    reads = [[BASE + s, 512, f"s{s}", -1] for s in sources]
    return [op, "y", [BASE + at, 512], 1, reads, int(view)]


@pytest.mark.parametrize("op", ["NORM", "GROUP_NORM", "L2_NORM", "LEAKY_RELU", "OPT_STEP_SGD"])
def test_what_the_program_puts_onto_its_source_may_lie_there(op: str, tmp_path: Path) -> None:
    for view in (False, True):
        log = Log()
        log.kernel(node(op, 0, 0, 1024, view=view))
        log.add("sync", be=0)
        found = log.verdict(tmp_path).refused
        assert (None if found is None else found.kind) == (None if view else "alias")


def test_a_step_of_adam_writes_both_of_its_moments(tmp_path: Path) -> None:
    """Weights, gradient, m, v and parameters; then another stream reads one of them."""
    for read, refused in ((2048, True), (3072, True), (1024, False), (4096, False)):
        log = Log()
        log.add("stream", be=1, dev=0)
        log.kernel(node("OPT_STEP_ADAMW", 0, 0, 1024, 2048, 3072, 4096, view=True))
        log.kernel(node("SQR", 5120, read, view=False), stream=1)
        log.add("sync", be=0)
        log.add("sync", be=1)
        wanted = ["'SQR y' on sim0.1 after 'OPT_STEP_ADAMW y' on sim0.0"]
        assert causes(log.verdict(tmp_path)) == (wanted if refused else [])


# What is said of a run that nothing, or not all, is known of.


def asked(log: Log, folder: Path, *extra: str) -> tuple[int, str]:
    log.recording(folder)
    done = CliRunner().invoke(app, ["record", "--log", str(folder / "log.jsonl"), *extra])
    return done.exit_code, done.output


def cut(kind: str) -> Log:
    """A log of nothing, of a run that did not end, or that ran into its limit."""
    log = Log()
    if kind == "begin":
        del log.lines[1:]
    if kind in ("in flight", "full"):
        log.kernel(node("SQR", 0, 1024, view=False))
    if kind == "full":
        log.add("sync", be=0)
        log.add("full", why="the limit of bytes is reached")
    return log


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("begin", "nothing was recorded"),
        ("idle", "nothing was recorded"),
        ("in flight", "something is in flight"),
        ("full", "the limit of bytes is reached"),
    ],
)
def test_what_is_not_a_whole_run_is_not_proved(kind: str, why: str, tmp_path: Path) -> None:
    status, said = asked(cut(kind), tmp_path)
    assert status == 2 and why in said
    status, said = asked(cut(kind), tmp_path, "--json")
    facts = json.loads(said)
    assert (status, facts["proved"], len(facts["missing"])) == (2, False, 1)
    assert why in facts["missing"][0]


def test_a_race_in_a_run_cut_short_is_a_race(tmp_path: Path) -> None:
    log = cut("in flight")
    log.add("host", what="get y", r=[BASE, 512], w=[OWN, 512])
    status, said = asked(log, tmp_path, "--json")
    assert status == 1 and len(json.loads(said)["missing"]) == 1


@pytest.mark.parametrize(
    ("status", "why"),
    [(0, ""), (7, "ended with 7"), (-11, "ended with -11"), (None, "out of time")],
)
def test_a_program_that_ends_badly_is_not_proved(
    status: int | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.kernel(node("SQR", 0, 1024, view=False))
    log.add("sync", be=0)

    def run(self: Program, stage: Stage, path: Path, **rest: object) -> Run:
        path.write_text("\n".join(map(json.dumps, log.lines)))
        return Run(status, b"")

    monkeypatch.setattr(Program, "run", run)
    monkeypatch.setattr(
        record, "program", lambda command, sources=None: Program(("it",), Engine((), tmp_path))
    )
    done = CliRunner().invoke(app, ["record", "--json", "--", "it"])
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["proved"]) == (2 if why else 0, not why)
    assert [why in gap for gap in facts["missing"]] == [True] * bool(why)


@pytest.mark.parametrize(
    ("lost", "gaps", "status"), [(0, [], 0), (1, [], 1), (0, ["cut"], 2), (1, ["cut"], 1)]
)
def test_torture_is_sound_only_where_all_is_known_and_nothing_lost(
    lost: int, gaps: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.kernel(node("SQR", 0, 1024, view=False))
    log.add("sync", be=0)
    trial = Trial("lazy", "", same=True, same_bytes=True, status=0, lost=lost)
    outcome = Outcome("", [log.verdict(tmp_path)], [trial], gaps)
    monkeypatch.setattr(record, "run_torture", lambda *given, **named: outcome)
    monkeypatch.setattr(
        record, "program", lambda command, sources=None: Program(("it",), Engine((), tmp_path))
    )
    done = CliRunner().invoke(app, ["torture", "--json", "--", "it"])
    assert done.exit_code == status
    assert json.loads(done.stdout)["sound"] == (status == 0)


@pytest.mark.parametrize(
    "order", ["eager", "lazy", "late:0", "late:1", "random:17", "hold:0.3", "hold:0.3:1.25"]
)
def test_orders_are_taken(order: str) -> None:
    assert Stage(devices=2, order=order).order == order


@pytest.mark.parametrize(
    "order", ["", "foo", "late", "late:2", "late:-1", "late:x", "random:", "hold:1", "lazy "]
)
def test_an_order_that_is_none_is_refused_before_anything_runs(order: str) -> None:
    with pytest.raises(InputError, match="order"):
        Stage(devices=2, order=order)
    done = CliRunner().invoke(app, ["record", "--devices", "2", "--order", order, "--", "true"])
    assert done.exit_code == 2 or isinstance(done.exception, InputError)


def test_a_script_is_told_from_a_program(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    with pytest.raises(InputError, match="a script is no program that loads ggml"):
        program([str(script)])
    with pytest.raises(InputError, match="BUILD_SHARED_LIBS"):
        program(["true"])


# As objdump names their operands; the last ones may be told as larger than they are.
INSTRUCTIONS = {
    "movss xmm0, dword": ("f30f1000", 4),
    "movsd qword, xmm9": ("f2440f1108", 8),
    "movups xmm0, xmmword": ("0f1000", 16),
    "movdqu xmm12, xmmword": ("f3440f6f20", 16),
    "vmovss xmm1, dword": ("c5fa1008", 4),
    "vmovsd qword, xmm1": ("c4c17b1109", 8),
    "vmovups ymm0, ymmword": ("c5fc1000", 32),
    "vmovups xmm0, xmmword": ("c481781044ac40", 16),
    "vmovdqu8 zmm0, zmmword": ("62f17f486f00", 64),
    "vmovdqu64 ymm17, ymmword": ("62e1fe286f08", 32),
    "vmovss xmm17, dword (EVEX)": ("62e17e081008", 4),
    "vfmadd231ps ymm0, ymm1, ymmword": ("c4e275b800", 32),
    "mulss xmm1, dword fs:": ("64f30f5908", 4),
    "cvtsi2sd xmm0, qword": ("f2480f2a00", 8),
    "mov byte, 5": ("c60005", 1),
    "mov byte, r8b": ("448800", 1),
    "mov word, 5": ("66c7000500", 2),
    "mov dword, eax": ("8900", 4),
    "mov qword, r9": ("4c8908", 8),
    "add qword, 3": ("4883400803", 8),
    "movzx eax, byte": ("0fb600", 1),
    "sete byte": ("0f9400", 1),
    "rep movs byte": ("f3a4", 1),
    "rep stos qword": ("f348ab", 8),
    "lock xadd qword": ("f0480fc110", 8),
    "push qword": ("ff30", 8),
    "fld tbyte (10)": ("db28", 16),
    "movzx eax, word (2)": ("0fb700", 8),
    "movsxd rax, dword (4)": ("486300", 8),
    "vfmadd231ss xmm0, xmm1, dword (4)": ("c4e271b900", 16),
    "cmpxchg16b (16)": ("480fc708", 4096),
    "fxsave (512)": ("0fae00", 4096),
}


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's instructions")
def test_an_instruction_says_how_far_it_reaches(tmp_path: Path) -> None:
    source, tool = Path(__file__).parent / "record" / "operand.cpp", tmp_path / "operand"
    subprocess.run(["c++", "-std=c++17", f"-I{NATIVE}", source, "-o", tool], check=True)
    codes = [code for code, _ in INSTRUCTIONS.values()]
    done = subprocess.run([tool, *codes], capture_output=True, text=True, check=True)
    found = dict(zip(INSTRUCTIONS, map(int, done.stdout.split()), strict=True))
    assert found == {name: nbytes for name, (_, nbytes) in INSTRUCTIONS.items()}
