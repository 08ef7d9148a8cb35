"""Sums of the innermost loops stay in registers. One that is written to the stack and read again in
the same loop waits for itself, which once cost attention a third of its speed; its bits are right
all the same, so that no other test sees it."""

import re
from collections.abc import Iterator

import pytest

from ggraph.backends.cpu.codegen.compiler import assembly
from ggraph.backends.cpu.codegen.isa import Isa, host
from ggraph.backends.cpu.kernels.passes import ABREAST, ABREAST_ROWS
from ggraph.backends.cpu.lowering import lower  # noqa: F401  (all kernels are there then)

BASIC = "+avx2,+fma,+f16c"
WIDE = BASIC + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
TARGETS = {"avx2": ("znver3", BASIC, "avx2"), "avx512": ("icelake-server", WIDE, "vnni")}
INTEL = {  # what is asked for ahead differs by maker, and with it who has which register
    "haswell": ("haswell", BASIC, "avx2"), "icelake": TARGETS["avx512"],
    "alderlake": ("alderlake", BASIC + ",+avxvnni,+gfni", "vnni"),
}  # fmt: skip
LABEL = re.compile(r"^(\.?L\w+):")
JUMP = re.compile(r"^\tj\w+\s+(\.?L\w+)")
SHORT = 100  # lines: a turn of more takes longer than a vector's way over the stack, 12 cycles
STORE = re.compile(r"^\tvmov\w+\t(%[xyz]mm\d+), (-?\d*\((%r\w+)\))")


def inner_loops(text: str) -> Iterator[list[str]]:
    """Lines of each short loop without another in it."""
    lines, labels = text.splitlines(), dict[str, int]()
    for i, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = i
        jump = JUMP.match(line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] : i + 1]
            if sum(bool(LABEL.match(x)) for x in body) == 1 and len(body) <= SHORT:
                yield body


def spilled(text: str) -> list[str]:
    """Places on the stack through which an innermost loop of products passes a vector on from one
    turn to the next."""
    frame = {"%rsp", "%rbp", *re.findall(r"\tmovq\t%rsp, (%rbx)", text)}
    found = list[str]()
    for body in inner_loops(text):
        for i, line in enumerate(body if any("vfmadd" in line for line in body) else []):
            store = STORE.match(line)
            if store is None or store[3] not in frame:
                continue
            before, rest = body[:i], [x for x in body[i + 1 :] if not x.endswith(store[2])]
            made = any(x.rstrip().endswith(store[1]) for x in before)
            if any(store[2] in x for x in before if not x.endswith(store[2])):
                found.append(store[2])  # read before it is written
            elif not made and any(store[2] in x for x in rest):
                found.append(store[2])  # what the turn before has left in a register
    return found


@pytest.mark.skipif(not host().is_x86, reason="reads assembly of x86")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["attention_f16", "attend_chunks_f16", "merge_chunks"])
def test_sums_stay_in_registers(kernel: str, target: str) -> None:
    text = assembly(kernel, Isa(host().triple, *TARGETS[target]))
    assert any("vfmadd" in line for body in inner_loops(text) for line in body)
    assert spilled(text) == []


@pytest.mark.skipif(not host().is_x86, reason="reads assembly of x86")
@pytest.mark.parametrize("target", INTEL)
@pytest.mark.parametrize("element", ["f16", "bf16", "f32"])
def test_products_of_floats_keep_their_sums(element: str, target: str) -> None:
    """On Intel's without 512 bits one of the twelve sums of halves went over the stack in each
    turn, for which prompts had half their speed; Zen 3's were asked for otherwise, and had none."""
    text = assembly(f"matmul_{element}", Isa(host().triple, *INTEL[target]))
    assert any("vfmadd" in line for body in inner_loops(text) for line in body)
    assert spilled(text) == []


@pytest.mark.skipif(not host().is_x86, reason="reads assembly of x86")
@pytest.mark.parametrize("layout", ["n4k", "n6k", "n5k", "n5z", "n4z", "b8"])
@pytest.mark.parametrize("family", ["matmul", "matmul_id"])
@pytest.mark.parametrize("cpu, routine", [("znver5", ""), ("icelake-server", "_opened_6:")])
def test_a_pass_of_most_rows_keeps_sums_and_addresses_in_registers(
    cpu: str, routine: str, family: str, layout: str
) -> None:
    """Vectors of 512 bits: 73 addresses were fetched from the stack for 96 products, and each sum
    came and went once a block; sums did so again when tiles came abreast. Intel's open blocks."""
    text = assembly(f"{family}_{layout}", Isa(host().triple, cpu, WIDE + ",+gfni", "vnni"))
    assert routine in text
    own = text.split(routine, 1)[1] if routine else text
    most = max(re.split(r"\n(?=\.?L\w+:)", own), key=lambda block: block.count("vpdpbusd"))
    lines = [x for x in most.splitlines() if x.startswith("\t")]
    assert sum("vpdpbusd" in x for x in lines) == 8 * ABREAST * ABREAST_ROWS
    stack = [x for x in lines if "(%rsp)" in x]  # rbp is a register like others in a routine
    assert len(stack) <= 12
    assert not [x for x in stack if "mm" in x.split("#")[0] and x.endswith(")")], "sums are stored"
