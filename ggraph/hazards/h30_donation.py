"""A donated buffer is overwritten in place while a kernel of another stream is pending."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input

STREAMS = {"made": 0, "pending": 0, "total": 0, "donated": 1, "after": 1, "y": 0}
LISTED = ("made", "pending", "total", "donated", "after", "y")


def donated() -> Graph:
    """`made` [T, E] has two readers on two streams; the second one takes its buffer."""
    made = linear(input("x", (T, E)), "made")
    pending = ops.sum_rows(ops.sqr(made, name="pending"), name="total")  # [T, 1]
    taken = ops.exp(made, name="donated")
    return Graph.of({"y": ops.mul(linear(taken, "after"), pending)}, name="donation")


HAZARDS = (
    Hazard(
        "30",
        30,
        "Donation: the last reference is gone on the host, but not the last read on the device",
        ("MLX #1863", "MLX #3462"),
        "A result may take the buffer of an operand that nobody else holds. The host's count of "
        "references says when nobody holds it; a kernel on another stream that was queued before "
        "may not have read it yet.",
        donated,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS, listed=LISTED),
        "a buffer is donated only if all its other readers are done in every order",
        Recipe("ggml", streams=2, on_stream=STREAMS, listed=LISTED),
        Expected("race", "pending", "donated"),
    ),
)
