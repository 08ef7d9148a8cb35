"""Some random settings of speculation; more of them: scripts/fuzz_drafts.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from fuzz_drafts import Case, complaint


def test_no_setting_changes_a_text() -> None:
    kept = 0
    for seed in range(10):
        wrong, accepted = complaint(Case.of(seed))
        assert not wrong, Case.of(seed)
        kept += accepted
    assert kept, "drafts that are never right would show nothing"
