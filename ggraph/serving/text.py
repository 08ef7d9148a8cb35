"""One text of many: what was asked for, and how far it has come."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from ggraph.decode.acceptance import Pick
from ggraph.decode.draft.tree import Draft
from ggraph.decode.given import is_still
from ggraph.decode.model import LONGEST_DRAFT
from ggraph.decode.speculation import Speculation
from ggraph.serving.prefix import Node
from ggraph.tensor import Array


class Voice(Protocol):
    """Chooses a text's tokens. Whatever exception a call raises ends this text and no other."""

    @property
    def greedy(self) -> bool:
        """Whether the token of the greatest logit is always it: who knows that need not ask."""
        ...

    def pick(self, logits: Array) -> int:
        """The next token from logits f32 [V]; asked once for each token, in order."""
        ...

    def accept(self, token: int) -> str | None:
        """The text goes on with `token`; why it ends with it, None where it does not."""
        ...

    def permitted(self, draft: Draft) -> Draft:
        """As much of a draft as may be said."""
        ...


@dataclass
class Plain:
    """The voice of a text that ends with the `turns`-th token of `ends`."""

    choose: Pick
    ends: frozenset[int] = frozenset()
    turns: int = 1
    greedy: bool = False

    def pick(self, logits: Array) -> int:
        """As `choose` does."""
        return self.choose(logits)

    def accept(self, token: int) -> str | None:
        """Count end tokens."""
        self.turns -= token in self.ends
        return None if self.turns else "end of text"

    def permitted(self, draft: Draft) -> Draft:
        """All of it."""
        return draft


@dataclass(frozen=True)
class Request:
    """A prompt to go on with for at most `limit` tokens (-1: until the context is full).

    Higher `priority` goes first. `features` keeps the taps of every row; such a text takes nothing
    from earlier ones, whose taps nobody kept, and leaves nothing. With `limit` 0 it is only read.
    Later prompts are likely to begin with the first `stem` tokens (-1: all but the last).
    """

    prompt: Sequence[int]
    voice: Voice
    limit: int = -1
    priority: int = 0
    drafts: Speculation | None = None
    features: bool = False
    stem: int = -1


@dataclass(eq=False)
class Text:
    """A request on its way. `tokens` begins with the prompt; `ended` says why it came to an end.

    The rows of the first `computed` tokens are in the cache, in `slots`; those of the first
    `shared` belong to the prefix tree, where `node` is held. `spare` slots are the text's own and
    hold nothing yet. Of a recurrent model it has slot `state` of the states, and `replay` are the
    rows of the log that are text, but not in the states yet. A state was kept behind the first
    `settled` tokens, and the next one is to be at `place`; behind `parted` of them the text is new.
    `unread` are the features f32 [n, A*G] of the latest rows, which a draft head has not read.
    """

    request: Request
    arrived: int
    limit: int
    tokens: list[int]
    slots: Array  # i32, with room for the longest that the text may become, and a draft
    node: Node
    computed: int = 0
    shared: int = 0
    spare: list[int] = field(default_factory=list)
    state: int = -1
    replay: list[int] = field(default_factory=list)
    settled: int = 0
    place: int = -1
    parted: int = 0
    features: list[Array] = field(default_factory=list)
    unread: list[Array] = field(default_factory=list)
    ended: str | None = None
    error: Exception | None = None
    read: int = 0  # rows that were computed for the first new token
    drafted: int = 0
    accepted: int = 0
    seen_version: int = -1  # of the tree, when it was last asked

    @property
    def new(self) -> int:
        """Tokens behind the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were in the cache."""
        return max(0, len(self.request.prompt) - self.read)

    @property
    def stem(self) -> int:
        """Tokens that later prompts are likely to begin with; the last one's row is always
        computed, for its logits."""
        last = len(self.request.prompt) - 1
        return last if self.request.stem < 0 else min(self.request.stem, last)

    @property
    def outstanding(self) -> int:
        """Tokens whose rows are to be computed; the last one's logits give the next token."""
        return len(self.tokens) - self.computed

    @cached_property
    def _still(self) -> list[int]:
        return [i for i, t in enumerate(self.request.prompt) if is_still(t)]

    def lag(self, at: int) -> int:
        """By how much the position by which its `at`-th row is turned is less than that."""
        return bisect_left(self._still, at)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: by priority, then by arrival."""
        return (-self.request.priority, self.arrived)


def begun(request: Request, arrived: int, limit: int, root: Node) -> Text:
    """A text of which nothing is computed yet."""
    room = len(request.prompt) + limit + LONGEST_DRAFT
    return Text(request, arrived, limit, list(request.prompt), np.full(room, -1, np.int32), root)
