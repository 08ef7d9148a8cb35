"""The kernel sources: what there is to compile, and what each kernel takes.

A *unit* is one source file with its template type: `Unit("matmul", "q4_k")`. A kernel's signature
is read from its own source, so the host packs exactly what the kernel declares, by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from struct import calcsize, pack
from typing import Any

import numpy as np

from ggraph import dtype
from ggraph.backends.cuda import nvrtc
from ggraph.errors import BackendError
from ggraph.formats import grids

WEIGHTS: tuple[str, ...] = tuple(
    t.name for t in dtype.ALL if t.is_block or t in (dtype.F32, dtype.F16, dtype.BF16)
)
CACHES: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0")
TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "matmul": ("WEIGHT", WEIGHTS),
    "lanes": ("WEIGHT", ("f32", "f16", "bf16")),
    "tiles": ("WEIGHT", tuple(w for w in WEIGHTS if w != "f32")),
    "attention": ("CACHE", CACHES),
    "prompt": ("CACHE", CACHES),
}
PLAIN_SOURCES: tuple[str, ...] = (
    "delay", "draw", "elementwise", "experts", "mixtures", "norm", "parts", "products", "recurrent",
    "rope", "rows", "softmax", "sort",
)  # fmt: skip
HEADERS = (
    "common.cuh", "blocks.cuh", "codes.cuh", "delay.cuh", "iquants.cuh", "lanes.cuh", "pieces.cuh",
    "parts.cuh", "units.cuh",
)  # fmt: skip
GRID = "grid.cuh"  # made here, for units of types whose blocks hold indices of a grid's rows
FOLLOW = "FOLLOW();"  # of src/common.cuh: a launch that began early waits there
_HEAD = re.compile(
    r"\bKERNEL(?:_OF\([^)]*\))?\s+(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)(?:\s*(?P<brace>\{))?"
)
_NO_CODE = re.compile(  # comments; raw strings, strings, characters (no separator of digits)
    r"//(?:\\\n|[^\n])*|/\*.*?\*/|"
    r'R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
    re.DOTALL,
)
FORMATS = {"i64": "q", "int": "i", "float": "f", "double": "d", "Axes": "4q", "Matrices": "4P"}


@dataclass(frozen=True)
class Unit:
    """One thing to compile; `type` is the template's type, "" where there is none. A source from
    outside brings its text as its `own`."""

    source: str
    type: str = ""
    own: str = ""

    @property
    def text(self) -> str:
        """The source, each kernel of which begins by FOLLOW, unless it says it elsewhere."""
        return _following(self.written)

    @property
    def written(self) -> str:
        """The source as it stands in its file, or came from outside."""
        return self.own or text(f"{self.source}.cu")

    @property
    def defines(self) -> str:
        """The compiler's definitions, such as "WEIGHT=q4_k"."""
        return f"{TEMPLATES[self.source][0]}={self.type}" if self.type else ""

    def __str__(self) -> str:
        return f"{self.source}.cu" + (f" {self.defines}" if self.type else "")


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel; `format` is its `struct` code, "P" for pointers; `kind` its type,
    or what it points to."""

    name: str
    format: str
    kind: str


def in_parts(unit: Unit) -> Unit:
    """The same kernels, of which all blocks but the first begin late. Blocks of a small launch
    otherwise run at the same time, so that none writes before all others have read."""
    first = _HEAD.search(_bare(unit.written))
    if first is None:
        raise BackendError(f"{unit}: no kernel that could be run in parts")
    before, kernels = unit.written[: first.start()], unit.written[first.start() :]
    late = _begun_by("pass_unless_first();", kernels)
    return Unit(unit.source, unit.type, f'{before}\n#include "delay.cuh"\n{late}')


def _begun_by(statement: str, source: str) -> str:
    """The source, each of its kernels with a statement before all others, if not anywhere in it."""
    bare = _bare(source)
    says = re.compile(rf"\b{re.escape(statement)}")
    heads = [*_HEAD.finditer(bare)]
    ends = [*(h.start() for h in heads), len(bare)][1:]
    for head, end in reversed([*zip(heads, ends, strict=True)]):  # so that places stay
        begin = head.end()
        if head["brace"] and not says.search(_body(bare[begin:end])):
            source = f"{source[:begin]} {statement}{source[begin:]}"
    return source


def _bare(source: str) -> str:
    """The source with blanks for comments and for what is quoted: every place stays."""
    return _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def _body(after: str) -> str:
    """What stands behind an opening brace, up to the one that closes it."""
    depth = 1
    for brace in re.finditer("[{}]", after):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return after[: brace.start()]
    return after


@cache
def _following(source: str) -> str:
    """The source, each of its kernels with FOLLOW, which none may lack: see `early.py`."""
    bodies = {head["name"] for head in _HEAD.finditer(_bare(source)) if head["brace"]}
    if lost := ", ".join(declared(source).keys() - bodies):
        raise BackendError(f"kernel {lost}: expected its body in braces behind its parameters")
    return _begun_by(FOLLOW, source)


def units() -> tuple[Unit, ...]:
    """Everything that a GPU may need: all sources and template instances."""
    plain = [Unit(name) for name in PLAIN_SOURCES]
    made = [Unit(name, t) for name, (_, types) in TEMPLATES.items() for t in types]
    return (*plain, *made)


@cache
def text(file: str) -> str:
    """A source file of this package."""
    return (resources.files(__package__) / "src" / file).read_text(encoding="utf-8")


def headers(type_name: str = "") -> dict[str, str]:
    """The header files by name; with that of its grid, where units of this type need one."""
    found = {name: text(name) for name in HEADERS}
    grid = grids.OF.get(type_name)
    return found if grid is None else {**found, GRID: _table(grid)}


@cache
def _table(grid: grids.Grid) -> str:
    """A grid as src/iquants.cuh wants it: four places a word, low ones first."""
    fours = grids.places(grid).reshape(-1, 4).astype(int)
    words = (fours << np.array([0, 4, 8, 12])).sum(axis=1)
    return f"TABLE u16 PLACES[{len(words)}] = {{{', '.join(map(str, words))}}};\n"


def code(unit: Unit, arch: str) -> bytes:
    """Its machine code, from the cache where it is there. Raises BackendError as `nvrtc.build`."""
    return nvrtc.build(*_asked(unit, arch))


def identity(unit: Unit, arch: str) -> str:
    """All that goes into its machine code, which is equal where this is."""
    return nvrtc.identity(*_asked(unit, arch))


def _asked(unit: Unit, arch: str) -> tuple[str, str, dict[str, str], str, str]:
    return f"{unit.source}.cu", unit.text, headers(unit.type), arch, unit.defines


@cache
def signatures(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The kernels of a source and their parameters, in order."""
    return declared(text(f"{source}.cu"))


@cache
def declared(source_text: str) -> dict[str, tuple[Parameter, ...]]:
    """The same of a text."""
    heads = _HEAD.finditer(_bare(source_text))
    return {h["name"]: tuple(_parameter(p) for p in h["parameters"].split(",")) for h in heads}


def _parameter(declared: str) -> Parameter:
    kind, _, name = declared.strip().rpartition(" ")
    pointer, kind = "*" in declared, re.sub(r"const|\*", "", kind).strip()
    code = "P" if pointer else FORMATS.get(kind, "")
    if not code:
        raise BackendError(f"kernel parameter {declared.strip()!r}: expected {', '.join(FORMATS)}")
    return Parameter(name.lstrip("*").strip(), code, kind)


@cache
def homes() -> dict[str, str]:
    """The source of each kernel."""
    sources = [*PLAIN_SOURCES, *TEMPLATES]
    return {kernel: s for s in sources for kernel in signatures(s)}


def packed(kernel: str, given: Mapping[str, Any], unit: Unit | None = None) -> tuple[bytes, ...]:
    """The arguments of a kernel as bytes, in its order.

    Raises BackendError when an argument is missing or unknown, which is a fault of the lowering.
    """
    wanted = declared((unit or Unit(homes()[kernel])).text)[kernel]
    names = {p.name for p in wanted}
    if names != set(given):
        odd = ", ".join(sorted(names ^ set(given)))
        raise BackendError(f"kernel {kernel}: arguments {odd} are missing or unknown")
    return tuple(_bytes(p, given[p.name]) for p in wanted)


def _bytes(p: Parameter, value: Any) -> bytes:
    if len(p.format) > 1:
        return pack(p.format, *value)
    data = pack(p.format, value)
    assert len(data) == calcsize(p.format), p
    return data
