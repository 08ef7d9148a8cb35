"""Names like one that is not there, as errors ask about them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ggraph.lazy import lazy

if TYPE_CHECKING:
    import difflib
else:
    difflib = lazy("difflib")


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a sentence, "; is it 'x' or 'y'?", or nothing where none of the known is near."""
    folded = {n.casefold(): n for n in known if isinstance(n, str)}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=3)
    return f"; is it {' or '.join(repr(folded[n]) for n in close)}?" if close else ""
