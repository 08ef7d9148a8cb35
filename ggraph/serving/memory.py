"""Which slots of the cache belong to whom: free ones, those of texts, those of the prefix tree.

Of a recurrent model texts that run have states, too, and rows of the log. A state is that after all
rows of a text and cannot be cut: a text goes on from the last place of its beginning where a state
was kept. Texts leave theirs when they go, and a copy at two places of a prompt: where it parts from
what was known, and where its `stem` ends, with which later prompts are likely to begin.
"""

from collections.abc import Sequence

from ggraph.errors import InputError
from ggraph.serving.prefix import PrefixTree
from ggraph.serving.slots import Slots
from ggraph.serving.states import KEPT, States
from ggraph.serving.text import Text


class Memory:
    """The cache's slots. Rows of finished texts stay in the tree until somebody needs the slots.
    Of a recurrent model there are `states`, kept at least `apart` tokens from those before."""

    def __init__(self, slots: int, states: States | None = None, apart: int = 1) -> None:
        self.pool, self.states, self.apart = Slots(slots), states, apart
        self.tree = PrefixTree() if states is None else PrefixTree(states.drop)
        self.log = Slots(KEPT)
        self.evicted = 0

    @property
    def room(self) -> int:
        """Slots that are free, or hold what nobody is using."""
        return self.pool.free + self.tree.evictable

    def begin(self, text: Text) -> None:
        """The text runs from now on."""
        if self.states is not None:
            text.state = self.states.begin(text.node)

    def look_up(self, text: Text) -> None:
        """Take over what the tree has of a text beyond what is computed; its last token's row is
        always computed, for its logits. All that it has computed must be the tree's already."""
        if not self._shares(text) or text.seen_version == self.tree.version:
            return
        text.seen_version = self.tree.version
        node, slots = self.tree.match(text.tokens[:-1])
        text.parted = len(slots)
        if self.states is not None:
            node, slots = self.states.find(node, slots)
        if len(slots) <= text.computed:
            return
        if self.states is not None and text.state >= 0:
            self.states.resume(node, text.state)
        self.tree.hold(node)
        self.tree.release(text.node)
        text.node, text.computed, text.shared = node, len(slots), len(slots)
        text.settled = text.computed
        text.slots[: len(slots)] = slots
        text.unread.clear()

    def ahead(self, text: Text) -> int:
        """How many tokens a text may read at once: up to where its state is to be kept."""
        text.place, places = -1, sorted((text.parted, text.stem))
        if self.states is not None and self._shares(text):
            far = (p for p in places if p > text.computed and p - text.settled >= self.apart)
            text.place = next(far, -1)
        return text.outstanding if text.place < 0 else text.place - text.computed

    def publish(self, text: Text) -> None:
        """Give what a text has computed to the tree, of a recurrent model as far as its state."""
        self._insert(text, text.computed - len(text.replay))
        if self.states is not None and text.computed == text.place:
            self.states.keep(text.node, text.state)
            text.settled, text.place = text.place, -1
            self.tree.version += 1

    def _insert(self, text: Text, end: int) -> None:
        if not self._shares(text) or text.shared == end:
            return
        new = slice(text.shared, end)
        node, slots, spare = self.tree.insert(text.node, text.tokens[new], text.slots[new].tolist())
        self.tree.hold(node)
        self.tree.release(text.node)
        self.pool.give(spare)
        text.slots[new] = slots
        text.node, text.shared = node, end

    def forget(self, text: Text) -> None:
        """A text holds nothing any more; what it computed stays in the tree, with its state."""
        text.place = -1
        self.publish(text)
        self.pool.give(text.spare)
        self.pool.give(text.slots[text.shared : text.computed].tolist())
        self.tree.release(text.node)
        self.replay(text)
        if self.states is not None and text.state >= 0:
            self.states.leave(text.node, text.state)
            self.tree.version += 1
            text.state = -1
        text.node, text.computed, text.shared, text.settled = self.tree.root, 0, 0, 0
        text.spare, text.seen_version = [], -1
        text.unread.clear()

    def standing(self, text: Text) -> list[tuple[int, int]]:
        """Of a recurrent model: how many tokens of a text each state stands behind, and its slot;
        those that are kept on its path, and last its own."""
        found, node, count = list[tuple[int, int]](), text.node, text.shared
        if self.states is None:
            return found
        while node.parent is not None:
            if (slot := self.states.slot_of(node)) is not None:
                found.append((count, slot))
            count, node = count - len(node.tokens), node.parent
        return [*found[::-1], (text.computed - len(text.replay), text.state)]

    def replay(self, text: Text, log: Sequence[int] = (), nodes: Sequence[int] = ()) -> None:
        """A text's states hold all but these nodes of a draft, whose rows lie in the log."""
        if log or text.replay:
            kept = [log[n] for n in nodes]
            self.log.give([*text.replay, *(row for row in log if row not in kept)])
            text.replay = kept

    def reserve(self, text: Text, count: int) -> bool:
        """Give a text `count` spare slots, for which earlier texts are forgotten. Whether there are
        as many."""
        missing = count - len(text.spare)
        if missing <= 0:
            return True
        if missing > self.pool.free:
            freed = self.tree.evict(missing - self.pool.free)
            self.evicted += len(freed)
            self.pool.give(freed)
        if missing > self.pool.free:
            return False
        text.spare += self.pool.take(missing)
        return True

    def _shares(self, text: Text) -> bool:
        return not text.request.features

    def check(self, texts: Sequence[Text]) -> None:
        """InputError unless every slot is free, one running text's, or the tree's, and all counts
        agree."""
        nodes = list(self.tree.nodes())
        held = [s for node in nodes for s in node.slots]
        for text in texts:
            held += text.spare + text.slots[text.shared : text.computed].tolist()
        self.pool.check(held)
        self.log.check(row for text in texts for row in text.replay)
        if self.states is not None:
            self.states.check((text.state for text in texts), nodes)
        found = sum(len(n.tokens) for n in nodes), sum(len(n.tokens) for n in nodes if n.users)
        if found != (self.tree.size, self.tree.held_count):
            raise InputError(
                f"the tree has {found[0]} tokens, {found[1]} held; it counts {self.tree.size}, "
                f"{self.tree.held_count}"
            )
