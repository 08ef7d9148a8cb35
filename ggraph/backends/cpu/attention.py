"""Attention over the cache with an online soft-max, for grouped queries. Floor 6.

`slots.py` first lists the slots that each row's mask shows. A row walks its list, not the
cache, in chunks of `CHUNK` entries. A chunk gives, for each head, the largest score, the sum of
exponentials and the weighted sum of values; chunks are merged in order. What a row sees thus
decides its bits: neither the number of rows, the bucket or the threads, nor in which slots lies
what it sees, so that a node of a draft tree gets the bits that it has as text. `attention_*` does
whole rows; where rows are few, `attend_chunks_*` shares out single chunks and `merge_chunks` puts
them together with the same arithmetic.

Legend: m rows, H heads on KV key heads (G = H / KV queries share a key head), hd numbers per head,
n slots of which the mask shows some; a state is [largest, sum, 0 .., out[hd]] in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from ggraph.backends.cpu import words
from ggraph.backends.cpu.cache import ONE, load8, number_at
from ggraph.backends.cpu.simd import (
    F32,
    F32X8,
    I32,
    I64,
    KERNELS,
    Kernel,
    KernelSpec,
    Val,
)  # fmt: skip
from ggraph.backends.cpu.slots import LIST_HEAD, LOWEST, SPARE, list_of, shown_count
from ggraph.backends.cpu.tiles import Q8_BLOCK

CHUNK = 128  # positions of a chunk
HEAD = 32  # bytes before a state's sums: largest score, sum of exponentials, padding
MAX_HEAD = 256  # numbers per head
MAX_QUERIES = 4  # queries handled together
AHEAD = 16  # positions between use and prefetch
TOGETHER = 4  # keys handled together
ARGS = ("q", "k", "v", "list", "y", "m", "heads", "kv_heads", "hd", "n", "qs", "ks", "kh",
        "vs", "vh", "ls", "ys", "part", "scale:f")  # fmt: skip
KINDS = (*ONE, "q8_0")


@dataclass(frozen=True)
class Job:
    """A group of queries of one row on one key head; addresses of everything it reads.

    `slots` and `biases` are those of the chunk's first position.
    """

    kind: str
    count: int
    q: Val  # [count, hd]
    keys: Val
    values: Val
    slots: Val
    biases: Val
    scores: Val  # [MAX_QUERIES, CHUNK]


def state_bytes(hd: int) -> int:
    """Bytes of one head's state."""
    return HEAD + 4 * hd


def _bytes_of(kind: str, count: int) -> int:
    """Bytes of `count` numbers, for prefetching."""
    return count * ONE.get(kind, 1)


def _prefetch(k: Kernel, at: Val, nbytes: int) -> None:
    """Ask for the lines of `nbytes`: the heads that lie between hide the pattern from hardware."""
    for line in range(0, nbytes, 64):
        where = k.pointer(at + line)
        k.intrinsic("llvm.prefetch.p0", ir.VoidType(), where, I32(0), I32(3), I32(1))


def _sums4(k: Kernel, a: Sequence[Val]) -> Val:
    """Sums of the lanes of four x8 vectors, as one x4 vector: ((0+1)+(2+3)) + ((4+5)+(6+7))."""

    def pairs(x: Val, y: Val) -> Val:
        even, odd = (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)
        return k.shuffle(x, y, even) + k.shuffle(x, y, odd)

    both = pairs(pairs(a[0], a[1]), pairs(a[2], a[3]))
    return k.shuffle(both, both, range(4)) + k.shuffle(both, both, range(4, 8))


def _slot(k: Kernel, job: Job, position: Val) -> Val:
    return k.cast("sext", k.load(job.slots + position * 4, I32), I64)


def _dots(k: Kernel, job: Job, position: Val, positions: int) -> None:
    """Scores of `positions` keys, one or `TOGETHER`, for each query, scaled, into job.scores."""
    hd, ks = k.words("hd ks")
    keys = [job.keys + ks * _slot(k, job, position + p) for p in range(positions)]
    later = [job.keys + ks * _slot(k, job, position + (p + AHEAD)) for p in range(positions)]
    sums = [[k.var(0, F32X8) for _ in keys] for _ in range(job.count)]

    def eight(d: Val, i: int) -> None:
        queries = [k.load(job.q + (hd * g + d + i) * 4, F32X8) for g in range(job.count)]
        for p, key in enumerate(keys):
            loaded = load8(k, job.kind, number_at(job.kind, key, d), i)
            for g, query in enumerate(queries):
                sums[g][p].value = words.fma(k, query, loaded, sums[g][p].value)
            k.keep_order()

    whole = hd // 32 * 32
    for d in k.loop(0, whole, 32):
        for key in later:
            _prefetch(k, number_at(job.kind, key, d), _bytes_of(job.kind, 32))
        for i in range(0, 32, 8):
            eight(d, i)
    if job.kind in ONE:
        for d in k.loop(whole, hd, 8):
            eight(d, 0)
    scale = k.splat(k.arg("scale"), TOGETHER)
    for g in range(job.count):
        at = job.scores + (position + g * CHUNK) * 4
        dots = _sums4(k, [sums[g][p % positions].value for p in range(TOGETHER)]) * scale
        k.store(at, dots if positions == TOGETHER else k.lane(dots, 0))


def _scores(k: Kernel, job: Job, length: Val) -> list[Val]:
    """Biased scores of the chunk's `length` positions; returns the largest for each query."""
    whole = length // TOGETHER * TOGETHER
    for position in k.loop(0, whole, TOGETHER):
        _dots(k, job, position, TOGETHER)
    for position in k.loop(whole, length):
        _dots(k, job, position, 1)
    tops = [k.var(k.const(LOWEST, F32X8)) for _ in range(job.count)]
    for i in k.loop(0, length, 8):
        shown = words.tail_mask(k, length - i)
        bias = k.load(job.biases + i * 4, F32X8)
        for g, top in enumerate(tops):
            at = job.scores + g * (CHUNK * 4) + i * 4
            value = k.select(shown, k.load(at, F32X8) + bias, float("-inf"))
            k.store(at, value)
            top.value = k.maximum(value, top.value)
    return [words.hmax(k, top.value) for top in tops]


def _exponentials(k: Kernel, job: Job, g: int, length: Val, top: Val) -> Val:
    """Replace query g's scores by exp(score - top); returns their sum."""
    total = k.var(0.0, F32X8)
    for i in k.loop(0, length, 8):
        at = job.scores + g * (CHUNK * 4) + i * 4
        value = words.exp(k, k.load(at, F32X8) - k.splat(top, 8))
        k.store(at, value)
        total.value = total.value + value
    return words.hsum(k, total.value)


def _weighted(k: Kernel, job: Job, length: Val, out: list[Val], width: int) -> None:
    """Sums of values weighted by job.scores, `width` vectors of 8 dimensions at a time."""
    hd, vs = k.words("hd vs")

    def dims(d: Val, count: int) -> None:
        sums = [[k.var(0, F32X8) for _ in range(count)] for _ in out]

        def one(position: Val) -> None:
            """Add the values of one position of the chunk."""
            at = number_at(job.kind, job.values + vs * _slot(k, job, position), d)
            later = number_at(job.kind, job.values + vs * _slot(k, job, position + AHEAD), d)
            _prefetch(k, later, _bytes_of(job.kind, count * 8))
            score = job.scores + position * 4
            weights = [words.broadcast(k, score + g * (CHUNK * 4)) for g in range(job.count)]
            for i in range(count):
                value = load8(k, job.kind, at, i * 8)
                for g, weight in enumerate(weights):
                    sums[g][i].value = words.fma(k, weight, value, sums[g][i].value)

        pairs = length // 2 * 2
        for position in k.loop(0, pairs, 2):
            one(position)
            one(position + 1)
        for position in k.loop(pairs, length):
            one(position)
        for g, target in enumerate(out):
            for i in range(count):
                k.store(target + (d + i * 8) * 4, sums[g][i].value)

    whole = hd // (8 * width) * (8 * width)
    for d in k.loop(0, whole, 8 * width):
        dims(d, width)
    if width > 1 and job.kind in ONE:
        for d in k.loop(whole, hd, 8):
            dims(d, 1)


def _chunk(k: Kernel, job: Job, length: Val, states: list[Val]) -> None:
    """State of a chunk of `length` positions for each query of the job, written to `states`."""
    tops = _scores(k, job, length)
    for g, (top, state) in enumerate(zip(tops, states, strict=True)):
        k.store(state, top)
        k.store(state + 4, _exponentials(k, job, g, length, top))
    width = {1: 8, 2: 4, 3: 4}.get(job.count, 2) if job.kind in ONE else Q8_BLOCK // 8
    _weighted(k, job, length, [s + HEAD for s in states], width)


def _merge(k: Kernel, state: Val, part: Val) -> None:
    """state = state and part together, each scaled to the larger of the two largest scores."""
    old, new = k.load(state, F32), k.load(part, F32)
    top = k.maximum(old, new)
    both = k.shuffle(k.splat(old - top, 8), k.splat(new - top, 8), (0, 8, 0, 0, 0, 0, 0, 0))
    factors = words.exp(k, both)
    keep, add = k.lane(factors, 0), k.lane(factors, 1)
    k.store(state, top)
    k.store(state + 4, k.load(state + 4, F32) * keep + k.load(part + 4, F32) * add)
    for d in k.loop(0, k.arg("hd"), 8):
        at = d * 4 + HEAD
        scaled = k.load(part + at, F32X8) * k.splat(add, 8)
        k.store(state + at, words.fma(k, k.load(state + at, F32X8), k.splat(keep, 8), scaled))


def _clear(k: Kernel, state: Val) -> None:
    k.store(state, k.const(LOWEST, F32))
    k.store(state + 4, k.const(0.0, F32))
    for d in k.loop(0, k.arg("hd"), 8):
        k.store(state + d * 4 + HEAD, k.const(0.0, F32X8))


def _finish(k: Kernel, state: Val, y: Val) -> None:
    """y = out / sum (zeros where nothing was shown)."""
    total = k.load(state + 4, F32)
    share = k.splat(k.select(total > 0.0, k.const(1.0, F32) / total, 0.0), 8)
    for d in k.loop(0, k.arg("hd"), 8):
        k.store(y + d * 4, k.load(state + d * 4 + HEAD, F32X8) * share)


def _groups(k: Kernel, each: Callable[[Val, int], None]) -> None:
    """`each(first query, count)` over the queries of one key head, at most MAX_QUERIES at once."""
    queries = k.arg("heads") // k.arg("kv_heads")
    whole = queries // MAX_QUERIES * MAX_QUERIES
    for g in k.loop(0, whole, MAX_QUERIES):
        each(g, MAX_QUERIES)
    for count in range(1, MAX_QUERIES):
        with k.when((queries - whole).eq(count)):
            each(whole, count)


def _job(
    k: Kernel, kind: str, at: tuple[Val, Val, Val], first: Val, count: int, scores: Val
) -> Job:
    """The job of queries first .. first + count - 1 at (row, key head, first list entry)."""
    q, keys, values, hd, n, qs, kh, vh = k.words("q k v hd n qs kh vh")
    row, kv, start = at
    query = q + qs * row + _head(k, kv, first) * hd * 4
    slots = list_of(k, row) + (LIST_HEAD + start * 4)
    biases = slots + (n + SPARE) * 4
    return Job(kind, count, query, keys + kh * kv, values + vh * kv, slots, biases, scores)


def _head(k: Kernel, kv: Val, first: Val) -> Val:
    return kv * (k.arg("heads") // k.arg("kv_heads")) + first


def _whole_rows(k: Kernel, kind: str) -> None:
    y, m, kv_heads, hd, ys = k.words("y m kv_heads hd ys")
    scores = k.scratch(MAX_QUERIES * CHUNK * 4)
    room = state_bytes(MAX_HEAD)
    states = [k.scratch(room) for _ in range(MAX_QUERIES)]
    parts = [k.scratch(room) for _ in range(MAX_QUERIES)]
    for item in k.share(m * kv_heads):
        row, kv = item // kv_heads, item % kv_heads

        def queries(first: Val, count: int, row: Val = row, kv: Val = kv) -> None:
            for state in states[:count]:
                _clear(k, state)
            shown = shown_count(k, row)
            for start in k.loop(0, shown, CHUNK):
                job = _job(k, kind, (row, kv, start), first, count, scores)
                _chunk(k, job, k.minimum(shown - start, CHUNK), parts[:count])
                for state, part in zip(states[:count], parts[:count], strict=True):
                    _merge(k, state, part)
            for g, state in enumerate(states[:count]):
                _finish(k, state, y + ys * row + (_head(k, kv, first) + g) * hd * 4)

        _groups(k, queries)


def _part(k: Kernel, row: Val, head: Val, chunk: Val) -> Val:
    """Address of the state of (row, head, chunk) in the scratch."""
    part, heads, hd, n = k.words("part heads hd n")
    chunks = (n + (CHUNK - 1)) // CHUNK
    return part + ((row * heads + head) * chunks + chunk) * (hd * 4 + HEAD)


def _single_chunks(k: Kernel, kind: str) -> None:
    m, kv_heads, n = k.words("m kv_heads n")
    scores = k.scratch(MAX_QUERIES * CHUNK * 4)
    chunks = (n + (CHUNK - 1)) // CHUNK
    for item in k.share(m * kv_heads * chunks):
        c, kv, row = item % chunks, item // chunks % kv_heads, item // chunks // kv_heads

        def queries(first: Val, count: int, row: Val = row, kv: Val = kv, c: Val = c) -> None:
            start = c * CHUNK
            job = _job(k, kind, (row, kv, start), first, count, scores)
            length = k.minimum(shown_count(k, row) - start, CHUNK)
            states = [_part(k, row, _head(k, kv, first) + g, c) for g in range(count)]
            with k.if_else(length > 0) as (some, none):
                with some:
                    _chunk(k, job, length, states)
                with none:
                    for state in states:  # nothing shown: the merge skips it
                        k.store(state, k.const(float("-inf"), F32))

        _groups(k, queries)


def _merge_chunks(k: Kernel) -> None:
    y, m, heads, hd, n, ys = k.words("y m heads hd n ys")
    state = k.scratch(state_bytes(MAX_HEAD))
    for item in k.share(m * heads):
        row, head = item // heads, item % heads
        _clear(k, state)
        for c in k.loop(0, (n + (CHUNK - 1)) // CHUNK):
            part = _part(k, row, head, c)
            with k.when(k.load(part, F32) > float("-inf")):
                _merge(k, state, part)
        _finish(k, state, y + ys * row + head * hd * 4)


def scratch_bytes(m: int, heads: int, hd: int, n: int) -> int:
    """Bytes of the scratch that `attend_chunks_*` and `merge_chunks` share."""
    return m * heads * -(-n // CHUNK) * state_bytes(hd)


def _register(name: str, build: Callable[[Kernel], None]) -> KernelSpec:
    KERNELS[name] = KernelSpec(name, ARGS, build)
    return KERNELS[name]


def _of_kind(build: Callable[[Kernel, str], None], kind: str) -> Callable[[Kernel], None]:
    return lambda k: build(k, kind)


WHOLE = {kind: _register("attention_" + kind, _of_kind(_whole_rows, kind)) for kind in KINDS}
CHUNKS = {
    kind: _register("attend_chunks_" + kind, _of_kind(_single_chunks, kind)) for kind in KINDS
}
MERGE = _register("merge_chunks", _merge_chunks)
