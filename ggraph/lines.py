"""Which line of a program made a tensor: Python knows it while it traces allocations.

To note the line of every tensor would take a tenth of the time that it takes to build a graph.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ggraph.graph import Graph
from ggraph.lazy import lazy
from ggraph.tensor import Tensor

if TYPE_CHECKING:
    import tracemalloc
else:
    tracemalloc = lazy("tracemalloc")

ROOM = str(Path(__file__).parent)
NAMED = re.compile(r"%([^\s:;,()\[\]]+)")  # as messages write tensors


def note_lines(error: Exception, graph: Graph) -> None:
    """Notes to an error: for each tensor of the graph that it names, the line that made it. There
    are none unless Python was started with -X tracemalloc=20, which keeps 20 calls of each line."""
    if not tracemalloc.is_tracing():
        return
    for name in dict.fromkeys(NAMED.findall(str(error))):
        t = graph.get(name)
        if t is not None and (made := _made_at(t)):
            error.add_note(f"%{name} was made at {made}")


def _made_at(t: Tensor) -> str:
    """File and line outside of ggraph. A tensor that gets a name is another object, of the same
    attributes; leaves have none, but a shape of their own."""
    calls = tracemalloc.get_object_traceback(t.shape if t.is_leaf else t.attrs)
    for call in reversed(calls or ()):  # the latest first
        if not call.filename.startswith(ROOM):
            return f"{call.filename}:{call.lineno}"
    return ""
