"""Every kernel source compiles for sm_80 and sm_90, to machine code that is no worse than it was:
registers, spills, loads, loops. No GPU is needed. Every template instance was compiled for every
architecture by `scripts/machine_code.py`, which notes what it has seen; what has changed since is
seen here."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph import dtype
from ggraph.backends.cuda import kernels, nvrtc
from ggraph.errors import BackendError
from ggraph.formats import grids

ARCHES = ("sm_80", "sm_90")
sys.path.append(str(Path(__file__).parent.parent / "scripts"))

machine: Any = importlib.import_module("machine_code")


def need_nvrtc() -> None:
    try:
        nvrtc.library()
    except BackendError as error:
        pytest.skip(f"NVRTC is not installed: {error}")


def one_of_each() -> list[kernels.Unit]:
    """A unit of each source: of those whose loops are looked at where there is one."""
    return [*{u.source: u for u in (*kernels.units(), *machine.GATED)}.values()]


def same_compiler() -> bool:
    return bool(machine.table()["nvrtc"] == machine.version())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("unit", one_of_each(), ids=str)
def test_a_source_compiles(unit: kernels.Unit, arch: str) -> None:
    """And what is looked at has no more spills, instructions of the inner loop or narrow loads than
    the table says."""
    need_nvrtc()
    code = machine.checked(unit, arch)
    assert code.startswith(b"\x7fELF")
    if unit in machine.GATED and same_compiler() and machine.disassembler() is not None:
        assert machine.worse(str(unit), arch, machine.figures(code)) == []


def test_every_instance_compiles_or_has_as_it_stands() -> None:
    """By this compiler, for all architectures, or else once more for one of them in turn."""
    need_nvrtc()
    changed = machine.stale()
    if same_compiler():
        assert not changed, "python scripts/machine_code.py --write compiles these, and says so"
    for i, unit in enumerate(changed):
        machine.checked(unit, ARCHES[i % len(ARCHES)])


def test_a_changed_source_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only a header or the compiler changed; and what is wrong with it."""
    need_nvrtc()
    unit, key = kernels.Unit("softmax"), machine.digest(kernels.Unit("softmax"))
    monkeypatch.setattr(kernels, "headers", lambda _: {"delay.cuh": "int other;"})
    assert machine.digest(unit) != key
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "version", lambda: (1, 0))
    assert machine.digest(unit) != key
    monkeypatch.undo()
    assert machine.digest(unit) == key
    monkeypatch.setattr(machine, "MOST_REGISTERS", 4)
    with pytest.raises(AssertionError, match=r"^softmax.cu sm_90: .*too many registers: {'"):
        machine.checked(unit, "sm_90")
    monkeypatch.setattr(kernels, "signatures", lambda _: {"another": ()})
    with pytest.raises(AssertionError, match=r"^softmax.cu sm_90: kernels \['"):
        machine.checked(unit, "sm_90")


def test_a_unit_whose_blocks_begin_late_compiles() -> None:
    """What a race within one launch is shown with; its kernels are the same, but for the wait."""
    need_nvrtc()
    unit = kernels.Unit("lanes", "f32")
    late = kernels.in_parts(unit)
    assert kernels.declared(late.text) == kernels.declared(unit.text)
    assert late.text.count("pass_unless_first();") == len(kernels.declared(unit.text))
    code = kernels.code(late, "sm_90")
    assert code.startswith(b"\x7fELF") and code != kernels.code(unit, "sm_90")
    with pytest.raises(BackendError, match=r"empty.cu: no kernel that could be run in parts"):
        kernels.in_parts(kernels.Unit("empty", own="// KERNEL"))


def test_every_kernel_waits_for_what_it_is_launched_behind() -> None:
    """Also those from outside, wherever they stand; where one says so itself, it is left."""
    for unit in kernels.units():
        assert unit.text.count(kernels.FOLLOW) == len(kernels.signatures(unit.source)), unit
    two = "  KERNEL one(int n) { n; }\nKERNEL_OF(32, 1)\ntwo(int n)\n{ n; }"
    whole = kernels.Unit("own", own=two).text
    assert whole == two.replace("{", "{ FOLLOW();")
    assert kernels.Unit("own", own=whole).text == whole
    for own in ("FOLLOW();", "if (n) { n; } FOLLOW(); FOLLOW();"):
        some = two.replace("n; }", f"{own} }}", 1)
        assert kernels.Unit("own", own=some).text == some.replace("\n{", "\n{ FOLLOW();")
    with pytest.raises(BackendError, match=r"^kernel one: expected its body in braces behind"):
        _ = kernels.Unit("own", own="KERNEL one(int n) __attribute__((hot)) { n; }").text


@pytest.mark.parametrize(
    "words",
    [
        "// FOLLOW(); is put here by ggraph\n{0}",
        "// all on one \\\nFOLLOW(); }}\n{0}",
        "{0}  // FOLLOW();",
        "/* FOLLOW();\n}} */ {0}",
        'const char* text = "// \\" FOLLOW(); }}"; {0}',
        'const char* text = R"a(" FOLLOW(); }})" )a"; {0}',
        "const char quote = '\"', brace = '}}'; int many = 1'000; {0} // FOLLOW();",
        "DONT_FOLLOW(); {0}",
    ],
)
def test_comments_and_strings_are_no_statements(words: str) -> None:
    """They neither stand for a kernel's wait nor end its body."""
    for before, behind in (("", "n;"), ("FOLLOW(); ", "n;"), ("", "FOLLOW();")):
        told = before + words.format(behind)
        source = f"KERNEL f(int n) {{{told}\n}}\nKERNEL g(int n) {{ FOLLOW(); }}"
        lacks = "" if before or behind != "n;" else " FOLLOW();"
        assert kernels.Unit("own", own=source).text == source.replace("{", "{" + lacks, 1)


def test_comments_about_kernels_are_none() -> None:
    head = "KERNEL f(const float* x,  // values (of rows)\n  int n /* of them) */)  // note\n{"
    source = f"// KERNEL g(odd x) {{\n/* KERNEL h() {{ FOLLOW(); */ {head} n; }}"
    assert [p.name for p in kernels.declared(source)["f"]] == ["x", "n"]
    assert list(kernels.declared(source)) == ["f"]
    assert kernels.Unit("own", own=source).text == source.replace(head, f"{head} FOLLOW();")
    late = kernels.in_parts(kernels.Unit("own", own=source)).written
    assert late.index("g(odd") < late.index("delay.cuh") < late.index("KERNEL f")


def test_a_macro_has_one_meaning() -> None:
    """No source defines what a header does, but for what that leaves to it (under #ifndef)."""

    def defined(text: str) -> set[str]:
        return {*re.findall(r"^ *#define +(\w+)", text, re.M)}

    left = {name for h in kernels.headers().values() for name in re.findall(r"#ifndef (\w+)", h)}
    shared = {name for h in kernels.headers().values() for name in defined(h)} - left
    sources = [*kernels.PLAIN_SOURCES, *kernels.TEMPLATES]
    assert not {s: twice for s in sources if (twice := defined(kernels.text(f"{s}.cu")) & shared)}


def test_grids_go_where_they_are_looked_up() -> None:
    """And into no other unit; four numbers are half a word, by which an instruction chooses."""
    weights = {name for name in kernels.WEIGHTS if kernels.GRID in kernels.headers(name)}
    assert weights == set(grids.OF) and kernels.GRID not in kernels.headers()
    for name, grid in grids.OF.items():
        declared, _, numbers = kernels.headers(name)[kernels.GRID].partition(" = {")
        words = np.array(numbers.removesuffix("};\n").split(", "), np.uint16)
        places = words[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
        assert np.array_equal(places.reshape(-1, grid.width), grids.places(grid)), name
        assert declared == f"TABLE u16 PLACES[{len(words)}]"


def test_waiting_is_an_instruction_where_launches_begin_early() -> None:
    """And nowhere else: older GPUs have none."""
    need_nvrtc()
    if machine.disassembler() is None:
        pytest.skip("nvdisasm is not installed")
    for arch, count in (("sm_80", 0), ("sm_90", 1), ("sm_100", 1)):
        code = kernels.code(kernels.Unit("parts"), arch)
        for kernel, lines in machine.instructions(code).items():
            waits = sum("ACQBULK" in line for line in lines)
            assert waits == count, (arch, kernel)


def test_worse_code_is_seen() -> None:
    """By every figure; and the table knows every kernel, none of which spills."""
    unit, arch = "tiles.cu WEIGHT=bf16", "sm_90"
    known = machine.table()["units"][f"{unit} {arch}"]
    assert machine.worse(unit, arch, known) == [] and known["mul_mat_tile"]["wide"] >= 4
    for key, by in (("registers", 1), ("frame", 8), ("local", 1), ("loop", 1), ("wide", -1)):
        changed = {**known, "mul_mat_tile": {**known["mul_mat_tile"], key: 0}}
        changed["mul_mat_tile"][key] = known["mul_mat_tile"][key] + by
        (line,) = machine.worse(unit, arch, changed)
        assert f"mul_mat_tile: {key} " in line
    assert "kernels" in machine.worse(unit, arch, {})[0]
    units = machine.table()["units"]
    assert set(units) == {f"{u} {a}" for u in machine.GATED for a in machine.ARCHES}
    spilling = {n for n, unit in units.items() for k in unit.values() if k["local"]}
    assert not spilling


def test_the_count_of_what_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    units = kernels.units()
    count = sum(len(kernels.signatures(u.source)) for u in units)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(units)} units, {count} kernels\n")
    weights = {t.name for t in dtype.ALL if t.is_block} | {"f32", "f16", "bf16"}
    assert {u.type for u in units if u.source == "matmul"} == weights
    assert len(units) == len(set(units)) and count >= len(units)


def test_the_page_names_every_kernel() -> None:
    """docs/cuda.md lists which kernels run as host C++."""
    page = (Path(__file__).parent.parent / "docs" / "cuda.md").read_text()
    (listed,) = (p for p in page.split("\n\n") if p.startswith("Every kernel but `delay` runs in"))
    few = {f"mul_mat_{m}" for m in range(2, 8)}  # "`mul_mat_1` to `mul_mat_8`"
    assert {*re.findall(r"`(\w+)`", listed)} == kernels.homes().keys() - few
    assert f"{len(kernels.units())} sources and template instances" in page


def test_what_is_explained_of_mutants_stands_in_the_sources() -> None:
    mutants: Any = importlib.import_module("mutate_kernels")
    gone = [(f, part) for f, part, _ in mutants.EXPLAINED if part not in kernels.text(f)]
    assert mutants.EXPLAINED and not gone


def test_a_kernel_that_does_not_compile_names_its_line() -> None:
    need_nvrtc()
    with pytest.raises(
        BackendError, match=r"^broken\.cu does not compile for sm_80: .*\(2\): error"
    ):
        nvrtc.compile_source("broken.cu", "\nint x = y;\n", {}, "sm_80", "")


def test_signatures_are_read_from_the_sources() -> None:
    by_name = {p.name: p.format for p in kernels.signatures("norm")["rms_norm_odd"]}
    assert by_name == {
        "x": "P", "w": "P", "y": "P", "parts": "P", "codes": "P", "n": "q",
        "shape": "4q", "strides": "4q", "eps": "f", "type": "i",
    }  # fmt: skip
    assert set(kernels.signatures("rope")) == {"rope", "rope_set_rows"}
    assert set(kernels.signatures("lanes")) == {f"mul_mat_{m}" for m in range(1, 9)}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(BackendError, match="kernel delay: arguments duration, seconds"):
        kernels.packed("delay", {"seconds": 1})
