"""A CPU split without inputs overwrites a host block that a device is still copying."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.parts import CPU, GPU, E, T, linear
from ggraph.tensor import input, state


def two_devices() -> Graph:
    """x [T, E] is read by the device; the host's side rolls a state of the same size."""
    x = input("x", (T, E))
    y = linear(x, "gpu.y")
    conv = state("conv", (T, E))
    rolled = ops.scale(ops.roll(conv, (1, 0), name="cpu.rolled"), 0.5, 1.0, name="cpu.scaled")
    kept = ops.cpy(ops.scale(rolled, 2.0, name="cpu.next"), conv, name="cpu.kept")
    return Graph.of({"y": y, "z": ops.dup(kept, name="cpu.z")}, name="split without inputs")


HAZARDS = (
    Hazard(
        "05",
        5,
        "A CPU split without inputs runs at once, over bytes that a copy still reads",
        ("llama.cpp #26040", "llama.cpp #23321", "llama.cpp #23827"),
        "The device's copy of a host input is asynchronous. The split after it runs on the CPU, "
        "has no inputs and so waits for nothing; in list order the input is dead, and a CPU "
        "result takes its bytes while the copy still reads. Upstream made the host wait.",
        two_devices,
        (GPU, CPU),
        Recipe(),
        "the host input keeps its bytes until the copy is complete",
        Recipe("ggml"),
        Expected("race", "copy:x@sim0", "cpu.rolled"),
        {"upstream's wait of the host": Recipe("ggml", forced_sync=("y",))},
        pins=("gpu.*=sim0", "cpu.*=cpu", "conv=cpu", "x=cpu"),
    ),
)
