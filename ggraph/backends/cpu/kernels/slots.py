"""Lists of the cache slots that a mask shows or that are given, which attention walks.

Legend: m rows, n slots or entries, c rows of the cache; a list is [count, 0 .., slots[n + SPARE],
biases[n + SPARE]] in 4-byte words, where a bias is what the mask adds to a score.
"""

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, F32X8, I32, I32X8, I64, Kernel, Val, kernel, vec

LIST_HEAD = 32  # bytes before a list's slots: their count, padding
HIDDEN = float("-inf")  # what a mask adds where it shows nothing
SPARE = 32  # entries after a list's last that may be written, and prefetched


def list_bytes(n: int) -> int:
    """Bytes of one row's list over n slots."""
    return LIST_HEAD + 8 * (n + SPARE)


def list_of(k: Kernel, row: Val) -> Val:
    """Address of a row's list."""
    return k.arg("list") + (k.arg("n") * 8 + list_bytes(0)) * row


def slot_at(k: Kernel, row: Val, i: Val | int) -> Val:
    """Address of entry i's slot in a row's list."""
    return list_of(k, row) + (LIST_HEAD + i * 4)


def shown_count(k: Kernel, row: Val) -> Val:
    """How many slots a row's list has."""
    return k.cast("sext", k.load(list_of(k, row), I32), I64)


def address_table(k: Kernel, out: Val, slots: Val, base: Val, stride: Val, count: Val) -> None:
    """out[i] = base + stride * slots[i], i64, for count slots rounded up to whole eights.

    A stride is below 4 GiB.
    """
    step = k.cast("zext", k.splat(k.cast("trunc", stride, I32), 8), vec(I64, 8))
    for i in k.loop(0, count, 8):
        slot = k.cast("zext", k.load(slots + i * 4, I32X8), vec(I64, 8))
        k.store(out + i * 8, slot * step + k.splat(base, 8))


@kernel("mask list length m n ms")
def shown_slots(k: Kernel) -> None:
    """For each row of the mask [m, n] the slots that it shows, ascending, and their biases; of the
    first `length` slots alone where that address of an i32 is not 0. mask = 0 shows all. What is
    not a number hides nothing."""
    mask, n, ms, length = k.words("mask n ms length")
    held = k.var(n)
    with k.when(length.ne(0)):
        held.value = k.minimum(n, k.cast("sext", k.load(length, I32), I64))
    seen = held.value
    for row in k.share(k.arg("m")):
        entry = k.var(slot_at(k, row, 0))
        biases = (n + SPARE) * 4
        lanes = k.consts(range(8), I32)
        for first in k.loop(0, seen, 8):
            left, given = seen - first, k.var(0.0, F32X8)
            with k.when(mask.ne(0)):
                given.value = words.load_tail(k, mask + ms * row + first * 4, left)
            bias = k.select(words.tail_mask(k, left), given.value, float("-inf"))
            at, known = entry.value, k.select(bias.is_nan(), k.const(0.0, F32X8), bias)
            with k.if_else(-words.hmax(k, -known) > HIDDEN) as (all_shown, not_all):
                with all_shown:
                    k.store(at, k.splat(k.cast("trunc", first, I32), 8) + lanes)
                    k.store(at + biases, bias)
                    entry.value = at + 32
                with not_all, k.when(words.hmax(k, known) > HIDDEN):
                    for lane in range(8):
                        shows, at = k.lane(known, lane) > HIDDEN, entry.value
                        k.store(at, k.cast("trunc", first + lane, I32))
                        k.store(at + biases, k.lane(bias, lane))
                        entry.value = k.select(shows, at + 4, at)
        count = (entry.value - list_of(k, row) - LIST_HEAD) // 4
        k.store(list_of(k, row), k.cast("trunc", count, I32))


@kernel("given list length m n c")
def listed_slots(k: Kernel) -> None:
    """For each row of the lists [m, n] its slots up to a number below 0, in that order, without
    biases; only those below c and, where that address of an i32 is not 0, below `length`."""
    given, n, length = k.words("given n length")
    held = k.var(k.arg("c"))
    with k.when(length.ne(0)):
        held.value = k.minimum(held.value, k.cast("sext", k.load(length, I32), I64))
    seen, biases = k.cast("trunc", held.value, I32), (n + SPARE) * 4
    for row in k.share(k.arg("m")):
        entry, source = k.var(slot_at(k, row, 0)), k.var(given + n * row * 4)
        end = k.var(source.value + n * 4)
        with k.while_(lambda source=source, end=end: source.value < end.value):  # type: ignore[misc]
            slot, at = k.load(source.value, I32), entry.value
            k.store(at, slot)
            k.store(at + biases, k.const(0.0, F32))
            entry.value = k.select(slot < seen, k.select(slot < 0, at, at + 4), at)
            source.value = source.value + 4
            end.value = k.select(slot < 0, source.value, end.value)
        count = (entry.value - list_of(k, row) - LIST_HEAD) // 4
        k.store(list_of(k, row), k.cast("trunc", count, I32))
