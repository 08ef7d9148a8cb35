"""A short notation for plans by hand: one device, two streams, values of 32 bytes. No test here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plan_strategies import plan_of

from ggraph.device import DeviceSpec
from ggraph.plan import (
    HOST_ACTOR,
    Access,
    Actor,
    Buffer,
    Certificate,
    Command,
    Do,
    Plan,
    Region,
    Value,
)
from ggraph.verify import CounterExample, examine

SIZE, ALIGN, ROOM = 32, 16, 256
DEV = DeviceSpec("d", "sim", ROOM * 4, ROOM * 2, ALIGN, streams=2, host_visible=True)
S0, S1 = Actor("d", 0), Actor("d", 1)


def accesses(names: Sequence[str]) -> tuple[Access, ...]:
    """ "x" is all of x, "x:4:8" some bytes of it."""
    found = []
    for text in names:
        name, *edges = text.split(":")
        start, stop = (int(e) for e in edges) if edges else (0, SIZE)
        found.append(Access(name, start, stop))
    return tuple(found)


def run(actor: Actor, out: str, *reads: str, seconds: float = 0.0) -> Command:
    outs = accesses(out.split())
    label = out.split()[0].split(":")[0]
    return Command(Do.LAUNCH, actor, label, label, accesses(reads), outs, seconds=seconds)


def copy(actor: Actor, out: str, source: str) -> Command:
    return Command(Do.COPY, actor, f"copy {out}", out, accesses([source]), accesses([out]))


def record(actor: Actor, event: str = "e") -> Command:
    return Command(Do.RECORD, actor, event, event=event)


def wait(actor: Actor, event: str = "e") -> Command:
    return Command(Do.WAIT, actor, event, event=event)


def sync(event: str | None = None, stream: Actor | None = None) -> Command:
    return Command(Do.HOST_SYNC, HOST_ACTOR, "sync", event=event, waits_for=stream)


def put(name: str) -> Command:
    return Command(Do.HOST_WRITE, HOST_ACTOR, f"put {name}", name, (), accesses([name]))


def get(name: str) -> Command:
    return Command(Do.HOST_READ, HOST_ACTOR, f"get {name}", name, accesses([name]))


def free(name: str) -> Command:
    return Command(Do.HOST_FREE, HOST_ACTOR, f"free {name}", None, (), accesses([name]))


def plan(
    places: Mapping[str, int | tuple[int, ...]],
    *commands: Command,
    carried: Mapping[str, str] | None = None,
    **traits: Mapping[str, object],
) -> Plan:
    """Values at offsets of one device buffer; a name that starts with "h" lies in host memory.

    `traits` changes a value's fields: `b={"same_as": "a"}`.
    """
    values, regions = [], {}
    for name, where in places.items():
        host = name.startswith("h")
        value = Value(name, "host" if host else "d", SIZE)
        values.append(replace(value, **traits.get(name, {})))  # type: ignore[arg-type]
        offsets = (where,) if isinstance(where, int) else where
        regions[name] = Region("host" if host else "mem", offsets, SIZE)
    buffers = [Buffer("mem", "d", ROOM, ALIGN), Buffer("host", "host", ROOM, ALIGN)]
    return plan_of([DEV], values, commands, buffers, regions, carried)


def fault(p: Plan) -> CounterExample:
    verdict = examine(p)
    assert isinstance(verdict, CounterExample), f"accepted: {verdict}"
    return verdict


def proof(p: Plan) -> Certificate:
    verdict = examine(p)
    assert isinstance(verdict, Certificate), str(verdict)
    return verdict
