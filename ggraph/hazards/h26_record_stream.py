"""A tensor made on one stream and read on another goes back to the first one's pool."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, E, T, linear
from ggraph.tensor import input

STREAMS = {"aux.made": 1, "main.read": 0, "aux.next": 1, "aux.out": 1, "y": 0}
LISTED = ("aux.made", "main.read", "aux.next", "aux.out", "y")


def two_streams() -> Graph:
    """The side stream makes a tensor [T, E], the main stream reads it, the side stream goes on."""
    x, z = input("x", (T, E)), input("z", (T, E))
    read = linear(linear(x, "aux.made"), "main.read")
    further = linear(linear(z, "aux.next"), "aux.out")
    return Graph.of({"y": ops.mul(read, further)}, name="side stream")


HAZARDS = (
    Hazard(
        "26",
        26,
        "A caching allocator reuses a block on its own stream while another stream reads it",
        ("TensorRT-LLM #15265", "PyTorch record_stream"),
        "Blocks belong to the stream that made them. When the last reference is dropped the block "
        "is free for that stream at once, although another stream may not have read it yet. The "
        "reader waited for the producer; nothing makes the next owner wait for the reader.",
        two_streams,
        (GPU,),
        Recipe(streams=2, on_stream=STREAMS, listed=LISTED),
        "the block is free only when the reading stream is through with it",
        Recipe("ggml", streams=2, on_stream=STREAMS, listed=LISTED),
        Expected("race", "main.read", "aux.next"),
    ),
)
