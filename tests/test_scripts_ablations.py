"""`scripts/ablations.py` end to end: answers, heads, figures and page for a tiny random model."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from small_model import learnable_model

from models.run.load import load
from models.train.data import AnswerOptions, make_answers

pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = AnswerOptions(new_tokens=24, text_tokens=128, lanes=8, own_share=0.5, seed=3)
ONLY = "base,other-seed,vocabulary-4096,steps-5,tokens-double,steps-1-double"


sys.path.insert(0, str(ROOT / "scripts"))
ablations: Any = importlib.import_module("ablations")


def script(*arguments: str) -> None:
    """Run the command line in this process: its kernels are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ablations.py", *arguments])
        ablations.main()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with answers, heads and figures."""
    folder = tmp_path_factory.mktemp("ablations")
    m = load(learnable_model(folder), ctx_size=128)
    prompts = [f"What is {i} and {i * i % 17}?" for i in range(160)]
    make_answers(m, prompts, (0, 1, 2), folder / "data", OPTIONS)
    m.close()
    run(folder, "r.json", ONLY)
    return folder


def run(folder: Path, result: str, only: str) -> None:
    script(
        "run", "--model", str(folder / "small.gguf"), "--data", str(folder / "data"), "--work",
        str(folder / "work"), "--json", str(folder / result), "--tokens", "4000", "--only", only,
        "--batch-tokens", "512", "--draft-vocab", "16", "--prompts", "2", "--new-tokens", "12",
        "--rounds", "2", "--ctx-size", "256",
    )  # fmt: skip


def test_every_head_differs_in_what_it_says(made: Path) -> None:
    found = json.loads((made / "r.json").read_text())
    heads = found["variants"]
    assert list(heads) == ONLY.split(",")
    base = heads["base"]["options"]
    for name, changed in (
        ("steps-5", {"steps"}), ("other-seed", {"seed"}), ("tokens-double", {"epochs"}),
        ("vocabulary-4096", {"draft_vocab"}), ("steps-1-double", {"epochs", "steps"}),
    ):  # fmt: skip
        assert {k for k, v in heads[name]["options"].items() if v != base[k]} == changed
    tokens = {name: h["tokens"] for name, h in heads.items()}
    assert tokens["base"] == tokens["steps-5"]
    assert tokens["steps-1-double"] == tokens["tokens-double"] > 1.5 * tokens["base"]
    assert heads["steps-1-double"]["against"] == "tokens-double"
    assert heads["vocabulary-4096"]["draft_vocabulary"] > heads["base"]["draft_vocabulary"] == 16
    for h in heads.values():
        assert len(h["held"]["lengths"]) == found["held_texts"] > 1
        assert all(1 <= n <= 5 for n in h["held"]["lengths"])
    assert heads["vocabulary-4096"]["held"]["covered"] == 1 > heads["base"]["held"]["covered"]


def test_decoding_says_what_plain_decoding_says(made: Path) -> None:
    found = json.loads((made / "r.json").read_text())["decoding"]
    assert list(found) == ONLY.split(",")
    for ways in found.values():
        assert list(ways) == ["eagle3:4", "eagle3"]
        assert all(w["identical"] and len(w["speedups"]) == 2 for w in ways.values())
        assert 1 <= ways["eagle3:4"]["acceptance_length"] <= 5
        chain = ways["eagle3:4"]
        assert chain["least_plain_seconds"] > 0 < chain["least_round_seconds"]


def test_what_is_there_is_kept(made: Path) -> None:
    folder = made / "work" / "base"
    head, first = (folder / "head.gguf").read_bytes(), json.loads((made / "r.json").read_text())
    (folder / "result.json").unlink()
    run(made, "again.json", "base")
    again = json.loads((made / "again.json").read_text())
    assert (folder / "head.gguf").read_bytes() == head
    assert again["variants"]["base"] == first["variants"]["base"]


def test_the_page_shows_all_heads(made: Path) -> None:
    page, picture = made / "page.md", made / "pictures" / "ablations.svg"
    page.write_text("# Page\n\ntail\n")
    for _ in range(2):
        script("page", "--json", str(made / "r.json"), "--page", str(page), "--picture",
               str(picture))  # fmt: skip
    text = page.read_text()
    assert text.startswith("# Page\n\ntail\n") and text.count("## Ablations") == 1
    assert "Texts: identical to plain." in text and text.count(" ± ") == 6 + 5 + 2 * 6
    assert "| another seed: what chance does |" in text
    shown = ElementTree.fromstring(picture.read_text())
    assert len([e for e in shown.iter() if e.tag.endswith("rect")]) == 1 + 6


def test_speeds_are_counted_by_vocabulary() -> None:
    heads = {"a": 8, "b": 8, "c": 16}
    ways = {"a": (2.0, 0.3), "b": (1.0, 0.1), "c": (2.0, 0.4)}
    found = {
        "variants": {n: {"draft_vocabulary": v} for n, v in heads.items()},
        "decoding": {
            n: {
                "eagle3:4": {
                    "acceptance_length": length,
                    "least_round_seconds": seconds,
                    "least_plain_seconds": 0.1,
                }
            }
            for n, (length, seconds) in ways.items()
        },
    }
    assert [ablations.counted(found, n) for n in "abc"] == pytest.approx([1.0, 0.5, 0.5])


def test_errors_are_those_of_weighed_texts() -> None:
    values = np.random.default_rng(1).normal(2.0, 0.5, 400)
    mean, error = ablations.weighed(values.tolist(), [3.0] * 400)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 20)
    mean, error = ablations.weighed([1.0, 2.0, 9.0], [1.0, 1.0, 0.0])
    assert mean == pytest.approx(1.5) and error > 0
    base = {"held": {"lengths": [1.0, 2.0, 3.0], "weights": [1, 1, 2]}}
    more = {"held": {"lengths": [1.5, 2.5, 3.5], "weights": [1, 1, 2]}}
    assert ablations.against(more, base) == pytest.approx((0.5, 0.0))
