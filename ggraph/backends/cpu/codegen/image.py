"""Compiled kernels as images: bytes that run wherever a page of memory begins.

LLVM hands out an ELF object, whose code and constants lie in sections and refer to one another by
distance. `link` lays them side by side and fills the distances in, once, when a kernel is compiled;
what is kept on disk then needs neither a linker nor LLVM (45 MB of memory), only memory to run in.
Objects with anything else in them (an outside function, a writable section, an address, another
processor or system) are refused with `Unlinkable`, and LLVM loads those itself.

Source: System V ABI, AMD64 supplement (ELF-64 object files). Legend of relocations: S address of
the symbol, A addend, P address of the place.
"""

import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np

HEADER = 64  # entry, zeros: sections behind it keep their alignment
ELF_X86_64 = b"\x7fELF\x02\x01\x01"
RELOCATABLE, X86_64 = 1, 62
PROGBITS, SYMTAB, RELA, NOBITS = 1, 2, 4, 8
WRITE, ALLOC = 1, 2
BY_DISTANCE = (2, 4)  # R_X86_64_PC32 and R_X86_64_PLT32: S + A - P in 32 bits
UNWIND = ".eh_frame"  # only debuggers and exceptions ask for it


class Unlinkable(Exception):
    """The object has something that an image cannot hold."""


@dataclass(frozen=True)
class Section:
    """A section header of an ELF object, with its bytes."""

    name: str
    kind: int
    flags: int
    link: int
    info: int
    align: int
    data: bytes

    @property
    def loaded(self) -> bool:
        """Whether a running program needs it."""
        return bool(self.flags & ALLOC) and self.name != UNWIND


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode("ascii", "replace")


def sections(code: bytes) -> list[Section]:
    """The sections of an x86-64 object. Unlinkable for any other file."""
    if len(code) < 64 or not code.startswith(ELF_X86_64):
        raise Unlinkable(f"not an ELF object of 64 bits: {code[:8]!r}")
    kind, processor = struct.unpack_from("<HH", code, 16)
    if (kind, processor) != (RELOCATABLE, X86_64):
        raise Unlinkable(f"ELF type {kind} for processor {processor}, expected 1 and {X86_64}")
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    table = code[rows[names][4] :]
    return [
        Section(_text(table, r[0]), r[1], r[2], r[6], r[7], max(1, r[8]),
                b"" if r[1] == NOBITS else code[r[4] : r[4] + r[5]])
        for r in rows
    ]  # fmt: skip


def _placed(found: list[Section]) -> dict[int, int]:
    """Offset of each section that is loaded, behind the header."""
    at, places = HEADER, {}
    for i, s in enumerate(found):
        if not s.loaded:
            continue
        if s.kind != PROGBITS or s.flags & WRITE or s.align > HEADER:
            raise Unlinkable(f"{s.name}: type {s.kind}, flags {s.flags}, alignment {s.align}")
        at = -(-at // s.align) * s.align
        places[i], at = at, at + len(s.data)
    return places


@dataclass(frozen=True)
class Symbol:
    """A name's section and its offset there."""

    name: str
    section: int
    value: int


def _symbols(found: list[Section]) -> list[Symbol]:
    table = next((s for s in found if s.kind == SYMTAB), None)
    if table is None:
        raise Unlinkable("no symbols")
    names = found[table.link].data
    rows = struct.iter_unpack("<IBBHQQ", table.data)
    return [Symbol(_text(names, r[0]), r[3], r[4]) for r in rows]


def _relocate(out: bytearray, at: int, rows: bytes, known: list[int | None]) -> None:
    """Fill in the distances of one section, which lies at `at`."""
    for offset, info, addend in struct.iter_unpack("<QQq", rows):
        target, kind = known[info >> 32], info & 0xFFFFFFFF
        if kind not in BY_DISTANCE or target is None:
            raise Unlinkable(f"relocation of type {kind} at {offset}, target {target}")
        struct.pack_into("<i", out, at + offset, target + addend - (at + offset))


def link(code: bytes, entry: str) -> bytes:
    """The image of an object whose function `entry` is to be called. Unlinkable: see above."""
    found = sections(code)
    places, symbols = _placed(found), _symbols(found)
    known = [places[s.section] + s.value if s.section in places else None for s in symbols]
    start = {s.name: k for s, k in zip(symbols, known, strict=True)}.get(entry)
    if start is None:
        raise Unlinkable(f"no function {entry!r}")
    out = bytearray(max(at + len(found[i].data) for i, at in places.items()))
    for i, at in places.items():
        out[at : at + len(found[i].data)] = found[i].data
    for s in found:
        if s.kind == RELA and s.info in places:
            _relocate(out, places[s.info], s.data, known)
    struct.pack_into("<Q", out, 0, start)
    return bytes(out)


@dataclass(frozen=True, eq=False)
class Mapped:
    """A kernel in memory; it can be called at `address` as long as this lives."""

    address: int
    held: mmap.mmap


def map_image(image: bytes) -> Mapped:
    """An image ready to run, in memory of its own that no file stands behind. Unlinkable where the
    system gives none, or where the entry lies outside."""
    entry = int.from_bytes(image[:8], "little")
    if not HEADER <= entry < len(image):
        raise Unlinkable(f"entry {entry} of an image of {len(image)} bytes")
    try:
        file = os.memfd_create("ggraph")
        try:
            if os.write(file, image) < len(image):
                raise OSError(f"{len(image)} bytes are more than a file may have")
            held = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
        finally:
            os.close(file)
    except (OSError, AttributeError) as error:  # AttributeError: no such call
        raise Unlinkable(f"no memory to run it in: {error}") from None
    return Mapped(int(np.frombuffer(held, np.uint8).ctypes.data) + entry, held)
