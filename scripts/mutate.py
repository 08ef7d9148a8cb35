"""Mutation testing of the planner and the verifier: are their tests able to fail?

    nice python scripts/mutate.py [--count 200] [--seed 0] [--only ggraph/verify] [--verbose]

Draws `--count` places in the sources of the rooms (`TESTS`) where one operator, comparison,
constant, condition or call of min/max/any/all can be changed, changes one at a time in memory
(files stay as they are) and runs the room's tests until one fails, each mutant in a fork of this
process. Prints each survivor with its line before and after, and the score. For files with compiled
functions numba's compiler is off, so that its cache cannot hide a change; examples that fail are
not shrunk. Run by hand, where there is fork: a second or two for a mutant that is caught, ten or
more for a survivor.
"""

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import os
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parent.parent
# Tests of each room, the quick ones first.
TESTS = {
    "ggraph/alloc": (
        "errors",
        "listing",
        "dyn",
        "ggml",
        "hb",
        "conflicts",
        "search",
        "climb",
        "instances",
        "explain",
    ),
    "ggraph/verify": (
        "verify",
        "verify_static",
        "verify_spans",
        "verify_figures",
        "verify_parts",
        "verify_wiring",
        "verify_trust",
        "verify_repairs",
        "verify_brute",
        "verify_large",
        "exactness",
    ),
    "ggraph/order": ("order", "order_offered"),
    "ggraph/split": ("split", "split_brute"),
    "ggraph/place": ("place", "place_brute"),
    "ggraph/rewrite.py": ("rewrite", "exactness", "joined"),
    "ggraph/pipeline.py": ("pipeline", "exactness"),
}
FIRST = {
    **dict.fromkeys(("blocks", "clocks", "hb", "layout"), "hb"),
    **dict.fromkeys(("canon", "offline"), "climb"),
    **dict.fromkeys(("anneal", "bounds", "fit", "offers", "tenants"), "search"),
    "check": "errors",
    "listed": "listing",
    "live": "verify_figures",
    "static": "verify_static",
    "spans": "verify_spans",
    "parts": "verify_parts",
    "wiring": "verify_wiring",
    "report": "verify_repairs",
    "rounding": "exactness",
}
# What is loaded anew for each mutant; all else is loaded once.
DEPENDENT = tuple(
    f"ggraph.{room}"
    for room in (
        *("place", "split", "order", "alloc", "verify", "rewrite", "pipeline", "trade", "show"),
        *("explain", "extend", "session", "hazards", "decode", "serving", "testing", "view"),
    )
)
# Seconds of processor time, thrice what the tests take; an endless loop counts as caught.
LIMITS = {**dict.fromkeys(TESTS, 18), "ggraph/alloc": 36, "ggraph/rewrite.py": 36}

COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """Change number `index` of those that `changes` finds in `path`."""

    path: str
    index: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.before}  ->  {self.after}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Each single change of this node alone, as a new node."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            new = copy.deepcopy(node)
            new.ops[i] = COMPARE[type(op)]()
            yield new
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        new_op = copy.deepcopy(node)
        new_op.op = ARITHMETIC[type(node.op)]()
        yield new_op
    elif isinstance(node, ast.BoolOp):
        new_bool = copy.deepcopy(node)
        new_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield new_bool
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        is_bool = isinstance(node.value, bool)
        yield ast.Constant(not node.value if is_bool else node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if name in CALLS:
            call = copy.deepcopy(node)
            if isinstance(call.func, ast.Name):
                call.func.id = CALLS[name]
            elif isinstance(call.func, ast.Attribute):
                call.func.attr = CALLS[name]
            yield call
    elif isinstance(node, (ast.Continue, ast.Break)):
        yield ast.Break() if isinstance(node, ast.Continue) else ast.Continue()


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every node that does something, with its place: parent, field, index in a list. Annotations,
    decorators, operators (changed with their owner) and text are left out."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "ops", "op", "decorator_list"):
            continue
        for i, child in list(enumerate(value)) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield tree, name, i, child
                yield from places(child)


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, ast.AST]]:
    """All single changes of a tree, in a fixed order: place, old node, new node."""
    for parent, name, i, child in places(tree):
        for new in changed(child):
            yield parent, name, i, child, ast.copy_location(new, child)


def mutated(path: Path, index: int) -> ast.Module:
    """The tree of a file with one change made."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for k, (parent, name, i, _, new) in enumerate(changes(tree)):
        if k == index:
            if i is None:
                setattr(parent, name, new)
            else:
                getattr(parent, name)[i] = new
            return ast.fix_missing_locations(tree)
    raise SystemExit(f"{path} has no change number {index}")


def sources(room: Path) -> list[Path]:
    """The files of a room, which may be one file."""
    return [room] if room.suffix else list(room.rglob("*.py"))


def mutants(rooms: Sequence[str]) -> list[Mutant]:
    """Every change of every file of the rooms."""
    found = []
    for path in sorted(p for room in rooms for p in sources(ROOT / room)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = str(path.relative_to(ROOT))
        for k, (_, _, _, old, new) in enumerate(changes(tree)):
            line = getattr(old, "lineno", 0)
            found.append(Mutant(name, k, line, ast.unparse(old), ast.unparse(new)))
    return found


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed tree; all others come as usual."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.path, self.tree, self.package = path, tree, parts[-1] == "__init__"

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only the one module."""
        if name != self.name:
            return None
        spec = importlib.machinery.ModuleSpec(
            name, self, origin=str(self.path), is_package=self.package
        )
        spec.has_location = True
        if self.package:
            spec.submodule_search_locations = [str(self.path.parent)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code in the module."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def work(path: Path, index: int, tests: Sequence[str]) -> int:
    """Run the tests against one mutant (index -1: the code as it is) in this process."""
    for name in [n for n in sys.modules if n == "ggraph" or n.startswith(DEPENDENT)]:
        del sys.modules[name]
    if index >= 0:
        sys.meta_path.insert(0, Loader(path, mutated(path, index)))
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=mutate"]
    return int(pytest.main([*options, *tests]))


def tests_of(path: str) -> list[str]:
    """Tests of the file's room, those that are most about the file first."""
    names = TESTS[room_of(path)]
    first = FIRST.get(Path(path).stem, Path(path).stem)
    files = {n: ROOT / "tests" / f"test_{n}.py" for n in names}
    found = {n: f if f.exists() else f.with_name(f"test_alloc_{n}.py") for n, f in files.items()}
    return [str(found[n]) for n in sorted(names, key=lambda n: n != first)]


def room_of(path: str) -> str:
    """The room that a file is in."""
    return next(room for room in TESTS if path.startswith(room))


def is_caught(mutant: Mutant) -> bool:
    """Whether a test fails (or never ends) in a fork of this process."""
    compiled = "@compiled" in (ROOT / mutant.path).read_text(encoding="utf-8")
    child = os.fork()
    if child == 0:
        os.environ["NUMBA_DISABLE_JIT"] = "1" if compiled else "0"
        limit = LIMITS[room_of(mutant.path)]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        status = 1
        try:
            status = work(ROOT / mutant.path, mutant.index, tests_of(mutant.path))
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] != 0


def main() -> int:
    """Draw, run, and print the survivors and the score."""
    parser = argparse.ArgumentParser(description="mutation testing of planner and verifier")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="files whose path begins so")
    parser.add_argument("--verbose", action="store_true", help="print the caught ones as well")
    parser.add_argument("--unchecked", action="store_true", help="no run without any change first")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    importlib.import_module("ggraph")
    settings.register_profile(
        "mutate",
        settings.get_profile("default"),
        max_examples=40,
        derandomize=True,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    every = [m for m in mutants(list(TESTS)) if m.path.startswith(given.only or "")]
    drawn = random.Random(given.seed).sample(every, min(given.count, len(every)))
    for room in sorted({room_of(m.path) for m in drawn}) if not given.unchecked else ():
        if is_caught(Mutant(str(sources(ROOT / room)[0].relative_to(ROOT)), -1, 0, "", "")):
            raise SystemExit(f"the tests of {room} fail without any change")
    survived = 0
    for k, mutant in enumerate(drawn, 1):
        caught = is_caught(mutant)
        survived += not caught
        if given.verbose or not caught:
            word = "caught  " if caught else "survived"
            print(f"[{k}/{len(drawn)}] {word} {mutant}", flush=True)
    print(f"{1 - survived / len(drawn):.1%} of {len(drawn)} mutants caught, {survived} survived;")
    print(f"drawn from {len(every)} with seed {given.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
