"""Write the tables of docs/library.md and docs/architectures.md from the code:
python scripts/make_library_docs.py

The pages' text is written by hand; what stands between `<!-- made: NAME -->` and `<!-- end -->` is
made here from docstrings, signatures, fields and op records. `tests/house` holds the pages against
what this script gives.
"""

import argparse
import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]  # a clone need not be installed

from pages import table

import ggraph
import ggraph.face
from ggraph import Array, Graph, Tensor, arrays, dtype, ops, plan
from ggraph.backends import KINDS
from ggraph.backends.cpu import open as open_cpu
from ggraph.backends.cpu.backend import CpuBackend, CpuProgram
from ggraph.backends.protocol import Launch
from ggraph.formats.checkpoint import storage_shape
from ggraph.ops.examples import build
from ggraph.tensor import OPS, Example, Kind, OpSpec, apply, leaf
from models.architecture import Architecture

PAGES = (ROOT / "docs" / "library.md", ROOT / "docs" / "architectures.md")
PAGE = PAGES[0]
MARKED = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.S)
FAMILIES = (
    "elementwise", "chain", "unary", "glu", "matmul", "attention", "norm", "rope", "reduce", "sort",
    "rows", "shape", "join", "copies", "create", "conv", "images", "solve", "moe", "recurrent",
    "scan", "draw", "fused", "activations",
)  # fmt: skip
NOUNS = (
    ggraph.Tensor, ggraph.face.Face, ggraph.Graph, ggraph.Session, ggraph.Options,
    arrays.Feeds, ggraph.DeviceSpec, ggraph.Plan, ggraph.VerifiedPlan, plan.Certificate,
)  # fmt: skip
ROOMS = (
    "ggraph.tensor", "ggraph.extend", "ggraph.testing", "ggraph.verify", "ggraph.show",
    "ggraph.plan_json", "ggraph.formats",
    "ggraph.backends.protocol", "ggraph.backends.sim", "ggraph.decode.model",
    "ggraph.decode.runner", "ggraph.decode.engine", "ggraph.decode.sampler", "ggraph_models.door",
)  # fmt: skip


def cell(text: str) -> str:
    """Text as it may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def said(thing: Any) -> str:
    """The first paragraph of a docstring."""
    text = re.sub(r"\s*Floor \d+\b[^.:;]*[.:;]?", "", inspect.getdoc(thing) or "")
    return cell(text.split("\n\n")[0])


def shapes(function: Callable[..., Any]) -> str:
    """What an op's docstring says beyond ggml's name and the error that all ops raise."""
    return re.sub(r"\s*(ggml: [^.]*|Errors: ShapeError)\.(?=\s|$)", "", said(function))


def call(name: str, function: Callable[..., Any]) -> str:
    """A call as one writes it: parameters and defaults, without types."""
    try:
        given = inspect.signature(function)
    except ValueError:
        return name
    plain = [
        p.replace(annotation=p.empty)
        for n, p in given.parameters.items()
        if n != "self" and (n, p.default) != ("name", "")
    ]
    shown = str(given.replace(parameters=plain, return_annotation=given.empty))
    return f"{name}{shown}".replace("<factory>", "..")


@dataclass(eq=False)
class Watched(CpuBackend):
    """A CPU that counts the launches which it leaves to NumPy."""

    fallbacks: int = 0

    def lower(self, launches: Sequence[Launch]) -> CpuProgram:
        """As ever."""
        made = super().lower(launches)
        self.fallbacks += len(made.fallbacks)
        return made


def fallbacks(spec: OpSpec, example: Example) -> int:
    """How many launches of an example the CPU leaves to NumPy; `w` and `table` are weights."""
    called = [*inspect.signature(getattr(ops, spec.name)).parameters, *example.args]
    kinds = [
        Kind.WEIGHT if name in ("w", "table") else Kind.INPUT
        for name, _ in zip(called, example.args, strict=False)
    ]
    if spec.overwrites is not None:
        kinds[spec.overwrites] = Kind.STATE
    leaves = [
        leaf(kind, chr(ord("a") + i), arg.shape, arg.dtype)
        for i, (kind, arg) in enumerate(zip(kinds, example.args, strict=True))
    ]
    result = apply(spec.name, *leaves, name="y", **example.attrs)
    plain = open_cpu("cpu", threads=1)
    backend = Watched(plain.spec, plain.pool)
    with closing(ggraph.Session({"cpu": backend}, ggraph.Options(rewrites=False))) as session:
        session.prepare("example", lambda: Graph.of({"y": result}), stored)
    return backend.fallbacks


def stored(t: Tensor) -> Array:
    """Zeros as a weight stores them."""
    return np.zeros(storage_shape(t.shape, t.dtype), t.dtype.np)


def compiled(spec: OpSpec) -> str:
    """How many of an op's examples run compiled on the CPU: "yes", "no", or a count."""
    if spec.view_of is not None:
        return "costs nothing"
    if spec.name == "copy":
        return "made by the planner"
    worked = [e for e in spec.examples if apply_size(spec, e)]
    found = [not fallbacks(spec, e) for e in worked]
    return {len(found): "yes", 0: "NumPy"}.get(sum(found), f"{sum(found)} of {len(found)}")


def apply_size(spec: OpSpec, example: Example) -> int:
    """Elements of an example's result."""
    return build(spec, example).size


def op_tables() -> str:
    """Every op by family: the call, its shapes and meaning, ggml's name, how the CPU runs it."""
    head = ("call", "meaning and shapes", "ggml", "compiled on the CPU")
    by_family: dict[str, list[Sequence[str]]] = {f: [] for f in FAMILIES}
    for name in sorted(ops.__all__):
        function = getattr(ops, name)
        spec = OPS.get(name)
        how = compiled(spec) if spec is not None else "made of other ops"
        peer = (spec.ggml if spec is not None else None) or ""
        by_family[family(function)].append(
            (f"`{call(name, function)}`", shapes(function), peer, how)
        )
    parts = []
    for name, rows in by_family.items():
        module = importlib.import_module(f"ggraph.ops.{name}")
        parts.append(f"**{name}**: {said(module)}\n\n{legend(module)}{table(head, rows)}")
    return "\n".join(parts)


def family(function: Callable[..., Any]) -> str:
    """The file of `ggraph/ops` that an op stands in."""
    return function.__module__.rsplit(".", 1)[1]


def legend(module: ModuleType) -> str:
    """The letters of a file's shapes, if it has any."""
    found = re.search(r"Legend:.*?(?=\n\n|\Z)", module.__doc__ or "", re.S)
    return f"{cell(found[0])}\n\n" if found else ""


def face() -> str:
    """What `from ggraph import ..` gives."""
    rows = []
    for name in sorted(ggraph.__all__, key=str.lower):
        thing = getattr(ggraph, name)
        if isinstance(thing, ModuleType):
            rows.append((f"`{name}`", f"module: {said(thing)}"))
        elif inspect.isclass(thing) or inspect.isfunction(thing):
            shown = name if inspect.isclass(thing) else call(name, thing)
            rows.append((f"`{shown}`", said(thing)))
        else:
            rows.append((f"`{name}`", f"the type `{thing}`".replace("|", "\\|")))
    return table(("name", "what it is"), rows)


def noun_tables() -> str:
    """Fields, properties and methods of the nouns that users hold."""
    return "\n".join(noun(n) for n in NOUNS)


def noun(cls: type) -> str:
    """One class: what it is, then its members in the order of the source."""
    rows = [(f"`{n}`", text) for n, text in field_rows(cls)]
    for name, member in vars(cls).items():
        if isinstance(member, property | cached_property) and name[0] != "_":
            rows.append((f"`{name}`", said(member)))
        elif inspect.isfunction(member) and name[0] != "_":
            rows.append((f"`{call(name, member)}`", said(member)))
        elif isinstance(member, classmethod | staticmethod):
            rows.append((f"`{call(name, getattr(cls, name))}`", said(member.__func__)))
    return f"**{cls.__name__}**: {said(cls)}\n\n{table(('member', 'meaning'), rows)}"


def field_rows(cls: type) -> Iterator[tuple[str, str]]:
    """A dataclass's fields with their defaults and the comments, or docstrings, behind them."""
    if not is_dataclass(cls):
        return
    source = textwrap.dedent(inspect.getsource(cls))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = source.splitlines()
    known = {f.name for f in fields(cls)}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            if name in known and name[0] != "_":
                _, _, comment = lines[node.lineno - 1].partition("  # ")
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    comment = str(after.value.value)
                default = "" if node.value is None else f" = {plain(ast.unparse(node.value))}"
                yield (
                    f"{name}: {ast.unparse(node.annotation)}{default}".replace("'", ""),
                    cell(comment),
                )


def plain(default: str) -> str:
    """A default as one writes it: what a factory makes, not the factory."""
    return re.sub(r"field\(.*", "..", default)


def dtype_table() -> str:
    """Every element type."""
    rows = [
        (
            f"`{d.name}`",
            str(d.block),
            str(d.block_bytes),
            str(d.np),
            f"{8 * d.block_bytes / d.block:.4g}",
        )
        for d in dtype.BY_NAME.values()
    ]
    return table(
        ("dtype", "elements a block", "bytes a block", "stored as NumPy", "bits an element"), rows
    )


def device_table() -> str:
    """The kinds of devices and how to open them."""
    rows = []
    for kind in KINDS:
        room = importlib.import_module(f"ggraph.backends.{kind}")
        shown = call("open_backend", room.open).replace("(name", f'("{kind}"')
        rows.append((f"`{shown}`", said(room.open), said(room)))
    return table(("call", "what it opens", "the room"), rows)


def room_tables() -> str:
    """What stands behind the face: public names of the rooms that one builds on."""
    parts = []
    for title in ROOMS:
        module = importlib.import_module(title)
        rows = [(f"`{shown}`", text) for shown, text in names(module)]
        parts.append(f"**{title}**: {said(module)}\n\n{table(('name', 'what it is'), rows)}")
    return "\n".join(parts)


def names(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Public functions and classes of a module, those that it defines or lists."""
    listed = getattr(module, "__all__", None) or vars(module)
    for name in listed:
        thing = getattr(module, name)
        own = getattr(thing, "__module__", "").startswith(module.__name__)
        if name[0] != "_" and own and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield name if inspect.isclass(thing) else call(name, thing), said(thing)


def lacking() -> str:
    """The ops some of whose examples have no kernel on the CPU."""
    rows = []
    for name in sorted(OPS):
        spec = OPS[name]
        worked = [e for e in spec.examples if apply_size(spec, e)]
        if spec.view_of is None and name != "copy":
            slow = [e for e in worked if fallbacks(spec, e)]
            if slow:
                rows.append((f"`{name}`", "; ".join(dict.fromkeys(map(_types, slow)))))
    return table(("op", "examples that NumPy computes: types and shapes of sources"), rows)


def _types(e: Example) -> str:
    sources = ", ".join(f"{a.dtype}{list(a.shape)}" for a in e.args)
    wanted = e.attrs.get("dtype")
    return sources + (f" to {wanted}" if wanted else "")


def architecture() -> str:
    """The record of a family of models."""
    rows = []
    for f, (shown, text) in zip(fields(Architecture), field_rows(Architecture), strict=True):
        shown = f'{f.name}: str = "{f.default}"' if isinstance(f.default, str) else shown
        rows.append((f"`{shown}`".replace("|", "\\|"), text))
    return table(("field", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "architecture": architecture,
    "ops": op_tables, "lacking": lacking, "face": face, "nouns": noun_tables, "dtypes": dtype_table,
    "devices": device_table, "rooms": room_tables,
}  # fmt: skip


def made(page: str) -> str:
    """The page with every marked part made anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", page)


def main() -> None:
    """Write the pages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page in PAGES:
        page.write_text(made(page.read_text()))
        print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
