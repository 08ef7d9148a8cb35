"""The host uses the vector that an asynchronous download is still filling."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_sync
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input


def step() -> Graph:
    """x [T, E] -> embeddings [T, E]."""
    pooled = ops.l2_norm(linear(input("x", (T, E)), "pool"))
    return Graph.of({"embeddings": pooled}, name="embedding step")


HAZARDS = (
    Hazard(
        "15",
        15,
        "The host reads, grows or frees its output vector while the download still writes it",
        ("llama.cpp #17974", "llama.cpp #25676", "llama.cpp #18310"),
        "Outputs are fetched into a vector of the host by an asynchronous copy. The host then read "
        "the vector, or reallocated it for a larger batch, without waiting for the copy.",
        step,
        (GPU,),
        Recipe("ggml"),
        "the host waits for the copy before it touches the vector",
        Recipe("ggml", faults=(forgets_sync("end of run"),)),
        Expected("race", "copy:embeddings@host", "read:embeddings"),
    ),
)
