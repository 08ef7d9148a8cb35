"""One chunk of attention: scores, exponentials, weighted values.

`attention.py` says which chunks there are and who does them. Key heads of a row take turns every
few keys, so that a row of the cache is read as it lies, all of it; and what lies `AHEAD` rows
further is asked for meanwhile.

Legend: hd numbers per head of keys, vd of values; a state as in `states.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, F32X8, I64, Kernel, Num, Val, Var, vec
from ggraph.backends.cpu.codegen.words import FOLDED
from ggraph.backends.cpu.kernels.blocks import ask
from ggraph.backends.cpu.kernels.cache import (
    bytes_of,
    load8,
    load_pair,
    load_wide,
    number_at,
    scale_at,
)
from ggraph.backends.cpu.kernels.states import HEAD, biased, clear, exponentials
from ggraph.backends.cpu.kernels.tiles import Q8_BLOCK
from ggraph.backends.cpu.runtime.pages import LINE

CHUNK = 128  # positions of a chunk
MAX_QUERIES = 4  # queries handled together
MOST = 32  # queries that go through a chunk together
TOGETHER = {8: 4, 16: 8}  # keys handled together, by lanes: a vector of 16 holds parts of two
VALUES = 16  # values handled together: sums are fetched and put back as often
AHEAD = 16  # rows of the cache
SUMS = {8: 12, 16: 16}  # of vectors that registers hold beside what they are made of


@dataclass(frozen=True)
class Heads:
    """Queries of one row, at most `MOST`: `each` of them from `first` on of every key head from
    `begin` to before `end`."""

    begin: Val
    end: Val
    first: Val
    each: Val


@dataclass(frozen=True)
class Job:
    """Queries of one row that go through a chunk; addresses of everything that they read.

    `keys` and `values` are tables of addresses of rows of the cache: one for each position of the
    chunk, then `AHEAD` of what is read behind them. `biases` are those of the chunk's first
    position. `state` gives the address of a query's state, by its number among all.
    """

    kind: str
    heads: Heads
    shared: Val  # queries of a key head, among which are those of the job
    q: Val  # of all queries
    keys: Val
    values: Val
    biases: Val
    scores: Val  # [MOST, CHUNK]
    state: Callable[[Val], Val]

    @property
    def first(self) -> Val:
        """The number of the first query among all; the others follow."""
        return self.heads.begin * self.shared + self.heads.first


@dataclass(frozen=True)
class Ahead:
    """Asks for the rows of the cache that a job reads `AHEAD` later: all its key heads of a row,
    then of the next, a line at a time. Hardware does not foresee where a list goes, and a processor
    takes few lines at once; but memory gives more where they come in the order in which they lie.
    """

    k: Kernel
    table: Val  # of addresses of rows
    offset: Val  # bytes from a row's begin to the job's first key head
    nbytes: Val  # of the job's key heads in a row
    entry: Var  # of the table
    last: Var
    line: Var
    end: Var  # of the row

    @classmethod
    def of(cls, k: Kernel, table: Val, heads: Heads, stride: Val) -> "Ahead":
        """Asks for key heads that lie `stride` bytes apart, in rows of a table."""
        nbytes = (heads.end - heads.begin) * stride
        return cls(k, table, heads.begin * stride, nbytes, *(k.var(0) for _ in range(4)))

    def seek(self, position: Val, rows: int) -> None:
        """From now on, ask for as many rows as are read from `position` on."""
        first = self.table + (position + AHEAD) * 8
        self.last.value = first + (rows - 1) * 8
        self._begin(first)

    def ask(self, nbytes: int) -> None:
        """Ask for as many bytes, in whole lines; behind the last row, for that one again."""
        for _ in range(-(-nbytes // LINE)):
            ask(self.k, self.line.value)
            self.line.value = self.line.value + LINE
            with self.k.when(self.line.value >= self.end.value):
                self._begin(self.k.minimum(self.entry.value + 8, self.last.value))

    def _begin(self, entry: Val) -> None:
        """Go on with a row. Where it begins amid a line, that is likely the end of another's."""
        row = self.k.load(entry, I64) + self.offset
        self.entry.value, self.end.value = entry, row + self.nbytes
        self.line.value = (row + (LINE - 1)) & -LINE


@dataclass(frozen=True)
class Group:
    """Up to `MAX_QUERIES` queries of one key head."""

    job: Job
    count: int
    head: Val  # number of the first query among all
    q: Val  # [count, hd]
    scores: Val  # [count, CHUNK]
    key: Val  # bytes from a row's begin to the head's key
    value: Val
    ahead: Ahead
    asks: Val  # whether it is the first of its key head

    def ask(self, k: Kernel, nbytes: int) -> None:
        """Ask for as much of what comes later as is read here."""
        with k.when(self.asks):
            self.ahead.ask(nbytes)


def in_groups(k: Kernel, first: Num, queries: Val, each: Callable[[Val, int], None]) -> None:
    """`each(first query, count)` over queries of one key head, at most MAX_QUERIES at once."""
    begin = k.same(first, queries)
    whole = begin + queries // MAX_QUERIES * MAX_QUERIES
    for g in k.loop(begin, whole, MAX_QUERIES):
        each(g, MAX_QUERIES)
    for count in range(1, MAX_QUERIES):
        with k.when((begin + queries - whole).eq(count)):
            each(whole, count)


def _each_group(k: Kernel, job: Job, ahead: Ahead, do: Callable[[Group], None]) -> None:
    """`do` for all queries of the job."""
    hd, kh, vh = k.words("hd kh vh")
    heads = job.heads
    for kv in k.loop(heads.begin, heads.end):

        def group(first: Val, count: int, kv: Val = kv) -> None:
            head = kv * job.shared + first
            scores = job.scores + (head - job.first) * (CHUNK * 4)
            q, asks = job.q + head * hd * 4, first.eq(heads.first)
            do(Group(job, count, head, q, scores, kh * kv, vh * kv, ahead, asks))

        in_groups(k, heads.first, heads.each, group)


def _entry(k: Kernel, table: Val, position: Val) -> Val:
    return k.load(table + position * 8, I64)


def _dots(k: Kernel, group: Group, position: Val, positions: int, first: int, count: int) -> None:
    """Scores of `positions` keys, one or a multiple of four, for `count` queries of the group.
    The sum of a key has eight lanes in any case, and thus the same bits."""
    hd, kind = k.arg("hd"), group.job.kind
    keys = [_entry(k, group.job.keys, position + p) + group.key for p in range(positions)]
    pairs = k.isa.lanes > 8 and positions > 1
    sums = [
        [k.var(0, vec(F32, 16 if pairs else 8)) for _ in range(0, positions, 1 + pairs)]
        for _ in range(count)
    ]
    rows = [group.q + hd * (g * 4) for g in range(first, first + count)]
    step = Q8_BLOCK if kind == "q8_0" else 8
    for d in k.loop(0, hd, step):  # not unrolled: the compiler would load early and spill
        if positions > 1 and not first:
            group.ask(k, positions * bytes_of(kind, step))
        at = [number_at(kind, key, d) for key in keys]
        scales = [scale_at(k, block) for block in at] if kind == "q8_0" else []
        for i in range(0, step, 8):
            queries = [k.load(q + (d + i) * 4, F32X8) for q in rows]
            if pairs:
                queries = [k.joined(q, q) for q in queries]
            for v in range(len(sums[0])):
                if pairs:
                    own = scales[2 * v : 2 * v + 2]
                    loaded = load_pair(k, kind, at[2 * v], at[2 * v + 1], i, own)
                else:
                    loaded = load8(k, kind, at[v], i, *scales[v : v + 1])
                for g, query in enumerate(queries):
                    sums[g][v].value = words.fma(k, query, loaded, sums[g][v].value)
                k.keep_order()
    for g in range(count):
        to = group.scores + (position + (first + g) * CHUNK) * 4
        found = [s.value for s in sums[g]]
        if positions == 1:
            k.store(to, k.lane(words.folded4(k, found * FOLDED, add), 0) * k.arg("scale"))
            continue
        for p in range(0, positions, FOLDED * (1 + pairs)):
            four = found[p // (1 + pairs) :][:FOLDED]
            whole = _of_pairs(k, four) if pairs else words.folded4(k, four, add)
            k.store(to + p * 4, whole * k.splat(k.arg("scale"), whole.v.type.count))


def _of_pairs(k: Kernel, x: Sequence[Val]) -> Val:
    """The sums of two or four pairs of eight lanes, as `folded4` makes them of each eight."""
    quarters = words.quartered(k, (*x, *x)[:FOLDED], add)
    each = range(len(x))
    parts = ([half + 8 * odd + i for i in each for odd in (0, 1)] for half in (0, FOLDED))
    first, second = (k.shuffle(quarters, quarters, part) for part in parts)
    return first + second


def _all_dots(k: Kernel, group: Group, position: Val, positions: int) -> None:
    """The same for all queries of the group: as many at once as registers hold sums of."""
    vectors = positions * 8 // k.isa.lanes
    at_once = group.count if group.count * vectors <= SUMS[k.isa.lanes] else 2
    for first in range(0, group.count, at_once):
        _dots(k, group, position, positions, first, min(at_once, group.count - first))


def _scores(k: Kernel, job: Job, length: Val) -> None:
    """Scores of the chunk's `length` positions, not biased yet."""
    together, done = TOGETHER[k.isa.lanes], k.const(0, I64)
    ahead = Ahead.of(k, job.keys, job.heads, k.arg("kh"))
    while together >= FOLDED:
        whole = length // together * together
        for position in k.loop(done, whole, together):
            ahead.seek(position, together)
            _each_group(k, job, ahead, partial(_all_dots, k, position=position, positions=together))
        together, done = together // 2, whole
    for position in k.loop(done, length):
        _each_group(k, job, ahead, partial(_all_dots, k, position=position, positions=1))


def _soften(k: Kernel, job: Job, length: Val) -> None:
    """Exponentials of all scores; states of the queries, with nothing summed up yet. All largest
    scores come first: what a query waits for, others have meanwhile."""
    queries = (job.heads.end - job.heads.begin) * job.heads.each
    for number in k.loop(0, queries):
        scores, state = job.scores + number * (CHUNK * 4), job.state(job.first + number)
        clear(k, state)
        k.store(state, biased(k, scores, job.biases, length))
    for number in k.loop(0, queries):
        scores, state = job.scores + number * (CHUNK * 4), job.state(job.first + number)
        k.store(state + 4, exponentials(k, scores, length, k.load(state, F32)))


def _weighted(k: Kernel, group: Group, begin: Val, end: Val) -> None:
    """Add values `begin` .. `end` - 1, weighted by the group's scores, to its states: as many
    vectors of dimensions at a time as registers hold sums of."""
    vd = k.arg("vd")
    out = [group.job.state(group.head + g) + HEAD for g in range(group.count)]
    done = k.const(0, I64)
    for shape in _shapes(group.job.kind, group.count, k.isa.lanes):
        step = shape[0] * shape[1]
        whole = vd // step * step
        for d in k.loop(done, whole, step):
            _add_values(k, group, (begin, end), [o + d * 4 for o in out], d, shape)
        done = whole


def _shapes(kind: str, queries: int, lanes: int) -> list[tuple[int, int]]:
    """How many vectors of how many lanes are summed up at a time, and those that do the rest: eight
    numbers, or in block types a block."""
    rest = (Q8_BLOCK // lanes, lanes) if kind == "q8_0" else (1, 8)
    if lanes > 8:
        return [(4, lanes), rest]
    return [rest] if kind == "q8_0" else [({1: 8, 2: 4, 3: 4}.get(queries, 2), 8), rest]


def _add_values(
    k: Kernel, group: Group, span: tuple[Val, Val], out: Sequence[Val], d: Val,
    shape: tuple[int, int],
) -> None:  # fmt: skip
    """Numbers from d on of values in `span`: so many vectors of so many lanes."""
    (begin, end), (count, lanes), kind = span, shape, group.job.kind
    places = range(0, count * lanes, lanes)
    sums = [[k.var(k.load(o + i * 4, vec(F32, lanes))) for i in places] for o in out]
    load = load_wide if lanes == k.isa.lanes else load8

    def one(position: Val) -> None:
        at = number_at(kind, _entry(k, group.job.values, position) + group.value, d)
        scores = [group.scores + (position + g * CHUNK) * 4 for g in range(group.count)]
        weights = [words.broadcast(k, s, lanes) for s in scores]
        for v, i in enumerate(places):
            value = load(k, kind, at, i)
            for own, weight in zip(sums, weights, strict=True):
                own[v].value = words.fma(k, weight, value, own[v].value)

    pairs = begin + (end - begin) // 2 * 2
    for position in k.loop(begin, pairs, 2):
        group.ask(k, 2 * bytes_of(kind, count * lanes))
        one(position)
        one(position + 1)
    for position in k.loop(pairs, end):
        one(position)
    for own, o in zip(sums, out, strict=True):
        for total, i in zip(own, places, strict=True):
            k.store(o + i * 4, total.value)


def chunk(k: Kernel, job: Job, length: Val) -> None:
    """States of a chunk of `length` positions for all queries of the job."""
    _scores(k, job, length)
    _soften(k, job, length)
    ahead = Ahead.of(k, job.values, job.heads, k.arg("vh"))
    for begin in k.loop(0, length, VALUES):
        end = k.minimum(begin + VALUES, length)
        ahead.seek(begin, VALUES)
        _each_group(k, job, ahead, partial(_weighted, k, begin=begin, end=end))
