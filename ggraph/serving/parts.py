"""One text's rows of a step: what they are, and where they are put."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.decode.draft.tree import NOTHING, Draft
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


def rows_of(part: Part) -> list[Row]:
    """The rows of a part: a piece of its text, then the draft below its last token."""
    text, at = part.text, part.text.computed
    certain = part.certain
    text.slots[at : at + certain] = part.slots[:certain]
    rows = [
        Row(part.tokens[i], part.slots[i], at + i, text.slots[: at + i + 1], False)
        for i in range(certain)
    ]
    if not part.wanted:
        return rows
    seen = [rows[-1].seen]
    for node, parent in enumerate(part.draft.parents, certain):
        seen.append(np.append(seen[parent + 1], np.int32(part.slots[node])))
    last = certain - 1
    ends = zip(part.tokens[last:], part.slots[last:], seen, strict=True)
    return [*rows[:-1], *(Row(token, slot, len(s) - 1, s, True) for token, slot, s in ends)]


def place(part: Part, path: Sequence[int]) -> None:
    """Rows `path` of a part become the text's; the slots of others are spare again."""
    text, at, chosen = part.text, part.text.computed, set(path)
    text.slots[at : at + len(path)] = [part.slots[r] for r in path]
    text.spare[:0] = [s for r, s in enumerate(part.slots) if r not in chosen]
    text.computed += len(path)
