"""Courses of rows through layers that carry a state.

`ggraph.ops.recurrent` says what the course of a text's rows is. Kernels walk it from the state that
the text has for certain, over replayed rows of the log and a row's forerunners, with one order of
operations: a node of a draft tree gets the bits that it has as text.

Legend: `slots` texts with a state each, m rows, L rows of the log, R most replayed rows.
"""

from collections.abc import Callable

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import I32, I64, Kernel, Val, Var

MAX_ROWS = 512  # of a step, whose owners a thread keeps on its stack


def entry(k: Kernel, table: Val, i: Val) -> Val:
    """A table's number i, int32."""
    return k.cast("sext", k.load(table + i * 4, I32), I64)


def each_replayed(k: Kernel, slot: Val, body: Callable[[Val], None]) -> None:
    """`body(row of the log)` for a slot's rows that became text, in order; -1 ends them."""
    replay, r, limit = k.words("replay r limit")
    at, row = k.var(0), k.var(-1)

    def goes_on() -> Val:
        row.value = -1
        with k.when(at.value < r):
            row.value = entry(k, replay, slot * r + at.value)
        return words.within(k, row.value, limit)

    with k.while_(goes_on):
        body(row.value)
        at.value = at.value + 1


def owners(k: Kernel) -> Val:
    """Address of a list of whose text each row of the step is: slots, int64."""
    found, m, slots = k.scratch(MAX_ROWS * 8), *k.words("m slots")
    for row in k.loop(0, m):
        before, own = _before(k, row), k.var(0)
        with k.if_else(before < 0) as (first, later):
            with first:
                own.value = k.minimum(-1 - before, slots - 1)
            with later:
                own.value = k.load(found + before * 8, I64)
        k.store(found + row * 8, own.value)
    return found


def _before(k: Kernel, row: Val) -> Val:
    """The row before one of this step in its course; below 0: -1 - its slot."""
    return k.minimum(entry(k, k.arg("parents"), row), row - 1)


def walk(
    k: Kernel, row: Val, most: int, base: Callable[[Val], None], each: Callable[[Val], None]
) -> None:
    """A course up to `row`: `each(row)` for the last `most` rows of this step, the last one last,
    and before them, if they are fewer, `base(slot)`, which is all where `row` is below 0."""
    path, count, at = k.scratch(most * 8), k.var(0), k.var(row)
    with k.while_(lambda: (count.value < most) & (at.value >= 0)):
        k.store(path + count.value * 8, at.value)
        at.value = _before(k, at.value)
        count.value = count.value + 1
    with k.when(at.value < 0):
        base(k.minimum(-1 - at.value, k.arg("slots") - 1))
    with k.while_(lambda: count.value > 0):
        count.value = count.value - 1
        each(k.load(path + count.value * 8, I64))


def follow(
    k: Kernel, t: Val, last: Var, most: int, base: Callable[[Val], None],
    each: Callable[[Val], None],
) -> Val:  # fmt: skip
    """Bring what is carried, of which the last `most` rows of this step can be part, to the
    forerunner of row t, which is there already in a chain. Gives whether it was not."""
    forerunner = _before(k, t)
    moved = forerunner.ne(last.value)
    with k.when(moved):
        walk(k, forerunner, most, base, each)
    last.value = t
    return moved


def each_changed(k: Kernel, body: Callable[[Val, Val], None]) -> None:
    """`body(slot, its last certain row)` for the slots that the step changes."""
    past, replay = k.words("past replay")
    for slot in k.loop(0, k.arg("slots")):
        last = end_of(k, slot)
        became = k.maximum(last, entry(k, replay, slot * k.arg("r")))
        new = entry(k, past, slot).eq(0)
        with k.when(new | (became >= 0)):
            body(slot, last)


def end_of(k: Kernel, slot: Val) -> Val:
    """The last row of the step that is text of a slot for certain; below 0: none."""
    return k.minimum(entry(k, k.arg("certain"), slot), k.arg("m") - 1)


def slot_of_only_row(k: Kernel) -> Val:
    """The slot in which row 0 is all that goes on the text; -1 where that is not so of its own."""
    slot = k.minimum(-1 - _before(k, k.const(0, I64)), k.arg("slots") - 1)
    known = entry(k, k.arg("past"), slot).ne(0)
    alone = entry(k, k.arg("replay"), slot * k.arg("r")) < 0
    return k.select(known & alone & end_of(k, slot).eq(0), slot, -1)
