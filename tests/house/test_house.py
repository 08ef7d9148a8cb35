"""The project's own rules: sizes, documentation, rooms of imports, nothing unfinished."""

import ast
import importlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from typer.main import get_command

from ggraph import cache_dir, env, ops
from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.pipeline import make_plan
from ggraph.tensor import OPS, input, line
from models.cli.app import COMMANDS, app
from models.run.fetch import DEFAULT

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted([*ROOT.glob("ggraph/**/*.py"), *ROOT.glob("models/**/*.py")])
LONGEST_FILE, LONGEST_PASS, LONGEST_FUNCTION = 400, 250, 60
PASSES = ("rewrite", "place", "split", "order", "alloc", "verify")


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def is_pass(path: Path) -> bool:
    room = path.relative_to(ROOT).parts[1]
    return path.relative_to(ROOT).parts[0] == "ggraph" and room.removesuffix(".py") in PASSES


def test_files_and_functions_keep_their_size() -> None:
    long, sizes = [], []
    for path in SOURCES:
        text = path.read_text()
        lines = text.count("\n")
        if lines > (LONGEST_PASS if is_pass(path) else LONGEST_FILE):
            long.append(f"{short(path)}: {lines} lines")
        for f in functions(ast.parse(text)):
            sizes.append((f.end_lineno or 0) - f.lineno + 1)
            if sizes[-1] > LONGEST_FUNCTION:
                long.append(f"{short(path)}: {f.name} has {sizes[-1]} lines")
    assert not long, "\n".join(long)
    assert statistics.median(sizes) <= 8
    assert statistics.quantiles(sizes, n=10)[-1] <= 30


def undocumented(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Public names of a class or function that have no docstring; its own name included."""
    if not ast.get_docstring(node):
        yield node.name
    for inner in node.body if isinstance(node, ast.ClassDef) else ():
        setter = isinstance(inner, ast.FunctionDef) and any(
            isinstance(d, ast.Attribute) and d.attr == "setter" for d in inner.decorator_list
        )
        if isinstance(inner, ast.FunctionDef) and inner.name[0] != "_" and not setter:
            yield from (f"{node.name}.{n}" for n in undocumented(inner))


def test_every_public_name_is_documented() -> None:
    bare = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            bare.append(f"{short(path)}: the file")
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                bare += [f"{short(path)}: {n}" for n in undocumented(node)]
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


def tracked() -> list[Path]:
    """Every text file under version control, or in the folder where there is none."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    found = [ROOT / n for n in names] or [*ROOT.glob("*.*"), *ROOT.glob("[!.]*/**/*.*")]
    return [
        p for p in found if p.suffix in (".py", ".md", ".toml", ".json", ".cu", "") and p.is_file()
    ]


def test_nothing_names_one_machine() -> None:
    place = re.compile(r"(?<![\w.}])/(work|root|opt|home|Users)/\w" + r"|find-links|index-url")
    found = [
        f"{short(p)}:{i}"
        for p in tracked()
        if p != Path(__file__)
        for i, text in enumerate(p.read_text(errors="replace").splitlines(), 1)
        if place.search(text)
    ]
    assert not found


LOG = ROOT / "docs" / "log"  # says what was true on its day, under the names of that day


def test_scripts_that_are_named_exist() -> None:
    gone = [
        f"{short(p)}: {name}"
        for p in tracked()
        if LOG not in p.parents
        for name in re.findall(
            r"\b((?:scripts|bench|tests|ggraph)/[\w/]+\.(?:py|md|sh))", p.read_text()
        )
        if not (ROOT / name).is_file()
    ]
    assert not gone


def test_every_script_is_listed_once() -> None:
    listed = re.findall(r"`(\w+\.py)`", (ROOT / "scripts" / "README.md").read_text())
    assert sorted(listed) == sorted(p.name for p in (ROOT / "scripts").glob("*.py"))


def homes(node: ast.stmt) -> set[str]:
    """Folders of the project that a statement imports from; "" is its root."""
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
    names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    tops = {n.split(".")[0] for n in names}
    return {
        folder
        for folder in ("", "tests", "bench", "scripts")
        for top in tops
        if (ROOT / folder / top).is_dir() or (ROOT / folder / f"{top}.py").is_file()
    }


def sought(text: str, own: str) -> set[str]:
    """Folders that a program of the folder `own` has put on Python's path by this text."""
    if "sys.path" not in text:
        return {own}
    return {own, "", *(f for f in ("tests", "bench", "scripts") if f'"{f}"' in text)}


@pytest.mark.parametrize("own", ["scripts", "bench"])
def test_programs_find_the_project_in_a_clone(own: str) -> None:
    """Types say nothing of where a program that is run by its path looks for modules."""
    lost, seen = [], 0
    for path in sorted((ROOT / own).glob("*.py")):
        text = path.read_text()
        if "__main__" not in text:
            continue
        for node in ast.parse(text).body:
            wanted, before = homes(node), "".join(text.splitlines(True)[: node.lineno - 1])
            seen += bool(wanted)
            if not wanted <= sought(before, own):
                lost.append(f"{short(path)}:{node.lineno}")
    assert lost == []
    assert seen > 10


def test_the_log_is_dated_and_narrow() -> None:
    named = re.compile(r"20\d\d-\d\d-\d\d-[a-z0-9-]+\.md|README\.md")
    entries = sorted(LOG.iterdir())
    assert [p.name for p in entries if not named.fullmatch(p.name)] == []
    wide = [
        f"{short(p)}:{i} has {len(text)} characters"
        for p in [*entries, ROOT / "docs" / "decisions.md"]
        for i, text in enumerate(p.read_text().splitlines(), 1)
        if len(text) > 100
    ]
    assert not wide, "\n".join(wide)


def links(path: Path) -> list[str]:
    """Files of the project that a page points to."""
    found = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    return [link.split("#")[0] for link in found if "://" not in link and link[0] != "#"]


def test_each_sentence_on_security_has_its_test() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs/security.md").read_text())
    assert len(named) > 30
    gone = [f"{f}::{t}" for f, t in named if f"def {t}(" not in (ROOT / "tests" / f).read_text()]
    assert not gone


def test_what_documents_link_to_exists() -> None:
    pages = [p for p in tracked() if p.suffix == ".md"]
    dead = [
        f"{short(p)}: {link}"
        for p in pages
        for link in links(p)
        if link and not (p.parent / link).exists()
    ]
    assert not dead, "\n".join(dead)


@cache
def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


TORCH_PARTS = ("net", "loop", "parts", "online", "round", "start", "steps", "target")


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("numba", ("ggraph/alloc/search/",)),
        ("llvmlite", ("ggraph/backends/cpu/",)),
        ("cupy", ("ggraph/backends/cuda/",)),
        ("torch", tuple(f"models/train/{x}.py" for x in TORCH_PARTS)),
        ("ray", tuple(f"models/serve/ray_{x}.py" for x in ("app", "replica", "router", "serving"))),
        ("gguf", ()),
        ("typer", ("models/",)),
        ("starlette", ("models/serve/",)),
        ("uvicorn", ("models/serve/",)),
        ("pydantic", ("models/serve/",)),
        ("prometheus_client", ("models/serve/",)),
        ("llguidance", ("models/serve/",)),
        ("rich", ("models/",)),
        ("tokenizers", ("ggraph/text/",)),
        ("jinja2", ("ggraph/text/",)),
        ("PIL", ("models/images.py",)),
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


def test_every_room_is_on_a_floor() -> None:
    floors = (ROOT / ".importlinter").read_text().partition("exhaustive")[0]
    listed = set(re.findall(r"ggraph\.(\w+)", floors))
    rooms = {p.stem for p in (ROOT / "ggraph").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert listed == {r for r in rooms if not r.startswith("__")}
    assert "(" not in floors, "a name in brackets that does not exist is passed over in silence"


README = (ROOT / "README.md").read_text()
README_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("block", README_BLOCKS, ids=["model", "graph"])
def test_the_readme_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The block that loads a model writes the text that the README shows."""
    loads = "Chat()" in block
    if loads and not (cache_dir() / DEFAULT.file).is_file():
        pytest.skip(f"{DEFAULT.file} is not in the cache")
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    if loads:
        assert f"```\n{printed}\n" in README


def test_the_readme_shows_the_library_page_first() -> None:
    linked = re.findall(r"\]\((docs/\w+\.md)\)", README.split("## Where to read on")[1])
    assert linked[0] == "docs/library.md"


def test_the_readme_names_every_command_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    table = "".join(r for r in text.splitlines(keepends=True) if r.startswith("| `"))
    assert set(re.findall(r"`ggraph ([\w-]+)", table)) == set(COMMANDS)
    assert set(re.findall(r"`ggraph ([\w-]+)", text)) <= set(COMMANDS)
    for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
        assert (ROOT / link).exists(), link


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Each command's name, groups left out, with its options."""
    inner = getattr(command, "commands", {})
    for name in inner:
        yield from leaves(command.get_command(None, name), (*path, name))
    if not inner:
        yield " ".join(path), {o for p in command.params for o in p.opts}


def test_every_option_that_a_page_shows_exists() -> None:
    known, seen = dict(leaves(get_command(app))), 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for said in re.findall(r"(?:ggraph|-m models|dev.py run) ([^`\n]+)", page.read_text()):
            name = max((n for n in known if f"{said} ".startswith(f"{n} ")), key=len, default="")
            given = re.split(r" --(?= )|[|>&]", said.removeprefix(name))[0] if name else ""
            shown = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", given))
            assert shown <= known.get(name, set()) | {"--help", "-h"}, (short(page), said)
            seen += len(shown)
    assert seen > 100


def test_every_script_reads_its_command_line_before_it_works() -> None:
    """So that `--help` helps, and an option that is not there does not pass in silence."""
    for path in sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("bench/*.py")]):
        text = path.read_text()
        if "\nif __name__ ==" in text:
            assert re.search(r"\.parse_(known_)?args\(|typer", text), short(path)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "measure.py", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("usage:") and "Print how large" in done.stdout


def test_the_readme_says_which_commands_have_no_json() -> None:
    found = re.search(r"and `--json`\s+(?:but for (.*?))?\.\n", README, re.S)
    assert found, "the README does not say who has --json"
    excepted = set(re.findall(r"`([\w -]+)`", found[1] or ""))
    lacking = {name for name, options in leaves(get_command(app)) if "--json" not in options}
    assert lacking == excepted


def test_the_clone_script_knows_every_command() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    assert set(COMMANDS) == importlib.import_module("dev").COMMANDS


def test_the_changelog_counts_what_there_is() -> None:
    assert f"{len(OPS)} ops" in (ROOT / "CHANGELOG.md").read_text()


def test_the_ir_document_shows_what_is_printed() -> None:
    text = (ROOT / "docs/ir.md").read_text()
    x = input("x", (2, 3))
    graph = Graph.of({"y": ops.scale(x + x, 2.0)})
    for t in graph:
        assert line(t) in text
    verified = make_plan(graph, [DeviceSpec("cpu", "cpu", host_visible=True)])
    for command in verified.plan.schedule:
        assert str(command) in text, str(command)
