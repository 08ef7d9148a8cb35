"""Importers: what IREE and ExecuTorch wrote themselves, and what is left of it when it is damaged.

The dump was printed by iree-compile 3.13.0, the .pte files were written by ExecuTorch's own flatc
and schema (1.5.1) from programs of ours: y = x + (a + a), a = x * x, laid out in three ways, and a
sum of two conditions' results (`siblings`).
"""

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ggraph.errors import FormatError
from ggraph.plan import Plan
from ggraph.record.executorch import plan_from_executorch
from ggraph.record.iree import functions, plan_from_iree
from ggraph.verify import CounterExample, examine
from models.cli.app import app

RECORDED = Path(__file__).parent / "recorded"


def dump(name: str) -> str:
    return gzip.decompress((RECORDED / f"{name}.dump.mlir.gz").read_bytes()).decode()


DUMP = dump("four_products")


def kind(plan: Plan) -> str:
    verdict = examine(plan)
    return verdict.kind if isinstance(verdict, CounterExample) else "proved"


def test_iree_has_the_streams_that_its_regions_ask_for() -> None:
    plan = plan_from_iree(DUMP)
    products = [c for c in plan.schedule if "matmul" in c.label]
    assert functions(DUMP) == ["main"] and len(products) == 4
    assert products[0].actor != products[1].actor  # the two members of the concurrent region
    assert products[2].actor == products[3].actor
    assert kind(plan) == "proved"
    assert plan_from_iree(DUMP, "main").schedule.commands == plan.schedule.commands


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("wo %arg7[%c16384 for", "wo %arg7[%c0 for", "race"),  # two members write the same bytes
        ("ro %arg3[%c0 for %c16384] : !stream.resource<external>{%c16384},\n"
         "          ro %arg5", "ro %arg7[%c0 for %c16384] : x,\n          ro %arg5", "race"),
        ("dealloca on(#hal.device.affinity<@__device_0>) await(%4) => ",
         "dealloca on(#hal.device.affinity<@__device_0>) ", "race"),  # given back too early
        ("wo %arg6[%c16384 for", "wo %arg6[%c0 for", "alias"),  # a product over its own source
    ],
)  # fmt: skip
def test_a_tampered_schedule_is_refused(old: str, new: str, verdict: str) -> None:
    assert DUMP.count(old) == 1
    assert kind(plan_from_iree(DUMP.replace(old, new))) == verdict


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("for %c16384]", "for %arg0_size]", "dynamic"),
        ("      stream.cmd.concurrent {", "      scf.if %x {", "unknown"),
        ("    %4 = stream.cmd.execute", "    cf.br ^bb1\n    %4 = stream.cmd.execute", "control"),
        ("ro %arg3[", "ro %arg99[", "unknown resource"),
        ("wo %arg7[%c0 for %c16384]", "wo %arg7[%c16384 for %c999]", "no constant"),
        ("%c16384 = arith.constant 16384", "%c16384 = arith.constant 1638400", "damaged"),
        ("%c16384 = arith.constant 16384", f"%c16384 = arith.constant {'9' * 5000}", "no constant"),
    ],
)
def test_iree_that_cannot_be_judged_is_refused(old: str, new: str, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        plan_from_iree(DUMP.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        # A copy into a tensor that a product of the same concurrent region still reads.
        ("update_in_place-20230815", "race"),
        ("update_in_place-20231004", "proved"),
        # Two results belong side by side in one buffer; their reader looks elsewhere.
        ("joined_results-3.0.0", "unwritten"),
        ("joined_results-3.2.0", "proved"),
    ],
)
def test_old_faults_of_iree_are_found_and_their_repairs_proved(name: str, verdict: str) -> None:
    assert kind(plan_from_iree(dump(name))) == verdict


@pytest.mark.parametrize("others", [("%0", "%0"), ("%0", "%q"), ("%q", "%0")])
def test_resources_that_are_parts_of_one_another_end(others: tuple[str, str]) -> None:
    """No way from part to whole goes round."""
    lines = "".join(
        f"    {a} = stream.resource.subview {b}[%c0]\n" for a, b in (others, others[::-1])
    )
    at = DUMP.index("    %4 = stream.cmd.execute")
    plan_from_iree(DUMP[:at] + lines + DUMP[at:])


def test_as_many_come_from_an_await_as_go_in() -> None:
    at = DUMP.index("    %4 = stream.cmd.execute")
    line = "    %a, %b = stream.timepoint.await %4 => %c : x\n"
    with pytest.raises(FormatError, match="1 resources are awaited as 2"):
        plan_from_iree(DUMP[:at] + line + DUMP[at:])


def test_iree_functions_are_named() -> None:
    for text, function in (("", None), (DUMP, "other")):
        with pytest.raises(FormatError, match="no function"):
            plan_from_iree(text, function)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("lifetimes", "proved"), ("lifetimes_short", "stale"), ("overlapping_result", "alias")],
)
def test_executorch_lifetimes(name: str, verdict: str) -> None:
    plan = plan_from_executorch((RECORDED / f"{name}.pte").read_bytes())
    assert kind(plan) == verdict
    assert [c.label for c in plan.schedule if c.do.value == "launch"] == [
        "aten::mul.out",
        "aten::add.out",
        "aten::add.out",
    ]


@pytest.mark.parametrize("path", ["tt", "tf", "ft", "ff"])
def test_a_branch_over_what_a_branch_before_it_handed_on(path: str, tmp_path: Path) -> None:
    """ExecuTorch #21490: what the second condition's branch makes lies on what the first's made."""
    taken = [b == "t" for b in path]
    for name, verdict in (("siblings", "stale"), ("siblings_apart", "proved")):
        data = (RECORDED / f"{name}.pte").read_bytes()
        plan = plan_from_executorch(data, branches=taken)
        assert kind(plan) == verdict
        launched = [c.label for c in plan.schedule if c.do.value == "launch"]
        wanted = ["aten::mul.out" if t else "aten::add.out" for t in taken]
        assert launched == [*wanted, "aten::add.out"]
        with pytest.raises(FormatError, match="say whether"):
            plan_from_executorch(data, branches=taken[:1])
    out = str(tmp_path / "plan.json")
    asked = ["import", "executorch", str(RECORDED / "siblings.pte"), "--branches", path]
    assert CliRunner().invoke(app, [*asked, "--out", out]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", out]).exit_code == 1


def test_damaged_programs_are_refused_or_read() -> None:
    rng, refused = random.Random(5), 0
    whole = [(RECORDED / f"{name}.pte").read_bytes() for name in ("lifetimes", "siblings")]
    for _ in range(500):
        data = bytearray(rng.choice(whole))
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randint(1, 3)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            examine(plan_from_executorch(bytes(data), branches=[True, False]))
        except FormatError:
            refused += 1
    assert 100 < refused < 500
    lines, word = DUMP.splitlines(), r"%\w+|\b\d+\b"
    words = re.findall(word, DUMP)
    for _ in range(300):
        damaged = list(lines)
        if rng.random() < 0.5:
            del damaged[rng.randrange(len(damaged))]
        else:  # one name or number for another
            i = rng.randrange(len(damaged))
            damaged[i] = re.sub(word, lambda _: rng.choice(words), damaged[i])
        try:
            examine(plan_from_iree("\n".join(damaged)))
        except FormatError:
            refused += 1


def test_what_is_imported_is_what_verify_reads(tmp_path: Path) -> None:
    dump, plan = tmp_path / "dump.mlir", tmp_path / "plan.json"
    dump.write_text(DUMP)
    done = CliRunner().invoke(app, ["import", "iree", str(dump), "--out", str(plan)])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["verify", str(plan)]).exit_code == 0
    done = CliRunner().invoke(app, ["import", "executorch", str(RECORDED / "lifetimes_short.pte")])
    plan.write_text(done.stdout)
    assert json.loads(done.stdout)["mode"] == "executorch"
    assert CliRunner().invoke(app, ["verify", str(plan)]).exit_code == 1
