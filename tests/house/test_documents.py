"""Documents that run: every Python block of a page, in order, in one namespace; what a ```text
block right behind one shows is exactly what it prints. A notebook's saved outputs are what its
cells give. Tables are what the code gives."""

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from ggraph.ops.rope import MODES
from models.architecture import Architecture

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.S | re.M)
PAGES = [p for p in sorted(ROOT.glob("docs/*.md")) if "```python\n" in p.read_text()]

sys.path.insert(0, str(ROOT / "scripts"))
library: Any = importlib.import_module("make_library_docs")
pictures: Any = importlib.import_module("make_pictures")
notebooks: Any = importlib.import_module("make_notebooks")
hazards: Any = importlib.import_module("make_hazard_docs")
SUMS = re.compile(r"(?<=expected )\S+(?=, got)|(?<=, got )\S+")  # their last bits are a processor's


@dataclass(frozen=True)
class Block:
    """A block of a page: its first line's number, its code, what it shows or None."""

    line: int
    code: str
    shown: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield Block(text.count("\n", 0, found.start()) + 2, found[1], found[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.shown is not None:
            assert printed.getvalue() == block.shown, f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda p: p.stem)
def test_a_notebook_holds_what_its_cells_give(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = json.loads(page.read_text())
    found = notebooks.executed(held, page.stem)
    for i, (old, new) in enumerate(zip(held["cells"], found["cells"], strict=True)):
        assert old == new, f"cell {i} of {page.name}: run python scripts/make_notebooks.py"
    assert notebooks.written(found) == page.read_text()


def test_the_notebook_of_races_shows_what_it_breaks_and_repairs() -> None:
    (page,) = [p for p in notebooks.PAGES if p.stem == "races"]
    cells = json.loads(page.read_text())["cells"]
    outputs = [o for c in cells for o in c.get("outputs", ())]
    drawn = ["".join(o["data"]["text/html"]) for o in outputs if "data" in o]
    refused = ["verify refuses this plan: race" in html for html in drawn]
    assert refused == [False, True, True, False]
    said = "".join(line for o in outputs for line in o.get("text", ()))
    assert "10 legal orders, 4 of them wrong" in said
    assert said.count("legal orders, 0 of them wrong") == 3


def test_there_are_pages_that_run() -> None:
    assert {"library", "tutorial", "gpt2", "races", "reading_a_plan"} <= {p.stem for p in PAGES}
    assert sum(len(list(blocks(p))) for p in PAGES) > 20


@pytest.mark.parametrize("page", library.PAGES, ids=lambda p: p.stem)
def test_the_tables_of_the_library_page_are_what_the_code_gives(page: Path) -> None:
    text = page.read_text()
    assert text == library.made(text), "run python scripts/make_library_docs.py"


def test_every_field_of_an_architecture_is_told_with_its_default() -> None:
    text = (library.ROOT / "docs" / "architectures.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+): [^`]*` \| (.*) \|$", text, re.M))
    assert rows.keys() == {f.name for f in fields(Architecture)} and all(rows.values())
    assert '`rope_mode: str = "neox"`' in text
    assert set(re.findall(r'"(\w+)"', rows["rope_mode"])) == set(MODES)


def test_the_library_page_names_every_op_and_every_public_name() -> None:
    text = library.PAGE.read_text()
    called = set(re.findall(r"^\| `(\w+)\(", text, re.M))
    assert set(library.ops.__all__) <= called
    shown = set(re.findall(r"^\| `(\w+)", text, re.M))
    assert set(library.ggraph.__all__) <= shown


def test_the_pictures_are_what_the_plans_give() -> None:
    for path, text in pictures.pictures().items():
        assert path.read_text() == text, "run python scripts/make_pictures.py"


def test_the_pictures_are_readable_on_dark_ground() -> None:
    for path in pictures.pictures():
        text = path.read_text()
        assert "prefers-color-scheme:dark" in text
        assert "<title>" in text and "aria-label" in text


def test_the_page_of_hazards_is_what_the_corpus_gives() -> None:
    for name, text in hazards.made().items():
        held = (ROOT / "docs" / name).read_text()
        assert SUMS.sub("", held) == SUMS.sub("", text), f"{name}: run scripts/make_hazard_docs.py"
