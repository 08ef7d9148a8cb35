"""The states of recurrent layers: whose each slot is, and what a step is told of its texts.

A text that runs has a slot of states of its own. Its drafted rows leave in a log what they would
put into the state; those that became text are replayed in its next step (`ggraph.ops.recurrent`).
Other slots hold states that texts have left behind, each at the end of a node of the prefix tree:
who begins with all that leads there goes on from a copy.

Legend: T token rows, N slots of states.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph import ops
from ggraph.decode.model import LOG, REPLAYED
from ggraph.dtype import I32, I64
from ggraph.graph import Graph
from ggraph.serving.prefix import Node
from ggraph.serving.slots import Slots
from ggraph.tensor import Array, Kind, Tensor, input

KEPT = LOG - 1  # rows of the log; the last one takes the writes of rows that are not drafted


@dataclass(frozen=True)
class Course:
    """The rows of one text in a step: `certain` ones that are text, then a draft whose nodes have
    these `parents` (-1: the last certain row), each with its row of the `log`. They go on from
    state `slot`, if the text has `begun`, and from what is replayed."""

    slot: int
    begun: bool
    replay: Sequence[int]
    certain: int
    parents: Sequence[int]
    log: Sequence[int]


def course_feeds(courses: Sequence[Course], rows: int, texts: int) -> dict[str, Array]:
    """The inputs that recurrent layers have beside others, of a step padded to `rows` rows."""
    parents = np.arange(-1, rows - 1, dtype=np.int32)  # rows that fill up follow one another
    log_slots = np.full(rows, KEPT, np.int64)
    replay = np.full((texts, REPLAYED), -1, np.int32)
    past, certain = np.ones(texts, np.int32), np.full(texts, -1, np.int32)
    at = 0
    for c in courses:
        parents[at] = -1 - c.slot
        replay[c.slot, : len(c.replay)] = c.replay
        past[c.slot], certain[c.slot] = c.begun, at + c.certain - 1
        at += c.certain
        end = at + len(c.parents)
        parents[at:end] = [at + p for p in c.parents]
        log_slots[at:end] = c.log
        at = end
    return {
        "parents": parents, "replay": replay, "past": past, "certain": certain,
        "log_slots": log_slots,
    }  # fmt: skip


class States:
    """N slots, of texts that run and of nodes that keep one. Where there is none left, the node's
    goes that was used longest ago. `copy(source, target)` copies a slot's states."""

    def __init__(self, count: int, copy: Callable[[int, int], None]) -> None:
        self.pool, self._copy = Slots(count), copy
        self._kept: dict[Node, int] = {}  # used longest ago first

    @property
    def kept(self) -> int:
        """How many are kept for later texts."""
        return len(self._kept)

    def find(self, node: Node, slots: list[int]) -> tuple[Node, list[int]]:
        """The lowest node on the path down to `node` that keeps a state, or the root; and those of
        the path's slots that lead there."""
        above = 0
        while node.parent is not None and node not in self._kept:
            above += len(node.tokens)
            node = node.parent
        return node, slots[: len(slots) - above]

    def slot_of(self, node: Node) -> int | None:
        """Where a node's state lies, if it keeps one."""
        return self._kept.get(node)

    def begin(self, node: Node) -> int:
        """A slot for a text that goes on from `node`, with the state that is kept there, if any."""
        source = self._used(node)
        slot = self._take()  # at worst that node's own, and then the text has its state
        if source not in (None, slot):
            self.resume(node, slot)
        return slot

    def resume(self, node: Node, slot: int) -> None:
        """Copy what is kept at a node to a text's slot."""
        self._copy(self._kept[node], slot)
        self._used(node)

    def keep(self, node: Node, slot: int) -> None:
        """Keep a copy of a text's states, which stand at a node's end. Where all slots are those of
        texts, nothing is kept."""
        if self._used(node) is None and (self.pool.free or self._kept):
            own = self._take()
            self._copy(slot, own)
            self._kept[node] = own

    def leave(self, node: Node, slot: int) -> None:
        """A text goes, whose states stand at a node's end: they are kept there as they are."""
        if node.parent is None or self._used(node) is not None:
            self.pool.give([slot])
        else:
            self._kept[node] = slot

    def drop(self, node: Node) -> None:
        """Forget what a node keeps, if anything."""
        if (slot := self._kept.pop(node, None)) is not None:
            self.pool.give([slot])

    def check(self, running: Iterable[int], nodes: Sequence[Node]) -> None:
        """InputError unless every slot is free, a running text's, or one of these nodes'."""
        held = [self._kept[n] for n in nodes if n in self._kept]
        self.pool.check([*running, *held])

    def _take(self) -> int:
        if not self.pool.free:
            self.drop(next(iter(self._kept)))
        (slot,) = self.pool.take(1)
        return slot

    def _used(self, node: Node) -> int | None:
        """The slot of a node, which is used now."""
        if node not in self._kept:
            return None
        self._kept[node] = slot = self._kept.pop(node)
        return slot


def carried(step: Graph, index: str) -> list[Tensor]:
    """The states that a step's input `index` says how to overwrite: what texts have for certain
    (`certain`), or logs (`log_slots`)."""
    found = step.leaves(Kind.STATE)
    return [s for s in found if index in [t.name for t in step.updates[s.name].sources]]


def copy_graph(step: Graph) -> Graph:
    """The graph that copies the states of a text of recurrent layers: from slot `from` i32 [1] to
    slot `to` i64 [1]."""
    source, target = input("from", (1,), I32), input("to", (1,), I64)
    copied = []
    for held in carried(step, "certain"):
        row = ops.get_rows(held.reshape(held.shape[0], -1), source)
        copied.append(ops.set_rows(held, row.reshape(1, *held.shape[1:]), target))
    return Graph.of({"copied": ops.cont(source)}, also=copied, name="copy states")
