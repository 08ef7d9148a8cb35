"""A simulated asynchronous accelerator that runs anywhere.

`open("sim0")` gives a device of the process's default machine, so that two devices opened by name
see each other's events. For another order, or rates of your own, make a `Machine` and its devices
with `Machine.device`. `Simulator` replays any plan, verified or not, and reports what went wrong.
"""

from typing import Any

from ggraph.backends.sim.backend import SimBackend, SimHost
from ggraph.backends.sim.machine import Machine, Span
from ggraph.backends.sim.orders import (
    Adversarial,
    InOrder,
    Order,
    Random,
    Scripted,
    Timed,
    every_order,
)
from ggraph.backends.sim.replay import Fault, Simulated, Simulator
from ggraph.device import DeviceSpec
from ggraph.door import checked

__all__ = [
    "Adversarial",
    "Fault",
    "InOrder",
    "Machine",
    "Order",
    "Random",
    "Scripted",
    "SimBackend",
    "SimHost",
    "Simulated",
    "Simulator",
    "Span",
    "Timed",
    "every_order",
    "open",
    "sim_spec",
]

_DEFAULT = Machine()


@checked
def sim_spec(name: str, **fields: Any) -> DeviceSpec:
    """A simulated GPU: four compute streams, two copy streams, peer copies; `fields` replace."""
    given: dict[str, Any] = {
        "memory_bytes": 1 << 36,
        "alignment": 128,
        "streams": 4,
        "copy_streams": 2,
        "flops_per_s": 1e13,
        "bytes_per_s": 1e12,
        "link_bytes_per_s": 2e10,
        "peer_bytes_per_s": 1e11,
        "launch_s": 4e-6,
    }
    return DeviceSpec(name, "sim", **{**given, **fields})


@checked
def open(name: str, *, machine: Machine | None = None, **fields: Any) -> SimBackend:
    """The simulated device `name` on `machine` (None: the process's default machine, in order).

    `fields` replace those of `sim_spec`.
    """
    return SimBackend(sim_spec(name, **fields), machine or _DEFAULT)
