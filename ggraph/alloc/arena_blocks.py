"""Values grouped into blocks: what must, and what may, lie on the same bytes.

A block is one place in an arena. Values that overwrite one another share a block because they must
(`same_as`), a result shares its source's block in place when nothing else can still need the source
(`may_replace`). Whether two blocks may share bytes is asked of their spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.alloc.check import alignments, root_of
from ggraph.alloc.dyn import align_up
from ggraph.alloc.precedence import Ints, Precedence, Spans, accesses, spans
from ggraph.plan import Schedule, Value


@dataclass(frozen=True)
class Block:
    """Values on the same bytes. `nbytes` is aligned and counts every slot of a rotating value."""

    values: tuple[str, ...]
    device: str
    nbytes: int
    slots: int
    pinned: bool  # holds data between runs or rotates: never shares bytes
    rows: tuple[int, ...]  # commands that access it


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of a schedule's arenas, the reasons of their members, and when they are used."""

    blocks: tuple[Block, ...]
    causes: Mapping[str, str]  # value -> why it shares its block
    spans: Spans
    order: Precedence

    def of_device(self, device: str) -> list[int]:
        """Indices of the blocks on `device` that need bytes."""
        return [i for i, b in enumerate(self.blocks) if b.device == device and b.nbytes]


@dataclass
class _Group:
    """A block while it grows."""

    values: list[str]
    rows: set[int] = field(default_factory=set)


class _Grouper:
    """Joins values in program order of the commands that make them."""

    def __init__(self, schedule: Schedule, order: Precedence) -> None:
        self.schedule, self.order = schedule, order
        self.align = alignments(schedule)
        self.causes: dict[str, str] = {}
        self.group: dict[str, _Group] = {}
        used = accesses(schedule)
        for v in schedule.values.values():
            root = root_of(schedule, v.name)
            group = self.group.setdefault(root, _Group([]))
            group.values.append(v.name)
            group.rows.update(used[v.name])
            self.group[v.name] = group
            if root != v.name:
                self.causes[v.name] = f"on %{v.same_as}'s bytes, which it overwrites"

    def replace_all(self) -> None:
        """Put every result in place that may be, the first candidate that qualifies winning."""
        for i, c in enumerate(self.schedule.commands):
            for made in dict.fromkeys(a.value for a in c.writes):
                for old in self.schedule.values[made].may_replace:
                    if self.may_join(i, made, old):
                        self.join(made, old)
                        break

    def may_join(self, i: int, made: str, old: str) -> bool:
        """Whether the result `made` of command i may lie exactly on `old`'s bytes."""
        values = self.schedule.values
        new, target = self.group[made], self.group[old]
        if new is target or values[made].same_as is not None:
            return False
        if not all(self._plain(values[name]) for name in (*new.values, *target.values)):
            return False
        if values[made].device != values[old].device or self.size(new) != self.size(target):
            return False
        reads = [a for a in self.schedule.commands[i].reads if a.value in target.values]
        # A view that starts further inside is not the result's place.
        return all(a.start == 0 for a in reads) and self._ordered(i, new.rows, target.rows)

    def _plain(self, v: Value) -> bool:
        held = v.external or v.initial or v.kept or v.slots > 1
        return not held and v.nbytes > 0

    def _ordered(self, i: int, new: set[int], old: set[int]) -> bool:
        """Every access of the old bytes precedes the new ones, command i alone being in both.

        Steady state: the new value's last access also precedes the next run's old value.
        """
        clock, who = self.order.clock, self.order.who
        olds, news = np.array(sorted(old)), np.array(sorted(new))
        within = clock[news][:, who[olds]] > olds  # [new, old]
        both = (news == i)[:, None] & (olds == i)
        across = clock[self.order.n + olds][:, who[news]] > news  # [old, new]
        return bool((within | both).all()) and bool(across.all())

    def join(self, made: str, old: str) -> None:
        """Add `made` to `old`'s block."""
        new, target = self.group[made], self.group[old]
        target.values += new.values
        target.rows |= new.rows
        self.group.update(dict.fromkeys(new.values, target))
        self.causes[made] = f"in place of %{old}"

    def size(self, group: _Group) -> int:
        """Aligned bytes of the largest member."""
        values = [self.schedule.values[name] for name in group.values]
        return align_up(max(v.nbytes for v in values), self.align[values[0].device])

    def block(self, group: _Group) -> Block:
        """The finished block."""
        values = [self.schedule.values[name] for name in group.values]
        slots = max(v.slots for v in values)
        pinned = slots > 1 or any(v.initial or v.kept for v in values)
        size = self.size(group) * slots
        rows = tuple(sorted(group.rows))
        return Block(tuple(group.values), values[0].device, size, slots, pinned, rows)


def make_blocks(schedule: Schedule, order: Precedence) -> Blocks:
    """Group the values that live in arenas; external ones are left out.

    Deterministic: blocks are in the order of `schedule.values`. Raises AllocError for a value that
    overwrites itself or one on another device.
    """
    grouper = _Grouper(schedule, order)
    grouper.replace_all()
    groups = {id(g): g for g in grouper.group.values()}.values()
    inside = [g for g in groups if not any(schedule.values[v].external for v in g.values)]
    blocks = tuple(grouper.block(g) for g in inside)
    return Blocks(blocks, grouper.causes, spans(order, [b.rows for b in blocks]), order)


def conflict_pairs(blocks: Blocks, of: Sequence[int]) -> tuple[Ints, Ints]:
    """Conflicts among the chosen blocks as compressed rows (start [m + 1], neighbours).

    Neighbours are positions in `of`.
    """
    at = np.asarray(of, dtype=np.int64)
    s = blocks.spans
    last, meet, meet2 = s.last[at], s.meet[at], s.meet2[at]
    pinned = np.array([blocks.blocks[i].pinned for i in of], dtype=bool)
    start = np.zeros(len(of) + 1, dtype=np.int64)
    rows = []
    for k in range(len(of)):
        first = (last[k] <= meet).all(axis=1) & (last <= meet2[k]).all(axis=1)
        second = (last <= meet[k]).all(axis=1) & (last[k] <= meet2).all(axis=1)
        row = ~(first | second) | pinned | pinned[k]
        row[k] = False
        rows.append(np.flatnonzero(row))
        start[k + 1] = start[k] + len(rows[-1])
    return start, np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
