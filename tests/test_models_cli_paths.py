"""No command writes over a file that it reads: under its name, through a link, within a folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_model import TINY, small_model
from typer.main import get_command
from typer.testing import CliRunner

from ggraph import InputError
from models.cli.app import app

# The command, its output's parameter, and its arguments: IN is the file that is read, OUT the same.
WRITERS = [
    ("convert", "out", ["IN", "--out", "OUT"]),
    ("convert", "out", [TINY / "eagle3_for_llama_tied", "--target", "IN", "-o", "OUT"]),
    ("quantize", "out", ["IN", "OUT"]),
    ("quantize", "out", [TINY / "llama_tied", "--imatrix", "IN", "OUT"]),
    ("imatrix", "out", [__file__, "-m", "IN", "--out", "OUT"]),
    ("imatrix", "out", ["IN", "-m", TINY / "llama_tied", "--out", "OUT"]),
    ("batch", "answers", ["IN", "OUT"]),
    ("batch", "answers", [__file__, "OUT", "-m", "IN"]),
    ("plan", "html", ["IN", "--html", "OUT"]),
    ("plan", "export", ["IN", "--export", "OUT"]),
    ("plan", "export", [TINY / "llama_tied", "--html", "IN", "--export", "OUT"]),
    ("verify", "html", ["IN", "--html", "OUT"]),
    ("record", "html", ["--log", "IN", "--html", "OUT"]),
    ("record", "html", ["--html", "OUT", "--", "program", "-m", "IN"]),
    ("record", "log", ["--log", "OUT", "--", "program", "--model=IN"]),
    ("import iree", "out", ["IN", "--out", "OUT"]),
    ("import executorch", "out", ["IN", "--out", "OUT"]),
    ("hazards run", "html", ["01H", "--html", "OUT", "--export", "IN"]),
    ("hazards run", "export", ["01H", "--html", "OUT", "--export", "IN"]),
    ("bench cpu", "out", ["-m", "IN", "--json", "OUT", "--peer", "none"]),
    ("bench spec", "out", ["-m", "IN", "--json", "OUT"]),
    ("bench spec", "out", ["-m", TINY / "llama_tied", "--head", "IN", "--json", "OUT"]),
    ("bench spec", "out", ["-m", TINY / "llama_tied", "--prompts", "IN", "--json", "OUT"]),
    ("bench serve", "out", ["-m", "IN", "--json", "OUT"]),
]
NAMES = {"out", "answers", "html", "export", "log"}  # of parameters that name what is written


@pytest.mark.parametrize("link", ["itself", "dotted", "symbolic", "hard"])
@pytest.mark.parametrize(("command", "arguments"), [(c, a) for c, _, a in WRITERS])
def test_what_is_read_is_not_written(
    command: str, arguments: list[str | Path], link: str, tmp_path: Path
) -> None:
    given, aim = small_model(tmp_path / "given.gguf"), tmp_path / "link"
    if link == "symbolic":
        aim.symlink_to(given)
    elif link == "hard":
        os.link(given, aim)
    else:
        aim = given if link == "itself" else tmp_path / ".." / tmp_path.name / "given.gguf"
    before = given.read_bytes()
    words = [str(a).replace("IN", str(given)).replace("OUT", str(aim)) for a in arguments]
    found = CliRunner().invoke(app, [*command.split(), *words]).exception
    assert isinstance(found, InputError) and "which this command needs" in str(found), found
    assert given.read_bytes() == before and (aim.is_symlink() == (link == "symbolic"))


@pytest.mark.parametrize(("command", "arguments"), [(c, a) for c, _, a in WRITERS])
def test_no_file_is_called_as_standard_output_is_elsewhere(
    command: str, arguments: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = small_model(tmp_path / "given.gguf")
    words = [str(a).replace("IN", str(given)).replace("OUT", "-") for a in arguments]
    found = CliRunner().invoke(app, [*command.split(), *words]).exception
    assert isinstance(found, InputError) and "cannot write -" in str(found), found
    assert [f.name for f in tmp_path.iterdir()] == ["given.gguf"]


def test_training_keeps_the_head_that_it_begins_with(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    for name in ("head.gguf", "head/model.safetensors"):
        (tmp_path / name).write_text("a head")
    for start in ("head", "head.gguf"):
        arguments = ["train-eagle3", "--start", str(tmp_path / start), "--out", str(tmp_path)]
        found = CliRunner().invoke(app, arguments).exception
        assert isinstance(found, InputError) and "which this command needs" in str(found), found


def test_a_file_of_a_folder_that_is_read_is_not_written(tmp_path: Path) -> None:
    for file in (TINY / "llama_tied").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    for command in (["quantize", tmp_path, config], ["plan", tmp_path, "--html", config]):
        found = CliRunner().invoke(app, [*map(str, command)]).exception
        assert isinstance(found, InputError) and "which this command needs" in str(found), found
    page = tmp_path / "page.html"  # a new file among them is nobody's loss
    assert CliRunner().invoke(app, ["plan", str(tmp_path), "--html", str(page)]).exit_code == 0
    assert "<svg" in page.read_text()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench cpu"])
def test_an_empty_path_of_a_model_is_not_this_folder(command: str) -> None:
    """As `-m "$MODEL"` is, where no such variable is set."""
    found = CliRunner().invoke(app, [*command.split(), "-m", ""]).exception
    assert isinstance(found, InputError) and "the path of a model is empty" in str(found)


def test_every_command_that_writes_a_file_is_asked() -> None:
    def writers(group: Any, name: str = "") -> Iterator[tuple[str, str]]:
        for command in group.commands:
            found = group.get_command(None, command)
            if hasattr(found, "commands"):
                yield from writers(found, f"{name}{command} ")
                continue
            for p in found.params:
                if p.name in NAMES and not getattr(p, "is_flag", False):
                    yield name + command, p.name

    own = {("train-eagle3", "out")}  # a folder, for which there is a test above
    assert {*writers(get_command(app))} == {(c, p) for c, p, _ in WRITERS} | own
