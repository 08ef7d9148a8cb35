"""What a step tells recurrent layers of its texts.

A text that runs has a slot of states of its own. Its drafted rows leave in a log what they would
put into the state; those that became text are replayed in its next step (`ggraph.ops.recurrent`).

Legend: T token rows, N texts with a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ggraph.decode.model import LOG, REPLAYED
from ggraph.tensor import Array

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
