"""Which ops of a graph become one chain: values that nothing but the chain reads.

A region grows from its last op towards the sources. What joins it is of elements, or reduces the
region's space along the region's axes. A kernel then computes all of it place by place, with one
pass over what is reduced for each reduction, and stores nothing in between. What several passes
need is computed in each of them; functions that cost more than memory does are not: the result's
memory holds one, or they end a region (`passes.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ggraph.dtype import F32
from ggraph.ops.chain import MOST_SOURCES, MOST_STEPS, Link, letter, links, reduced_axes, spreads
from ggraph.ops.passes import DEAR, REDUCTIONS, held
from ggraph.ops.trace import trace
from ggraph.tensor import Tensor, apply

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Around:
    """What a region may be made of: readers of each value that may vanish, the place of each tensor
    in the graph, whether the devices have a kernel for a chain, and names of what stays alone."""

    users: Mapping[str, Sequence[Tensor]]
    order: Mapping[str, int]
    runs: Callable[[Tensor], bool]
    apart: frozenset[str]


def chains(nodes: Sequence[Tensor], around: Around) -> dict[str, Tensor]:
    """The chains that nodes of a graph, in its order, become, by the names of their last ops."""
    made, gone = dict[str, Tensor](), set[str]()
    for t in reversed(nodes):
        found = None if t.name in gone else _joined(t, around)
        if found is not None:
            made[t.name], members = found
            gone |= {m.name for m in members}
    return made


def _joined(root: Tensor, around: Around) -> tuple[Tensor, list[Tensor]] | None:
    """`root` with what only it reads as one chain, and the members of that chain; None where there
    is nothing to join."""
    if root.name in around.apart or not (_of_elements(root) or _axes(root) is not None):
        return None
    for space, axes in _spaces(root, around):
        found = _without_dear(root, around, space, axes)
        reduces = any(_axes(t) is not None for t in found)
        if len(found) > 1 and reduces == (axes is not None):
            made = _chain(found)
            if around.runs(made):
                return made, found
    return None


def _axes(t: Tensor) -> Shape | None:
    """Along which axes an op reduces its source; None for one that does not."""
    return reduced_axes(t.op, t.sources, t.attrs) if t.dtype is F32 else None


def _of_elements(t: Tensor) -> bool:
    """Whether each element of `t` needs one of each source."""
    if t.spec is None or t.dtype is not F32:
        return False
    if t.op == "chain":
        return all(link.of_elements for link in _links(t))
    return t.spec.elementwise and all(isinstance(v, int | float) for v in t.attrs.values())


def _links(t: Tensor) -> tuple[Link, ...]:
    return links(str(t.attrs["program"]))


def _spaces(root: Tensor, around: Around) -> Iterator[tuple[Shape, Shape | None]]:
    """What the region of `root` may span: the space and axes of the reductions behind it, nearest
    first, then its own shape without any."""
    seen, awaiting, found = {root.name}, [root], list[tuple[Shape, Shape]]()
    while awaiting and len(seen) <= MOST_STEPS:
        t = awaiting.pop(0)
        axes = _axes(t)
        if axes is not None:
            found.append((t.sources[0].shape, axes))
        if axes is not None or _of_elements(t):
            fresh = {s.name: s for s in t.sources if s.name in around.users and s.name not in seen}
            seen |= fresh.keys()
            awaiting += fresh.values()
    yield from dict.fromkeys(found)
    yield root.shape, None


def _without_dear(root: Tensor, around: Around, space: Shape, axes: Shape | None) -> list[Tensor]:
    """The region, but for what would be computed too often."""
    apart = set(around.apart)
    while True:
        found = _region(root, around, space, axes, apart)
        if len(found) < 2:
            return found
        passes = _passes(found, space) if axes is not None else {}
        dear = [t for t in found[:-1] if len(passes.get(t.name, ())) > 1 and _is_dear(t)]
        if not dear or _holds(found):
            return found
        apart |= {t.name for t in dear}


def _region(
    root: Tensor, around: Around, space: Shape, axes: Shape | None, apart: set[str]
) -> list[Tensor]:
    """What joins `root`, which comes last; nothing if it does not fit itself."""
    kept = tuple(1 if axes and i in axes else n for i, n in enumerate(space))

    def fits(t: Tensor) -> bool:
        if _axes(t) is not None:
            return (t.sources[0].shape, _axes(t)) == (space, axes)
        return t.shape in (space, kept) and (_of_elements(t) or spreads(t.op, t.sources, t.attrs))

    members = {root.name: root} if fits(root) and root.op != "repeat" else {}
    awaiting = list(root.sources) if members else []
    while awaiting:
        t = awaiting.pop(0)
        only = t.name in around.users and all(u.name in members for u in around.users[t.name])
        grown = [*members.values(), t]
        if only and t.name not in {*members, *apart} and fits(t) and not _too_large(grown):
            members[t.name] = t
            awaiting += t.sources if t.op != "repeat" else ()
    return sorted(members.values(), key=lambda t: around.order[t.name])


def _too_large(members: Sequence[Tensor]) -> bool:
    steps = sum(len(_links(t)) if t.op == "chain" else 1 for t in members)
    return steps > MOST_STEPS or len(_sources(members)) > MOST_SOURCES


def _sources(members: Sequence[Tensor]) -> list[Tensor]:
    """What a region reads, in the order in which its members do."""
    inside = {t.name for t in members}
    return [*{s.name: s for t in members for s in t.sources if s.name not in inside}.values()]


def _passes(members: Sequence[Tensor], space: Shape) -> dict[str, set[str]]:
    """For each member that spans the space the passes that compute it: those of reductions, and
    the one that stores the result."""
    found: dict[str, set[str]] = {t.name: set() for t in members}
    for t in reversed(members):
        mine = found[t.name] if t.shape == space else set()
        if t is members[-1] and t.shape == space:
            mine.add("store")
        if _axes(t) is not None:
            mine = mine | {f"{t.name}.{i}" for i in range(_count(t, REDUCTIONS))}
        for s in t.sources:
            if s.name in found:
                found[s.name] |= mine
    return found


def _holds(members: Sequence[Tensor]) -> bool:
    """Whether the memory of the last member holds what would be computed too often."""
    found = trace(_chain(members))
    return held(found, found.boxes[0].step) is not None


def _count(t: Tensor, words: frozenset[str]) -> int:
    """How many steps of the traced meaning of `t` are among the words."""
    return sum(step.op in words for step in trace(t).steps)


def _is_dear(t: Tensor) -> bool:
    return _axes(t) is None and _count(t, DEAR) > 0


def _chain(members: Sequence[Tensor]) -> Tensor:
    """The members as one op with the name of the last."""
    sources = _sources(members)
    known = {s.name: letter(i) for i, s in enumerate(sources)}
    steps: list[Link] = []
    for t in members:
        given = [known[s.name] for s in t.sources]
        if t.op == "chain":
            first, inner = len(steps), {letter(i): name for i, name in enumerate(given)}
            for link in _links(t):
                args = (inner[a] if a in inner else str(int(a) + first) for a in link.args)
                steps.append(Link(link.op, tuple(args), link.attrs))
        else:
            steps.append(Link(t.op, tuple(given), t.attrs))
        known[t.name] = str(len(steps) - 1)
    program = "; ".join(map(str, steps))
    return apply("chain", *sources, name=members[-1].name, program=program)
