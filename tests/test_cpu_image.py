"""Kernels as images: what they compute, what is refused, what is loaded again, and without LLVM."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph import kept
from ggraph.backends.cpu.codegen import isa, jit
from ggraph.backends.cpu.codegen.compiler import compile_object
from ggraph.backends.cpu.codegen.image import HEADER, Unlinkable, link, map_image
from ggraph.backends.cpu.codegen.isa import Isa, detect, host
from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.codegen.simd import KERNELS
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler

LINUX_X86 = host().is_x86 and sys.platform == "linux"
only_elf = pytest.mark.skipif(not LINUX_X86, reason="images are made of x86-64 ELF objects")

CHILD = """
import json, sys
from ggraph.backends.cpu.codegen.jit import Jit
from ggraph.backends.cpu.runtime.pool import Pool
pool = Pool(2)
pool.jit.address("matmul_n4m")
print(json.dumps([pool.jit.compiled, "llvmlite.binding" in sys.modules]))
"""

SCATTERED = """
import ctypes
from ggraph.backends.cpu.lowering import lower
from ggraph.backends.cpu.codegen.compiler import Linker, compile_object
from ggraph.backends.cpu.codegen.isa import Isa, host
from ggraph.backends.cpu.codegen.simd import KERNELS
old = Isa(host().triple, "x86-64", "", "plain")
names = "soft_max", "swiglu", "rms_norm"
objects = {name: compile_object(KERNELS[name], old) for name in names}
system = ctypes.CDLL(None)
system.mmap.restype = ctypes.c_void_p
system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
def taken(nbytes):  # addresses, and no memory
    return system.mmap(None, nbytes, 0, 0x4022, -1, 0)
low = taken(1 << 32)  # what follows lies below, as soon as the gaps above are full
for size in (1 << 24, 1 << 20, 1 << 16, 1 << 14, 1 << 12):
    while taken(size) > low:
        pass
gaps = []
for _ in range(200):
    gaps.append(taken(4096))
    taken(3 << 30)
for gap in gaps:
    system.munmap(gap, 4096)
linkers = [Linker(old) for _ in range(20)]
for linker in linkers:
    for name, code in objects.items():
        assert linker.load(name, code)
"""


def outputs(kernels: Jit) -> list[bytes]:
    """Bits that three kernels with constants and tables in their objects write."""
    x = np.linspace(-9, 9, 64, dtype=np.float32).reshape(2, 32)
    y, z, scaled = (np.zeros_like(x) for _ in range(3))
    pool, asm = Pool(1, kernels), Assembler(kernels)
    rows: dict[str, Any] = {"m": 2, "n": 32}
    asm.add("swiglu", a=x, b=x, y=y, **rows, **{"as": 128, "bs": 128, "ys": 128})
    asm.add("soft_max", x=x, mask=0, y=z, **rows, xs=128, ms=0, ys=128, scale=1.0)
    asm.add("rms_norm", x=x, w=0, y=scaled, **rows, xs=128, ys=128, eps=1e-5)
    pool.run(asm.freeze())
    pool.close()
    return [a.tobytes() for a in (y, z, scaled)]


def unlinkable(code: bytes, entry: str) -> bytes:
    raise Unlinkable(f"{entry}: {len(code)} bytes")


@only_elf
def test_images_compute_the_bits_of_llvms_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = outputs(Jit(folder=tmp_path / "images"))
    assert {p.suffix for p in (tmp_path / "images").iterdir()} == {".image"}
    monkeypatch.setattr(jit, "link", unlinkable)
    objects = Jit(folder=tmp_path / "objects")
    assert outputs(objects) == images
    assert {p.suffix for p in (tmp_path / "objects").iterdir()} == {".o"}
    again = Jit(folder=tmp_path / "objects")
    assert outputs(again) == images
    assert not again.compiled


@only_elf
def test_an_image_whose_entry_lies_outside_is_not_mapped() -> None:
    image = link(compile_object(KERNELS["soft_max"], host()), "soft_max")
    assert map_image(image).address
    for entry in (0, HEADER - 1, len(image), 1 << 62, (1 << 64) - 1):
        with pytest.raises(Unlinkable, match=f"entry {entry} of"):
            map_image(struct.pack("<Q", entry) + image[8:])
    for short in (b"", image[:7], image[:HEADER]):
        with pytest.raises(Unlinkable, match="entry"):
            map_image(short)


@only_elf
def test_a_system_without_such_memory_has_llvm_load_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outputs(Jit(folder=tmp_path / "images"))
    monkeypatch.delattr("os.memfd_create")
    for first in (True, False):
        there = Jit(folder=tmp_path / "objects")
        assert outputs(there) == expected
        assert bool(there.compiled) is first


@only_elf
def test_what_an_image_cannot_hold_is_refused(tmp_path: Path) -> None:
    code = compile_object(KERNELS["soft_max"], host())
    with pytest.raises(Unlinkable, match="no function 'other'"):
        link(code, "other")
    for bad in (b"", b"\x7fELF" + bytes(80), code[:17] + b"\x07" + code[18:]):
        with pytest.raises(Unlinkable):
            link(bad, "soft_max")
    absolute = code.replace(struct.pack("<I", 2), struct.pack("<I", 1))  # PC32 becomes an address
    with pytest.raises((Unlinkable, struct.error, IndexError)):
        link(absolute, "soft_max")
    old = Isa(host().triple, "x86-64", "", "plain")  # calls the library's fused multiply-add
    with pytest.raises(Unlinkable, match="relocation"):
        link(compile_object(KERNELS["soft_max"], old), "soft_max")
    there = Jit(old, tmp_path)
    assert outputs(there) == outputs(Jit(folder=tmp_path / "host"))
    assert ".o" in {p.suffix for p in tmp_path.iterdir()}


@only_elf
def test_a_second_run_needs_no_llvm(tmp_path: Path) -> None:
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", CHILD], check=True, capture_output=True, text=True,
                cwd=Path(__file__).parent.parent, env={"GGRAPH_CACHE": str(tmp_path)},
            ).stdout
        )
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0][0] and runs[0][1]
    assert runs[1] == [[], False]


def test_the_processor_is_noted_and_a_note_of_another_version_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    monkeypatch.delenv("GGRAPH_VECTORS", raising=False)  # noted is all that the processor has
    found, key = detect(), isa._telling()
    for content in (None, b"{", b'{"triple": 1}', b"\xff", b"[]"):
        host.cache_clear()
        if content is not None and key is not None:
            kept.write(kept.folder("cpu"), isa.NOTE, key, content)
        assert host() == found
        assert key is None or isa._noted(key) == found
    host.cache_clear()


@only_elf
def test_objects_are_loaded_where_addresses_are_scattered() -> None:
    """As in a process that has lived long: gaps of a page lie gigabytes apart."""
    command = [sys.executable, "-c", SCATTERED]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-500:]
