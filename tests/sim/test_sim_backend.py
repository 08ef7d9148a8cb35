"""The simulated backend: memory with poison, capacity, copies between devices and the host."""

import numpy as np
import pytest

from ggraph.backends import open_backend
from ggraph.backends.host import HostMemory
from ggraph.backends.sim import Machine, SimBackend, SimHost, sim_spec
from ggraph.errors import BackendError
from ggraph.plan import Buffer
from ggraph.tensor import weight


def pair(**fields: object) -> tuple[SimBackend, SimBackend, SimHost]:
    machine = Machine()
    zero = SimBackend(sim_spec("sim0", **fields), machine)
    return zero, SimBackend(sim_spec("sim1"), machine), SimHost(machine)


def test_two_devices_copy_through_an_event() -> None:
    zero, one, host = pair()
    a, b = zero.allocate(Buffer("a", "sim0", 64, 64)), one.allocate(Buffer("b", "sim1", 64, 64))
    zero.write(a, 8, np.arange(4, dtype=np.float32))
    zero.copy(0, (a, 32), (a, 8), 16)
    zero.record(0, "e")
    one.wait(2, "e")
    one.copy(2, (b, 0), (a, 32), 16)
    one.synchronise(2)
    assert one.read(b, 0, 16).view(np.float32).tolist() == [0, 1, 2, 3]
    staged = host.allocate(Buffer("h", "host", 16, 64))
    one.copy(0, (staged, 0), (b, 0), 16)
    one.synchronise()
    assert host.read(staged, 12, 4).view(np.float32).tolist() == [3]


def test_reading_bytes_that_nobody_wrote_is_named() -> None:
    zero, _, _ = pair()
    a = zero.allocate(Buffer("a", "sim0", 64, 64))
    zero.write(a, 0, np.zeros(4, np.uint8))
    with pytest.raises(BackendError, match=r"bytes \[0, 8\) of 'a', but nobody wrote byte 4"):
        zero.read(a, 0, 8)
    zero.copy(0, (a, 32), (a, 16), 8)
    with pytest.raises(BackendError, match="nobody wrote byte 16"):
        zero.synchronise()


def test_memory_is_poisoned_bounded_and_freed_once() -> None:
    zero, _, _ = pair(memory_bytes=100)
    a = zero.allocate(Buffer("a", "sim0", 64, 64))
    assert np.isnan(a.handle.view(np.float32)).all()
    with pytest.raises(BackendError, match="'b' of 64 bytes does not fit: 64 of 100"):
        zero.allocate(Buffer("b", "sim0", 64, 64))
    zero.free(a)
    with pytest.raises(BackendError, match="freed twice"):
        zero.free(a)
    zero.close()
    with pytest.raises(BackendError, match="closed"):
        zero.record(0, "e")


def test_what_was_never_given_back_is_not_taken_for_memory_made_later() -> None:
    """Python gives the addresses of dropped arrays to new ones: what was known of the old bytes
    said of the host's own that nobody had written them."""
    zero, _, _ = pair()
    held = zero.allocate(Buffer("a", "sim0", 64, 64))
    dropped = [zero.allocate(Buffer("d", "sim0", 64, 64)) for _ in range(100)]
    del dropped
    theirs = [HostMemory().allocate(Buffer("h", "host", 64, 64)) for _ in range(100)]
    for staged in theirs:
        zero.copy(0, (held, 0), (staged, 0), 64)
    zero.synchronise()
    assert not zero.read(held, 0, 64).any()


def test_a_weight_of_the_wrong_size_is_refused() -> None:
    zero, _, _ = pair()
    w = weight("w", (4, 4))
    with pytest.raises(BackendError, match="expected 64 bytes, got 60"):
        zero.load(Buffer("w", "sim0", 64, 64), w, np.zeros(15, np.float32))


def test_a_freed_weight_leaves_the_callers_array_alone() -> None:
    zero, _, _ = pair()
    raw = np.ones(16, np.float32)
    zero.free(zero.load(Buffer("w", "sim0", 64, 64), weight("w", (4, 4)), raw))
    assert raw.flags.writeable and (raw == 1).all()


def test_devices_opened_by_name_share_a_machine() -> None:
    zero, one = open_backend("sim0"), open_backend("sim1")
    assert isinstance(zero, SimBackend) and isinstance(one, SimBackend)
    assert zero.machine is one.machine
