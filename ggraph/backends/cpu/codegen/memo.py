"""Answers that are kept, by what was asked: a bounded number of them, from any thread."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")
MOST = 4096  # answers; a large model asks some hundred questions


@dataclass(frozen=True)
class Memo(Generic[A]):
    """Answers by question. When there are too many all are forgotten. Of threads that ask the same
    at once, each may find the answer by itself."""

    most: int = MOST
    _known: dict[Hashable, A] = field(default_factory=dict)

    def find(self, asked: Hashable, answer: Callable[[], A]) -> A:
        """What `answer` gave when this was asked before, or gives now."""
        try:
            return self._known[asked]  # at once: another thread may forget it at any time
        except KeyError:
            pass
        found = answer()
        if len(self._known) >= self.most:
            self._known.clear()
        self._known[asked] = found
        return found
