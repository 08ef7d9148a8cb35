"""A cache page is overwritten while it is still being copied out to other memory."""

from ggraph import ops
from ggraph.dtype import I64
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU, GPU1, E, T
from ggraph.tensor import input, state

PAGES = 8


def step() -> Graph:
    """The pages [PAGES, E] are stored on a second device, then new keys go to some of them."""
    pages = state("pages", (PAGES, E))
    stored = ops.scale(pages, 1.0, 0.0, name="stored")
    keys, ids = input("keys", (T, E)), input("ids", (T,), I64)
    filled = ops.set_rows(pages, keys, ids, name="filled")
    return Graph.of({"stored": stored}, also=[filled], name="store and reuse")


HAZARDS = (
    Hazard(
        "35",
        35,
        "Cache pages: pages are freed and filled anew while an asynchronous store reads them",
        ("vLLM #52360",),
        "Pages are copied to other memory, to be brought back later. The copy runs on a "
        "stream of its own and is counted as done when it is enqueued; the pages are free then, "
        "and the next step writes them under the copy. What comes back later is a mixture.",
        step,
        (GPU, GPU1),
        Recipe(),
        "the step that fills the pages waits for the copy out of them",
        Recipe("ggml", faults=(forgets_wait("after:copy:pages@sim1", "sim0.0"),)),
        Expected("race", "copy:pages@sim1", "filled"),
        pins=("^stored$=sim1", "^pages$=sim0"),
        runs=3,
    ),
)
