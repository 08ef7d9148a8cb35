"""Sums of the innermost loops stay in registers. One that is written to the stack and read again in
the same loop waits for itself, which once cost attention a third of its speed; its bits are right
all the same, so that no other test sees it."""

import re
from collections.abc import Iterator

import pytest

from ggraph.backends.cpu import lower  # noqa: F401: all kernels are there then
from ggraph.backends.cpu.compiler import assembly
from ggraph.backends.cpu.isa import Isa, host

BASIC = "+avx2,+fma,+f16c"
WIDE = BASIC + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni"
TARGETS = {"avx2": ("znver3", BASIC, "avx2"), "avx512": ("icelake-server", WIDE, "vnni")}
LABEL = re.compile(r"^(\.?L\w+):")
JUMP = re.compile(r"^\tj\w+\s+(\.?L\w+)")
STORE = re.compile(r"^\tvmov\w+\t%[xyz]mm\d+, (-?\d*\((%r\w+)\))")


def inner_loops(text: str) -> Iterator[list[str]]:
    """Lines of each loop without another in it."""
    lines, labels = text.splitlines(), dict[str, int]()
    for i, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = i
        jump = JUMP.match(line)
        if jump and jump[1] in labels:
            body = lines[labels[jump[1]] : i + 1]
            if sum(bool(LABEL.match(x)) for x in body) == 1:
                yield body


def spilled(text: str) -> list[str]:
    """Places on the stack that an innermost loop of products both writes vectors to and reads."""
    frame = {"%rsp", "%rbp", *re.findall(r"\tmovq\t%rsp, (%r\w+)", text)}
    found = list[str]()
    for body in inner_loops(text):
        stores = [s for line in body if (s := STORE.match(line)) and s[2] in frame]
        if any("vfmadd" in line for line in body):
            read = [line for line in body if not STORE.match(line)]
            found += [s[1] for s in stores if any(s[1] in line for line in read)]
    return found


@pytest.mark.skipif(not host().is_x86, reason="reads assembly of x86")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["attention_f16", "attend_chunks_f16", "merge_chunks"])
def test_sums_stay_in_registers(kernel: str, target: str) -> None:
    text = assembly(kernel, Isa(host().triple, *TARGETS[target]))
    assert any("vfmadd" in line for body in inner_loops(text) for line in body)
    assert spilled(text) == []
