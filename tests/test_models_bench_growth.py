"""The growth bench: its verdict on made-up costs, its plots, and a run on a tiny model."""

import importlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from small_model import small_model

from models.run.load import load

ROOT = Path(__file__).parent.parent
CONTEXTS = (64, 1024, 2048, 4096, 8192)
ROWS = (1, 8, 64, 128, 256, 512)


@pytest.fixture(scope="module")
def growth() -> Any:
    sys.path.insert(0, str(ROOT / "bench"))
    return importlib.import_module("growth")


def test_lines_are_accepted_and_curves_are_not(growth: Any) -> None:
    context = {c: 5e-3 + 2e-6 * c for c in CONTEXTS}
    rows = {n: 5e-3 + 1e-3 * n + 1e-8 * n * n for n in ROWS}
    assert growth.faster_than_theory(context, rows) == []
    square = {c: 5e-3 + 1e-9 * c * c for c in CONTEXTS}
    assert growth.faster_than_theory(square, rows)[0].startswith("context: ")
    steep = {n: 5e-3 + 1e-5 * n * n for n in ROWS}
    assert growth.faster_than_theory(context, steep)[0].startswith("rows: ")


def test_a_plot_is_well_formed_and_shows_every_point(growth: Any) -> None:
    picture = ET.fromstring(
        growth.plot("Speed", "tokens", {64: 100.0, 128: 90.5, 256: 70.0}, "t/s")
    )
    circles = [e for e in picture if e.tag.endswith("circle")]
    assert len(circles) == 3
    heights = [float(c.attrib["cy"]) for c in circles]
    assert heights == sorted(heights), "slower points lie lower"
    words = [e.text for e in picture if e.tag.endswith("text")]
    assert {"64", "128", "256", "100", "90.5"} <= set(words)


def test_steps_are_measured_and_forgotten(growth: Any, tmp_path: Path) -> None:
    changes = {"llama.context_length": 1024}
    with_profile = load(
        small_model(tmp_path / "small.gguf", changes), threads=1, ctx_size=256, profile=True
    )
    ids = growth.fill(with_profile, 200)
    assert with_profile.runner.past == len(ids) == 200
    assert growth.step_seconds(with_profile, ids, 64, 5, True) > 0
    assert with_profile.runner.past == 64
    table = growth.roofline(with_profile, ids, 64, 5)
    assert {"mul_mat", "flash_attn"} <= {name.split("_add")[0] for name in table["ops"]}
    assert table["step_ms"] > 0
    with_profile.close()
