"""A cache page stands twice in the free list, and two texts get it."""

from functools import partial

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import planned_apart
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import weight

FIRST = ("a.page", "a.read")
STREAMS = {"a.page": 0, "a.read": 0, "b.page": 1, "b.read": 1, "y": 0}


def step() -> Graph:
    """Two texts fill a page [T, E] each and read it, on a stream each."""
    a, b = (linear(weight(n, (T, E)), f"{n}.page") for n in "ab")
    y = ops.add(linear(a, "a.read"), linear(b, "b.read"), name="y")
    return Graph.of({"y": y}, name="freed twice")


HAZARDS = (
    Hazard(
        "37",
        37,
        "Cache pages: a page that was given back twice is handed to two texts at once",
        ("vLLM #47728",),
        "A page is freed when its draft is rejected and once more when the text ends. The free "
        "list holds it twice, and two texts that know nothing of each other get the same bytes: "
        "each plans as if it were alone.",
        step,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS),
        "a page that is free already cannot be freed: both texts are planned as one",
        Recipe("ggml", streams=2, on_stream=STREAMS, layout=partial(planned_apart, first=FIRST)),
        Expected("race", "a.read", "b.page"),
    ),
)
