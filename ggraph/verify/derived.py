"""Are the values what the graph and the ops' records make of them? Floor 6: knows no order.

Where there is a graph nothing is believed that a plan says of its own values: which value lies on
which, what may be replaced, what stands there before the first run and what the next run finds are
derived here from tensors and `OpSpec`, and the plan is held against it. A plan may allow itself
less in-place work than is derived, never more.

Legend: t a tensor that is no view, s, o its sources, v a value.
"""

from collections.abc import Iterator

from ggraph.plan import Do, Plan, Value
from ggraph.tensor import Kind, Tensor
from ggraph.verify.report import CounterExample


def value_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every value and every state's heir that is not what the graph says; none without a graph.

    Relies on what `static_faults` has seen.
    """
    if not plan.graph.tensors:
        return
    tensors = {t.name: t for t in plan.graph if t.view_src is None}
    values = plan.schedule.values
    if len(plan.graph.named) < len(plan.graph):
        yield CounterExample("declaration", "two tensors of the graph have one name")
    for name in (n for n in tensors if n not in values):
        yield _fault(name, "has no value")
    for v in values.values():
        t = tensors.get(v.name)
        for message in _invented(v) if t is None else _unlike(v, t):
            yield _fault(v.name, message)
        for message in _homeless(v, plan) if v.same_as is None else ():
            yield _fault(v.name, message)


def lasting_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every value that is promised and that no command makes, and every state that the plan ends in
    another value than it may.

    The proof of bytes comes before: what it says of a lost write tells more.
    """
    values, carried = plan.schedule.values, dict(plan.schedule.carried)
    steps = (c for c in plan.schedule if c.do is not Do.HOST_FREE)
    written = {a.value for c in steps for a in c.writes if a.start < a.stop}
    for v in values.values():
        if v.nbytes and not v.initial and v.name not in written:
            message = f"{v.name!r} is declared and not initial, and no command writes it"
            yield CounterExample("unwritten", message, values=(v.name,))
    for name in carried:
        if not values[name].initial or name in written:
            yield _fault(name, "is carried on, but is no state: initial, and written by no command")
    over = plan.graph.overwriting
    heirs = {t.overwritten.root.name: t.name for t in over if t.overwritten is not None}
    for t in plan.graph:
        if t.kind is Kind.STATE and t.is_leaf:
            last = t.name
            while last in heirs:
                last = heirs[last]
            if (got := carried.pop(t.name, None)) != last:
                yield _fault(t.name, f"is carried by {got!r}, in the graph by {last!r}")
    for name in carried if plan.graph.tensors else ():
        yield _fault(name, "is carried on, but is no state of the graph")


def _fault(name: str, message: str) -> CounterExample:
    return CounterExample("declaration", f"{name!r} {message}", values=(name,))


def _invented(v: Value) -> Iterator[str]:
    """Staging and scratch hold nothing between runs and lie on nobody else's bytes."""
    if v.initial or v.external or v.same_as is not None or v.may_replace:
        yield "is no tensor of the graph: it cannot hold, overwrite or replace one"


def _unlike(v: Value, t: Tensor) -> Iterator[str]:
    """What a tensor's value says of itself and the tensor does not."""
    lasting = t.is_leaf and t.kind is not Kind.INPUT
    if v.nbytes != t.nbytes:
        yield f"has {v.nbytes} bytes, its tensor {t.nbytes}"
    if v.initial != lasting or (v.external and not lasting):
        yield f"is an {t.kind.value}, but initial={v.initial}, external={v.external}"
    old = t.overwritten
    if v.same_as != (old.root.name if old is not None else None):
        yield f"lies on {v.same_as!r}, its op overwrites {None if old is None else old.root.name!r}"
    allowed = replaceable(t) if v.may_replace else ()
    for name in (n for n in v.may_replace if n not in allowed):
        yield f"may not replace {name!r}: {t.op} says nothing of the kind"
    yield from _overwriting(t)


def _overwriting(t: Tensor) -> Iterator[str]:
    """An op overwrites all of a root, and reads it through that one source alone."""
    if t.spec is None or t.spec.overwrites is None:
        return
    old = t.sources[t.spec.overwrites]
    if (old.offset, old.nbytes) != (0, old.root.nbytes) or old.nbytes != t.nbytes:
        yield f"overwrites a part of {old.root.name!r}"
    if _showing(t, t.spec.overwrites):
        yield f"overwrites {old.root.name!r} and reads it as another source: read a copy (cont)"


def replaceable(t: Tensor) -> frozenset[str]:
    """Values on whose bytes the kernel of `t` may work in place, by its op's record."""
    slots = t.spec.inplace_ok if t.spec is not None else ()
    found = (i for i in slots if i < len(t.sources) and _in_place(t, i))
    return frozenset(t.sources[i].root.name for i in found)


def _in_place(t: Tensor, slot: int) -> bool:
    """Whether source `slot` is its whole root in the result's layout, and no other source shows a
    byte of it; where the op is elementwise another one may, as the very same view."""
    assert t.spec is not None, t.name
    s = t.sources[slot]
    whole = s.offset == 0 and s.nbytes == s.root.nbytes and s.is_contiguous and t.is_contiguous
    alike = (s.shape, s.dtype) == (t.shape, t.dtype)
    seen = _showing(t, slot)
    same = all((o.offset, o.shape, o.strides) == (s.offset, s.shape, s.strides) for o in seen)
    return whole and alike and (not seen or (t.spec.elementwise and same))


def _showing(t: Tensor, slot: int) -> list[Tensor]:
    """The other sources that show a byte of the root of source `slot`, which is to show it all."""
    root = t.sources[slot].root
    return [o for i, o in enumerate(t.sources) if i != slot and o.root is root and o.nbytes]


def _homeless(v: Value, plan: Plan) -> Iterator[str]:
    """Each weight and state has a buffer of its own, called as it is, that the caller brings, and
    nothing else lies there but what overwrites it, which `static_faults` has seen to lie there.
    """
    region = plan.memory.regions[v.name]
    external = plan.memory.buffers[region.buffer].external
    own = (region.buffer, region.offsets) == (v.name, (0,))
    if external != v.initial or (external and not own):
        yield f"lies in {region.buffer} at {region.offsets}, which is no place for it"
