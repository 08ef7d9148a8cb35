"""Where attention is: a row, a chunk; and the jobs of its queries.

Legend: as in `attention.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import I32X8, I64, Kernel, Val, vec
from ggraph.backends.cpu.kernels.chunks import AHEAD, CHUNK, MOST, Heads, Job
from ggraph.backends.cpu.kernels.slots import SPARE, address_table, shown_count, slot_at

START = 16  # what a chunk costs besides its positions, in positions


@dataclass(frozen=True)
class Room:
    """A thread's working memory: scores, and the tables of addresses of a job."""

    scores: Val
    keys: Val
    values: Val


@dataclass(frozen=True)
class Place:
    """Where a job is: a row, the first entry of a chunk, its length."""

    row: Val
    start: Val
    length: Val


def length_at(k: Kernel, row: Val, start: Val) -> Val:
    """Entries of a row's list in the chunk from `start` on."""
    return k.maximum(k.minimum(shown_count(k, row) - start, CHUNK), 0)


def place_at(k: Kernel, row: Val, start: Val) -> Place:
    """The place from entry `start` on; without entries where there is no such row."""
    m = k.arg("m")
    own = k.minimum(row, m - 1)
    return Place(own, start, k.select(row < m, length_at(k, own, start), 0))


def until(k: Kernel, mark: Val, before: Val, cost: Val, count: Val) -> Val:
    """How many of `count` items of the same cost, `before` that of all in front of them, have their
    middle in front of `mark`."""
    return k.minimum(k.maximum(mark - before - cost // 2 + cost - 1, 0) // cost, count)


def queries_of(k: Kernel) -> Val:
    """Queries that share a key head."""
    return k.arg("heads") // k.arg("kv_heads")


def head_of(k: Kernel, kv: Val, first: Val) -> Val:
    """The number of a query of a key head among all."""
    return kv * queries_of(k) + first


def room_of(k: Kernel) -> Room:
    """A thread's. Tables name something everywhere, since what they name is asked for."""
    entries = CHUNK + AHEAD + 8  # a table is filled in whole eights
    room = Room(k.scratch(MOST * CHUNK * 4), *(k.scratch(entries * 8) for _ in range(2)))
    for i in k.loop(0, entries * 8, 8):
        for table, name in ((room.keys, "k"), (room.values, "v")):
            k.store(table + i, k.arg(name))
    return room


def _pieces(k: Kernel, whole: Heads) -> Iterator[Heads]:
    """The same queries, no more than `MOST` at once: whole key heads, or parts of one."""
    fitting = k.maximum(k.const(MOST, I64) // whole.each, 1)
    for i in k.loop(0, (whole.end - whole.begin + fitting - 1) // fitting):
        begin = whole.begin + i * fitting
        end = k.minimum(begin + fitting, whole.end)
        for first in k.loop(whole.first, whole.first + whole.each, MOST):
            each = k.minimum(whole.first + whole.each - first, MOST)
            yield Heads(begin, end, first, each)


def _fill(k: Kernel, room: Room, at: Place, then: Place) -> None:
    """The tables of a place: of keys, then its first values; of values, then the keys of the place
    that follows."""
    keys, values, ks, vs = k.words("k v ks vs")
    slots, next_slots = (slot_at(k, p.row, p.start) for p in (at, then))
    own, following = (k.minimum(p.length, AHEAD) for p in (at, then))
    address_table(k, room.keys, slots, keys, ks, at.length)
    address_table(k, room.keys + at.length * 8, slots, values, vs, own)
    address_table(k, room.values, slots, values, vs, at.length)
    address_table(k, room.values + at.length * 8, next_slots, keys, ks, following)


def jobs_of(
    k: Kernel, kind: str, room: Room, places: tuple[Place, Place], whole: Heads,
    state: Callable[[Val], Val],
) -> Iterator[Job]:  # fmt: skip
    """The jobs of queries at the first place; another follows."""
    q, n, qs = k.words("q n qs")
    at, shared = places[0], k.opaque(queries_of(k))
    _fill(k, room, *places)
    biases = slot_at(k, at.row, at.start) + (n + SPARE) * 4
    for heads in _pieces(k, whole):
        yield Job(
            kind, heads, shared, q + qs * at.row, room.keys, room.values, biases, room.scores, state
        )


def begins_alike(k: Kernel, row: Val, wanted: Val) -> Val:
    """Whether it is `wanted`, and there is such a row, which sees something and begins its first
    chunk as the row before, as far as both go."""
    length, i = k.var(0), k.var(0)
    with k.when(wanted), k.when(row < k.arg("m")):
        length.value = k.minimum(*(length_at(k, r, k.const(0, I64)) for r in (row - 1, row)))
    here, before = (slot_at(k, r, 0) for r in (row, row - 1))
    whole = length.value
    with k.while_(lambda: i.value < length.value):
        at = i.value * 4
        odd = k.load(here + at, I32X8) ^ k.load(before + at, I32X8)
        found = lanes_or(k, k.select(words.tail_mask(k, whole - i.value), odd, 0))
        length.value = k.select(found.eq(0), length.value, 0)
        i.value = i.value + 8
    return length.value > 0


def lanes_or(k: Kernel, x: Val) -> Val:
    """0 where all of eight integers are."""
    quads = k.cast("bitcast", x, vec(I64, 4))
    return k.lane(quads, 0) | k.lane(quads, 1) | k.lane(quads, 2) | k.lane(quads, 3)
