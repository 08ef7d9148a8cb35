"""The host sets the next step's inputs while the device still reads this step's."""

from ggraph import ops
from ggraph.dtype import I32
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import IGPU, E, T, linear, norm
from ggraph.tensor import input, state, weight


def step() -> Graph:
    """Tokens [T] -> logits [T, E]; what the tokens say is also kept for the next step."""
    tokens, old = input("inp_tokens", (T,), I32), state("history", (T, E))
    table = weight("token_embd.weight", (8, E))
    x = ops.add(ops.get_rows(table, tokens, name="embd"), old, name="with_history")
    again = ops.get_rows(weight("history.weight", (8, E)), tokens, name="late")
    kept = ops.cpy(again, old, name="kept")
    return Graph.of({"logits": linear(norm(x, "norm"), "out")}, also=[kept], name="step")


HAZARDS = (
    Hazard(
        "06",
        6,
        "Shared memory: inputs of step k+1 are written while step k reads them",
        ("llama.cpp #25863", "llama.cpp #26225", "llama.cpp #27311"),
        "On a GPU that shares the host's memory, inputs lie in pinned host memory and are read in "
        "place. The host set the tokens of the next step without waiting for the kernels of this "
        "one. A ring of inputs was the cure.",
        step,
        (IGPU,),
        Recipe("ggml", overlap=True, copies=2),
        "inputs rotate over two slots",
        Recipe("ggml", overlap=True, faults=(forgets_wait("end:sim0.0"),)),
        Expected("race", "late", "write:inp_tokens"),
        {"one slot, the host waits": Recipe("ggml", overlap=True)},
        runs=3,
        agreement=True,
    ),
)
