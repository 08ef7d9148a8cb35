"""Where attention is: a row, a key head, a chunk; and the jobs of its queries.

Legend: as in `attention.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph.backends.cpu.cache import ONE
from ggraph.backends.cpu.chunks import CHUNK, MAX_QUERIES, Ahead, Job
from ggraph.backends.cpu.simd import I32, I64, Kernel, Num, Val, Var
from ggraph.backends.cpu.slots import LIST_HEAD, SPARE, address_table, list_of, shown_count
from ggraph.backends.cpu.tiles import Q8_BLOCK, Q8_BYTES

Aheads = tuple[Sequence[Ahead], Sequence[Ahead]]  # beside keys and beside values
NOTHING: Aheads = ((), ())
START = 16  # what a chunk costs besides its positions, in positions


@dataclass(frozen=True)
class Room:
    """A thread's working memory: scores, and the tables of addresses of a job."""

    scores: Val
    keys: Val
    values: Val


@dataclass(frozen=True)
class Place:
    """Where a job is: a row, a key head, the first entry of a chunk, its length."""

    row: Val
    kv: Val
    start: Val
    length: Val


def length_at(k: Kernel, row: Val, start: Val) -> Val:
    """Entries of a row's list in the chunk from `start` on."""
    return k.maximum(k.minimum(shown_count(k, row) - start, CHUNK), 0)


def first_slot(k: Kernel, at: Place) -> Val:
    """Address of the first slot's number in the chunk."""
    return list_of(k, at.row) + (LIST_HEAD + at.start * 4)


def place_at(k: Kernel, row: Val, kv: Val, start: Val) -> Place:
    """The place from entry `start` on; without entries where there is no such row."""
    m = k.arg("m")
    own = k.minimum(row, m - 1)
    return Place(own, kv, start, k.select(row < m, length_at(k, own, start), 0))


def aheads_of(k: Kernel, kind: str, last: Var, at: Place, then: Place) -> Aheads:
    """Beside a chunk's keys its values, beside its values the keys of the place that follows, each
    where it is not what the place before, by its mark in `last`, has read: rows of a text read the
    same."""
    here = _mark(k, at)
    there = k.var(here)
    with k.when(then.length > 0):
        there.value = _mark(k, then)
    values = k.select(last.value.ne(here), at.length, 0)
    keys = k.select(there.value.ne(here), then.length, 0)
    last.value = here
    beside_keys = _lines(k, kind, "v vs vh vd", at, values)
    return (beside_keys,), (_lines(k, kind, "k ks kh hd", then, keys),)


def _mark(k: Kernel, at: Place) -> Val:
    """A number that places have in common which begin with the same key."""
    return k.cast("zext", k.load(first_slot(k, at), I32), I64) | (at.kv << 32)


def _lines(k: Kernel, kind: str, names: str, at: Place, length: Val) -> Ahead:
    """One key head's part of `length` rows of a chunk."""
    base, stride, head, numbers = k.words(names)
    width = numbers * ONE[kind] if kind in ONE else numbers // Q8_BLOCK * Q8_BYTES
    first = first_slot(k, at)
    return Ahead(k.var(first), first + length * 4, base + head * at.kv, stride, width)


def queries_of(k: Kernel) -> Val:
    """Queries that share a key head."""
    return k.arg("heads") // k.arg("kv_heads")


def head_of(k: Kernel, kv: Val, first: Val) -> Val:
    """The number of a query of a key head among all."""
    return kv * queries_of(k) + first


def room_of(k: Kernel) -> Room:
    """A thread's."""
    return Room(k.scratch(MAX_QUERIES * CHUNK * 4), *(k.scratch(CHUNK * 8) for _ in range(2)))


def in_groups(k: Kernel, first: Num, queries: Val, each: Callable[[Val, int], None]) -> None:
    """`each(first query, count)` over queries of one key head, at most MAX_QUERIES at once."""
    begin = k.same(first, queries)
    whole = begin + queries // MAX_QUERIES * MAX_QUERIES
    for g in k.loop(begin, whole, MAX_QUERIES):
        each(g, MAX_QUERIES)
    for count in range(1, MAX_QUERIES):
        with k.when((begin + queries - whole).eq(count)):
            each(whole, count)


def job_of(
    k: Kernel, kind: str, room: Room, at: Place, first: Val, count: int, aheads: Aheads
) -> Job:
    """The job of queries first .. first + count - 1 at a place; fills the room's tables."""
    q, keys, values, hd, n, qs, ks, kh, vs, vh = k.words("q k v hd n qs ks kh vs vh")
    query = q + qs * at.row + head_of(k, at.kv, first) * hd * 4
    slots = first_slot(k, at)
    biases = slots + (n + SPARE) * 4
    address_table(k, room.keys, slots, keys + kh * at.kv, ks, at.length)
    address_table(k, room.values, slots, values + vh * at.kv, vs, at.length)
    return Job(kind, count, query, room.keys, room.values, biases, room.scores, aheads)
