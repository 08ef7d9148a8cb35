"""What `verify` refuses before it looks at any order: names, bounds, alignment, capacity, reach."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from plan_strategies import with_commands, with_regions, with_value
from verify_kit import (
    ALIGN,
    DEV,
    ROOM,
    S0,
    S1,
    SIZE,
    copy,
    fault,
    get,
    plan,
    proof,
    put,
    record,
    run,
    sync,
    wait,
)

from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.plan import (
    HOST_ACTOR,
    Access,
    Actor,
    Buffer,
    Command,
    Do,
    Placement,
    Plan,
    Region,
    Splits,
)
from ggraph.tensor import input
from ggraph.verify.static import static_faults

END = sync()


def good() -> Plan:
    return plan({"x": 0, "y": 32, "hx": 0}, put("hx"), copy(S0, "x", "hx"), run(S0, "y", "x"), END)


def with_buffer(p: Plan, buffer: Buffer) -> Plan:
    return replace(p, memory=replace(p.memory, buffers={**p.memory.buffers, buffer.name: buffer}))


def on(p: Plan, *devices: DeviceSpec) -> Plan:
    placement = replace(p.schedule.splits.placement, devices=devices)
    return replace(p, schedule=replace(p.schedule, splits=Splits(placement, ())))


def renamed_value(p: Plan) -> Plan:
    values = {**p.schedule.values, "other": p.schedule.values["x"]}
    return replace(p, schedule=replace(p.schedule, values=values))


def traits(name: str, **changes: object) -> Callable[[Plan], Plan]:
    return lambda p: with_value(p, replace(p.schedule.values[name], **changes))  # type: ignore[arg-type]


def region(name: str, **changes: object) -> Callable[[Plan], Plan]:
    return lambda p: with_regions(p, {name: replace(p.memory.regions[name], **changes)})  # type: ignore[arg-type]


def buffer(name: str, **changes: object) -> Callable[[Plan], Plan]:
    return lambda p: with_buffer(p, replace(p.memory.buffers[name], **changes))  # type: ignore[arg-type]


def carried(**pairs: str) -> Callable[[Plan], Plan]:
    return lambda p: replace(p, schedule=replace(p.schedule, carried=pairs))


def also(*commands: Command) -> Callable[[Plan], Plan]:
    return lambda p: with_commands(p, (*p.schedule.commands, *commands))


def no_region(p: Plan) -> Plan:
    regions = {k: v for k, v in p.memory.regions.items() if k != "y"}
    return replace(p, memory=replace(p.memory, regions=regions))


def misnamed_buffer(p: Plan) -> Plan:
    buffers = {**p.memory.buffers, "spare": Buffer("other", "d", 1, 1)}
    return replace(p, memory=replace(p.memory, buffers=buffers))


def strangers(p: Plan) -> Plan:
    return with_regions(p, {"nobody": Region("mem", (0,), 1)})


def bad(do: Do, actor: Actor = HOST_ACTOR, **fields: object) -> Callable[[Plan], Plan]:
    return also(Command(do, actor, "odd", **fields))  # type: ignore[arg-type]


READS, TWICE = (Access("x", 0, SIZE),), run(S0, "y", "x")
FAULTS: list[tuple[str, Callable[[Plan], Plan], str, str]] = [
    # Names.
    ("value under a false name", renamed_value, "declaration", "value 'other' calls itself 'x'"),
    ("buffer under a false name", misnamed_buffer, "declaration", "buffer 'spare' calls itself"),
    (
        "unknown same_as",
        traits("y", same_as="q"),
        "declaration",
        "unknown value 'q' is named by 'y'",
    ),
    ("unknown may_replace", traits("y", may_replace=("q",)), "declaration", "'q' is named by 'y'"),
    ("unknown heir", carried(x="q"), "declaration", "unknown value 'q' is named by carried"),
    ("region of nobody", strangers, "declaration", "unknown value 'nobody'"),
    ("overwrites itself", traits("y", same_as="y"), "declaration", "'y' overwrites itself"),
    ("negative size", traits("y", nbytes=-1), "bounds", "'y' has -1 bytes"),
    # Buffers.
    ("alignment 0", buffer("mem", alignment=0), "alignment", "alignment 0 is not a power of two"),
    ("alignment 24", buffer("mem", alignment=24), "alignment", "24 is not a power of two"),
    ("buffer of less", buffer("mem", alignment=8), "alignment", "aligned to 8, d needs 16"),
    ("negative buffer", buffer("host", nbytes=-1), "bounds", "host has -1 bytes"),
    ("unknown device", buffer("mem", device="q"), "capacity", "mem is on unknown device 'q'"),
    ("buffer too large", buffer("mem", nbytes=ROOM * 2 + 1), "capacity", "d allows 512"),
    (
        "device full",
        lambda p: buffer("mem", nbytes=ROOM * 2)(
            with_buffer(
                with_buffer(p, Buffer("a", "d", ROOM * 2, ALIGN)), Buffer("b", "d", 1, ALIGN)
            )
        ),
        "capacity",
        f"{ROOM * 4 + 1} bytes on d, which has {ROOM * 4}",
    ),
    # Regions.
    ("no region", no_region, "bounds", "'y' lies in no region"),
    ("no buffer", region("y", buffer="q"), "bounds", "'y' lies in unknown buffer 'q'"),
    ("wrong device", region("y", buffer="host"), "bounds", "'y' belongs on d, lies on host"),
    ("region too small", region("y", nbytes=SIZE - 1), "bounds", "has 32 bytes, its region 31"),
    ("no offset", region("y", offsets=()), "bounds", "region without an offset"),
    ("negative offset", region("y", offsets=(-16,)), "bounds", "[-16, 16) leaves mem"),
    ("behind the end", region("y", offsets=(0, ROOM)), "bounds", "[256, 288) leaves mem"),
    ("tail unaligned", region("y", offsets=(33,)), "alignment", "33 of mem: no multiple of 16"),
    ("overwrites elsewhere", traits("y", same_as="x"), "alias", "but lies elsewhere: mem+(32,)"),
    ("external in an arena", traits("y", external=True), "declaration", "is the caller's"),
    (
        "endless rotation",
        lambda p: region("hx", offsets=(0,) * 11)(region("y", offsets=(32,) * 7)(p)),
        "declaration",
        "period of 77 runs",
    ),
    # Commands.
    ("host step on a stream", bad(Do.HOST_SYNC, S0), "declaration", "host_sync on d.0"),
    ("kernel on the host", bad(Do.LAUNCH), "declaration", "launch on host"),
    ("no such device", bad(Do.LAUNCH, Actor("q")), "declaration", "unknown device 'q'"),
    ("no such stream", bad(Do.LAUNCH, Actor("d", 2)), "declaration", "stream 2 of 2 on d"),
    ("negative stream", bad(Do.LAUNCH, Actor("d", -1)), "declaration", "stream -1 of 2"),
    (
        "waits for no stream",
        bad(Do.HOST_SYNC, waits_for=Actor("d", 9)),
        "declaration",
        "stream 9 of 2",
    ),
    (
        "waits for itself",
        bad(Do.HOST_SYNC, waits_for=HOST_ACTOR),
        "declaration",
        "host_sync on the host itself",
    ),
    ("a wait that reads", bad(Do.WAIT, S0, reads=READS), "declaration", "wait cannot touch"),
    ("a host read that writes", bad(Do.HOST_READ, writes=READS), "declaration", "cannot touch"),
    ("a host write that reads", bad(Do.HOST_WRITE, reads=READS), "declaration", "cannot touch"),
    ("a kernel that waits", bad(Do.LAUNCH, S0, waits_for=S1), "declaration", "cannot wait for"),
    (
        "a copy of another size",
        also(copy(S0, "y:0:16", "x")),
        "declaration",
        "copy of 32 bytes to 16 bytes",
    ),
    ("record of nothing", bad(Do.RECORD, S0), "declaration", "record without an event"),
    ("wait for nothing", bad(Do.WAIT, S0), "declaration", "wait without an event"),
    ("wait for an event of nobody", also(wait(S0)), "declaration", "which nothing records"),
    ("sync on an event of nobody", also(sync("e")), "declaration", "which nothing records"),
    ("unknown value", bad(Do.HOST_READ, reads=(Access("q", 0, 1),)), "declaration", "value 'q'"),
    ("behind the value", also(get("x:0:33")), "declaration", "leaves the value's 32 bytes"),
    ("before the value", also(get("x:-1:3")), "declaration", "leaves the value's 32 bytes"),
    ("backwards", also(get("x:3:1")), "declaration", "leaves the value's 32 bytes"),
    (
        "a copy chosen by nobody",
        also(replace(copy(S0, "y:0:16", "x:0:16"), chosen_by="q")),
        "declaration",
        "copy chosen by 'q', which the host has not read before",
    ),
    (
        "a kernel that is chosen",
        also(get("hx"), replace(run(S0, "y", "x"), chosen_by="hx")),
        "declaration",
        "launch chosen by 'hx'",
    ),
    (
        "written twice behind what is given up",
        also(Command(Do.HOST_FREE, HOST_ACTOR, "free", None, (), (Access("hx", 0, SIZE),)), TWICE),
        "declaration",
        "y[0:32] has been written before in this run",
    ),
    ("written twice", also(TWICE), "declaration", "y[0:32] has been written before in this run"),
]


def test_every_fault_is_listed_in_the_order_of_the_checks() -> None:
    p = no_region(buffer("mem", device="q")(renamed_value(good())))
    found = [f.message for f in static_faults(p)]
    assert found[0] == "value 'other' calls itself 'x'"
    assert found[1] == "mem is on unknown device 'q'"
    assert "'x' belongs on d, lies on q" in found and "'y' lies in no region" in found
    assert found.index("'y' lies in no region") > found.index("'x' belongs on d, lies on q")


def test_a_fault_hides_no_other_of_its_kind() -> None:
    """Of two buffers on no device, two values in no buffer, and what lies behind them."""
    p = buffer("mem", device="q")(buffer("host", device="r", alignment=3)(good()))
    found = [f.message for f in static_faults(region("hx", buffer="s")(region("x", buffer="t")(p)))]
    for said in ("mem is on unknown device 'q'", "host is on unknown device 'r'",
                 "host: alignment 3 is not a power of two",
                 "'x' lies in unknown buffer 't'", "'hx' lies in unknown buffer 's'",
                 "'y' belongs on d, lies on q"):  # fmt: skip
        assert said in found, found


@pytest.mark.parametrize("alignment", range(-2, 66))
def test_alignments_are_powers_of_two(alignment: int) -> None:
    p = buffer("host", alignment=alignment)(good())
    if alignment in (1, 2, 4, 8, 16, 32, 64):
        proof(p)
    else:
        assert fault(p).kind == "alignment"


def test_a_device_may_be_full_to_its_last_byte() -> None:
    p = on(good(), replace(DEV, memory_bytes=ROOM))
    proof(p)
    assert fault(on(p, replace(DEV, memory_bytes=ROOM - 1))).kind == "capacity"


@pytest.mark.parametrize(
    ("shape", "strides", "sound"),
    [
        ((2, 4), (16, 4), True),
        ((0, 4), (16, 4), True),
        ((-1, 4), (16, 4), False),
        ((2, -1), (16, 4), False),
        ((2, 4), (4,), False),
        ((2,), (16, 4), False),
        ((), (4,), False),
    ],
)
def test_tensors_have_a_stride_for_each_axis(
    shape: tuple[int, ...], strides: tuple[int, ...], sound: bool
) -> None:
    x = replace(input("x", (2, 4)), shape=shape, strides=strides)
    placement = Placement(Graph("forged", (x,), (), {}), (DEV,), {})
    p = good()
    forged = replace(p, schedule=replace(p.schedule, splits=Splits(placement, ())))
    assert ([f.values for f in static_faults(forged)] == [("x",)]) == (not sound)


@pytest.mark.parametrize(
    ("damage", "kind", "text"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_what_is_refused(damage: Callable[[Plan], Plan], kind: str, text: str) -> None:
    proof(good())
    f = fault(damage(good()))
    assert f.kind == kind and text in str(f), str(f)


def test_the_host_reaches_visible_memory_only() -> None:
    p = plan({"x": 0}, run(S0, "x"), END, get("x"))
    proof(p)
    f = fault(on(p, replace(DEV, host_visible=False)))
    assert f.kind == "declaration" and "host_read on host cannot reach x[0:32] on d" in f.message


def test_copies_reach_everything() -> None:
    proof(
        on(
            plan({"x": 0, "hx": 0}, put("hx"), copy(S0, "x", "hx"), END),
            replace(DEV, host_visible=False),
        )
    )


def test_kernels_reach_their_own_device_only() -> None:
    far = DeviceSpec("far", "sim", alignment=ALIGN)
    p = with_value(plan({"x": 0}, run(Actor("far"), "x"), END), plan({"x": 0}).schedule.values["x"])
    assert "launch on far.0 cannot reach x[0:32] on d" in fault(on(p, DEV, far)).message


def test_copy_streams_count_as_streams() -> None:
    p = plan({"x": 0}, run(Actor("d", 2), "x"), END)
    assert fault(p).kind == "declaration"
    proof(on(p, replace(DEV, copy_streams=1)))


def test_values_without_bytes_may_lie_anywhere() -> None:
    p = plan({"x": 0, "none": 1}, run(S0, "x"), run(S0, "none:0:0", "x"), END, none={"nbytes": 0})
    proof(with_regions(p, {"none": Region("mem", (1,), 0)}))


def test_the_culprit_is_shown_with_its_neighbours() -> None:
    f = fault(also(record(S1), wait(S0, "f"))(good()))
    assert f.first and f.first.index == 5 and ">     5      d.0 wait       f" in f.nearby


@pytest.mark.parametrize("do", [Do.RECORD, Do.WAIT, Do.HOST_SYNC, Do.HOST_FREE, Do.HOST_WRITE])
def test_what_moves_no_data_out_declares_no_reads(do: Do) -> None:
    actor = S0 if do in (Do.RECORD, Do.WAIT) else HOST_ACTOR
    event = "e" if do in (Do.RECORD, Do.WAIT) else None
    found = fault(also(record(S0), Command(do, actor, "odd", None, READS, (), event))(good()))
    assert f"{do.value} cannot touch" in found.message


@pytest.mark.parametrize("do", [Do.RECORD, Do.WAIT, Do.HOST_SYNC, Do.HOST_READ])
def test_what_moves_no_data_in_declares_no_writes(do: Do) -> None:
    actor = S0 if do in (Do.RECORD, Do.WAIT) else HOST_ACTOR
    event = "e" if do in (Do.RECORD, Do.WAIT) else None
    found = fault(also(record(S0), Command(do, actor, "odd", None, (), READS, event))(good()))
    assert f"{do.value} cannot touch" in found.message


def test_an_empty_buffer_is_no_fault() -> None:
    proof(with_buffer(good(), Buffer("empty", "d", 0, 16)))


def test_the_longest_period_that_is_proved() -> None:
    """64 runs are, 65 are not."""
    for slots, refused in ((64, False), (65, True)):
        p = with_buffer(region("hx", offsets=(0,) * slots)(good()), Buffer("spare", "d", 0, 16))
        assert any("period" in f.message for f in static_faults(p)) is refused


def test_a_part_may_be_chosen_by_what_the_host_has_read() -> None:
    """Not before it has, and by nothing else."""
    moved = replace(copy(S0, "y", "hx"), chosen_by="hx")
    read = Command(Do.HOST_READ, HOST_ACTOR, "get", "hx", (Access("hx", 0, SIZE),))
    after = plan({"y": 32, "hx": 0}, put("hx"), read, moved, END)
    assert not [f for f in static_faults(after) if "chosen" in f.message]
    before = plan({"y": 32, "hx": 0}, put("hx"), moved, read, END)
    assert [f for f in static_faults(before) if "has not read before" in f.message]
