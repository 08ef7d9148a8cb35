"""Attention of many rows: tiles of queries meet a chunk of keys and values together.

A tile is all queries of one key head in some rows that begin alike, as those of a text do. Where
its rows see the same slots, as far as each sees, a chunk's keys are turned for all of them so that
lanes are keys, and its values become float32 once; memory is linear in the tile. A score is the sum
of the eight sums that `chunks.py` has in lanes, in its order, so that the bits are the same. Rows
that see other slots, and few ones, are done one by one.

Legend: as in `attention.py`; t queries of a tile, W lanes of a vector.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, F32X8, I32X8, I64, Kernel, Val, Var, vec
from ggraph.backends.cpu.kernels.blocks import ask
from ggraph.backends.cpu.kernels.cache import bytes_of, load8, load_pair, load_wide, number_at
from ggraph.backends.cpu.kernels.chunks import CHUNK, MOST, Heads, chunk
from ggraph.backends.cpu.kernels.jobs import (
    Place,
    Room,
    begins_alike,
    head_of,
    jobs_of,
    lanes_or,
    length_at,
    place_at,
    queries_of,
    room_of,
)
from ggraph.backends.cpu.kernels.slots import SPARE, address_table, shown_count, slot_at
from ggraph.backends.cpu.kernels.states import (
    HEAD,
    biased,
    clear,
    exponentials,
    finish,
    merge,
    merge_heads,
    merge_sums,
    state_bytes,
)
from ggraph.backends.cpu.runtime.pages import LINE
from ggraph.backends.cpu.runtime.taking import Taking

MAX_HEAD = 512  # numbers of a value's head
MAX_KEY = 640  # of a query's and a key's: MPNet's 64 and one for each of 512 positions
QUERIES = 96  # of a tile: 48, 96, 192 gave 42, 44 and 46 GMAC/s, and take as much more memory
SEVERAL = 12  # queries from which on sharing keys costs less than doing rows alone
AT_ONCE = {
    8: 3,
    16: 4,
}  # queries whose sums registers hold, by lanes; they divide QUERIES
WIDTH = 4  # sums of a query at once, and vectors of a value's numbers
SCORED = {8: 3, 16: 6}  # queries whose scores are made at once, by lanes; they divide QUERIES
VECTORS = 2  # of keys at once: fewer loads than multiply-adds
PAIR = 2  # sums of a query and a vector of keys at once: four, of half the queries, load more
STATE = state_bytes(MAX_HEAD)


@dataclass(frozen=True)
class Tile:
    """Queries of some key heads in `rows` rows from `row` on, and where a thread keeps what belongs
    to it. Rows that are done one by one have several key heads, others one."""

    heads: Heads
    row: Val
    rows: Val
    queries: Val  # addresses of the queries, the last ones repeated
    lengths: Val  # of the chunk at hand, for each query
    factors: Val  # by which its state and its part are multiplied
    scores: Val  # [QUERIES + SCORED, CHUNK]
    states: Val
    keys: Val  # [hd, keys at once], or values [CHUNK, 4 W]
    part: Val
    parts: Val  # states of a row's chunk

    @property
    def of_row(self) -> Val:
        """Queries of a row."""
        return (self.heads.end - self.heads.begin) * self.heads.each

    @property
    def count(self) -> Val:
        """Queries."""
        return self.rows * self.of_row

    def head(self, k: Kernel) -> Val:
        """The number of a row's first query among all; the others follow."""
        return head_of(k, self.heads.begin, self.heads.first)


def whole_rows(k: Kernel, kind: str) -> None:
    """Attention of rows, tile by tile; a thread takes the key heads of a tile that come next."""
    m, kv_heads = k.words("m kv_heads")
    queries, lanes = queries_of(k), k.isa.lanes
    room, spare = room_of(k), QUERIES + SCORED[lanes]
    addresses, lengths, factors = (k.scratch(spare * 8) for _ in range(3))
    scores = k.scratch(spare * CHUNK * 4)
    states, parts = (k.scratch(QUERIES * STATE) for _ in range(2))
    keys = k.scratch(max(MAX_KEY * VECTORS, CHUNK * WIDTH) * lanes * 4)
    part = k.scratch(AT_ONCE[lanes] * WIDTH * lanes * 4)
    memory = addresses, lengths, factors, scores, states, keys, part, parts
    fitting = k.const(QUERIES, I64) // k.minimum(queries, QUERIES)
    most = k.maximum(k.minimum(m * kv_heads // (k.threads * 2), fitting), 1)
    tiles = (m + (most - 1)) // most
    most = (m + (tiles - 1)) // k.maximum(tiles, 1)  # tiles alike, which threads can share evenly
    row, pieces, count = k.var(0), Taking(k), k.var(0)
    with k.while_(lambda: row.value < m):
        own = _alike(k, row.value, most)
        for heads in _tiles(k, pieces, count, own):
            _tile(k, kind, room, Tile(heads, row.value, own, *memory))
        row.value = row.value + own
    pieces.finish(count.value)


def _tiles(k: Kernel, pieces: Taking, count: Var, rows: Val) -> Iterator[Heads]:
    """The queries of some rows, tile by tile, those that this thread takes; `count` pieces came
    before them."""
    queries, kv_heads, before = queries_of(k), k.arg("kv_heads"), count.value
    fitting = k.select(rows * queries < SEVERAL, k.const(MOST, I64) // (rows * queries), 1)
    count.value = before + (kv_heads + fitting - 1) // fitting
    for piece in pieces.before(count.value):
        begin = (piece - before) * fitting
        end = k.minimum(begin + fitting, kv_heads)
        for first in k.loop(0, queries, QUERIES):
            yield Heads(begin, end, first, k.minimum(queries - first, QUERIES))


def _alike(k: Kernel, row: Val, most: Val) -> Val:
    """How many rows from `row` on, at most so many, begin with what the one before begins with, in
    their first chunk."""
    rows = k.var(1)
    with k.while_(lambda: begins_alike(k, row + rows.value, rows.value < most)):
        rows.value = rows.value + 1
    return rows.value


def _state(k: Kernel, tile: Tile, t: Val) -> Val:
    return tile.states + t * state_bytes(k.arg("vd"))


def _tile(k: Kernel, kind: str, room: Room, tile: Tile) -> None:
    y, q, hd, vd, qs, ys = k.words("y q hd vd qs ys")
    most, seer = k.var(0), k.var(tile.row)  # who sees most
    for t in k.loop(0, tile.count + SCORED[k.isa.lanes]):
        at = k.minimum(t, tile.count - 1)
        row, head = tile.row + at // tile.of_row, tile.head(k) + at % tile.of_row
        k.store(tile.queries + t * 8, q + qs * row + head * hd * 4)
        with k.when(t < tile.count):
            clear(k, _state(k, tile, t))
        shown = shown_count(k, row)
        seer.value = k.select(shown > most.value, row, seer.value)
        most.value = k.maximum(shown, most.value)
    several = tile.rows * tile.heads.each >= SEVERAL
    for start in k.loop(0, most.value, CHUNK):
        length = k.minimum(most.value - start, CHUNK)
        place = Place(seer.value, start, length)
        with k.if_else(_agree(k, tile, place) & several) as (together, apart):
            with together:
                _together(k, kind, room, tile, place)
            with apart:
                _apart(k, kind, room, tile, start)
    for t in k.loop(0, tile.count):
        row, head = tile.row + t // tile.of_row, tile.head(k) + t % tile.of_row
        finish(k, _state(k, tile, t), y + ys * row + head * vd * 4, head)


def _agree(k: Kernel, tile: Tile, place: Place) -> Val:
    """Whether each row's chunk begins as the longest one does, as far as it goes."""
    differ = k.var(0, I32X8)
    slots = slot_at(k, place.row, place.start)
    for r in k.loop(tile.row, tile.row + tile.rows):
        own, length = slot_at(k, r, place.start), length_at(k, r, place.start)
        for i in k.loop(0, length, 8):
            here = words.tail_mask(k, length - i)
            odd = k.load(slots + i * 4, I32X8) ^ k.load(own + i * 4, I32X8)
            differ.value = differ.value | k.select(here, odd, 0)
    return lanes_or(k, differ.value).eq(0)


def _apart(k: Kernel, kind: str, room: Room, tile: Tile, start: Val) -> None:
    """A chunk of each row alone."""
    nbytes, first = state_bytes(k.arg("vd")), tile.head(k)

    def state(head: Val) -> Val:
        return tile.parts + (head - first) * nbytes

    for r in k.loop(0, tile.rows):
        at = Place(tile.row + r, start, length_at(k, tile.row + r, start))
        with k.when(at.length > 0):
            places = at, _following(k, tile, at)
            for job in jobs_of(k, kind, room, places, tile.heads, state):
                chunk(k, job, at.length)
            for t in k.loop(0, tile.of_row):
                merge(k, _state(k, tile, r * tile.of_row + t), tile.parts + t * nbytes)


def _following(k: Kernel, tile: Tile, at: Place) -> Place:
    """What comes behind a row's chunk: another row's of the tile, the row's next one, or the rows
    behind the tile, from the start."""
    row, start = k.var(at.row + 1), k.var(at.start)
    with k.when(row.value.eq(tile.row + tile.rows)):
        row.value, start.value = tile.row, at.start + CHUNK
        with k.when(start.value >= shown_count(k, tile.row)):
            row.value, start.value = tile.row + tile.rows, 0
    return place_at(k, row.value, start.value)


def _together(k: Kernel, kind: str, room: Room, tile: Tile, place: Place) -> None:
    """A chunk of all rows: scores, exponentials, weighted values."""
    keys, values, ks, kh, vs, vh = k.words("k v ks kh vs vh")
    slots = slot_at(k, place.row, place.start)
    address_table(k, room.keys, slots, keys + kh * tile.heads.begin, ks, place.length)
    address_table(k, room.values, slots, values + vh * tile.heads.begin, vs, place.length)
    wide = k.isa.lanes * VECTORS
    for p in k.loop(place.length, (place.length + (wide - 1)) // wide * wide):
        k.store(room.keys + p * 8, k.load(room.keys, I64))  # some key, whose scores nobody reads
    _ask_ahead(k, kind, room.values, place.length)
    for block in k.loop(0, place.length, wide):
        for v in range(VECTORS):
            at = v * k.isa.lanes
            _turn(k, kind, room.keys + (block + at) * 8, tile.keys + at * 4)
        for first in k.loop(0, tile.count, SCORED[k.isa.lanes]):
            _scores(k, tile, first, block)
    _next_keys(k, kind, room, tile, place)
    _soften(k, tile, place)
    for t in k.loop(tile.count, tile.count + AT_ONCE[k.isa.lanes]):
        k.store(tile.lengths + t * 8, k.load(tile.lengths + (tile.count - 1) * 8, I64))
    width = WIDTH * k.isa.lanes
    for d in k.loop(0, k.arg("vd"), width):
        dims = k.minimum(k.arg("vd") - d, width)
        for p in k.loop(0, place.length):
            value, out = k.load(room.values + p * 8, I64), tile.keys + p * (width * 4)
            _widen(k, kind, value, d, dims, out)
        for first in k.loop(0, tile.count, AT_ONCE[k.isa.lanes]):
            _weighted(k, tile, first, d, dims)


def _ask_ahead(k: Kernel, kind: str, table: Val, count: Val) -> None:
    """Ask for one head's part of the cache rows of a table of addresses."""
    hd = k.arg("hd")
    width = bytes_of(kind, hd)
    for p in k.loop(0, count):
        row = k.load(table + p * 8, I64)
        for at in k.loop(0, width, LINE):
            ask(k, row + at)


def _next_keys(k: Kernel, kind: str, room: Room, tile: Tile, place: Place) -> None:
    """Ask for the keys of the chunk that follows in the list."""
    keys, ks, kh = k.words("k ks kh")
    begin = place.start + CHUNK
    count = k.maximum(k.minimum(shown_count(k, place.row) - begin, CHUNK), 0)
    slots = slot_at(k, place.row, begin)
    address_table(k, room.keys, slots, keys + kh * tile.heads.begin, ks, count)
    _ask_ahead(k, kind, room.keys, count)


def _widen(k: Kernel, kind: str, row: Val, d: Val, dims: Val, out: Val) -> None:
    """Numbers d .. d + dims - 1 of a row as float32."""
    step = 32 if kind == "q8_0" else k.isa.lanes
    whole = dims // step * step
    for i in k.loop(0, whole, step):
        at = number_at(kind, row, d + i)
        for j in range(0, step, k.isa.lanes):
            k.store(out + (i + j) * 4, load_wide(k, kind, at, j))
    if kind != "q8_0":
        for i in k.loop(whole, dims, 8):
            k.store(out + i * 4, load8(k, kind, number_at(kind, row, d + i), 0))


def _turn(k: Kernel, kind: str, table: Val, out: Val) -> None:
    """The keys of a table of addresses, as many as lanes, as columns of [hd, keys at once]."""
    lanes, step = k.isa.lanes, 32 if kind == "q8_0" else 8
    wide = lanes * VECTORS * 4
    rows = [k.load(table + i * 8, I64) for i in range(lanes)]
    for d in k.loop(0, k.arg("hd"), step):
        at = [number_at(kind, row, d) for row in rows]
        for i in range(0, step, 8):
            if lanes == 8:
                found = [load8(k, kind, a, i) for a in at]
            else:
                pairs = zip(at[:8], at[8:], strict=True)
                found = [load_pair(k, kind, a, b, i) for a, b in pairs]
            for j, column in enumerate(words.turned(k, found)):
                k.store(out + (d + (i + j)) * wide, column)
            k.keep_order()


def _scores(k: Kernel, tile: Tile, first: Val, block: Val) -> None:
    """Scores of a block of keys for some queries: ((0+1)+(2+3)) + ((4+5)+(6+7)) of the sums over
    every eighth number."""
    lanes, hd = k.isa.lanes, k.arg("hd")
    vectors, t = range(VECTORS), vec(F32, lanes)
    queries = range(SCORED[lanes])
    rows = [k.load(tile.queries + (first + q) * 8, I64) for q in queries]
    out = [tile.scores + (first + q) * (CHUNK * 4) + block * 4 for q in queries]
    scale = k.splat(k.arg("scale"), lanes)
    made: list[list[list[Val]]] = [[[] for _ in vectors] for _ in rows]
    for start in range(0, 8, PAIR):
        sums = [[[k.var(0, t) for _ in range(PAIR)] for _ in vectors] for _ in rows]
        for d in k.loop(0, hd, 8):
            for j in range(PAIR):
                at = tile.keys + (d + (start + j)) * (lanes * len(vectors) * 4)
                keys = [k.load(at + v * (lanes * 4), t) for v in vectors]
                for own, row in zip(sums, rows, strict=True):
                    query = words.broadcast(k, row + (d + (start + j)) * 4, lanes)
                    for total, key in zip(own, keys, strict=True):
                        total[j].value = words.fma(k, query, key, total[j].value)
                k.keep_order()
        for own, found in zip(sums, made, strict=True):
            for (even, odd), parts in zip(own, found, strict=True):
                parts.append(even.value + odd.value)
    for found, to in zip(made, out, strict=True):
        for v, (a, b, c, d) in enumerate(found):
            k.store(to + v * (lanes * 4), ((a + b) + (c + d)) * scale)


def _soften(k: Kernel, tile: Tile, place: Place) -> None:
    """Exponentials of all scores, and what becomes of the states. In three turns, since each step
    of a query waits for the one before: what one waits for, others have meanwhile."""
    for t in k.loop(0, tile.count):
        row = tile.row + t // tile.of_row
        length = length_at(k, row, place.start)
        biases = slot_at(k, row, place.start) + (k.arg("n") + SPARE) * 4
        k.store(tile.lengths + t * 8, length)
        k.store(tile.factors + t * 8, biased(k, tile.scores + t * (CHUNK * 4), biases, length))
    for t in k.loop(0, tile.count):
        scores, length = tile.scores + t * (CHUNK * 4), k.load(tile.lengths + t * 8, I64)
        total = exponentials(k, scores, length, k.load(tile.factors + t * 8, F32))
        k.store(tile.factors + t * 8 + 4, total)
    for t in k.loop(0, tile.count):
        with k.when(k.load(tile.lengths + t * 8, I64) > 0):
            top, total = (k.load(tile.factors + t * 8 + at, F32) for at in (0, 4))
            keep, add = merge_heads(k, _state(k, tile, t), top, total)
            k.store(tile.factors + t * 8, keep)
            k.store(tile.factors + t * 8 + 4, add)


def _weighted(k: Kernel, tile: Tile, first: Val, d: Val, dims: Val) -> None:
    """Weighted values of some queries added to their states: together as far as all of them see,
    then each its own rest. Weights are held, of which there are no more than
    values: eight lanes have no register to spare, and a sum that is spilled waits for itself."""
    lanes = k.isa.lanes
    together, t, width = AT_ONCE[lanes], vec(F32, lanes), WIDTH * lanes * 4
    lengths = [k.load(tile.lengths + (first + q) * 8, I64) for q in range(together)]
    common = lengths[0]
    for length in lengths[1:]:
        common = k.minimum(common, length)
    scores = tile.scores + first * (CHUNK * 4)
    sums = [[k.var(0, t) for _ in range(WIDTH)] for _ in range(together)]
    for p in k.loop(0, common):
        shares = (scores + q * (CHUNK * 4) + p * 4 for q in range(together))
        weights = [words.broadcast(k, s, lanes) for s in shares]
        for n in range(WIDTH):
            value = k.load(tile.keys + p * width + n * (lanes * 4), t)
            for own, weight in zip(sums, weights, strict=True):
                own[n].value = words.fma(k, weight, value, own[n].value)
            k.keep_order()
    for q, own in enumerate(sums):
        for v, total in enumerate(own):
            k.store(tile.part + q * width + v * (lanes * 4), total.value)
    for one in k.loop(0, k.minimum(tile.count - first, together)):
        length, part = k.load(tile.lengths + (first + one) * 8, I64), tile.part + one * width
        for i in k.loop(0, k.select(length > common, dims * 4, 0), 32):
            rest = k.var(k.load(part + i, F32X8))
            for p in k.loop(common, length):
                weight = words.broadcast(k, scores + one * (CHUNK * 4) + p * 4)
                value = k.load(tile.keys + p * width + i, F32X8)
                rest.value = words.fma(k, weight, value, rest.value)
            k.store(part + i, rest.value)
        with k.when(length > 0):
            at = tile.factors + (first + one) * 8
            factors = k.load(at, F32), k.load(at + 4, F32)
            state = _state(k, tile, first + one) + HEAD + d * 4
            merge_sums(k, state, part, factors, dims)
