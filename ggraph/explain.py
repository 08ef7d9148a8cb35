"""Why a tensor's bytes lie where they lie, pass by pass. Reads a plan, decides nothing.

The answer quotes what each pass wrote down when it decided, and proves every passing-on of bytes by
the chain of commands that orders the last use of one tenant before the first use of the next.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ggraph.alloc import tenants
from ggraph.door import checked
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.nearest import nearest
from ggraph.plan import Plan, Split, VerifiedPlan
from ggraph.tensor import Tensor, line


@dataclass(frozen=True)
class Explanation:
    """One tensor's place, and what led to it.

    `value` owns the bytes (a view's root, else the tensor itself). `passes` maps each pass that had
    a say to its words, in the pipeline's order. `tenants` has one line for each value that held the
    bytes directly before or after, with the ordering proof, or UNORDERED where there is none.
    """

    tensor: str
    value: str
    device: str
    buffer: str
    offsets: tuple[int, ...]  # one per slot
    nbytes: int
    split: int | None  # None: no command computes it
    stream: str  # who writes it: "sim0.1", "host", or "" for what nobody writes
    passes: dict[str, str] = field(default_factory=dict)
    tenants: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{name:<9} {text}" for name, text in self.passes.items()]
        return "\n".join([self.tensor, *rows, "bytes", *(f"  {t}" for t in self.tenants)])


@checked
def explain(plan: Plan | VerifiedPlan, tensor: str, *, given: Graph | None = None) -> Explanation:
    """Pass and rule, split, stream, offset, previous tenants and the proofs of their order.

    `tensor` names a tensor of the planned graph, or a value of the plan (`NAME@host` is a staging
    copy, `NAME#NEED` what a launch has beside its operands). Raises InputError for any other name;
    of a tensor of the graph that was `given` to be planned, which rewriting left out, the error
    names the first that the plan has behind it.
    """
    p = plan.plan if isinstance(plan, VerifiedPlan) else plan
    t = p.graph.get(tensor)
    value = tensor if t is None or tensor in p.schedule.values else t.root.name
    if value not in p.schedule.values:
        raise InputError(f"no tensor {tensor!r} in this plan{_instead(tensor, p, given)}")
    region = p.memory.regions.get(value)
    if region is None or region.buffer not in p.memory.buffers:
        raise InputError(f"%{value} has no bytes in any buffer of this plan")
    makers = _makers(p, value)
    return Explanation(
        tensor=tensor,
        value=value,
        device=p.schedule.values[value].device,
        buffer=region.buffer,
        offsets=tuple(o + (t.offset if t is not None else 0) for o in region.offsets),
        nbytes=region.nbytes if t is None else t.nbytes,
        split=None if (s := _split(p, value)) is None else s.index,
        stream=str(p.schedule.commands[makers[0]].actor) if makers else "",
        passes=dict(_passes(p, t, value, makers)),
        tenants=tenants(p.schedule, p.memory, value),
    )


def _instead(tensor: str, p: Plan, given: Graph | None) -> str:
    """Where to look: behind a tensor that was left out, or at names like it."""
    known = [*(t.name for t in p.graph), *p.schedule.values]
    if given is not None and given.get(tensor) is not None:
        behind = _behind(tensor, given, known)
        return f", which was rewritten; the first behind it is {behind!r}" if behind else ""
    return nearest(tensor, known)


def _behind(tensor: str, given: Graph, known: Sequence[str]) -> str:
    """The first of the plan's tensors on the way from a given one to the outputs. What has another
    form in the plan (`NAME@a8`: in 8 bits) has its name, too."""
    forms = {name.partition("@")[0]: name for name in reversed(known)} | {n: n for n in known}
    users, way = given.users(), deque([tensor])
    seen = {tensor}
    while way:
        name = way.popleft()
        if name in forms:
            return forms[name]
        more = [u.name for u in users[name] if u.name not in seen]
        seen.update(more)
        way.extend(more)
    return ""


def _makers(p: Plan, value: str) -> list[int]:
    """Commands that write the value, in enqueue order."""
    writes = ({a.value for a in c.writes} for c in p.schedule)
    return [i for i, written in enumerate(writes) if value in written]


def _split(p: Plan, value: str) -> Split | None:
    """The split that computes the value or copies it in."""
    found = (s for s in p.schedule.splits.splits if value in (*s.nodes, *s.copies_in))
    return next(found, None)


def _passes(p: Plan, t: Tensor | None, value: str, makers: list[int]) -> Iterator[tuple[str, str]]:
    if t is not None:
        yield "graph", line(t) + (f", a view of %{value}" if t.name != value else "")
        device = p.schedule.splits.placement.device(t.name)
        yield "place", f"{device.name}: {p.schedule.splits.placement.of[t.name].cause}"
        if not device.compiled(t):
            yield "kernel", f"none on {device.name}: NumPy computes it"
    else:
        yield "graph", f"%{value} is a buffer of the plan's own, no tensor"
    if (s := _split(p, value)) is not None:
        yield "split", f"{s.index} on {s.device}, {len(s.nodes)} nodes from {s.nodes[0]}"
    count = len(p.schedule.commands)
    yield "order", "; ".join(_made(p, i, count) for i in makers) or "no command writes it"
    region, buffer = p.memory.regions[value], p.memory.buffers[p.memory.regions[value].buffer]
    ends = ", ".join(f"[{o}, {o + region.nbytes})" for o in region.offsets)
    rule = p.memory.causes.get(value) or "no cause given"
    where = f"{buffer.name} {ends} of {buffer.nbytes} bytes on {buffer.device}"
    yield "allocate", f"{where}, mode {p.memory.mode}: {rule}"


def _made(p: Plan, i: int, count: int) -> str:
    c = p.schedule.commands[i]
    return f"command {i} of {count}, {c.do.value} on {c.actor}"
