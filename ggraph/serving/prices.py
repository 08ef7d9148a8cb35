"""What one text's rows cost in a step that others share.

Legend: R(k) what a step of k rows costs beyond one row, in plain steps, as measured.

A step of B texts brings B tokens, so that a token costs (1 + R(B)) / B; a further row costs what it
adds to the step. The policy of a text compares the two, and so drafts as if alone where nobody else
is there, and in a full batch only what is nearly sure.
"""

from ggraph.decode.prices import Prices
from ggraph.decode.rows import row_bucket


class SharedPrices(Prices):
    """The prices `of` a machine, as they are for a text beside `others` rows."""

    def __init__(self, of: Prices) -> None:
        super().__init__()
        self.of, self.others = of, 0

    def rows(self, count: int) -> float:
        """What `count` rows of this text cost beyond one, in what a token costs here."""
        first, last = (row_bucket(self.others + n) for n in (1, count))
        return (self.of.rows(last) - self.of.rows(first)) / self._token()

    def guess(self, drafter: str, number: int) -> float:
        """What a guess costs, in what a token costs here."""
        return self.of.guess(drafter, number) / self._token()

    def note_step(self, rows: int, seconds: float) -> None:
        """Nothing: the batch notes its steps once."""

    def note_guesses(self, drafter: str, count: int, seconds: float) -> None:
        """`count` guesses took `seconds` together."""
        self.of.note_guesses(drafter, count, seconds)

    def _token(self) -> float:
        rows = self.others + 1
        return (1.0 + self.of.rows(row_bucket(rows))) / rows
