"""The tables of docs/other_engines.md, made of what `ggraph hazards real` found.

ggraph hazards real --rows found.jsonl
ggraph hazards real --version 0.3.16 --rows found.jsonl
python scripts/real_tables.py found.jsonl
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import pages

from ggraph.record.real import MUTANTS, NEW, OLD, SETTINGS, Mutant, Setting

PAGE = ROOT / "docs" / "other_engines.md"
SCRIPT = "scripts/real_tables.py"
BOTH = (NEW, OLD)

Row = dict[str, Any]


def verdict(row: Row) -> str:
    """A cell: what was said of how many steps, and the first cause of what was refused."""
    some = f"{row['proved']} of " if row["verdict"] == "refused" else ""
    steps = f", {some}{row['steps']} steps{' proved' if some else ''}" if row["steps"] else ""
    more = f" (and {len(row['why']) - 1} more)" if len(row["why"]) > 1 else ""
    why = f": {row['why'][0]}{more}" if row["why"] else ""
    return f"**{row['verdict']}**{steps}{why}".replace("|", "/")


def fault(row: Row) -> str:
    """A cell of a mutant: its verdict, and whether the text was still right."""
    said = [
        f"text {how} {'right' if row[f'{how}_same'] else '**wrong**'}" for how in ("eager", "lazy")
    ]
    odd = "" if row["verdict"] == row["expected"] else f" (expected: {row['expected']})"
    return f"{verdict(row)}{odd}; {', '.join(said)}"


def cells(rows: Sequence[Row], of: Setting | Mutant, told: Callable[[Row], str]) -> list[str]:
    """What was found of a configuration or a mutant in each version."""
    where = of.versions if isinstance(of, Setting) else tuple(of.which)
    found = {r["version"]: r for r in rows if r["name"] == of.name}
    absent = {v: "not run" if v in where else "not in this version" for v in BOTH}
    return [told(found[v]) if v in found else absent[v] for v in BOTH]


def text(rows: Sequence[Row]) -> str:
    """Both tables."""
    sound = [
        (f"`{s.name}`", s.what, f"{s.devices}, {s.contract}", *cells(rows, s, verdict))
        for s in SETTINGS
    ]
    broken = [(f"`{m.name}`", m.what, f"`{m.where}`", *cells(rows, m, fault)) for m in MUTANTS]
    return "\n".join((
        "Unmodified:\n",
        pages.table(("configuration", "what", "devices, contract", *BOTH), sound),
        "With one fault:\n",
        pages.table(("fault", "what", "run as", *BOTH), broken),
    ))  # fmt: skip


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    rows = [json.loads(line) for line in parser.parse_args().rows.read_text().splitlines()]
    PAGE.write_text(pages.placed(PAGE.read_text(), SCRIPT, "The real llama.cpp", text(rows)))


if __name__ == "__main__":
    main()
