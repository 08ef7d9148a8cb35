"""The CPU begins the next batch over bytes that the device is still fetching."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import CPU, GPU, E, T, linear
from ggraph.tensor import input, state


def batch() -> Graph:
    """A CPU split makes `cpu.h` [T, E]; the GPU keeps it for the next batch."""
    x, old = input("x", (T, E)), state("gpu.carry", (T, E))
    y = linear(old, "gpu.y")
    h = linear(x, "cpu.h")
    return Graph.of({"y": y}, also=[ops.cpy(h, old, name="gpu.kept")], name="batch")


HAZARDS = (
    Hazard(
        "12",
        12,
        "CPU split before a GPU split: the next batch overwrites what is still being copied",
        ("llama.cpp #8897",),
        "The copy from the CPU's result to the GPU is asynchronous. The host began the next batch, "
        "whose CPU split writes the same bytes, without waiting for it.",
        batch,
        (GPU, CPU),
        Recipe("ggml", overlap=True),
        "the host waits for the copy before the next batch's CPU split",
        Recipe(
            "ggml",
            overlap=True,
            faults=(forgets_wait("end:sim0.0", on="host"), forgets_wait("end:sim0.4", on="host")),
        ),
        Expected("race", "copy:cpu.h@sim0", "cpu.h"),
        {"one batch at a time": Recipe("ggml")},
        pins=("cpu.*=cpu", "gpu.*=sim0"),
        runs=3,
    ),
)
