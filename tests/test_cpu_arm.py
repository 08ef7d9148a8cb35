"""What is compiled for a 64-bit Arm, read where there is none. `scripts/check_arm.py` runs it."""

import re

import pytest

from ggraph.backends.cpu.codegen import isa
from ggraph.backends.cpu.codegen.compiler import assembly
from ggraph.backends.cpu.codegen.isa import Isa, llvm
from ggraph.backends.cpu.lowering import lower  # noqa: F401  (all kernels are there then)

TRIPLE = "aarch64-unknown-linux-gnu"
CALL = re.compile(r"^\tbl\t(\S+)", re.M)


@pytest.fixture(scope="module", autouse=True)
def for_arm() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        llvm.Target.from_triple(TRIPLE)
    except RuntimeError:
        pytest.skip("this LLVM has no code generator for Arm")


@pytest.mark.parametrize(("dots", "chosen"), [(True, "sdot"), (False, "plain")])
def test_dot_products_are_seen_where_llvm_does_not_tell_of_them(
    dots: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM names some features of an Arm under Linux, and these are not among them."""
    told = type(llvm.get_host_cpu_features())({"neon": True, "lse": True, "sve": False})
    monkeypatch.setattr(llvm, "get_process_triple", lambda: TRIPLE)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "neoverse-n1")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: told)
    monkeypatch.setattr(isa, "_arm_has_dots", lambda: dots)
    found = isa.detect()
    assert found.dot == chosen and found.is_arm and not found.is_x86
    assert ("+dotprod" in found.features.split(",")) == dots


@pytest.mark.parametrize(
    "kernel", ["matmul_n4k", "matmul_n6k", "gated_swiglu_n4k", "matmul_f16", "attention_f16"]
)
def test_kernels_are_whole_instructions_of_an_arm(kernel: str) -> None:
    """Numbers of half the bits, exponentials and dot products of bytes are computed in place: no
    library is called for them."""
    text = assembly(kernel, Isa(TRIPLE, "neoverse-n1", "+neon,+fp-armv8,+dotprod,+lse", "sdot"))
    assert [name for name in CALL.findall(text) if not name.startswith(f"{kernel}_")] == []
    assert "\tfmla\tv" in text
    assert ("\tsdot\tv" in text) == (kernel not in ("matmul_f16", "attention_f16"))
