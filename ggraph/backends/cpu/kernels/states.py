"""A query's state in attention: what it has seen of the cache so far, to which more is added.

A state is its largest score, the sum of exponentials, and the values that they weigh: [largest,
sum, 0 .., out[vd]] in float32.
"""

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, F32X8, Count, Kernel, Val, vec

HEAD = 32  # bytes before a state's sums: largest score, sum of exponentials, padding
SOFTENED = {8: 32, 16: 16}  # scores at once, by lanes: vectors take turns, of long chains each


def state_bytes(vd: Count) -> Count:
    """Bytes of one head's state."""
    return vd * 4 + HEAD


def biased(k: Kernel, scores: Val, biases: Val, length: Val) -> Val:
    """Capped scores with what the mask adds; returns the largest."""
    with k.when(k.arg("softcap") > 0.0):
        _capped(k, scores, length)
    lanes = SOFTENED[k.isa.lanes]
    top = k.var(k.const(words.LOWEST, vec(F32, lanes)))
    for i in k.loop(0, length, lanes):
        shown = words.tail_mask(k, length - i, lanes)
        found = k.load(scores + i * 4, vec(F32, lanes)) + k.load(biases + i * 4, vec(F32, lanes))
        value = k.select(shown, found, float("-inf"))
        k.store(scores + i * 4, value)
        top.value = k.maximum(value, top.value)
    return words.hmax(k, top.value)


def _capped(k: Kernel, scores: Val, length: Val) -> None:
    """Hold the chunk's scores within +-softcap by a tanh."""
    cap = k.splat(k.arg("softcap"), 8)
    for i in k.loop(0, length, 8):
        at = scores + i * 4
        k.store(at, cap * _tanh(k, k.load(at, F32X8) / cap))


def _tanh(k: Kernel, x: Val) -> Val:
    """Within 2e-7; `maths.tanh` has more digits near 0, which scores do not need."""
    return words.sigmoid(k, x * 2.0) * 2.0 - 1.0


def exponentials(k: Kernel, scores: Val, length: Val, top: Val) -> Val:
    """Replace a query's scores by exp(score - top); returns their sum."""
    total, lanes = k.var(0.0, F32X8), SOFTENED[k.isa.lanes]
    for i in k.loop(0, length, lanes):
        value = words.exp_below(k, k.load(scores + i * 4, vec(F32, lanes)) - k.splat(top, lanes))
        k.store(scores + i * 4, value)
        for half in range(0, lanes, 8):
            total.value = total.value + k.shuffle(value, value, range(half, half + 8))
    return words.hsum(k, total.value)


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
    whole = count // k.isa.lanes * k.isa.lanes
    for first, end, lanes in ((k.same(0, count), whole, k.isa.lanes), (whole, count, 8)):
        keep, add = (k.splat(f, lanes) for f in factors)
        for d in k.loop(first * 4, end * 4, lanes * 4):
            scaled = k.load(part + d, vec(F32, lanes)) * add
            k.store(state + d, words.fma(k, k.load(state + d, vec(F32, lanes)), keep, scaled))


def merge(k: Kernel, state: Val, part: Val) -> None:
    """state = state and part together, each scaled to the larger of the two largest scores."""
    factors = merge_heads(k, state, k.load(part, F32), k.load(part + 4, F32))
    merge_sums(k, state + HEAD, part + HEAD, factors, k.arg("vd"))


def clear(k: Kernel, state: Val) -> None:
    """The state of nothing seen."""
    k.store(state, k.const(words.LOWEST, F32))
    k.store(state + 4, k.const(0.0, F32))
    for d in k.loop(0, k.arg("vd"), 8):
        k.store(state + d * 4 + HEAD, k.const(0.0, F32X8))


def finish(k: Kernel, state: Val, y: Val, head: Val) -> None:
    """y = out / sum (zeros where the sum is 0); the head's sink takes part in the sum."""
    total, kept = k.var(k.load(state + 4, F32)), k.var(1.0, F32)
    sinks = k.arg("sinks")
    with k.when(sinks.ne(0)):
        own, seen = k.load(sinks + head * 4, F32), k.load(state, F32)
        top = k.maximum(own, seen)
        both = k.shuffle(k.splat(seen - top, 8), k.splat(own - top, 8), (0, 8, 0, 0, 0, 0, 0, 0))
        parts = words.exp(k, both)
        kept.value = k.lane(parts, 0)
        total.value = total.value * kept.value + k.lane(parts, 1)
    share = k.splat(k.select(total.value.eq(0.0), k.const(0.0, F32), kept.value / total.value), 8)
    for d in k.loop(0, k.arg("vd"), 8):
        k.store(y + d * 4, k.load(state + d * 4 + HEAD, F32X8) * share)
