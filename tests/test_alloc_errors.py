"""Bad input to the allocator: one typed error, naming the tensor and the number."""

from dataclasses import replace
from math import inf, nan

import pytest
from alloc_kit import act, schedule

from ggraph.alloc import allocate, lower_bounds
from ggraph.device import DeviceSpec
from ggraph.errors import AllocError
from ggraph.plan import HOST_ACTOR, Access, Actor, Command, Do, Schedule, Value
from ggraph.strides import MAX_BYTES

SIM = DeviceSpec("d", "sim", alignment=32)
X, Y = Value("x", "d", 64), Value("y", "d", 100)


def use(*values: Value, device: DeviceSpec = SIM, actor: Actor | None = None) -> Schedule:
    return schedule([device], values, [act(Do.LAUNCH, actor or Actor("d"), values)])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Value("x", "gpu", 4), "%x: unknown device 'gpu'; known: d, host"),
        (Value("x", "d", -4), "%x: size -4 is outside"),
        (Value("x", "d", MAX_BYTES + 1), f"%x: size {MAX_BYTES + 1} is outside 0..{MAX_BYTES}"),
        (Value("x", "d", 4, slots=0), "%x: 0 slots"),
        (Value("x", "d", 4, same_as="z"), "%x: may lie on %z"),
        (Value("x", "d", 4, None, ("z",)), "%x: may lie on %z"),
        (Value("x", "d", 4, same_as="x"), "%x: overwrites itself through x -> x"),
        (Value("x", "host", 100, same_as="y"), "%x on host cannot lie on %y, which is on d"),
    ],
)
def test_bad_values(value: Value, message: str) -> None:
    with pytest.raises(AllocError) as caught:
        allocate(schedule([SIM], [value, Y], []))
    assert message in str(caught.value)


def test_sizes_that_overflow_together() -> None:
    many = [Value(f"v{k}", "d", 1 << 61) for k in range(3)]
    for values in (many, [Value("x", "d", 1 << 61, slots=3)]):
        with pytest.raises(AllocError, match=f"together need {3 << 61} bytes"):
            allocate(use(*values))


def test_the_largest_size_and_the_least_are_served() -> None:
    device = replace(SIM, memory_bytes=MAX_BYTES, max_buffer_bytes=MAX_BYTES)
    nothing = Value("nothing", "d", 0)
    for x in (Value("x", "d", MAX_BYTES), Value("x", "d", MAX_BYTES // 2, slots=2)):
        assert allocate(use(x, nothing, device=device)).arena_bytes == MAX_BYTES


def test_a_value_listed_under_another_name() -> None:
    s = use(X)
    with pytest.raises(AllocError, match="value %x is listed as %q"):
        allocate(replace(s, values={"q": X}))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (act(Do.LAUNCH, Actor("gpu"), [X]), "command 0 (launch launch): unknown device 'gpu'"),
        (act(Do.LAUNCH, Actor("d", 3), [X]), "unknown stream d.3; the device has 1"),
        (act(Do.LAUNCH, Actor("d", 1), [X]), "unknown stream d.1; the device has 1"),
        (act(Do.LAUNCH, Actor("d", -1), [X]), "unknown stream d.-1"),
        (act(Do.LAUNCH, Actor("d"), [Y]), "command 0: access y[0:100] to a value"),
        (
            Command(Do.LAUNCH, Actor("d"), "f", None, (Access("x", 60, 65),)),
            "command 0: access x[60:65] is outside %x of 64 bytes",
        ),
        (
            Command(Do.HOST_READ, HOST_ACTOR, "f", None, (Access("x", 8, 4),)),
            "command 0: access x[8:4] is outside",
        ),
    ],
)
def test_bad_commands(command: Command, message: str) -> None:
    with pytest.raises(AllocError) as caught:
        allocate(schedule([SIM], [X], [command]))
    assert message in str(caught.value)


def test_streams_for_copies_stand_behind_the_others() -> None:
    device = replace(SIM, streams=2, copy_streams=1)
    assert allocate(use(X, device=device, actor=Actor("d", 2))).arena_bytes == 64
    with pytest.raises(AllocError, match=r"unknown stream d\.3; the device has 3"):
        allocate(use(X, device=device, actor=Actor("d", 3)))


def test_a_launch_on_the_host_is_a_host_step_of_its_own_queue() -> None:
    s = schedule([SIM], [X], [act(Do.LAUNCH, HOST_ACTOR, [X])])
    assert allocate(s).arena_bytes == 64


@pytest.mark.parametrize("mode", ["hb", "offline", "ggml"])
def test_capacity(mode: str) -> None:
    s = use(X, Y)
    assert allocate(s, mode=mode, capacity={"d": 192}).arena_bytes == 192
    with pytest.raises(AllocError) as caught:
        allocate(s, mode=mode, capacity={"d": 191})
    assert "d: the plan needs 192 bytes, 191 are there" in str(caught.value)
    assert "less than 192; largest value %y (100 bytes)" in str(caught.value)
    with pytest.raises(AllocError, match=r"%y needs 128 bytes, d has 100"):
        allocate(s, mode=mode, capacity={"d": 100})


def test_capacity_for_nobody_and_below_zero() -> None:
    with pytest.raises(AllocError, match="capacity for unknown device 'gpu'"):
        allocate(use(X), capacity={"gpu": 10})
    with pytest.raises(AllocError, match="capacity of d is -1 bytes"):
        allocate(use(X), capacity={"d": -1})


def test_a_device_holds_its_weights_and_the_arena() -> None:
    device = replace(SIM, memory_bytes=300)
    w = Value("w", "d", 200, external=True)
    assert allocate(use(w, X, device=device)).arena_bytes == 64
    with pytest.raises(AllocError, match=r"%y needs 128 bytes, d has 100"):
        allocate(use(w, Y, device=device))


def test_a_value_beyond_the_largest_buffer() -> None:
    device = replace(SIM, max_buffer_bytes=100)
    with pytest.raises(AllocError, match=r"%y needs 128 bytes \(1 slots\), d's largest .* has 96"):
        allocate(use(Y, device=device))


def test_bad_options() -> None:
    with pytest.raises(AllocError, match="unknown allocator mode 'best'; known: hb, offline, ggml"):
        allocate(use(X), mode="best")
    for seconds in (-1.0, inf, nan):
        with pytest.raises(AllocError, match=f"offline_seconds={seconds}: expected 0 or more"):
            allocate(use(X), mode="offline", offline_seconds=seconds)


@pytest.mark.parametrize("told", [True, False])
def test_what_no_plan_can_do_without_is_told(told: bool) -> None:
    """Where the limit is given, and where it is the device's own memory."""
    plan = use(X, Y, device=replace(SIM, memory_bytes=1 << 20 if told else 128))
    least = lower_bounds(plan)["d"].nbytes
    assert least > 0
    with pytest.raises(AllocError, match=rf"needs less than {least};"):
        allocate(plan, capacity={"d": 128} if told else None)


def test_a_plan_that_fits_asks_for_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than to lay out memory."""
    monkeypatch.setattr("ggraph.alloc.lower_bound", None)
    allocate(use(X, Y), capacity={"d": 1024})
