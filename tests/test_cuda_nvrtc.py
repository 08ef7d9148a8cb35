"""Every kernel source and template instance compiles for sm_80 and sm_90, without a GPU."""

import sys
from pathlib import Path

import pytest

from ggraph import dtype
from ggraph.backends.cuda import kernels, nvrtc
from ggraph.errors import BackendError

ARCHES = ("sm_80", "sm_90")


def need_nvrtc() -> None:
    try:
        nvrtc.library()
    except BackendError as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("unit", kernels.units(), ids=str)
def test_a_unit_compiles(unit: kernels.Unit, arch: str) -> None:
    need_nvrtc()
    code = nvrtc.compile_source(
        f"{unit.source}.cu", kernels.text(f"{unit.source}.cu"), kernels.headers(), arch,
        unit.defines,
    )  # fmt: skip
    assert code.startswith(b"\x7fELF")
    for kernel in kernels.signatures(unit.source):
        assert kernel.encode() in code, f"{unit}: no {kernel}"


def test_the_count_of_what_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    units = kernels.units()
    count = sum(len(kernels.signatures(u.source)) for u in units)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(units)} units, {count} kernels for {' and '.join(ARCHES)}\n")
    weights = {t.name for t in dtype.ALL if t.is_block} | {"f32", "f16", "bf16"}
    assert {u.type for u in units if u.source == "matmul"} == weights
    assert len(units) == len(set(units)) and count >= len(units)


def test_the_page_names_every_kernel() -> None:
    """docs/cuda.md lists which kernels run as host C++."""
    page = (Path(__file__).parent.parent / "docs" / "cuda.md").read_text()
    few = {f"mul_mat_{m}" for m in range(2, 8)}  # "`mul_mat_1` to `mul_mat_8`"
    assert not [k for k in set(kernels.homes()) - few if f"`{k}`" not in page]
    assert f"{len(kernels.units())} sources and template instances" in page


def test_a_kernel_that_does_not_compile_names_its_line() -> None:
    need_nvrtc()
    with pytest.raises(
        BackendError, match=r"^broken\.cu does not compile for sm_80: .*\(2\): error"
    ):
        nvrtc.compile_source("broken.cu", "\nint x = y;\n", {}, "sm_80", "")


def test_signatures_are_read_from_the_sources() -> None:
    by_name = {p.name: p.format for p in kernels.signatures("norm")["rms_norm"]}
    assert by_name == {
        "x": "P", "w": "P", "y": "P", "n": "q", "shape": "4q", "strides": "4q", "eps": "f",
        "type": "i",
    }  # fmt: skip
    assert set(kernels.signatures("rope")) == {"rope", "rope_set_rows"}
    assert set(kernels.signatures("lanes")) == {f"mul_mat_{m}" for m in range(1, 9)}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(BackendError, match="kernel delay: arguments duration, seconds"):
        kernels.packed("delay", {"seconds": 1})
