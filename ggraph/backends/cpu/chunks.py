"""One chunk of attention: scores, exponentials, weighted values; and states put together.

`attention.py` says which chunks there are and who does them. A chunk's state for a query is its
largest score, the sum of exponentials and the weighted sum of values.

Legend: hd numbers per head of keys, vd of values; a state is [largest, sum, 0 .., out[vd]] in
float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from ggraph.backends.cpu import words
from ggraph.backends.cpu.blocks import SECOND, ask
from ggraph.backends.cpu.cache import ONE, load8, load_pair, load_wide, number_at
from ggraph.backends.cpu.simd import F32, F32X8, I32, I64, Kernel, Val, Var, vec
from ggraph.backends.cpu.slots import LOWEST
from ggraph.backends.cpu.tiles import Q8_BLOCK

CHUNK = 128  # positions of a chunk
HEAD = 32  # bytes before a state's sums: largest score, sum of exponentials, padding
MAX_QUERIES = 4  # queries handled together
FOUR = 4  # scores that are summed up together
TOGETHER = {8: 4, 16: 8}  # keys handled together, by lanes: a vector of 16 holds parts of two
SUMS = {8: 12, 16: 16}  # of vectors that registers hold beside what they are made of
LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Ahead:
    """Memory to ask for while something else is computed: of each slot of a part of a list the
    `width` bytes at base + stride * slot. `entry` is the address of the next slot's number."""

    entry: Var
    end: Val
    base: Val
    stride: Val
    width: Val


@dataclass(frozen=True)
class Job:
    """A group of queries of one row on one key head; addresses of everything it reads.

    `keys` and `values` are tables of addresses, one for each position of the chunk; `biases` are
    those of the chunk's first position. `aheads`: to ask for
    beside the keys and beside the values.
    """

    kind: str
    count: int
    q: Val  # [count, hd]
    keys: Val
    values: Val
    biases: Val
    scores: Val  # [MAX_QUERIES, CHUNK]
    aheads: tuple[Sequence[Ahead], Sequence[Ahead]]


def state_bytes(hd: int) -> int:
    """Bytes of one head's state."""
    return HEAD + 4 * hd


def _ask(k: Kernel, ahead: Ahead, slots: int | None = None) -> None:
    """Ask for what so many slots hold, or all that are left: hardware does not foresee where a list
    goes, and has fewer lines on their way for what is read than for what is asked for."""
    first = ahead.entry.value
    stop = ahead.end if slots is None else k.minimum(first + slots * 4, ahead.end)
    for at in k.loop(first, stop, 4):
        start = ahead.base + k.cast("sext", k.load(at, I32), I64) * ahead.stride
        for line in k.loop(start & -LINE, start + ahead.width, LINE):
            ask(k, line, SECOND)
    ahead.entry.value = k.maximum(first, stop)


def _entry(k: Kernel, table: Val, position: Val) -> Val:
    return k.load(table + position * 8, I64)


def _dots(k: Kernel, job: Job, position: Val, positions: int, first: int, count: int) -> None:
    """Scores of `positions` keys, one or a multiple of four, for `count` queries, into job.scores.
    The sum of a key has eight lanes in any case, and thus the same bits."""
    hd = k.arg("hd")
    keys = [_entry(k, job.keys, position + p) for p in range(positions)]
    pairs = k.isa.lanes > 8 and positions > 1
    sums = [
        [k.var(0, vec(F32, 16 if pairs else 8)) for _ in range(0, positions, 1 + pairs)]
        for _ in range(count)
    ]
    rows = [job.q + hd * (g * 4) for g in range(first, first + count)]
    step = Q8_BLOCK if job.kind not in ONE else 8
    for d in k.loop(0, hd, step):  # not unrolled: the compiler would load early and spill
        for i in range(0, step, 8):
            queries = [k.load(q + (d + i) * 4, F32X8) for q in rows]
            if pairs:
                queries = [k.joined(q, q) for q in queries]
            at = [number_at(job.kind, key, d) for key in keys]
            for v in range(len(sums[0])):
                if pairs:
                    loaded = load_pair(k, job.kind, at[2 * v], at[2 * v + 1], i)
                else:
                    loaded = load8(k, job.kind, at[v], i)
                for g, query in enumerate(queries):
                    sums[g][v].value = words.fma(k, query, loaded, sums[g][v].value)
                k.keep_order()
    for g in range(count):
        to = job.scores + (position + (first + g) * CHUNK) * 4
        found = [s.value for s in sums[g]]
        if positions == 1:
            k.store(to, k.lane(words.folded4(k, found * FOUR, add), 0) * k.arg("scale"))
            continue
        for p in range(0, positions, FOUR * (1 + pairs)):
            four = found[p // (1 + pairs) :][:FOUR]
            whole = _of_pairs(k, four) if pairs else words.folded4(k, four, add)
            k.store(to + p * 4, whole * k.splat(k.arg("scale"), whole.v.type.count))


def _of_pairs(k: Kernel, x: Sequence[Val]) -> Val:
    """The sums of two or four pairs of eight lanes, as `folded4` makes them of each eight."""
    quarters = words.quartered(k, (*x, *x)[:FOUR], add)
    each = range(len(x))
    parts = ([half + 8 * odd + i for i in each for odd in (0, 1)] for half in (0, FOUR))
    first, second = (k.shuffle(quarters, quarters, part) for part in parts)
    return first + second


def _all_dots(k: Kernel, job: Job, position: Val, positions: int) -> None:
    """The same for all queries of the job: as many at once as registers hold sums of."""
    vectors = positions * 8 // k.isa.lanes
    at_once = job.count if job.count * vectors <= SUMS[k.isa.lanes] else 2
    for first in range(0, job.count, at_once):
        _dots(k, job, position, positions, first, min(at_once, job.count - first))


def _scores(k: Kernel, job: Job, length: Val) -> list[Val]:
    """Biased scores of the chunk's `length` positions; returns the largest for each query."""
    together, done = TOGETHER[k.isa.lanes], k.const(0, I64)
    while together >= FOUR:
        whole = length // together * together
        for position in k.loop(done, whole, together):
            for ahead in job.aheads[0]:
                _ask(k, ahead, together)
            _all_dots(k, job, position, together)
        together, done = together // 2, whole
    for ahead in job.aheads[0]:
        _ask(k, ahead)
    for position in k.loop(done, length):
        _all_dots(k, job, position, 1)
    return biased(k, job, length)


def biased(k: Kernel, job: Job, length: Val) -> list[Val]:
    """Capped scores with what the mask adds; returns the largest for each query."""
    with k.when(k.arg("softcap") > 0.0):
        _capped(k, job, length)
    lanes = k.isa.lanes
    tops = [k.var(k.const(LOWEST, vec(F32, lanes))) for _ in range(job.count)]
    for i in k.loop(0, length, lanes):
        shown = words.tail_mask(k, length - i, lanes)
        bias = k.load(job.biases + i * 4, vec(F32, lanes))
        for g, top in enumerate(tops):
            at = job.scores + g * (CHUNK * 4) + i * 4
            value = k.select(shown, k.load(at, vec(F32, lanes)) + bias, float("-inf"))
            k.store(at, value)
            top.value = k.maximum(value, top.value)
    return [words.hmax(k, top.value) for top in tops]


def _capped(k: Kernel, job: Job, length: Val) -> None:
    """Hold the chunk's scores within +-softcap by a tanh."""
    cap = k.splat(k.arg("softcap"), 8)
    for g in range(job.count):
        for i in k.loop(0, length, 8):
            at = job.scores + g * (CHUNK * 4) + i * 4
            k.store(at, cap * words.tanh(k, k.load(at, F32X8) / cap))


def exponentials(k: Kernel, job: Job, g: int, length: Val, top: Val) -> Val:
    """Replace query g's scores by exp(score - top); returns their sum."""
    total, lanes = k.var(0.0, F32X8), k.isa.lanes
    for i in k.loop(0, length, lanes):
        at = job.scores + g * (CHUNK * 4) + i * 4
        value = words.exp_below(k, k.load(at, vec(F32, lanes)) - k.splat(top, lanes))
        k.store(at, value)
        for half in range(0, lanes, 8):
            total.value = total.value + k.shuffle(value, value, range(half, half + 8))
    return words.hsum(k, total.value)


def _weighted(k: Kernel, job: Job, length: Val, out: list[Val], width: int) -> None:
    """Sums of values weighted by job.scores, `width` vectors of dimensions at a time."""
    vd = k.arg("vd")

    def dims(d: Val, count: int, lanes: int) -> None:
        sums = [[k.var(0, vec(F32, lanes)) for _ in range(count)] for _ in out]
        load = load_wide if lanes == k.isa.lanes else load8

        def one(position: Val) -> None:
            """Add the values of one position of the chunk."""
            at = number_at(job.kind, _entry(k, job.values, position), d)
            score = job.scores + position * 4
            scores = [score + g * (CHUNK * 4) for g in range(job.count)]
            weights = [words.broadcast(k, s, lanes) for s in scores]
            for i in range(count):
                value = load(k, job.kind, at, i * lanes)
                for g, weight in enumerate(weights):
                    sums[g][i].value = words.fma(k, weight, value, sums[g][i].value)

        pairs = length // 2 * 2
        for position in k.loop(0, pairs, 2):
            for ahead in job.aheads[1]:
                _ask(k, ahead, 2)
            one(position)
            one(position + 1)
        for ahead in job.aheads[1]:
            _ask(k, ahead)
        for position in k.loop(pairs, length):
            one(position)
        for g, target in enumerate(out):
            for i in range(count):
                k.store(target + (d + i * lanes) * 4, sums[g][i].value)

    step = k.isa.lanes * width
    whole = vd // step * step
    for d in k.loop(0, whole, step):
        dims(d, width, k.isa.lanes)
    if step > 8 and job.kind in ONE:
        for d in k.loop(whole, vd, 8):
            dims(d, 1, 8)


def chunk(k: Kernel, job: Job, length: Val, states: list[Val]) -> None:
    """State of a chunk of `length` positions for each query of the job, written to `states`."""
    tops = _scores(k, job, length)
    for g, (top, state) in enumerate(zip(tops, states, strict=True)):
        k.store(state, top)
        k.store(state + 4, exponentials(k, job, g, length, top))
    if job.kind not in ONE:
        width = Q8_BLOCK // k.isa.lanes
    elif k.isa.lanes > 8:
        width = 4
    else:
        width = {1: 8, 2: 4, 3: 4}.get(job.count, 2)
    _weighted(k, job, length, [s + HEAD for s in states], width)


def merge_heads(k: Kernel, state: Val, top: Val, total: Val) -> tuple[Val, Val]:
    """The largest score and the sum of a state and of a part together; what the weighted sums of
    both are to be multiplied by."""
    old = k.load(state, F32)
    both = k.maximum(old, top)
    gaps = k.shuffle(k.splat(old - both, 8), k.splat(top - both, 8), (0, 8, 0, 0, 0, 0, 0, 0))
    factors = words.exp_below(k, gaps)
    keep, add = k.lane(factors, 0), k.lane(factors, 1)
    k.store(state, both)
    k.store(state + 4, k.load(state + 4, F32) * keep + total * add)
    return keep, add


def merge_sums(k: Kernel, state: Val, part: Val, factors: tuple[Val, Val], count: Val) -> None:
    """`count` weighted sums at `state` become those of it and of a part together."""
    keep, add = (k.splat(f, 8) for f in factors)
    for d in k.loop(0, count * 4, 32):
        scaled = k.load(part + d, F32X8) * add
        k.store(state + d, words.fma(k, k.load(state + d, F32X8), keep, scaled))


def merge(k: Kernel, state: Val, part: Val) -> None:
    """state = state and part together, each scaled to the larger of the two largest scores."""
    factors = merge_heads(k, state, k.load(part, F32), k.load(part + 4, F32))
    merge_sums(k, state + HEAD, part + HEAD, factors, k.arg("vd"))


def clear(k: Kernel, state: Val) -> None:
    """The state of nothing seen."""
    k.store(state, k.const(LOWEST, F32))
    k.store(state + 4, k.const(0.0, F32))
    for d in k.loop(0, k.arg("vd"), 8):
        k.store(state + d * 4 + HEAD, k.const(0.0, F32X8))


def finish(k: Kernel, state: Val, y: Val, head: Val) -> None:
    """y = out / sum (zeros where nothing was shown); the head's sink takes part in the sum."""
    total, kept = k.var(k.load(state + 4, F32)), k.var(1.0, F32)
    sinks = k.arg("sinks")
    with k.when(sinks.ne(0)):
        own, seen = k.load(sinks + head * 4, F32), k.load(state, F32)
        top = k.maximum(own, seen)
        both = k.shuffle(k.splat(seen - top, 8), k.splat(own - top, 8), (0, 8, 0, 0, 0, 0, 0, 0))
        parts = words.exp(k, both)
        kept.value = k.lane(parts, 0)
        total.value = total.value * kept.value + k.lane(parts, 1)
    share = k.splat(k.select(total.value > 0.0, kept.value / total.value, 0.0), 8)
    for d in k.loop(0, k.arg("vd"), 8):
        k.store(y + d * 4, k.load(state + d * 4 + HEAD, F32X8) * share)
