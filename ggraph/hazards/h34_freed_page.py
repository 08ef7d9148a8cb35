"""A cache page is given to another text while the step of its last owner still writes it."""

from ggraph import ops
from ggraph.dtype import I64
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input, state

PAGES = 8  # rows of the cache; a page is one row here
STREAMS = {"old.kept": 1, "new.filled": 0, "seen": 0, "y": 0}


def step() -> Graph:
    """The old text's keys go to its pages, then the new text's to the pages that it was given."""
    pages, held = state("pages", (PAGES, E)), input("old.pages", (T,), I64)
    kept = ops.set_rows(pages, input("old.keys", (T, E)), held, name="old.kept")
    given = input("new.pages", (T,), I64)
    filled = ops.set_rows(kept, input("new.keys", (T, E)), given, name="new.filled")
    return Graph.of({"y": linear(ops.scale(filled, 0.5, name="seen"), "y")}, name="freed pages")


HAZARDS = (
    Hazard(
        "34",
        34,
        "Cache pages: freed pages are filled for a new text while a step in flight writes them",
        ("vLLM #45357", "vLLM #49674"),
        "A text ends or a draft is rejected, and its pages go back to the pool at once. The step "
        "that was enqueued before still writes its keys to them, after the next owner has put its "
        "own there: the new text attends to tokens of the old one.",
        step,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS),
        "a page is given out only after the last step that may write it",
        Recipe("ggml", streams=2, on_stream=STREAMS, faults=(forgets_wait("after:old.kept"),)),
        Expected("race", "old.kept", "new.filled"),
        runs=3,
    ),
)
