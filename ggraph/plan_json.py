"""Plans as JSON: the door for other runtimes. Beside `plan`, knows no pass and no judge.

Any runtime that can list what it enqueues, with byte ranges and places in memory, can have its
plans proved: `verify(plan_from_json(text))`. docs/plan_json.md has the format, field by field. The
graph is not part of it: a plan that comes from JSON has its declarations alone.

The parser is strict: unknown or repeated keys, wrong types and sizes out of range raise FormatError
with the path of the culprit, and nothing else is ever raised.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ggraph.device import HOST, DeviceSpec
from ggraph.errors import FormatError, PlaceError
from ggraph.graph import Graph
from ggraph.plan import (
    HOST_ACTOR,
    Access,
    Actor,
    Buffer,
    Command,
    Do,
    MemoryMap,
    Placement,
    Plan,
    Region,
    Schedule,
    Splits,
    Value,
)

FORMAT, VERSION = "ggraph.plan", 1
MAX_TEXT_BYTES = 256 << 20
MAX_ITEMS = 1 << 20  # commands, values, buffers; accesses of one command
MAX_SLOTS = 64
MAX_NAME = 4096  # characters
MAX_NUMBER = 1 << 62  # bytes, offsets

Json = Any
T = TypeVar("T")


def plan_to_json(plan: Plan) -> dict[str, Json]:
    """The plan as a dict of lists, numbers and texts; fields at their defaults are left out."""
    schedule, memory = plan.schedule, plan.memory
    return {
        "format": FORMAT,
        "version": VERSION,
        "mode": memory.mode,
        "devices": [_device_out(d) for d in schedule.splits.placement.devices],
        "buffers": [_lean(vars(b), external=False) for b in memory.buffers.values()],
        "values": [_value_out(v, memory.regions[v.name]) for v in schedule.values.values()],
        "commands": [_command_out(c) for c in schedule],
        "carried": dict(schedule.carried),
        "log": list(plan.log),
    }


def plan_from_json(text: str | bytes) -> Plan:
    """The plan that `text` describes; its graph is empty. Raises FormatError and nothing else."""
    root = _Object("plan", _parsed(text))
    for key, wanted in (("format", FORMAT), ("version", VERSION)):
        if (got := root.take(key, _anything)) != wanted:
            _refuse(f"plan.{key}", repr(wanted), got)
    devices = root.list("devices", _device)
    buffers = root.list("buffers", _buffer)
    placed = root.list("values", _value)
    commands = root.list("commands", _command)
    nothing: dict[str, str] = {}
    carried = root.take("carried", _names, nothing)
    mode, log = root.take("mode", _name, "hb"), root.list("log", _name, ())
    root.close()
    _unique("devices", [d.name for d in devices])
    values = _table("values", [v for v, _ in placed])
    regions = {v.name: region for v, region in placed}
    splits = Splits(Placement(Graph("json", (), (), {}), tuple(devices), {}), ())
    schedule = Schedule(splits, values, tuple(commands), carried)
    return Plan(schedule, MemoryMap(mode, _table("buffers", buffers), regions), tuple(log))


# Writing.


def _lean(fields: Mapping[str, Json], **defaults: Json) -> dict[str, Json]:
    return {k: v for k, v in fields.items() if k not in defaults or v != defaults[k]}


def _device_out(d: DeviceSpec) -> dict[str, Json]:
    fields = {k: getattr(d, k) for k in ("name", "kind", *_DEVICE)}
    standard = DeviceSpec("x", "sim")
    return _lean(fields, **{k: getattr(standard, k) for k in _DEVICE})


def _value_out(v: Value, region: Region) -> dict[str, Json]:
    fields = vars(v) | {"buffer": region.buffer, "offsets": list(region.offsets)}
    fields |= {"may_replace": list(v.may_replace), "reserved": region.nbytes}
    flags = dict.fromkeys(_FLAGS, False)
    return _lean(fields, reserved=v.nbytes, same_as=None, may_replace=[], slots=1, **flags)


def _command_out(c: Command) -> dict[str, Json]:
    fields = {
        "do": c.do.value,
        "actor": _actor_out(c.actor),
        "label": c.label,
        "node": c.node,
        "reads": [[a.value, a.start, a.stop] for a in c.reads],
        "writes": [[a.value, a.start, a.stop] for a in c.writes],
        "event": c.event,
        "waits_for": None if c.waits_for is None else _actor_out(c.waits_for),
        "seconds": c.seconds,
        "chosen_by": c.chosen_by,
    }
    absent = dict.fromkeys(("node", "event", "waits_for", "chosen_by"))
    return _lean(fields, reads=[], writes=[], seconds=0.0, **absent)


def _actor_out(a: Actor) -> Json:
    return HOST if a == HOST_ACTOR else [a.device, a.stream]


# Reading.


def _refuse(where: str, expected: str, got: object) -> NoReturn:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise FormatError(f"{where}: expected {expected}, got {shown}")


def _parsed(text: str | bytes) -> Json:
    if len(text) > MAX_TEXT_BYTES:
        _refuse("plan", f"at most {MAX_TEXT_BYTES} bytes", len(text))
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
        raise FormatError(f"plan: not JSON: {error}") from error


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise FormatError(f"plan: a key is repeated in {[k for k, _ in pairs][:20]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise FormatError(f"plan: {name} is no number")


class _Object:
    """A JSON object whose keys are taken one by one; `close` refuses what is left."""

    def __init__(self, where: str, raw: Json) -> None:
        if not isinstance(raw, dict):
            _refuse(where, "an object", raw)
        self.where, self._left = where, dict(raw)

    def take(self, key: str, read: Callable[[str, Json], T], *default: T) -> T:
        """The field `key`, read with its path; the default where it is missing."""
        where = f"{self.where}.{key}"
        if key in self._left:
            return read(where, self._left.pop(key))
        if default:
            return default[0]
        raise FormatError(f"{where}: missing")

    def list(self, key: str, read: Callable[[str, Json], T], *default: Sequence[T]) -> Sequence[T]:
        """The list `key`, each item read with its path."""
        return self.take(key, lambda where, raw: _list(where, raw, read), *default)

    def close(self) -> None:
        """Every key has been understood."""
        if self._left:
            known = ", ".join(sorted(map(repr, self._left)))[:200]
            raise FormatError(f"{self.where}: unknown keys {known}")


def _anything(where: str, raw: Json) -> Json:
    return raw


def _list(where: str, raw: Json, read: Callable[[str, Json], T]) -> list[T]:
    if not isinstance(raw, list) or len(raw) > MAX_ITEMS:
        _refuse(where, f"a list of at most {MAX_ITEMS} items", raw)
    return [read(f"{where}[{i}]", item) for i, item in enumerate(raw)]


def _name(where: str, raw: Json) -> str:
    if not isinstance(raw, str) or len(raw) > MAX_NAME:
        _refuse(where, f"a text of at most {MAX_NAME} characters", raw)
    if any("\ud800" <= ch <= "\udfff" for ch in raw):
        _refuse(where, "a text without half characters (surrogates)", raw)
    return raw


def _name_or_none(where: str, raw: Json) -> str | None:
    return None if raw is None else _name(where, raw)


def _names(where: str, raw: Json) -> dict[str, str]:
    if not isinstance(raw, dict) or len(raw) > MAX_ITEMS:
        _refuse(where, "an object of texts", raw)
    return {_name(where, k): _name(f"{where}.{k}", v) for k, v in raw.items()}


def _flag(where: str, raw: Json) -> bool:
    if not isinstance(raw, bool):
        _refuse(where, "true or false", raw)
    return raw


def _number(where: str, raw: Json) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= MAX_NUMBER:
        _refuse(where, f"a whole number from 0 to {MAX_NUMBER}", raw)
    return raw


def _seconds(where: str, raw: Json) -> float:
    if not isinstance(raw, (int, float)) or isinstance(raw, bool):
        _refuse(where, "a number of seconds", raw)
    if not 0 <= raw <= MAX_NUMBER:
        _refuse(where, f"seconds from 0 to {MAX_NUMBER}", raw)
    return float(raw)


def _triple(where: str, raw: Json) -> Access:
    if not isinstance(raw, list) or len(raw) != 3:
        _refuse(where, "[value, start, stop]", raw)
    return Access(_name(where, raw[0]), _number(where, raw[1]), _number(where, raw[2]))


def _actor(where: str, raw: Json) -> Actor:
    if raw == HOST:
        return HOST_ACTOR
    if not isinstance(raw, list) or len(raw) != 2 or raw[0] == HOST:
        _refuse(where, f'"{HOST}" or [device, stream]', raw)
    return Actor(_name(where, raw[0]), _number(where, raw[1]))


def _actor_or_none(where: str, raw: Json) -> Actor | None:
    return None if raw is None else _actor(where, raw)


_DEVICE: Mapping[str, Callable[[str, Json], Json]] = {
    "memory_bytes": _number,
    "max_buffer_bytes": _number,
    "alignment": _number,
    "streams": _number,
    "copy_streams": _number,
    "host_visible": _flag,
}
_FLAGS = ("external", "initial", "kept")


def _device(where: str, raw: Json) -> DeviceSpec:
    o = _Object(where, raw)
    name, kind = o.take("name", _name), o.take("kind", _name, "sim")
    given = {k: o.take(k, read, None) for k, read in _DEVICE.items()}
    o.close()
    try:
        return DeviceSpec(name, kind, **{k: v for k, v in given.items() if v is not None})
    except PlaceError as error:
        raise FormatError(f"{where}: {error}") from error


def _buffer(where: str, raw: Json) -> Buffer:
    o = _Object(where, raw)
    name, device, nbytes = o.take("name", _name), o.take("device", _name), o.take("nbytes", _number)
    buffer = Buffer(
        name, device, nbytes, o.take("alignment", _number), o.take("external", _flag, False)
    )
    o.close()
    return buffer


def _value(where: str, raw: Json) -> tuple[Value, Region]:
    o = _Object(where, raw)
    nbytes = o.take("nbytes", _number)
    value = Value(
        o.take("name", _name),
        o.take("device", _name),
        nbytes,
        o.take("same_as", _name_or_none, None),
        tuple(o.list("may_replace", _name, ())),
        external=o.take("external", _flag, False),
        initial=o.take("initial", _flag, False),
        kept=o.take("kept", _flag, False),
        slots=o.take("slots", _number, 1),
    )
    offsets = tuple(o.list("offsets", _number))
    if not 1 <= len(offsets) <= MAX_SLOTS:
        _refuse(f"{where}.offsets", f"1 to {MAX_SLOTS} offsets", len(offsets))
    region = Region(o.take("buffer", _name), offsets, o.take("reserved", _number, nbytes))
    o.close()
    return value, region


def _command(where: str, raw: Json) -> Command:
    o = _Object(where, raw)
    command = Command(
        o.take("do", _verb),
        o.take("actor", _actor),
        o.take("label", _name),
        o.take("node", _name_or_none, None),
        tuple(o.list("reads", _triple, ())),
        tuple(o.list("writes", _triple, ())),
        o.take("event", _name_or_none, None),
        o.take("waits_for", _actor_or_none, None),
        o.take("seconds", _seconds, 0.0),
        o.take("chosen_by", _name_or_none, None),
    )
    o.close()
    return command


def _verb(where: str, raw: Json) -> Do:
    known = {d.value: d for d in Do}
    if not isinstance(raw, str) or raw not in known:
        _refuse(where, f"one of {', '.join(known)}", raw)
    return known[raw]


def _unique(where: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        again = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise FormatError(f"plan.{where}: {again!r} stands there twice")


Named = TypeVar("Named", Value, Buffer)


def _table(where: str, items: Sequence[Named]) -> dict[str, Named]:
    _unique(where, [x.name for x in items])
    return {x.name: x for x in items}
