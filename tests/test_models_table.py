"""docs/models.md holds a row for every architecture, and each says what the tests ask for."""

from pathlib import Path

from test_models_golden import NAMES, TOLERANCE

from models.registry import BUILT_IN, open_model

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "models.md").read_text().splitlines()
    if line.startswith("| `")
]


def test_every_architecture_has_a_row() -> None:
    golden = [open_model(ROOT / "tests" / "golden" / n).config.architecture for n in NAMES]
    assert [row[0].strip("`") for row in ROWS] == golden
    assert {a.name for a in BUILT_IN} == set(golden)


def test_every_row_is_within_the_bars() -> None:
    for _, name, folder, gguf, _, identity, numpy, cuda in ROWS:
        assert max(float(folder), float(gguf)) < TOLERANCE, name
        same, _, count = identity.split(",")[0].split()
        assert same == count, name
        assert numpy == cuda == "none", name
