"""Lowerings of images that grow."""

from typing import Any

from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.needs import is_rows
from ggraph.backends.protocol import Launch
from ggraph.ops.images import neighbours
from ggraph.ops.rules import integers


def lower(low: Lowering, x: Launch) -> bool:
    """Bilinear upscaling of float32 images without gaps."""
    a, t = x.sources[0].tensor, x.result.tensor
    if t.attrs["mode"] != "bilinear" or not is_rows(a):
        return False
    (height, width), (rows, columns) = a.shape[-2:], t.shape[-2:]
    s, f = integers(t.attrs, "factor", 2)
    names = ("above", "below", "down", "left", "right", "across")
    tables = (*neighbours(height, s), *neighbours(width, f))
    held: dict[str, Any] = {
        name: low.constant(table) for name, table in zip(names, tables, strict=True)
    }
    low.add(
        "enlarge", x=low.at(x.sources[0]), y=low.at(x.result), images=a.size // (height * width),
        height=height, width=width, rows=rows, columns=columns, **held,
    )  # fmt: skip
    return True
