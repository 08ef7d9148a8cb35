"""The project's own rules: sizes, documentation, rooms of imports, nothing unfinished."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggraph import env, ops
from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.pipeline import make_plan
from ggraph.tensor import OPS, input, line

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted([*ROOT.glob("ggraph/**/*.py"), *ROOT.glob("models/*.py")])
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_files_and_functions_keep_their_size() -> None:
    long = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > LONGEST_FILE:
            long.append(f"{short(path)}: {text.count(chr(10))} lines")
        for f in functions(ast.parse(text)):
            body = (f.end_lineno or 0) - f.body[0].lineno + 1
            if body > LONGEST_FUNCTION:
                long.append(f"{short(path)}: {f.name} has {body} lines")
    assert not long, "\n".join(long)


def test_every_public_name_is_documented() -> None:
    bare = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree) and path.name != "__init__.py":
            bare.append(f"{short(path)}: the file")
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
            if public and not ast.get_docstring(node):
                bare.append(f"{short(path)}: {node.name}")
    assert not bare, "\n".join(bare)


def test_every_op_is_documented_and_has_examples() -> None:
    assert len(OPS) > 70
    bare = [s.name for s in OPS.values() if not s.doc or not s.examples]
    assert not bare


def test_nothing_is_left_unfinished() -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|NotImplemented" + "Error")
    found = [
        f"{short(p)}:{i}"
        for p in SOURCES
        for i, text in enumerate(p.read_text().splitlines(), 1)
        if mark.search(text)
    ]
    assert not found


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("numba", ("ggraph/alloc/", "ggraph/backends/cpu/")),
        ("llvmlite", ("ggraph/backends/cpu/",)),
        ("cupy", ("ggraph/backends/cuda/",)),
        ("torch", ()),
        ("gguf", ()),
        ("typer", ("models/",)),
        ("rich", ("models/",)),
        ("tokenizers", ("ggraph/decode/",)),
        ("jinja2", ("ggraph/decode/",)),
    ],
)
def test_heavy_packages_stay_in_their_rooms(package: str, rooms: tuple[str, ...]) -> None:
    users = [short(p) for p in SOURCES if package in imports(p)]
    assert [u for u in users if not u.startswith(rooms or ("nowhere",))] == []


def test_only_env_reads_the_environment() -> None:
    readers = [short(p) for p in SOURCES if re.search(r"os\.(environ|getenv)", p.read_text())]
    assert readers == ["ggraph/env.py"]


def test_every_switch_is_documented() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/env.md").read_text(), re.M)
    assert dict(rows) == env.SWITCHES
    assert len(rows) <= 8


def test_no_import_hides_in_a_function() -> None:
    hidden = [
        f"{short(p)}: {f.name}"
        for p in SOURCES
        for f in functions(ast.parse(p.read_text()))
        for node in ast.walk(f)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert not hidden


def test_floors() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [str(lint), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_the_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`ggraph (\w+)", text))
    done = subprocess.run(
        [sys.executable, "-m", "models", "--help"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert named
    assert all(name in done.stdout for name in named), (named, done.stdout)
    for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
        assert (ROOT / link).exists(), link


def test_the_ir_document_shows_what_is_printed() -> None:
    text = (ROOT / "docs/ir.md").read_text()
    x = input("x", (2, 3))
    graph = Graph.of({"y": ops.scale(x + x, 2.0)})
    for t in graph:
        assert line(t) in text
    verified = make_plan(graph, [DeviceSpec("cpu", "cpu", host_visible=True)])
    for command in verified.plan.schedule:
        assert str(command) in text, str(command)
