"""All-reduce over peer copies: the next layer's copy lands on operands still in use."""

from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import GPU, GPU1, E, T, linear
from ggraph.tensor import Tensor, input


def _layer(h: Tensor, g: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """Each GPU makes a part, each adds the other's: h and g are the same sum [T, E] on both."""
    a, b = linear(h, f"a.{i}"), linear(g, f"b.{i}")
    near, far = (a + b).named(f"a.sum.{i}"), (b + a).named(f"b.sum.{i}")
    return near, far


def two_layers() -> Graph:
    """Two layers over two GPUs."""
    x = input("x", (T, E))
    h, g = _layer(x, x, 0)
    h, g = _layer(h, g, 1)
    return Graph.of({"a.y": linear(h, "a.head"), "b.y": linear(g, "b.head")}, name="all-reduce")


HAZARDS = (
    Hazard(
        "22",
        22,
        "All-reduce: a peer's copy overwrites what the receiving GPU still reads",
        ("ik_llama.cpp #1114", "ik_llama.cpp #1124", "ik_llama.cpp #1049"),
        "Each GPU copies its part into a temporary of the other. In list order the operand of the "
        "other GPU's own product is dead when the temporary is placed, so the temporary gets its "
        "bytes; but the copy runs on a stream of its own and did not wait for the product that "
        "still reads them. An escape hatch that forces synchronisation came before the wait.",
        two_layers,
        (GPU, GPU1),
        Recipe(),
        "a temporary gets bytes only after every access of their old tenant",
        Recipe("ggml"),
        Expected("race", "a.0", "copy:b.0@sim0"),
        pins=(r"^a\.=sim0", r"^b\.=sim1"),
    ),
)
