"""The CPU backend. `open("cpu", threads=2)` is all that the rest of ggraph needs of it."""

from functools import partial

from ggraph import env
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.lowering.needs import held_bytes, rounds
from ggraph.backends.cpu.lowering.rehearsal import compiled, constant_bytes, needs
from ggraph.backends.cpu.profile import Profile
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.device import DeviceSpec
from ggraph.errors import InputError

FUSED = frozenset(
    {"rms_norm_mul", "mul_mat_add", "mul_mat_gated", "mul_mats", "rope_set_rows", "chain"}
)
IN_8_BITS = frozenset(
    {"quantise", "rms_norm_quantise", "swiglu_quantise", "mul_mat_gated_quantise"}
)


def open(
    name: str, *, threads: int | None = None, exact: bool = False, profile: bool = False
) -> CpuBackend:
    """The CPU under the device name `name`.

    `exact` keeps activations in float32; `profile` lets `backend.profile` time every launch.
    """
    count = env.thread_count() if threads is None else threads
    most = env.MOST_THREADS
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise InputError(f"threads = {count!r}: expected a whole number from 1 to {most}")
    for option, value in (("exact", exact), ("profile", profile)):
        if not isinstance(value, bool):
            raise InputError(f"{option} = {value!r}: expected True or False")
    pool = Pool(count)
    return CpuBackend(cpu_spec(name, exact), pool, exact, Profile(pool) if profile else None)


def cpu_spec(name: str, exact: bool = False) -> DeviceSpec:
    """What planning must know of this CPU."""
    return DeviceSpec(
        name,
        "cpu",
        host_visible=True,
        alignment=64,
        fused=FUSED if exact else FUSED | IN_8_BITS,
        needs=partial(needs, exact=exact),
        held_bytes=partial(held_bytes, exact=exact),
        rounds=partial(rounds, exact=exact),
        compiled=partial(compiled, exact=exact),
        constant_bytes=partial(constant_bytes, exact=exact),
    )
