"""Values grouped into blocks: what must, and what may, lie on the same bytes.

A block is one place in an arena. Values that overwrite one another share a block because they must
(`same_as`), a result shares its source's block in place when nothing else can still need the source
(`may_replace`). Whether two blocks may share bytes is asked of their spans.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ggraph.alloc.check import alignments, roots
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
    """A block while it grows. Of its accesses only the last per actor, and what happens before all
    of those of the next run, decide what may join it."""

    values: list[str]
    nbytes: int  # of the largest member
    is_plain: bool  # the plan's own, of one run
    rows: list[int]
    last: Ints  # [A] as in `Spans`
    meet2: Ints  # [A]


class _Grouper:
    """Joins values in program order of the commands that make them."""

    def __init__(self, schedule: Schedule, order: Precedence) -> None:
        self.schedule, self.order = schedule, order
        self.align = alignments(schedule)
        self.causes: dict[str, str] = {}
        self.group: dict[str, _Group] = {}
        used, members = accesses(schedule), dict[str, list[str]]()
        for name, root in roots(schedule).items():
            members.setdefault(root, []).append(name)
            if root != name:
                over = schedule.values[name].same_as
                self.causes[name] = f"on %{over}'s bytes, which it overwrites"
        rows = [
            used[of[0]] if len(of) == 1 else sorted({i for v in of for i in used[v]})
            for of in members.values()
        ]
        s = spans(order, rows)
        for k, of in enumerate(members.values()):
            values = [schedule.values[v] for v in of]
            nbytes, plain = max([v.nbytes for v in values]), all(map(_is_plain, values))
            group = _Group(of, nbytes, plain, rows[k], s.last[k], s.meet2[k])
            self.group.update(dict.fromkeys(of, group))

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
        if not (new.is_plain and target.is_plain):
            return False
        if values[made].device != values[old].device or self.size(new) != self.size(target):
            return False
        reads = [a for a in self.schedule.commands[i].reads if self.group[a.value] is target]
        # A view that starts further inside is not the result's place.
        return all(a.start == 0 for a in reads) and self._ordered(i, new, target)

    def _ordered(self, i: int, new: _Group, old: _Group) -> bool:
        """Every access of the old bytes precedes the new ones, command i alone being in both.

        Steady state: the new value's last access also precedes the next run's old value.
        """
        rows = np.asarray(new.rows, dtype=np.int64)
        known = self.order.clock[rows]  # [new, A]
        known[rows == i, self.order.actor_of[i]] = i + 1
        return bool((old.last <= known).all()) and bool((new.last <= old.meet2).all())

    def join(self, made: str, old: str) -> None:
        """Add `made` to `old`'s block."""
        new, target = self.group[made], self.group[old]
        target.values += new.values
        target.rows += new.rows
        target.last = np.maximum(target.last, new.last)
        target.meet2 = np.minimum(target.meet2, new.meet2)
        self.group.update(dict.fromkeys(new.values, target))
        self.causes[made] = f"in place of %{old}"

    def size(self, group: _Group) -> int:
        """Aligned bytes of the largest member."""
        device = self.schedule.values[group.values[0]].device
        return align_up(group.nbytes, self.align[device])

    def block(self, group: _Group) -> Block:
        """The finished block."""
        values = [self.schedule.values[name] for name in group.values]
        slots = max([v.slots for v in values])
        pinned = slots > 1 or any(v.initial or v.kept for v in values)
        size = self.size(group) * slots
        rows = tuple(sorted(set(group.rows)))
        return Block(tuple(group.values), values[0].device, size, slots, pinned, rows)


def _is_plain(v: Value) -> bool:
    return v.nbytes > 0 and not (v.external or v.initial or v.kept or v.slots > 1)


def make_blocks(schedule: Schedule, order: Precedence) -> Blocks:
    """Group the values that live in arenas; external ones are left out.

    Deterministic: blocks are in the order of `schedule.values`. Raises AllocError for a value that
    overwrites itself or one on another device.
    """
    grouper = _Grouper(schedule, order)
    grouper.replace_all()
    groups = {id(g): g for g in grouper.group.values()}.values()
    values = schedule.values
    inside = [g for g in groups if not any(values[v].external for v in g.values)]
    blocks = tuple(grouper.block(g) for g in inside)
    return Blocks(blocks, grouper.causes, spans(order, [b.rows for b in blocks]), order)
