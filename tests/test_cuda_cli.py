"""The runner with `--device cuda0`: the stand-in for a GPU, and the one line without one."""

import json
from pathlib import Path

import pytest
from cuda_host import HostDriver, need_compiler
from small_model import TINY
from typer.testing import CliRunner

from ggraph.backends import cuda
from models.cli.app import app

HEAD = TINY / "eagle3_for_llama_tied"


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[HostDriver]:
    """The stand-ins that commands open, in order."""
    made: list[HostDriver] = []

    def opened(name: str) -> HostDriver:
        made.append(HostDriver())
        return made[-1]

    monkeypatch.setattr(cuda, "open_driver", opened)
    return made


@need_compiler
def test_text_is_the_same_with_and_without_a_head(model: Path, drivers: list[HostDriver]) -> None:
    texts = []
    for more in ([], ["--draft", "lookup"], ["--draft", "eagle3", "--head", str(HEAD)]):
        given = ["generate", "-m", str(model), "-n", "8", "--temp", "0", "--device", "cuda0"]
        result = CliRunner().invoke(app, [*given, *more, "--json", "ab ab ab"])
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    assert len(set(texts)) == 1 and texts[0]
    assert all(any("mul_mat_tile" in c for c in d.calls) for d in drivers), "the GPU did the work"
    assert all(any("first_k" in c for c in d.calls) for d in drivers), "and picked the tokens"
    assert all(d.used == 0 and not d.pinned for d in drivers), "everything was given back"


@need_compiler
@pytest.mark.parametrize("penalty", ["1", "1.2"])
def test_drawn_text_is_the_same_with_drafts(
    model: Path, drivers: list[HostDriver], penalty: str
) -> None:
    """Tokens are drawn on the GPU, unless penalties need all logits on the host."""
    given = ["generate", "-m", str(model), "-n", "12", "--temp", "1.2", "--seed", "3"]
    given += ["--repeat-penalty", penalty, "--device", "cuda0", "--json", "ab ab ab"]
    texts = []
    for more in ([], ["--draft", "suffix"], ["--draft", "eagle3", "--head", str(HEAD)]):
        result = CliRunner().invoke(app, [*given, *more])
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    assert len(set(texts)) == 1 and texts[0]
    draws = [any(c.startswith("draw") for c in d.calls) for d in drivers]
    assert draws == 3 * [penalty == "1"]


@need_compiler
@pytest.mark.parametrize(
    ("target", "drafts", "opened"),
    [("cuda0", "cuda0", 2), ("cuda0", "cpu", 1), ("cpu", "cuda0", 1)],
)
def test_drafts_on_a_device_of_their_own(
    model: Path, drivers: list[HostDriver], target: str, drafts: str, opened: int
) -> None:
    """On the same GPU too: other streams, other memory, other graphs; the text stays the same. With
    a penalty the host looks at the target's logits, so that only drafts are picked on a device."""
    given = ["generate", "-m", str(model), "-n", "8", "--temp", "0", "--exact", "--json"]
    given += ["--repeat-penalty", "1.01"]
    head = ["--draft", "eagle3", "--head", str(HEAD), "--fixed", "--draft-max", "3"]
    split = ["--device", target, "--device-draft", drafts]
    texts = []
    for more in (["--device", target], [*head, *split]):
        result = CliRunner().invoke(app, [*given, *more, "ab ab ab"])
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    assert texts[0] == texts[1] and texts[0]
    new = drivers[-opened:]
    drafting = [d for d in new if any(c.startswith("first_k") for c in d.calls)]
    assert len(drafting) == (drafts == "cuda0"), "chains choose their tokens where they run"
    assert all(d.used == 0 and not d.pinned for d in drivers), "everything was given back"


@need_compiler
def test_the_plan_names_the_device(model: Path, drivers: list[HostDriver]) -> None:
    result = CliRunner().invoke(app, ["plan", str(model), "--device", "cuda0"])
    assert result.exit_code == 0 and "cuda0" in result.stdout, result.output


def test_without_a_gpu_there_is_one_line(model: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "-m", str(model), "--device", "cuda9999", "x"])
    assert result.exit_code != 0 and "cuda9999: " in str(result.exception)
