"""Where attention is: a row, a key head, a chunk; and the jobs of its queries.

Legend: as in `attention.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph.backends.cpu.chunks import CHUNK, MAX_QUERIES, Ahead, Job
from ggraph.backends.cpu.simd import Kernel, Num, Val
from ggraph.backends.cpu.slots import LIST_HEAD, SPARE, address_table, list_of

Aheads = tuple[Sequence[Ahead], Sequence[Ahead]]  # beside keys and beside values
NOTHING: Aheads = ((), ())


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
    slots = list_of(k, at.row) + (LIST_HEAD + at.start * 4)
    biases = slots + (n + SPARE) * 4
    address_table(k, room.keys, slots, keys + kh * at.kv, ks, at.length)
    address_table(k, room.values, slots, values + vh * at.kv, vs, at.length)
    return Job(kind, count, query, room.keys, room.values, biases, room.scores, aheads)
