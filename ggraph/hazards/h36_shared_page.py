"""Two texts share the page of their common prefix; one of them goes on in place."""

from functools import partial

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import planned_apart
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import weight

FIRST = ("prefix", "a.new", "a.page", "a.read")  # as the pool knows them
LISTED = ("prefix", "a.new", "a.page", "a.read", "b.read")


def step() -> Graph:
    """Text a adds its tokens to the prefix's page [T, E] and reads it; text b reads the prefix."""
    prefix = linear(weight("text", (T, E)), "prefix")
    page = ops.add(prefix, linear(weight("more", (T, E)), "a.new"), name="a.page")
    mine, other = linear(page, "a.read"), linear(prefix, "b.read")
    return Graph.of({"y": ops.add(mine, other, name="y")}, name="shared prefix")


HAZARDS = (
    Hazard(
        "36",
        36,
        "Cache pages: a prefix's page is shared by two texts, and one of them overwrites it",
        ("vLLM #37076", "vLLM #37164", "SGLang #23392"),
        "A page holds the beginning that two texts have in common. The pool counts one owner too "
        "few (the other one was cancelled, or hit the prefix a moment later), so that the first "
        "text writes into the page instead of into a copy. There is no race: the other text reads "
        "foreign tokens in every order.",
        step,
        (GPU,),
        Recipe("ggml", listed=LISTED),
        "every reader is counted: a page with two of them is copied before it is written",
        Recipe(
            "ggml",
            listed=LISTED,
            layout=partial(planned_apart, first=FIRST),
        ),
        Expected("stale", "a.page", "b.read"),
    ),
)
