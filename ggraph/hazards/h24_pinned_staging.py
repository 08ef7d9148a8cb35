"""A pinned staging buffer is refilled while the upload from it is still running."""

from ggraph import ops
from ggraph.graph import Graph
from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import CPU, GPU, E, T, linear, norm
from ggraph.tensor import input, state


def step() -> Graph:
    """Chances [T, E] come from the tables of the step before; new tables [T, E] are stored."""
    old = state("tables", (T, E))
    logits = linear(norm(old, "gpu.norm"), "gpu.out")
    stored = ops.cpy(input("block_table", (T, E)), old, name="gpu.stored")
    sampled = ops.soft_max(logits, name="sampled")
    return Graph.of({"logits": sampled}, also=[stored], name="engine step")


HAZARDS = (
    Hazard(
        "24",
        24,
        "Pinned staging: the host fills it for step k+1 while the upload of step k reads it",
        ("vLLM #25279", "vLLM #29288", "vLLM #35137", "vLLM #54269", "vllm-ascend #12071"),
        "Block tables and lengths are prepared in one pinned buffer per kind and uploaded without "
        "waiting. With scheduling ahead, the host prepared the next step in the same buffer "
        "before the upload had read it.",
        step,
        (GPU, CPU),
        Recipe("ggml", overlap=True, copies=2),
        "two pinned buffers in turn, each guarded by the event of its upload",
        Recipe(
            "ggml",
            overlap=True,
            faults=(forgets_wait("end:sim0.4", on="host"), forgets_wait("end:sim0.0", on="host")),
        ),
        Expected("race", "copy:block_table", "write:block_table"),
        {"one buffer, the host waits": Recipe("ggml", overlap=True)},
        pins=("gpu.*=sim0", "block_table=sim0", "logits=cpu"),
        runs=3,
        agreement=True,
    ),
)
