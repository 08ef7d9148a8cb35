"""Print how large the code is: files, lines, and the longest functions.

python scripts/measure.py
"""

import argparse
import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ggraph", "models", "tests", "scripts", "bench")


def function_lengths(path: Path) -> list[tuple[int, str]]:
    """Lines of every function of a file, signature and docstring included, with its place."""
    return [
        ((f.end_lineno or f.lineno) - f.lineno + 1, f"{path.relative_to(ROOT)}:{f.lineno} {f.name}")
        for f in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def main() -> None:
    """One line per room."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'room':<8} {'files':>6} {'lines':>7}   functions: median, 90%, longest")
    for room in ROOMS:
        files = sorted((ROOT / room).rglob("*.py"))
        lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in files)
        found = sorted(f for p in files for f in function_lengths(p))
        sizes = [n for n, _ in found]
        middle, most = statistics.median(sizes), sizes[len(sizes) * 9 // 10]
        print(f"{room:<8} {len(files):>6} {lines:>7}   {middle:g}, {most}, {found[-1][0]} ", end="")
        print(f"({found[-1][1]})")


if __name__ == "__main__":
    main()
