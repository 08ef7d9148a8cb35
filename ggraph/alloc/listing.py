"""Schedules as ggml node lists. Decides nothing about offsets.

ggml plans from a list of nodes and leafs, so a schedule is flattened to the order in which the host
enqueues its launches; streams and events are dropped, which is exactly what upstream does. Rule
numbers (A, S) are those of docs/ggml_allocator.md.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from ggraph.alloc.check import alignments, roots
from ggraph.alloc.dyn import align_up
from ggraph.alloc.ggml import Node, NodeList
from ggraph.device import HOST
from ggraph.plan import Command, Do, Schedule, Value
from ggraph.tensor import Tensor

_VIEW_OPS = frozenset(("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))


def ggml_op(t: Tensor) -> str:
    """The name under which ggml's allocator knows the op of `t`; NONE for leaves."""
    if t.spec is None:
        return "NONE"
    name = (t.spec.ggml or t.spec.name).upper().removeprefix("GGML_OP_")
    if t.is_view:
        return name if name in _VIEW_OPS else "VIEW"  # never NONE, which A23 treats apart
    family = name.split("_")[0]  # upstream's UNARY and GLU are one op with a parameter each
    return family if family in ("UNARY", "GLU") else name


def layout(t: Tensor) -> Hashable:
    """Equal for two tensors just when ggml finds type, extents and strides equal (A16)."""
    missing = 4 - len(t.shape)  # ggml has four axes always; one step along those is all of it
    return (t.dtype.name, (*(1,) * missing, *t.shape), (*(t.nbytes,) * missing, *t.strides))


@dataclass
class _Lister:
    """Builds the list of one schedule; `at` maps tensor and value names to indices."""

    schedule: Schedule
    buffers: dict[str, int]
    tensors: list[Node] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    leafs: list[int] = field(default_factory=list)
    at: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.schedule.graph
        self.align, self.roots = alignments(self.schedule), roots(self.schedule)
        commands = self.schedule.commands
        self.by_host = _touched(c for c in commands if c.do is Do.HOST_WRITE)
        self.to_host = {a.value for c in commands if c.do is Do.HOST_READ for a in c.reads}
        self.made = _touched(c for c in commands if c.do in (Do.LAUNCH, Do.COPY))

    def add(self, node: Node, key: str) -> int:
        self.tensors.append(node)
        self.at[key] = len(self.tensors) - 1
        return self.at[key]

    def leaf(self, v: Value) -> None:
        """A value that no launch or copy makes; rotating ones are never recycled (S8)."""
        stays = v.initial or v.kept or v.slots > 1
        node = self._plain(v, is_output=stays or v.name in self.to_host)
        self.leafs.append(self.add(node, v.name))

    def _plain(self, v: Value, *, is_output: bool, sources: tuple[int, ...] = ()) -> Node:
        t = self.graph.get(v.name)
        root = self.roots[v.name]
        return Node(
            name=v.name,
            op="NONE" if t is None else ggml_op(t),
            nbytes=self.size(v),
            sources=sources,
            view_of=None if root == v.name else self.index(root),
            layout=None if t is None else layout(t),
            # What holds data between runs is placed first, so that nothing is there before it.
            is_input=v.name in self.by_host or v.initial or v.kept or v.slots > 1,
            is_output=is_output,
            external=v.external,
            buffer=self.buffers[v.device],
        )

    def size(self, v: Value) -> int:
        """Bytes of a value; the copies of a rotating one lie behind one another."""
        return v.nbytes if v.slots == 1 else align_up(v.nbytes, self.align[v.device]) * v.slots

    def index(self, name: str) -> int:
        """Where a value stands in the list; one not met yet is added (placed at first use)."""
        if name not in self.at:
            v = self.schedule.values[name]
            self.add(self._plain(v, is_output=v.initial or v.kept), name)
        return self.at[name]

    def source(self, t: Tensor) -> int:
        """Where a source tensor stands; views become nodes in front of their first user."""
        if not t.is_view:
            return self.index(t.name)
        if t.name not in self.at:
            sources = tuple(self.source(s) for s in t.sources)
            root = self.index(self.roots[t.root.name])
            owner = self.tensors[root]
            view = Node(t.name, ggml_op(t), 0, sources, root, layout(t), buffer=owner.buffer)
            self.nodes.append(self.add(view, t.name))
        return self.at[t.name]

    def step(self, c: Command) -> None:
        """A launch or copy: what it uses, then what it makes."""
        made = [a.value for a in c.writes]
        if not made:
            return
        main = c.node if c.node in made else made[0]
        if c.do is Do.COPY:
            for a in c.reads:
                self.depend(a.value)
            self.make(main, ())
            return
        t = self.graph.get(main)
        slots = [] if t is None else [self.source(s) for s in t.sources]
        covered = {*slots, *(self.tensors[s].view_of for s in slots)}
        others = dict.fromkeys(a.value for a in (*c.reads, *c.writes) if a.value != main)
        slots += [i for i in map(self.index, others) if i not in covered]  # scratch and the like
        self.make(main, tuple(slots))

    def depend(self, name: str) -> None:
        """S9, A23: a NONE view keeps the source of a copy alive up to here."""
        i = self.index(name)
        root = self.tensors[i].view_of
        keeper = Node(f"{name} (dep)", "NONE", 0, (i,), i if root is None else root)
        self.nodes.append(self.add(keeper, f"{name} (dep {len(self.nodes)})"))

    def make(self, name: str, sources: tuple[int, ...]) -> None:
        """The node that makes value `name`."""
        v = self.schedule.values[name]
        stays = v.initial or v.kept or v.slots > 1 or name in self.to_host
        t = self.graph.get(name)
        node = self._plain(v, is_output=stays or (t is not None and t.is_output), sources=sources)
        if name in self.at:  # a second write of one value, or a use that came first
            self.tensors[self.at[name]] = node
        else:
            self.add(node, name)
        self.nodes.append(self.at[name])


def _touched(commands: Iterable[Command]) -> set[str]:
    return {a.value for c in commands for a in c.writes}


def _work(schedule: Schedule) -> Iterator[Command]:
    """Launches and copies as upstream lists them: enqueue order, but S9."""
    work = [c for c in schedule.commands if c.do in (Do.LAUNCH, Do.COPY)]
    splits = schedule.splits.splits
    begins = {n: s for s in splits for n in (*s.copies_in, *s.nodes)}
    copies: dict[str | None, list[Command]] = {n: [] for s in splits for n in s.copies_in}
    for c in work:
        if c.do is Do.COPY and c.node in copies:
            copies[c.node].append(c)
    for c in work:
        split = begins.get(c.node or "")
        for name in split.copies_in if split is not None else ():
            yield from copies[name]
            copies[name] = []
        if c.do is not Do.COPY or c.node not in copies:
            yield c


def list_schedule(schedule: Schedule, buffers: dict[str, int]) -> tuple[NodeList, dict[str, int]]:
    """A schedule as a ggml node list, with the index of every value.

    `buffers` gives each device's (and the host's) buffer index. Host writes make inputs (A14),
    host reads outputs (A13), copies become S9's pair of a NONE view and a source-less node.
    """
    lister = _Lister(schedule, buffers)
    for v in schedule.values.values():
        if v.name not in lister.made:
            lister.leaf(v)
    for c in _work(schedule):
        lister.step(c)
    for name in schedule.values:
        lister.index(name)
    tensors = tuple(lister.tensors)
    listing = NodeList(tensors, tuple(dict.fromkeys(lister.nodes)), tuple(lister.leafs))
    return listing, {name: lister.at[name] for name in schedule.values}


def buffer_order(schedule: Schedule) -> dict[str, int]:
    """Buffer index of each device in order of the placement, and of the host, which is last."""
    names = [d.name for d in schedule.splits.placement.devices]
    return {name: k for k, name in enumerate([*names, HOST])}
