"""How much of prompts a step reads.

Those who go on wait for all rows of their step. Few of them would feel a long one, so that it is
kept brief; that of many is long anyway. Where nobody goes on, a step reads as much as it can. How
much was measured (docs/log/2026-11-24-one-thread-for-copies.md, `PACE` in 2026-11-25-zen-5.md).
"""

from ggraph.decode.rows import ROW_BUCKETS, row_bucket

# Rows of steps in which some want no logits; prompts of up to 256 fill them to 0.89 in the mean
MIXED_ROWS = tuple(b for b in ROW_BUCKETS if 16 <= b <= 256)
CUT = 8  # rows that a step costs beside its rows: five to eight were measured
PIECE, PIECES = 2, 96  # rows beside each text that goes on, and at most beside many
# A step beside few takes no longer than this, as far as that can be: seconds, and steps without
# prompts, which are shorter on a quick machine
PAUSE, PACE = 0.025, 3


def mixed_bucket(rows: int) -> int:
    """Rows of the step that so many are planned for, where some want no logits: one of MIXED_ROWS,
    or more beside a block that cannot be cut."""
    return row_bucket(max(rows, MIXED_ROWS[0]))


def filling(rows: int, most: int) -> int:
    """How many of so many rows a step reads where nobody goes on, at most `most`: those that fill a
    bucket, where the rest as a step of its own costs less than rows that would fill this one up."""
    if rows > most or rows <= MIXED_ROWS[0]:
        return min(rows, most)
    cuts = ((b + mixed_bucket(rows - b) + CUT, -b) for b in MIXED_ROWS if b < rows)
    cost, first = min(cuts)
    return -first if cost < mixed_bucket(rows) else rows


def beside(going: int, most: int, row_seconds: float, step_seconds: float) -> int:
    """How many rows fill a step well beside so many that go on: the step has about `most` or, if a
    row takes so many seconds and a step without prompts as many as that, fewer; more where many go
    on. Seconds are 0 where they are not known."""
    longest = min(PAUSE, PACE * step_seconds or PAUSE)
    brief = max((b for b in MIXED_ROWS if b * row_seconds <= longest), default=MIXED_ROWS[0])
    least = max(min(most, brief), going + min(going * PIECE, PIECES))
    return mixed_bucket(min(least, MIXED_ROWS[-1])) - going
