"""Text, dot and JSON views of the nouns. Reads, never changes.

One line per element, in the format of the noun itself, so that dumps, tests and errors agree.
"""

from collections.abc import Iterator
from typing import Any

from ggraph.account import accounts
from ggraph.door import checked
from ggraph.graph import Graph
from ggraph.order import critical_path, estimate, speedup
from ggraph.plan import Do, Plan, Schedule, VerifiedPlan
from ggraph.tensor import Kind, Tensor, line

_COLOURS = {
    Kind.INPUT: "#cfe8cf",
    Kind.WEIGHT: "#e8e4cf",
    Kind.STATE: "#e8cfcf",
    Kind.COMPUTED: "#dbe4f3",
}


@checked
def graph_text(graph: Graph) -> str:
    """Every tensor on a line of its own."""
    return "\n".join([f"graph {graph.name}: {len(graph)} tensors", *map(line, graph)])


@checked
def graph_dot(graph: Graph) -> str:
    """The graph for Graphviz: boxes are tensors, dashed boxes views, thick edges overwrites."""
    rows = [f'digraph "{_quoted(graph.name)}" {{', "  node [shape=box style=filled];"]
    rows += [f"  {_dot_node(t)}" for t in graph]
    rows += [f"  {edge}" for t in graph for edge in _dot_edges(t)]
    return "\n".join([*rows, "}"])


def _dot_node(t: Tensor) -> str:
    style = '"filled,dashed"' if t.is_view else "filled"
    label = f"{_quoted(t.name)}\\n{_quoted(t.op)} {t.dtype}{list(t.shape)}"
    return f'"{_quoted(t.name)}" [label="{label}" style={style} fillcolor="{_COLOURS[t.kind]}"];'


def _dot_edges(t: Tensor) -> Iterator[str]:
    for slot, source in enumerate(t.sources):
        thick = " [penwidth=3]" if t.spec is not None and t.spec.overwrites == slot else ""
        yield f'"{_quoted(source.name)}" -> "{_quoted(t.name)}"{thick};'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


@checked
def schedule_text(schedule: Schedule) -> str:
    """Every command on a line of its own, numbered in enqueue order."""
    return "\n".join(f"{i:>5} {c}" for i, c in enumerate(schedule))


@checked
def plan_brief(verified: VerifiedPlan) -> str:
    """The verdict, then the plan in a screenful: splits, streams, buffers, how it came about."""
    return "\n".join([*_summary(verified), *("log  " + entry for entry in verified.plan.log)])


@checked
def plan_text(verified: VerifiedPlan) -> str:
    """The whole plan: the verdict, splits, streams, buffers, placement and regions with causes."""
    plan = verified.plan
    sections = [
        *_summary(verified),
        *_placement(plan),
        *_regions(plan),
        *("log  " + entry for entry in plan.log),
    ]
    return "\n".join(sections)


def _summary(verified: VerifiedPlan) -> Iterator[str]:
    plan = verified.plan
    yield f"plan of {plan.graph.name!r}"
    yield from _certificate(verified)
    yield from _splits(plan)
    yield from _streams(plan)
    yield f"estimated: {estimate(plan.schedule)}"
    yield from _buffers(plan)


def _splits(plan: Plan) -> Iterator[str]:
    for s in plan.schedule.splits.splits:
        copies = f", copies in: {', '.join(s.copies_in)}" if s.copies_in else ""
        ends = f"{s.nodes[0]} .. {s.nodes[-1]}" if s.nodes else "nothing"
        yield f"split {s.index} on {s.device}: {len(s.nodes)} nodes, {ends}{copies}"


def _placement(plan: Plan) -> Iterator[str]:
    placement = plan.schedule.splits.placement
    for t in plan.graph:
        where = placement.of[t.name]
        yield f"place {t.name:<32} {where.device:<8} {where.cause}"


def _streams(plan: Plan) -> Iterator[str]:
    counts: dict[str, int] = {}
    for c in plan.schedule:
        counts[str(c.actor)] = counts.get(str(c.actor), 0) + 1
    for actor, count in sorted(counts.items()):
        yield f"stream {actor}: {count} commands"


def _buffers(plan: Plan) -> Iterator[str]:
    outside = sum(b.nbytes for b in plan.memory.buffers.values() if b.external)
    for b in plan.memory.buffers.values():
        if not b.external:
            yield f"buffer {b.name}: {b.nbytes} bytes on {b.device}, alignment {b.alignment}"
    yield f"external: {outside} bytes of weights and states"
    for a in accounts(plan):
        parts = ", ".join(f"{name} {value}" for name, value in vars(a).items() if name != "device")
        yield f"account {a.device}: {parts}; together {a.total} bytes"


def _regions(plan: Plan) -> Iterator[str]:
    owned = {b.name for b in plan.memory.buffers.values() if not b.external}
    regions = plan.memory.regions.items()
    inside = [(r.buffer, r.offset, v, r) for v, r in regions if r.buffer in owned]
    for buffer, offset, value, region in sorted(inside, key=lambda row: row[:3]):
        cause = plan.memory.causes.get(value, "")
        yield f"region {buffer}+{offset:<10} {region.nbytes:>10} {value:<32} {cause}".rstrip()


def _certificate(verified: VerifiedPlan) -> Iterator[str]:
    c = verified.certificate
    yield f"verified: {c.commands} commands ({c.unrolled} in the unrolled steady state)"
    yield f"  {c.pairs_checked} conflicting pairs ordered, {c.reads_proved} reads traced"
    yield f"  {c.reuses} reuses of bytes"
    yield f"  peak {c.peak_bytes} bytes, live-bytes bound {c.live_bound_bytes}"
    queues = len({k.actor for k in verified.plan.schedule if k.do in (Do.LAUNCH, Do.COPY)})
    if queues > 1:  # copies have queues of their own, also beside one stream
        yield f"  beyond the bound, as {queues} queues run at once: {c.concurrency_bytes} bytes"
    yield "  a run ends when all its work is done" if c.ends_complete else "  runs may overlap"
    if not c.approximations:
        yield "  exact: nothing is rounded that the graph does not round"
    yield from (f"  approximates: {a}" for a in c.approximations)


@checked
def plan_summary(verified: VerifiedPlan) -> dict[str, Any]:
    """The plan as plain data: what `ggraph plan --json` prints."""
    plan = verified.plan
    placement = plan.schedule.splits.placement
    return {
        "graph": plan.graph.name,
        "splits": [
            {"device": s.device, "nodes": list(s.nodes), "copies_in": list(s.copies_in)}
            for s in plan.schedule.splits.splits
        ],
        "placement": {
            t.name: {"device": placement.of[t.name].device, "cause": placement.of[t.name].cause}
            for t in plan.graph
        },
        "commands": [str(c) for c in plan.schedule],
        "buffers": {
            b.name: {"device": b.device, "bytes": b.nbytes, "external": b.external}
            for b in plan.memory.buffers.values()
        },
        "regions": {
            v: {"buffer": r.buffer, "offsets": list(r.offsets), "bytes": r.nbytes}
            for v, r in plan.memory.regions.items()
        },
        "accounts": [{**vars(a), "total": a.total} for a in accounts(plan)],
        "critical_path_seconds": critical_path(plan.schedule)[0],
        "speedup_over_one_stream": speedup(plan.schedule),
        "certificate": vars(verified.certificate),
        "log": list(plan.log),
    }


VerifiedPlan.text = plan_brief  # what print(plan) prints
