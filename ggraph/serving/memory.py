"""Which slots of the cache belong to whom: free ones, those of texts, those of the prefix tree.

Of a recurrent model texts that run have states, too, and rows of the log. A state is that after all
rows of a text and cannot be cut, so that such texts share nothing.
"""

from collections.abc import Sequence

from ggraph.errors import InputError
from ggraph.serving.prefix import PrefixTree
from ggraph.serving.slots import Slots
from ggraph.serving.states import KEPT
from ggraph.serving.text import Text

LUMP = 16  # slots that a text takes at once, so that most of it lies side by side


class Memory:
    """The cache's slots. Rows of finished texts stay in the tree until somebody needs the slots.
    Of a recurrent model so many `texts` have states."""

    def __init__(self, slots: int, texts: int = 0) -> None:
        self.pool, self.tree = Slots(slots), PrefixTree()
        self.states = Slots(texts) if texts else None
        self.log = Slots(KEPT)
        self.evicted = 0

    @property
    def room(self) -> int:
        """Slots that are free, or hold what nobody is using."""
        return self.pool.free + self.tree.evictable

    def begin(self, text: Text) -> None:
        """The text runs from now on."""
        if self.states is not None:
            (text.state,) = self.states.take(1)

    def look_up(self, text: Text) -> None:
        """Take over what the tree has of a text beyond what is computed; its last token's row is
        always computed, for its logits. All that it has computed must be the tree's already."""
        if not self._shares(text) or text.seen_version == self.tree.version:
            return
        text.seen_version = self.tree.version
        node, slots = self.tree.match(text.tokens[:-1])
        if len(slots) <= text.computed:
            return
        self.tree.hold(node)
        self.tree.release(text.node)
        text.node, text.computed, text.shared = node, len(slots), len(slots)
        text.slots[: len(slots)] = slots
        text.unread.clear()

    def publish(self, text: Text) -> None:
        """Give what a text has computed to the tree."""
        if not self._shares(text) or text.shared == text.computed:
            return
        new = slice(text.shared, text.computed)
        node, slots, spare = self.tree.insert(text.node, text.tokens[new], text.slots[new].tolist())
        self.tree.hold(node)
        self.tree.release(text.node)
        self.pool.give(spare)
        text.slots[new] = slots
        text.node, text.shared = node, text.computed

    def forget(self, text: Text) -> None:
        """A text holds nothing any more; what it computed stays in the tree."""
        self.publish(text)
        self.pool.give(text.spare)
        self.pool.give(text.slots[text.shared : text.computed].tolist())
        self.tree.release(text.node)
        self.replay(text)
        if self.states is not None and text.state >= 0:
            self.states.give([text.state])
            text.state = -1
        text.node, text.computed, text.shared = self.tree.root, 0, 0
        text.spare, text.seen_version = [], -1
        text.unread.clear()

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
        wanted = max(missing, LUMP)
        if wanted > self.pool.free:
            freed = self.tree.evict(wanted - self.pool.free)
            self.evicted += len(freed)
            self.pool.give(freed)
        if missing > self.pool.free:
            return False
        text.spare += self.pool.take(min(wanted, self.pool.free))
        return True

    def _shares(self, text: Text) -> bool:
        return not text.request.features and self.states is None

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
            self.states.check(text.state for text in texts)
        found = sum(len(n.tokens) for n in nodes), sum(len(n.tokens) for n in nodes if n.users)
        if found != (self.tree.size, self.tree.held_count):
            raise InputError(
                f"the tree has {found[0]} tokens, {found[1]} held; it counts {self.tree.size}, "
                f"{self.tree.held_count}"
            )
