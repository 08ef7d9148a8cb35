"""One text's rows of a step: what they are, and where they are put."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.given import later
from ggraph.serving.states import Course
from ggraph.serving.steps import Row
from ggraph.serving.text import Text


@dataclass(eq=False)
class Part:
    """One text's rows of a step: a piece of it and, behind its last token, a draft."""

    text: Text
    tokens: list[int]
    slots: list[int]
    wanted: bool  # whether the piece ends with the text's last token
    draft: Draft = NOTHING
    log: list[int] = field(default_factory=list)  # the draft's rows of a recurrent model's log
    first: int = 0  # its first row of the step
    logits: int = 0  # its first row of the step's logits

    @property
    def certain(self) -> int:
        """Its rows that are text."""
        return len(self.tokens) - len(self.draft)


def course_of(part: Part) -> Course:
    """What recurrent layers are told of a part."""
    text, parents = part.text, part.draft.parents
    begun = text.computed > 0
    return Course(text.state, begun, text.replay, part.certain, parents, part.log)


def rows_of(part: Part, behind: int = 0) -> list[Row]:
    """The rows of a part: a piece of its text, then the draft below its last token; `behind` as
    many rows that are about to be computed."""
    text, at = part.text, part.text.computed + behind
    certain = part.certain
    text.slots[at : at + certain] = part.slots[:certain]
    last = certain - 1 if part.wanted else certain
    rows = list[Row]()
    for i in range(certain):
        more = later(part.tokens[i])
        seen = text.slots[: at + i + 1 + more]
        token, lag = part.tokens[i], text.lag(at + i)
        rows.append(Row(token, part.slots[i], at + i, seen, i == last, behind=more, lag=lag))
    for node, parent in enumerate(part.draft.parents, certain):
        seen = np.append(rows[last + parent + 1].seen, np.int32(part.slots[node]))
        token, lag = part.tokens[node], text.lag(len(seen) - 1)
        rows.append(Row(token, part.slots[node], len(seen) - 1, seen, True, lag=lag))
    return rows


def rows_of_all(parts: Sequence[Part], behind: int = 0) -> list[Row]:
    """The rows of a step, part by part; each learns which are its first ones."""
    rows = list[Row]()
    wanted = 0
    for part in parts:
        part.first, part.logits = len(rows), wanted
        rows += rows_of(part, behind)
        wanted += len(part.draft) + part.wanted
    return rows


def place(part: Part, nodes: Sequence[int]) -> None:
    """The certain rows of a part are its text's, and so are those of its draft's `nodes` now; the
    slots of others are spare again."""
    text, certain = part.text, part.certain
    text.computed += certain + len(nodes)
    if part.draft:
        slots = part.slots[certain:]
        text.slots[text.computed - len(nodes) : text.computed] = [slots[n] for n in nodes]
        text.spare[:0] = [s for n, s in enumerate(slots) if n not in nodes]


def rows_of_text(part: Part, nodes: Sequence[int]) -> list[int]:
    """The rows of its step that are a text's now: the certain ones, and those of these nodes."""
    certain = part.first + part.certain
    return [*range(part.first, certain), *(certain + n for n in nodes)]
