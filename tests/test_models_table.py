"""docs/models.md holds a row for every architecture, and each says what the tests ask for."""

import re
from pathlib import Path

import encoder_kit
from encoder_kit import ALL
from golden_kit import NAMES, TOLERANCE

from models.families import FAMILIES
from models.registry import open_model

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text()
ROWS, ENCODERS, DRAFTED = (
    [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    for part in re.split("## Encoders|## Drafts", PAGE)
)


def test_every_architecture_has_a_row() -> None:
    golden = [open_model(ROOT / "tests" / "golden" / n).config.architecture for n in NAMES]
    for rows in (ROWS, DRAFTED):
        assert [row[0].strip("`") for row in rows] == golden
    assert {a.name for a in FAMILIES if a.causal} == set(golden)
    encoders = {row[0].strip("`") for row in ENCODERS}
    assert {a.name for a in FAMILIES if not a.causal} == encoders and len(ENCODERS) == len(ALL)


def test_the_first_page_counts_them() -> None:
    decoders = sum(a.causal for a in FAMILIES)
    told = (
        f"| models | {decoders} decoder architectures and {len(FAMILIES) - decoders} encoders, text"
    )
    assert told in (ROOT / "README.md").read_text()


def test_every_row_is_within_the_bars() -> None:
    for rows, bar in ((ROWS, TOLERANCE), (ENCODERS, encoder_kit.TOLERANCE)):
        for _, name, folder, gguf, _, numpy, cuda in rows:
            assert max(float(folder), float(gguf)) < bar, name
            assert numpy == cuda == "none", name


def test_no_drafter_changes_a_text_of_any_architecture() -> None:
    own = ("Gemma4", "Glm4Moe", "Glm4MoeLite", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
    for _, name, *cells in DRAFTED:
        has = name.removesuffix("ForCausalLM") in own
        assert [c == "-" for c in cells[-2:]] == [not has] * 2, name
        for cell in cells:
            same, _, count = ("0 of 0" if cell == "-" else cell.split(",")[0]).split()
            assert same == count, (name, cell)
        assert cells[0] != "-" and "-" not in cells[:6], name
