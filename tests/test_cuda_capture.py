"""Captures by the CUDA backend that are refused or interrupted, over the stand-in driver."""

import contextlib

import numpy as np
import pytest
from cuda_host import need_compiler
from cuda_kit import bytes_on, host_bytes, opened

from ggraph.errors import BackendError, InputError


@need_compiler
def test_a_later_part_that_is_refused_takes_the_earlier_ones_with_it() -> None:
    """Streams of the part that is no graph must not wait for what only a graph recorded."""
    backend = opened()
    first, second = bytes_on(backend, 64, "first"), bytes_on(backend, 64, "second")
    given = host_bytes(4096)

    def one() -> None:
        backend.copy(1, (first, 0), (given, 0), 64)
        backend.record(1, "e")

    def two() -> None:
        backend.wait(2, "e")
        backend.copy(2, (second, 0), (first, 0), 64)
        backend.record(2, "end")

    parts = [backend.capture([0, 1, 2], part) for part in (one, two)]
    refused = pytest.warns(UserWarning, match="plans run without graphs from now on")
    for i in range(4):  # enqueued; captured, but for the second part; enqueued from then on
        given.handle[:] = i + 1
        parts[0]()
        backend.driver.refuses_capture = i == 1  # type: ignore[attr-defined]
        with refused if i == 1 else contextlib.nullcontext():
            parts[1]()
        backend.synchronise(event="end")
        assert (backend.read(second, 0, 64) == i + 1).all(), i
    assert backend.driver.calls[-2:] == ["copy 64", "copy 64"]  # type: ignore[attr-defined]
    backend.close()


@need_compiler
def test_an_interrupted_capture_ends_and_the_next_run_captures() -> None:
    """What interrupts it comes through, though streams that forked were not joined."""
    backend = opened()
    device, given = bytes_on(backend, 64), host_bytes(4096)
    given.handle[:] = 3
    trouble: list[BaseException] = []

    def enqueue() -> None:
        backend.copy(1, (device, 0), (given, 0), 64)
        if trouble:
            raise trouble.pop()
        backend.record(1, "e")

    replay = backend.capture([0, 1], enqueue)
    replay()
    for error in (KeyboardInterrupt(), InputError("odd")):
        trouble.append(error)
        with pytest.raises(type(error)):
            replay()
        backend.abandon()
        assert backend._marks is None and backend.graphs
    replay()
    backend.synchronise(event="e")
    assert backend.driver.calls[-1] == "graph of 1"  # type: ignore[attr-defined]
    assert (backend.read(device, 0, 64) == 3).all()
    backend.close()


@need_compiler
def test_events_are_waited_for_where_no_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(stream: int) -> None:
        raise BackendError("none begins")

    backend = opened()
    home, device = host_bytes(4096), bytes_on(backend, 64)

    def enqueue() -> None:
        backend.copy(1, (home, 0), (device, 0), 64)
        backend.record(1, "home")

    monkeypatch.setattr(backend.driver, "begin_capture", refuses)
    replay = backend.capture([0, 1], enqueue)
    replay()
    for value, expected in (
        (1, pytest.warns(UserWarning, match="without graphs from now on: none begins")),
        (2, contextlib.nullcontext()),
    ):
        backend.write(device, 0, np.full(64, value, np.uint8))
        with expected:
            replay()
        backend.synchronise(event="home")
        assert (home.handle[:64] == value).all()
    backend.close()
