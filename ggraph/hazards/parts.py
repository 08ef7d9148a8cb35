"""Small pieces that the hazards' graphs are made of.

Legend: T token rows, E width. Everything is tiny: what matters is the shape of the graph, and each
plan is replayed under a thousand orders.
"""

from ggraph import ops
from ggraph.backends.sim import sim_spec
from ggraph.device import DeviceSpec
from ggraph.tensor import Tensor, weight

T, E = 4, 16

GPU, GPU1 = sim_spec("sim0"), sim_spec("sim1")
IGPU = sim_spec("sim0", host_visible=True, copy_streams=0)  # shares the host's memory
CPU = DeviceSpec("cpu", "cpu", host_visible=True)


def linear(x: Tensor, name: str, width: int = E) -> Tensor:
    """x [.., n] times a weight [width, n]: [.., width]."""
    return ops.mul_mat(weight(f"{name}.weight", (width, x.shape[-1])), x, name=name)


def norm(x: Tensor, name: str) -> Tensor:
    """RMS norm over the last axis, times a weight: nodes `name.rms` and `name`."""
    scaled = ops.rms_norm(x, name=f"{name}.rms")
    return ops.mul(scaled, weight(f"{name}.weight", (x.shape[-1],)), name=name)
