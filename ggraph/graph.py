"""Graph: a closed, ordered set of tensors with outputs and state updates.

`Graph.of(outputs)` is the only way to make one: it orders the tensors, names the unnamed ones,
takes leaves that are alike for one, and checks that every state is overwritten in one chain. Passes
make new graphs, they never change one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap, zip_longest
from operator import is_
from typing import TYPE_CHECKING

from ggraph.errors import GraphError, shown
from ggraph.face import unscoped
from ggraph.lazy import lazy
from ggraph.nearest import nearest
from ggraph.tensor import Kind, Tensor, altered, apply, check_overwrite, line
from ggraph.unchanging import Unchanging

if TYPE_CHECKING:
    import networkx as nx
else:
    nx = lazy("networkx")


@dataclass(frozen=True, eq=False)
class Graph(Unchanging):
    """A closed set of tensors in an order that runs, with its outputs and state updates.

    `tensors` holds leaves, views and results, sources before users, and every reader of a value
    before the op that overwrites it. `updates` maps each state to the tensor that holds its value
    at the end of a run.
    """

    name: str
    tensors: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    updates: Mapping[str, Tensor]

    @staticmethod
    def of(
        outputs: Mapping[str, Tensor] | Sequence[Tensor],
        *,
        also: Iterable[Tensor] = (),
        name: str = "graph",
    ) -> "Graph":
        """The graph that computes `outputs`; a mapping gives them their names.

        A tensor may be an output under several names, and a leaf under another than its own: each
        further name is a view of it. `also` adds tensors that are wanted for their effect on a
        state only. Raises GraphError for duplicate names, cycles, states that are overwritten in
        two unrelated ways, and where nothing is asked for.
        """
        with unscoped():
            wanted, titles = _titled(outputs)
            roots = [*wanted, *_tensors(also, "also")]
            if not roots:
                raise GraphError(f"graph {name!r}: no outputs, and no states to change")
            return _rebuild(name, _order(*_one_of_each(roots, titles)), titles)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str) -> Tensor:
        found = self.get(name)
        if found is None:
            near = nearest(name, self.named)
            raise GraphError(f"graph {self.name!r} has no tensor {shown(name)}{near}")
        return found

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name; None where there is none."""
        return self.named.get(name) if isinstance(name, str) else None

    @cached_property
    def named(self) -> Mapping[str, Tensor]:
        """The tensors by name."""
        return {t.name: t for t in self.tensors}

    def leaves(self, kind: Kind) -> tuple[Tensor, ...]:
        """All inputs, weights or states, in graph order."""
        if not isinstance(kind, Kind):
            raise GraphError(f"leaves: expected a Kind, got {shown(kind)}")
        return tuple(t for t in self.tensors if t.is_leaf and t.kind is kind)

    @cached_property
    def nodes(self) -> tuple[Tensor, ...]:
        """The tensors that need work: results that are not views."""
        return tuple([t for t in self.tensors if t.spec is not None and t.view_src is None])

    @cached_property
    def overwriting(self) -> tuple[Tensor, ...]:
        """The tensors whose op overwrites a source."""
        return tuple(_overwriting(self.tensors))

    def replace(self, heirs: Mapping[str, Tensor]) -> "Graph":
        """The graph in which each named tensor's users take its heir instead.

        An heir may be a tensor of this graph or a new one over tensors of this graph. What nothing
        needs any more is gone. Outputs and states keep their names.
        """
        if not isinstance(heirs, Mapping) or not heirs.keys() <= self.named.keys():
            raise GraphError(f"replace: {shown(heirs)}: expected heirs by names of this graph")
        _tensors(heirs.values(), "heirs")
        new: dict[Tensor, Tensor] = {}
        moved: set[Tensor] = set()
        with unscoped():
            for t in self.tensors:
                if t.name in heirs or t in new:
                    new[t] = _follow(heirs.get(t.name, t), new)
                elif moved.isdisjoint(t.sources):
                    new[t] = t
                    continue
                else:
                    new[t] = _changed(t, tuple([new[s] for s in t.sources]))
                moved.add(t)
        outputs = {t.name: new[t] for t in self.outputs}
        also = [new[t] for t in self.updates.values() if not t.is_leaf]
        return Graph.of(outputs, also=also, name=self.name)

    def users(self) -> dict[str, list[Tensor]]:
        """For each tensor's name, the tensors that take it as a source (once per slot)."""
        found: dict[str, list[Tensor]] = {t.name: [] for t in self.tensors}
        for t in self.tensors:
            for s in t.sources:
                found[s.name].append(t)
        return found

    def to_networkx(self) -> "nx.MultiDiGraph[str]":
        """Nodes are names with attribute `tensor`; edges run from source to user, key = slot."""
        g: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for t in self.tensors:
            g.add_node(t.name, tensor=t)
            for slot, s in enumerate(t.sources):
                g.add_edge(s.name, t.name, key=slot)
        return g

    def __repr__(self) -> str:
        return "\n".join([f"graph {self.name}", *("  " + line(t) for t in self.tensors)])


def _overwriting(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of them whose op overwrites a source."""
    return [t for t in tensors if t.spec is not None and t.spec.overwrites is not None]


def _follow(t: Tensor, new: dict[Tensor, Tensor]) -> Tensor:
    """What `t` has become: itself over what its sources have."""
    if t not in new:
        new[t] = over(t, tuple([_follow(s, new) for s in t.sources]))
    return new[t]


def over(t: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """`t` of these sources. Its op's rule is asked again only where it could see a difference."""
    return t if all(map(is_, sources, t.sources)) else _changed(t, sources)


def _changed(t: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
    """`over`, where at least one source is another."""
    changed = [s for s in zip(sources, t.sources, strict=True) if s[0] is not s[1]]
    if t.spec is None or not all(starmap(_alike, changed)):
        return apply(t.op, *sources, name=t.name, **t.attrs)
    if t.spec.view_of is not None:
        old, new = t.sources[t.spec.view_of], sources[t.spec.view_of]
        offset = t.offset - old.offset + new.offset
        return altered(t, sources=sources, view_src=new.root, offset=offset)
    made = altered(t, sources=sources)
    if t.spec.overwrites is not None:
        check_overwrite(made)
    return made


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether an op's rule can see no difference, so that its result is as it was."""
    return one.shape == other.shape and one.dtype is other.dtype and one.strides == other.strides


def _tensors(given: object, what: str) -> list[Tensor]:
    """`given` as a list. GraphError where something in it is no tensor."""
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise GraphError(f"{what}: expected several tensors, got {shown(given)}")
    found = list(given)
    for t in found:
        if not isinstance(t, Tensor):
            raise GraphError(f"{what}: expected a tensor, got {shown(t)}")
    return found


Titles = dict[Tensor, str]  # of an output: its name, "" for the one that it has


def _titled(outputs: object) -> tuple[list[Tensor], Titles]:
    """The output tensors and their names. What goes by a name already is shown by a view."""
    if not isinstance(outputs, Mapping):
        titles = dict.fromkeys(_tensors(outputs, "outputs"), "")
        return list(titles), titles
    titles = {}
    wanted = _tensors(outputs.values(), "outputs")
    for i, (title, t) in enumerate(zip(outputs, wanted, strict=True)):
        if not isinstance(title, str) or not title:
            raise GraphError(f"outputs: {line(t)} needs a name, got {title!r}")
        if t in titles or (t.is_leaf and t.name != title):
            wanted[i] = apply("permute", t, axes=tuple(range(len(t.shape))))
        titles[wanted[i]] = title
    return wanted, titles


def _one_of_each(roots: list[Tensor], titles: Titles) -> tuple[list[Tensor], list[Tensor]]:
    """The roots over one leaf of each name, where leaves of one name are alike, and all that they
    reach, as a walk meets it; `titles` follow."""
    reached = _walk(roots)
    leaves = [t for t in reached if t.spec is None]
    if len({t.name for t in leaves}) == len(leaves):
        return roots, reached
    first: dict[tuple[object, ...], Tensor] = {}
    new = {t: first.setdefault((t.kind, t.name, t.shape, t.dtype), t) for t in leaves}
    moved = {t for t in leaves if new[t] is not t}
    for t in reached:
        if not t.is_leaf:
            new[t] = _renewed(t, new, moved, t.name, t.is_output)
            moved |= {t} if new[t] is not t else set()
    for t in reached:
        if t in titles:
            titles[new[t]] = titles[t]
    return [new[t] for t in roots], list(dict.fromkeys(new[t] for t in reached))


def _renewed(
    t: Tensor, new: Mapping[Tensor, Tensor], moved: set[Tensor], name: str, is_output: bool
) -> Tensor:
    """`t` over what its sources have become: itself where nothing changes, `moved` being those of
    `new` that have become others."""
    root = t.view_src
    if root is not None and root not in new:
        raise GraphError(f"{line(t)} shows bytes of {root.label}, which is no source")
    same = name == t.name and is_output is t.is_output and root not in moved
    if same and moved.isdisjoint(t.sources):
        return t
    sources = tuple([new[s] for s in t.sources])
    view_src = None if root is None else new[root]
    return altered(t, name=name, sources=sources, view_src=view_src, is_output=is_output)


def _order(roots: list[Tensor], seen: list[Tensor]) -> list[Tensor]:
    """Sources first, in the order a depth-first walk meets them; readers before overwriters."""
    old = {t: t.overwritten.root for t in _overwriting(seen) if t.overwritten is not None}
    first: dict[Tensor, Tensor] = {}
    for t, root in old.items():
        if (other := first.setdefault(root, t)) is not t:
            raise GraphError(
                f"{line(other)} and {line(t)} both overwrite {root.label}: let one take the "
                "other's result in its place"
            )
    readers: dict[Tensor, list[Tensor]] = {root: [] for root in old.values()}
    for t in seen if old else ():
        for s in t.sources if t.view_src is None else ():
            root = s if s.view_src is None else s.view_src
            if root in readers:
                readers[root].append(t)
    extra = {t: [r for r in readers[root] if r is not t] for t, root in old.items()}
    if not any(extra.values()):
        return seen
    return _moved_forward(_walk(roots, extra), extra)


def _moved_forward(ordered: list[Tensor], extra: Mapping[Tensor, list[Tensor]]) -> list[Tensor]:
    """The same order, but right behind what it needs comes what is to come soon."""
    place = {t: i for i, t in enumerate(ordered)}
    for t in ordered:
        if t.spec is not None and t.spec.soon:
            before = (*t.sources, *extra.get(t, ()))
            place[t] = max((place[s] for s in before if not s.is_leaf), default=0)
            for s in t.sources:
                place[s] = min(place[s], place[t])  # a leaf that nothing else needs
    return sorted(ordered, key=place.__getitem__)


def _walk(roots: list[Tensor], extra: Mapping[Tensor, list[Tensor]] | None = None) -> list[Tensor]:
    """Iterative post-order over sources and the `extra` predecessors; a cycle is an error."""
    done: dict[Tensor, None] = {}
    begun: set[Tensor] = set()
    stack = roots[::-1]
    while stack:
        t = stack[-1]
        if t in begun:
            done[stack.pop()] = None
            continue
        begun.add(t)
        before = (*t.sources, *extra.get(t, ())) if extra else t.sources
        if not before:
            done[stack.pop()] = None
            continue
        for s in before[::-1]:
            if s in done:
                continue
            if s in begun:
                raise GraphError(
                    f"cycle through {line(s)}: a reader of the old value needs the new; ops.cont "
                    "keeps a copy of the old"
                )
            stack.append(s)
    return list(done)


def _rebuild(name: str, ordered: list[Tensor], titles: Titles) -> Graph:
    """The tensors with unique names and output flags, copies where those change, and the state
    updates."""
    given: set[str] | None = None
    taken: dict[str, Tensor] = {}
    new: dict[Tensor, Tensor] = {}
    moved: set[Tensor] = set()
    for i, t in enumerate(ordered):
        title = titles.get(t) or t.name
        if not title:
            given = given or {titles.get(t) or t.name for t in ordered}
            title = _free(f"{t.op}_{i}", given)
        if title in taken:
            raise GraphError(
                f"two tensors are called {title!r}: {line(t)} and {line(taken[title])}"
            )
        taken[title] = t
        heir = _renewed(t, new, moved, title, t in titles)
        if heir is not t:
            moved.add(t)
        new[t] = heir
    tensors = tuple(new.values())
    outputs = tuple(t for t in tensors if t.is_output)
    return Graph(name, tensors, outputs, _updates(tensors))


def _free(name: str, given: set[str]) -> str:
    """`name`, or a longer one where the user calls another tensor so."""
    while name in given:
        name += "_"
    return name


def _updates(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Follow each state through its chain of overwrites to its last value."""
    heir: dict[str, Tensor] = {}
    for t in _overwriting(tensors):
        assert t.overwritten is not None, t.name
        old = t.overwritten.root
        if old.kind is Kind.WEIGHT or old.kind is Kind.INPUT:
            raise GraphError(f"{line(t)} overwrites the {old.kind.value} %{old.name}")
        heir[old.name] = t
    last = {t.name: t for t in tensors if t.spec is None and t.kind is Kind.STATE}
    for title, t in last.items():
        while t.name in heir:
            t = heir[t.name]
        last[title] = t
    return last


def first_difference(one: Graph, other: Graph) -> tuple[str, str] | None:
    """The first line in which two graphs differ, as each has it; None where they are the same."""
    if one is other:
        return None
    pairs = zip_longest(repr(one).splitlines(), repr(other).splitlines(), fillvalue="no more")
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), None)
