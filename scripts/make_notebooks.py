"""Run the notebooks of docs/ and keep what their cells give: python scripts/make_notebooks.py

No Jupyter is needed: code cells run in order in one namespace; what a cell prints, and the value of
its last expression, become its outputs as Jupyter would save them. `tests/house` runs them too and
holds the saved outputs against what it gets.
"""

import argparse
import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # a clone need not be installed

PAGES = sorted((ROOT / "docs").glob("*.ipynb"))
Json = dict[str, Any]


def executed(notebook: Json, name: str) -> Json:
    """The notebook with the outputs that its cells give now."""
    names: Json = {"__name__": name}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = given("".join(cell["source"]), names, f"{name}[{count}]", count)
            cells.append({**cell, "execution_count": count, "outputs": outputs})
        else:
            cells.append(cell)
    return {**notebook, "cells": cells}


def given(code: str, names: Json, title: str, count: int) -> list[Json]:
    """What one cell gives: its printed text, then the value of its last expression."""
    tree = ast.parse(code, title)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, title, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), names)
    text = printed.getvalue()
    outputs: list[Json] = []
    if text:
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if value is not None:
        outputs.append(
            {
                "data": shown(value), "execution_count": count, "metadata": {},
                "output_type": "execute_result",
            }
        )  # fmt: skip
    return outputs


def shown(value: object) -> Json:
    """A value as a notebook keeps it: HTML where the value has some, else as it prints."""
    html = getattr(value, "_repr_html_", None)
    if html is not None:
        return {"text/html": lines(html()), "text/plain": [f"<{type(value).__name__}>"]}
    return {"text/plain": lines(repr(value))}


def lines(text: str) -> list[str]:
    """Lines with their ends, as notebooks keep text."""
    return text.splitlines(keepends=True)


def written(notebook: Json) -> str:
    """The file's text."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Run all of them."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in PAGES:
        path.write_text(written(executed(json.loads(path.read_text()), path.stem)))
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
