"""Who is asked for a draft, how much is verified: the protocol, and fixed lengths.

`ggraph.decode.length` has the policy that chooses by what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.tree import Draft


class LengthPolicy(Protocol):
    """Chooses whom to ask for a draft in each round, and how much of it to verify."""

    def rest(self, drafters: Sequence[str], past: int) -> int:
        """For how many rounds behind `past` tokens none of these is to be asked."""
        ...

    def rested(self, steps: int, first: float, others: float) -> None:
        """So many plain steps were made without asking anybody: seconds of the first, behind a
        round of another kind, and of all others."""
        ...

    def begin(self, past: int) -> None:
        """A round in which some may be asked begins behind `past` tokens."""
        ...

    def hopes(self, drafter: str) -> bool:
        """Whether a drafter may be asked soon, so that it should read the prompt."""
        ...

    def was_read(self, drafter: str) -> None:
        """A drafter has taken in all of the text, and its next guess with it."""
        ...

    def length(self, drafter: str, most: int, held: float) -> int:
        """Tokens to ask for, 0 to `most`, where a draft worth `held` steps is there already."""
        ...

    def goes_on(self, drafter: str, chances: Sequence[float]) -> bool:
        """Whether a drafter that is sure of its guesses by `chances` is to make another."""
        ...

    def weigh(self, drafter: str, draft: Draft, seconds: float) -> tuple[Draft, float]:
        """The part of a draft that is worth verifying, its worth, given what drafting took."""
        ...

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """What a round brought, and what its step took."""
        ...

    def note_host(self, drafted: bool, seconds: float) -> None:
        """What a round, with or without a draft, took beside asking and its step."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same length, by the first drafter that proposes something."""

    count: int

    def rest(self, drafters: Sequence[str], past: int) -> int:
        """Never."""
        return 0

    def rested(self, steps: int, first: float, others: float) -> None:
        """Nothing to note."""

    def begin(self, past: int) -> None:
        """Nothing to note."""

    def hopes(self, drafter: str) -> bool:
        """Always."""
        return True

    def was_read(self, drafter: str) -> None:
        """Nothing to note."""

    def length(self, drafter: str, most: int, held: float) -> int:
        """`count`, as far as there is room, until there is a draft."""
        return max(0, min(self.count, most)) if held <= 0 else 0

    def goes_on(self, drafter: str, chances: Sequence[float]) -> bool:
        """Always."""
        return True

    def weigh(self, drafter: str, draft: Draft, seconds: float) -> tuple[Draft, float]:
        """All of it."""
        return draft, float(len(draft))

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Nothing to learn."""

    def note_host(self, drafted: bool, seconds: float) -> None:
        """Nothing to note."""
