"""The values of a schedule: one per leaf, result, staging copy and scratch.

A value is called as its tensor is; `NAME@host` is the host's staging copy of an input or output,
`NAME#NEED` what a kernel needs beside its operands. Views have no value.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ggraph.device import HOST, Need
from ggraph.errors import PlanError
from ggraph.graph import Graph
from ggraph.plan import Access, Actor, Placement, Value, scratch
from ggraph.tensor import Kind, Tensor, line


def staging(name: str) -> str:
    """Name of the host's copy of value `name`."""
    return f"{name}@{HOST}"


@dataclass(eq=False)
class Beside:
    """What launches have beside their operands, by name, as far as the list of commands goes."""

    values: dict[str, Value] = field(default_factory=dict)
    needs: dict[str, tuple[Need, ...]] = field(default_factory=dict)  # by launch
    _wanted: set[str] = field(default_factory=set)  # what launches cannot do without

    def ask(self, t: Tensor, actor: Actor, needs: tuple[Need, ...]) -> None:
        """Note what the launch of `t` needs, before any gets it."""
        self.needs[t.name] = needs
        self._wanted.update(scratch(t, n, actor) for n in needs if not n.is_offered)

    def of(self, t: Tensor, actor: Actor) -> tuple[list[Access], list[Access]]:
        """What the launch of `t` finds there and what it fills: the first that needs bytes does."""
        found: list[Access] = []
        filled: list[Access] = []
        for need in self.needs[t.name]:
            name = scratch(t, need, actor)
            if name not in self._wanted:
                continue
            value = Value(name, actor.device, need.nbytes)
            (found if name in self.values else filled).append(Access(name, 0, need.nbytes))
            if self.values.setdefault(name, value) != value:
                have = self.values[name].nbytes
                raise PlanError(f"{line(t)}: %{name} has {have} bytes, not {need.nbytes}")
        return found, filled


def reads_of(t: Tensor) -> tuple[Access, ...]:
    """Every byte range that computing `t` reads."""
    found: dict[tuple[str, int, int], None] = {}
    for s, root in zip(t.sources, t.roots, strict=True):
        for start, stop in s.byte_ranges():
            if start < stop:
                found[root.name, start, stop] = None
    return tuple([Access(*bytes_of) for bytes_of in found])


def writes_of(t: Tensor) -> tuple[Access, ...]:
    """The byte range that computing `t` writes."""
    return (Access(t.name, 0, t.storage.nbytes),) if t.storage.nbytes else ()


def carried(graph: Graph) -> dict[str, str]:
    """For each state, the value that holds it at the end of a run."""
    return {name: t.root.name for name, t in graph.updates.items()}


def values(
    graph: Graph,
    placement: Placement,
    n_copies: int,
    staged: Mapping[str, int],
    needed: Iterable[Value],
) -> dict[str, Value]:
    """Every value of the schedule; `staged` gives the host's staging values and their slots,
    `needed` what launches have beside their operands."""
    last = frozenset(carried(graph).values())
    found: dict[str, Value] = {}
    for t in graph:
        if t.view_src is not None:
            continue
        device = placement.of[t.name].device
        found[t.name] = _value(t, device, n_copies, t.name in last)
    for name, slots in staged.items():
        found[staging(name)] = Value(staging(name), HOST, graph[name].nbytes, slots=slots)
    return found | {v.name: v for v in needed}


def _value(t: Tensor, device: str, n_copies: int, is_last: bool) -> Value:
    if t.is_leaf:
        outer = t.kind is not Kind.INPUT
        kept = t.kind is Kind.WEIGHT or is_last
        slots = n_copies if t.kind is Kind.INPUT else 1
        return Value(t.name, device, t.nbytes, None, (), outer, outer, kept, slots)
    old = t.overwritten
    if old is not None:
        _check_whole(t, old)
        return Value(t.name, device, t.storage.nbytes, same_as=old.root.name, kept=is_last)
    return Value(t.name, device, t.nbytes, may_replace=_replaceable(t), slots=_slots(t, n_copies))


def _slots(t: Tensor, n_copies: int) -> int:
    """A device's copy of a rotating input rotates too."""
    first = t.roots[0] if t.sources else t
    return n_copies if first.kind is Kind.INPUT and t.op == "copy" and first.is_leaf else 1


def _check_whole(t: Tensor, old: Tensor) -> None:
    if old.offset or old.nbytes != old.root.nbytes:
        raise PlanError(
            f"{line(t)} overwrites a part of %{old.root.name}: bytes {old.offset} to "
            f"{old.offset + old.nbytes} of {old.root.nbytes}; overwrite the whole tensor"
        )


def _replaceable(t: Tensor) -> tuple[str, ...]:
    """Values in whose bytes `t` may be put: the op allows it, and the layouts are the same.

    A view counts when it shows all of its root in order (facts A17: ggml never takes those).
    """
    if t.spec is None:
        return ()
    chosen = [t.sources[i] for i in t.spec.inplace_ok if i < len(t.sources)]
    return tuple(dict.fromkeys(s.root.name for s in chosen if _tolerated(t, s) and _ours(s)))


def _tolerated(t: Tensor, s: Tensor) -> bool:
    """Whether element i of `t` would lie on element i of `s`, and no other source sees it move."""
    root = s.root
    whole = s.is_contiguous and s.offset == 0 and s.nbytes == root.nbytes
    same = s.shape == t.shape and s.dtype is t.dtype and t.is_contiguous
    shown = [o for o in t.sources if o.root is root and o.nbytes]
    alike = all((o.strides, o.shape, o.offset) == (s.strides, s.shape, s.offset) for o in shown)
    elementwise = t.spec is not None and t.spec.elementwise
    return whole and same and alike and (elementwise or len(shown) == 1)


def _ours(s: Tensor) -> bool:
    """Whether the plan owns the bytes and nobody wants them after the run."""
    root = s.root
    if s.storage.kind in (Kind.WEIGHT, Kind.STATE):
        return False
    return not (s.is_output or root.is_output)
