"""What is hidden behind a head's rows: a state of the session, where its next steps begin.

A step of true rows leaves what is hidden behind its wanted rows from row 0 on: row 0 is the root of
the drafts that follow. One of fed-back rows leaves it from row 1 on, so that the root stays, and is
told which row each of its own follows, four bytes. A chain or a tree in one plan begins at the root
and leaves nothing. So it never visits the host.

Legend: T token rows, M wanted rows, H rows that are held, E head width.
"""

import numpy as np

from ggraph import ops
from ggraph.decode.rows import ROW_BUCKETS
from ggraph.dtype import F32, I32
from ggraph.graph import Graph
from ggraph.tensor import Array, Kind, Tensor, input, state

HELD = 1 + ROW_BUCKETS[-1]  # H: a root, and the rows of one step
ROOT_ROW = np.zeros((1, 1), np.int32)  # what the first row of a draft follows
NEXT_ROW = np.ones((1, 1), np.int32)  # what a row follows that was fed back alone


def held(name: str, width: int) -> Tensor:
    """The state f32 [H, E] of the head of that name."""
    return state(f"{name}.hidden", (HELD, width), F32)


def root(rows: Tensor) -> Tensor:
    """What is hidden behind the last true row, f32 [1, E] of `rows`."""
    return ops.rows(rows, 0, 1)


def below(rows: Array) -> Array:
    """Which rows i32 [T, 1] those follow that lie below these of the last fed-back step."""
    return (1 + rows).astype(np.int32)[:, None]


def keeping(step: Graph, rows: Tensor) -> Graph:
    """A head's step which begins and ends in the state `rows`: in place of `hidden` it is told
    `behind` i32 [T, 1], which row each of its own follows; and it gives no `feedback`."""
    fed_back = "hidden" in {t.name for t in step.leaves(Kind.INPUT)}
    if fed_back:
        count = step["hidden"].shape[0]
        at = input("behind", (count, 1), I32).reshape(count)
        step = step.replace({"hidden": ops.get_rows(rows, at)})
    outputs = {t.name: t for t in step.outputs}
    left = outputs.pop("feedback", None)
    if left is None:
        return step
    also = [t for t in step.updates.values() if not t.is_leaf]
    kept = ops.set(rows, left, (int(fed_back), 0))
    return Graph.of(outputs, also=[*also, kept], name=step.name)
