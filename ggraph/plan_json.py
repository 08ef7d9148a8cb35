"""Plans as JSON: the door for other runtimes. Beside `plan`, knows no pass and no judge.

Any runtime that can list what it enqueues, with byte ranges and places in memory, can have its
plans proved: `verify(plan_from_json(text))`. docs/plan_json.md has the format, field by field. The
graph is not part of it: a plan that comes from JSON has its declarations alone.

The parser is strict: unknown or repeated keys, wrong types and sizes out of range raise FormatError
with the path of the culprit, and nothing else is ever raised.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import filterfalse
from sys import intern
from typing import Any, NoReturn, TypeVar

from ggraph.device import HOST, DeviceSpec
from ggraph.door import checked
from ggraph.errors import FormatError, PlaceError, PlanError, printable, shown
from ggraph.graph import Graph
from ggraph.json_parts import A_NAME, MAX_NAME, Parts, is_name, texts
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
    VerifiedPlan,
)

FORMAT, VERSION = "ggraph.plan", 1
MAX_TEXT_BYTES = 256 << 20
MAX_ITEMS = 1 << 20  # commands, values, buffers; accesses of one command
MAX_SLOTS, MAX_NUMBER = 64, 1 << 62  # of one value; bytes, offsets

Json = Any
T = TypeVar("T")


@checked
def plan_to_json(plan: Plan | VerifiedPlan) -> dict[str, Json]:
    """The plan as a dict of lists, numbers and texts; fields at their defaults are left out.

    Raises PlanError for a value without a region, and for names that `plan_from_json` refuses.
    """
    plan = plan.plan if isinstance(plan, VerifiedPlan) else plan
    schedule, memory = plan.schedule, plan.memory
    for name in (v.name for v in schedule.values.values() if v.name not in memory.regions):
        raise PlanError(f"value {name!r} has no region")
    made = {
        "format": FORMAT,
        "version": VERSION,
        "mode": memory.mode,
        "devices": [_device_out(d) for d in schedule.splits.placement.devices],
        "buffers": [_lean(_fields(b), external=False) for b in memory.buffers.values()],
        "values": [_value_out(v, memory.regions[v.name]) for v in schedule.values.values()],
        "commands": [_command_out(c) for c in schedule],
        "carried": dict(schedule.carried),
        "log": list(plan.log),
    }
    for text in filterfalse(is_name, texts(made)):
        raise PlanError(f"{shown(text)}: expected {A_NAME}")
    return made


@checked
def plan_from_json(text: str | bytes) -> Plan:
    """The plan that `text` describes, without a graph. FormatError where it is none, InputError."""
    found = _members(text)
    for key, wanted in (("format", FORMAT), ("version", VERSION)):
        got = found.get(key)
        if key in found and (type(got) is not type(wanted) or got != wanted):  # True equals 1
            _refuse(f"plan.{key}", repr(wanted), got)
    for key in (k for k in _NEEDED if k not in found):
        raise FormatError(f"plan.{key}: missing")
    devices, placed = found["devices"], found["values"]
    _unique("devices", [d.name for d in devices])
    values = _table("values", [v for v, _ in placed])
    regions = {v.name: region for v, region in placed}
    splits = Splits(Placement(Graph("json", (), (), {}), tuple(devices), {}), ())
    schedule = Schedule(splits, values, tuple(found["commands"]), found.get("carried", {}))
    memory = MemoryMap(found.get("mode", "hb"), _table("buffers", found["buffers"]), regions)
    return Plan(schedule, memory, tuple(found.get("log", ())))


def _members(text: str | bytes) -> dict[str, Any]:
    """The document's fields as nouns, made one by one while the text is read."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    if len(raw) > MAX_TEXT_BYTES:
        _refuse("plan", f"at most {MAX_TEXT_BYTES} bytes", len(raw))
    parts, found = Parts(raw), {}
    for key in parts.members():
        where = f"plan.{key}"
        if key in _LISTS and parts.begins_list():
            found[key] = _items(where, parts.items(), _LISTS[key])
        elif key in _LISTS:
            _refuse(where, f"a list of at most {MAX_ITEMS} items", parts.value())
        elif key in _SINGLES:
            found[key] = _SINGLES[key](where, parts.value())
        else:
            raise _unknown("plan", [key], (*_SINGLES, *_LISTS))
    return found


# Writing.


def _lean(made: Mapping[str, Json], **defaults: Json) -> dict[str, Json]:
    return {k: v for k, v in made.items() if k not in defaults or v != defaults[k]}


def _fields(noun: Value | Buffer) -> dict[str, Json]:
    return {f.name: getattr(noun, f.name) for f in fields(noun)}


def _device_out(d: DeviceSpec) -> dict[str, Json]:
    made = {k: getattr(d, k) for k in ("name", "kind", *_DEVICE)}
    standard = DeviceSpec("x", "sim", alignment=1)  # what a device of another engine asks for
    return _lean(made, **{k: getattr(standard, k) for k in _DEVICE})


def _value_out(v: Value, region: Region) -> dict[str, Json]:
    made = _fields(v) | {"buffer": region.buffer, "offsets": list(region.offsets)}
    made |= {"may_replace": list(v.may_replace), "reserved": region.nbytes}
    flags = dict.fromkeys(_FLAGS, False)
    return _lean(made, reserved=v.nbytes, same_as=None, may_replace=[], slots=1, **flags)


def _command_out(c: Command) -> dict[str, Json]:
    made = {
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
    return _lean(made, reads=[], writes=[], seconds=0.0, **absent)


def _actor_out(a: Actor) -> Json:
    return HOST if a == HOST_ACTOR else [a.device, a.stream]


# Reading.


def _refuse(where: str, expected: str, got: object) -> NoReturn:
    raise FormatError(f"{where}: expected {expected}, got {shown(got, 80)}")


def _unknown(where: str, keys: Iterable[str], known: Iterable[str]) -> FormatError:
    named = ", ".join(sorted(map(repr, keys)))[:200]
    return FormatError(f"{where}: unknown keys {named}; known: {', '.join(known)}")


class _Object:
    """A JSON object whose keys are taken one by one; `close` refuses what is left."""

    def __init__(self, where: str, raw: Json) -> None:
        if not isinstance(raw, dict):
            _refuse(where, "an object", raw)
        self.where, self._left, self._known = where, dict(raw), list[str]()

    def take(self, key: str, read: Callable[[str, Json], T], *default: T) -> T:
        """The field `key`, read with its path; the default where it is missing."""
        where = f"{self.where}.{key}"
        self._known.append(key)
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
            raise _unknown(self.where, self._left, self._known)


def _anything(where: str, raw: Json) -> Json:
    return raw


def _list(where: str, raw: Json, read: Callable[[str, Json], T]) -> list[T]:
    if not isinstance(raw, list):
        _refuse(where, f"a list of at most {MAX_ITEMS} items", raw)
    return _items(where, raw, read)


def _items(where: str, items: Iterable[Json], read: Callable[[str, Json], T]) -> list[T]:
    """Every item read with its path, up to as many as a list may have."""
    found: list[T] = []
    for i, item in enumerate(items):
        if i == MAX_ITEMS:
            _refuse(where, f"a list of at most {MAX_ITEMS} items", "more")
        found.append(read(f"{where}[{i}]", item))
    return found


def _name(where: str, raw: Json) -> str:
    if not isinstance(raw, str) or not is_name(raw):
        _refuse(where, A_NAME, raw)
    return intern(raw)  # a value is named by every command that touches it


def _name_or_none(where: str, raw: Json) -> str | None:
    return None if raw is None else _name(where, raw)


def _names(where: str, raw: Json) -> dict[str, str]:
    if not isinstance(raw, dict) or len(raw) > MAX_ITEMS:
        _refuse(where, "an object of texts", raw)
    return {_name(where, k): _name(f"{where}.{printable(k)}", v) for k, v in raw.items()}


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


def _accesses(where: str, raw: Json) -> list[Access]:
    """Most of a plan: looked at item by item only to say which one is wrong."""
    if isinstance(raw, list) and len(raw) <= MAX_ITEMS and all(map(_is_access, raw)):
        return [Access(intern(name), start, stop) for name, start, stop in raw]
    return _list(where, raw, _triple)


def _is_access(raw: Json) -> bool:
    if type(raw) is not list or [type(x) for x in raw] != [str, int, int]:
        return False
    name, start, stop = raw
    short = len(name) <= MAX_NAME and name.isascii()
    return short and 0 <= start <= MAX_NUMBER and 0 <= stop <= MAX_NUMBER


def _triple(where: str, raw: Json) -> Access:
    if not isinstance(raw, list) or len(raw) != 3:
        _refuse(where, "[value, start, stop]", raw)
    return Access(_name(where, raw[0]), _number(where, raw[1]), _number(where, raw[2]))


def _actor(where: str, raw: Json) -> Actor:
    if raw == HOST:
        return HOST_ACTOR
    if not isinstance(raw, list) or len(raw) != 2 or raw[0] == HOST:
        _refuse(where, f'"{HOST}" or [device, stream]', raw)
    return _shared_actor(_name(where, raw[0]), _number(where, raw[1]))


@lru_cache(maxsize=1024)
def _shared_actor(device: str, stream: int) -> Actor:
    """One noun for the many commands of a stream."""
    return Actor(device, stream)


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
    given = {k: v for k, read in _DEVICE.items() if (v := o.take(k, read, None)) is not None}
    o.close()
    try:
        return DeviceSpec(name, kind, **{"alignment": 1, **given})
    except PlaceError as error:
        raise FormatError(f"{where}: {error}") from error


def _buffer(where: str, raw: Json) -> Buffer:
    o = _Object(where, raw)
    name, device, nbytes = o.take("name", _name), o.take("device", _name), o.take("nbytes", _number)
    alignment, external = o.take("alignment", _number), o.take("external", _flag, False)
    o.close()
    return Buffer(name, device, nbytes, alignment, external)


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
        tuple(o.take("reads", _accesses, [])),
        tuple(o.take("writes", _accesses, [])),
        o.take("event", _name_or_none, None),
        o.take("waits_for", _actor_or_none, None),
        o.take("seconds", _seconds, 0.0),
        o.take("chosen_by", _name_or_none, None),
    )
    o.close()
    return command


def _verb(where: str, raw: Json) -> Do:
    if not isinstance(raw, str) or raw not in _VERBS:
        _refuse(where, f"one of {', '.join(_VERBS)}", raw)
    return _VERBS[raw]


_VERBS = {d.value: d for d in Do}

_LISTS: Mapping[str, Callable[[str, Json], Any]] = {
    "devices": _device,
    "buffers": _buffer,
    "values": _value,
    "commands": _command,
    "log": _name,
}
_SINGLES: Mapping[str, Callable[[str, Json], Any]] = {
    "format": _anything,
    "version": _anything,
    "mode": _name,
    "carried": _names,
}
_NEEDED = ("format", "version", "devices", "buffers", "values", "commands")


def _unique(where: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        again = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise FormatError(f"plan.{where}: {again!r} stands there twice")


Named = TypeVar("Named", Value, Buffer)


def _table(where: str, items: Sequence[Named]) -> dict[str, Named]:
    _unique(where, [x.name for x in items])
    return {x.name: x for x in items}
