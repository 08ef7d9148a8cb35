"""Attention over the cache with an online soft-max, for grouped queries.

`slots.py` first lists the slots that each row's mask shows. A row walks its list, not the
cache, in chunks of `CHUNK` entries. A chunk gives, for each head, the largest score, the sum of
exponentials and the weighted sum of values; chunks are merged in order. What a row sees thus
decides its bits: neither the number of rows, the bucket or the threads, nor in which slots lies
what it sees, so that a node of a draft tree gets the bits that it has as text. `attention_*` does
whole rows, many at once (`sweeps.py`); where rows are few, `attend_chunks_*` shares out single
chunks, those of all rows one after the other while the cache has what they read, and `merge_chunks`
puts them together with the same arithmetic. What is read next is asked for meanwhile (`chunks.py`):
lists lead anywhere, and a text's keys have left the caches since its last step.

Legend: m rows, H heads on KV key heads (G = H / KV queries share a key head), hd numbers per head,
vd of a value, n slots of which the mask shows some or entries of a list, c rows of the cache; a
state is [largest, sum, 0 .., out[vd]] in float32.
"""

from collections.abc import Callable, Iterator
from functools import partial

from ggraph.backends.cpu.codegen.simd import I64, Kernel, KernelSpec, Val, kernel
from ggraph.backends.cpu.kernels.chunks import CHUNK, Heads, chunk
from ggraph.backends.cpu.kernels.jobs import (
    START,
    Place,
    jobs_of,
    length_at,
    place_at,
    queries_of,
    room_of,
    until,
)
from ggraph.backends.cpu.kernels.slots import shown_count
from ggraph.backends.cpu.kernels.states import clear, finish, merge, state_bytes
from ggraph.backends.cpu.kernels.sweeps import MAX_HEAD, whole_rows

ARGS = "q k v list y m heads kv_heads hd vd n c qs ks kh vs vh ys part sinks scale:f softcap:f"
KINDS = ("f32", "f16", "q8_0")  # of caches


def _part(k: Kernel, head: Val, row: Val, chunk: Val) -> Val:
    """Address of the state of (row, head, chunk) in the scratch."""
    part, heads, vd, n = k.words("part heads vd n")
    chunks = (n + (CHUNK - 1)) // CHUNK
    return part + ((row * heads + head) * chunks + chunk) * state_bytes(vd)


def _most_shown(k: Kernel) -> Val:
    """Entries of the longest list."""
    most = k.var(0)
    for row in k.loop(0, k.arg("m")):
        most.value = k.maximum(shown_count(k, row), most.value)
    return most.value


def _share_chunks(k: Kernel) -> Iterator[tuple[Val, Val, Val, Val]]:
    """(chunk, row, first key head, end of key heads) for this thread's part of all.

    An item, a key head of a row in a chunk, costs what the longest list has in its chunk, and
    `START`; the one belongs to the thread in whose part of the whole cost its middle lies.
    """
    m, kv_heads = k.words("m kv_heads")
    most, items = _most_shown(k), m * kv_heads
    chunks = (most + (CHUNK - 1)) // CHUNK
    whole = (most + chunks * START) * items
    marks = [whole * (k.thread + i) // k.threads for i in (0, 1)]
    for c in k.loop(0, chunks):
        cost = k.minimum(most - c * CHUNK, CHUNK) + START
        before = c * (CHUNK + START) * items
        first, end = (until(k, mark, before, cost, items) for mark in marks)
        for row in k.loop(first // kv_heads, (end + kv_heads - 1) // kv_heads):
            begin = k.maximum(first - row * kv_heads, 0)
            yield c, row, begin, k.minimum(end - row * kv_heads, kv_heads)


def _following(k: Kernel, at: Place) -> Place:
    """What comes behind a row's chunk: the next row, else chunk."""
    last = (at.row + 1).eq(k.arg("m"))
    start = k.select(last, at.start + CHUNK, at.start)
    return place_at(k, k.select(last, k.const(0, I64), at.row + 1), start)


def _single_chunks(k: Kernel, kind: str) -> None:
    room = room_of(k)
    for c, row, begin, end in _share_chunks(k):
        at = Place(row, c * CHUNK, length_at(k, row, c * CHUNK))
        with k.when(at.length > 0):
            heads = Heads(begin, end, k.const(0, I64), queries_of(k))
            state = partial(_part, k, chunk=c, row=row)
            for job in jobs_of(k, kind, room, (at, _following(k, at)), heads, state):
                chunk(k, job, at.length)


def _merge_chunks(k: Kernel) -> None:
    y, m, heads, vd, ys = k.words("y m heads vd ys")
    state = k.scratch(state_bytes(MAX_HEAD))
    rows, parts = k.grid(m, heads)
    for row in k.loop(*rows):
        for head in k.loop(*parts):
            clear(k, state)
            for c in k.loop(0, (shown_count(k, row) + (CHUNK - 1)) // CHUNK):
                merge(k, state, _part(k, head, row, c))
            finish(k, state, y + ys * row + head * vd * 4, head)


def scratch_bytes(m: int, heads: int, vd: int, n: int) -> int:
    """Bytes of the scratch that `attend_chunks_*` and `merge_chunks` share."""
    return m * heads * -(-n // CHUNK) * state_bytes(vd)


def _each(name: str, build: Callable[[Kernel, str], None]) -> dict[str, KernelSpec]:
    """A kernel for each kind of cache."""

    def of(kind: str) -> KernelSpec:
        return kernel(ARGS, name=name + kind)(lambda k: build(k, kind))

    return {kind: of(kind) for kind in KINDS}


WHOLE = _each("attention_", whole_rows)
CHUNKS = _each("attend_chunks_", _single_chunks)
MERGE = kernel(ARGS, name="merge_chunks")(_merge_chunks)
# Who attends with whole rows, reading a prompt, will next do so with few, and should not wait again
NEXT = {WHOLE[kind].name: (CHUNKS[kind].name, MERGE.name) for kind in KINDS}
