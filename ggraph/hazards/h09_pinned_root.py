"""A device reads a tensor of another device in place; its owner recycles the bytes."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import reads_in_place
from ggraph.hazards.parts import CPU, IGPU, E, T, linear
from ggraph.tensor import input


def borrowed() -> Graph:
    """The CPU makes h [T, E]; the GPU reads it; the CPU goes on with other work."""
    h = ops.sqr(input("x", (T, E)), name="cpu.h")
    far = linear(h, "gpu.y")
    near = ops.scale(ops.exp(input("z", (T, E)), name="cpu.exp"), 0.5, name="cpu.half")
    own = linear(near, "cpu.w")
    return Graph.of({"gpu.y": far, "cpu.w": own}, name="borrowed tensor")


HAZARDS = (
    Hazard(
        "09",
        9,
        "A split reads another device's tensor without a copy, and the owner reuses its bytes",
        ("llama.cpp #27311",),
        "A split on a GPU with shared memory reads a CPU tensor where it lies. The allocator sees "
        "the reader in list order, frees the tensor and gives its bytes to a later CPU split, "
        "which does not wait for the GPU. Upstream pins the tensor's root.",
        borrowed,
        (IGPU, CPU),
        Recipe(split=reads_in_place),
        "the tensor keeps its bytes until the other device has read it",
        Recipe("ggml", split=reads_in_place),
        Expected("race", "gpu.y", "cpu.w"),
        pins=("gpu.*=sim0", "cpu.*=cpu", "x=cpu", "z=cpu"),
    ),
)
