"""A plan that nobody can change any more: what was proved is what runs. Decides nothing."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from ggraph.graph import Graph
from ggraph.plan import Command, MemoryMap, Plan, Region, Schedule, Value

K = TypeVar("K")
V = TypeVar("V")


def frozen(plan: Plan) -> Plan:
    """The same plan with copies of its tables that cannot be written, and tuples for its lists."""
    schedule, memory = _schedule(plan.schedule), _memory(plan.memory)
    return Plan(schedule, memory, tuple(plan.log))


def _table(given: Mapping[K, V]) -> Mapping[K, V]:
    return MappingProxyType(dict(given))


def _schedule(s: Schedule) -> Schedule:
    placement = s.splits.placement
    graph = _graph(placement.graph)
    devices, of = tuple(placement.devices), _table(placement.of)
    placement = replace(placement, graph=graph, devices=devices, of=of)
    return replace(
        s,
        splits=replace(s.splits, placement=placement, splits=tuple(s.splits.splits)),
        values=_table({name: _value(v) for name, v in s.values.items()}),
        commands=tuple(map(_command, s.commands)),
        carried=_table(s.carried),
    )


def _graph(g: Graph) -> Graph:
    return replace(g, tensors=tuple(g.tensors), outputs=tuple(g.outputs), updates=_table(g.updates))


def _memory(m: MemoryMap) -> MemoryMap:
    regions = _table({name: _region(r) for name, r in m.regions.items()})
    return replace(m, buffers=_table(m.buffers), regions=regions, causes=_table(m.causes))


def _value(v: Value) -> Value:
    held = type(v.may_replace) is tuple
    return v if held else replace(v, may_replace=tuple(v.may_replace))


def _region(r: Region) -> Region:
    return r if type(r.offsets) is tuple else replace(r, offsets=tuple(r.offsets))


def _command(c: Command) -> Command:
    held = type(c.reads) is tuple and type(c.writes) is tuple
    return c if held else replace(c, reads=tuple(c.reads), writes=tuple(c.writes))
