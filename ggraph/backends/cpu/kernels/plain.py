"""Attention of any shape, one number at a time: what `attention.py` has no lanes for.

Legend: m query rows, heads and kv_heads, hd numbers of a key head and vw of a value head, n cache
rows; a distance `kr` is that of rows of k, `kh` of heads, `kd` of numbers, in bytes.
"""

from functools import partial
from itertools import product

from ggraph.backends.cpu.codegen import maths, words
from ggraph.backends.cpu.codegen.simd import F32, I32, I64, Kernel, Val, kernel
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES, FLOATS, number

ARGS = (
    "q k v mask length scores y m heads kv_heads hd vw n qr qh qd kr kh kd vr vh vd "
    "scale:f softcap:f"
)


def _one(k: Kernel, word: str, value: Val) -> Val:
    """A function of vectors, of one number."""
    return k.lane(maths.WORDS[word](k, k.splat(value, 8)), 0)


def _score(k: Kernel, kinds: tuple[str, str], row: Val, head: Val, at: Val) -> Val:
    """What key `at` scores for a query, mask included."""
    q, keys, mask, n, qr, qh, qd, kr, kh, kd = k.words("q k mask n qr qh qd kr kh kd")
    kv = head // (k.arg("heads") // k.arg("kv_heads"))
    total = k.var(0.0, F32)
    for d in k.loop(0, k.arg("hd")):
        a = k.load(q + qr * row + qh * head + qd * d, F32)
        b = number(k, kinds[0], keys + kr * at + kh * kv + kd * d)
        total.value = total.value + a * b
    cap = k.arg("softcap")
    found = k.var(total.value * k.arg("scale"))
    with k.when(cap > 0.0):
        found.value = _one(k, "tanh", found.value / cap) * cap
    with k.when(mask.ne(0)):
        bias = number(k, kinds[1], mask + (row * n + at) * ELEMENT_BYTES[kinds[1]])
        found.value = found.value + bias
    return found.value


def _attend(k: Kernel, kinds: tuple[str, str]) -> None:
    values, y, heads, vw, n, length = k.words("v y heads vw n length")
    vr, vh, vd, scores = k.words("vr vh vd scores")
    seen = k.var(n)
    with k.when(length.ne(0)):
        seen.value = k.minimum(n, k.cast("sext", k.load(length, I32), I64))
    for item in k.share(k.arg("m") * heads):
        row, head = item // heads, item % heads
        own, top = scores + item * n * 4, k.var(k.const(float("-inf"), F32))
        for at in k.loop(0, seen.value):
            score = _score(k, kinds, row, head, at)
            k.store(own + at * 4, score)
            top.value = k.select(score.is_nan(), score, k.maximum(top.value, score))
        base, total = k.maximum(top.value, words.LOWEST), k.var(0.0, F32)
        for at in k.loop(0, seen.value):
            weight = _one(k, "exp", k.load(own + at * 4, F32) - base)
            k.store(own + at * 4, weight)
            total.value = total.value + weight
        share = k.select(total.value.eq(0.0), k.const(0.0, F32), k.const(1.0, F32) / total.value)
        kv = head // (heads // k.arg("kv_heads"))
        for d in k.loop(0, vw):
            mixed = k.var(0.0, F32)
            for at in k.loop(0, seen.value):
                value = number(k, kinds[0], values + vr * at + vh * kv + vd * d)
                mixed.value = mixed.value + k.load(own + at * 4, F32) * value
            k.store(y + (item * vw + d) * 4, mixed.value * share)


for _kinds in product(FLOATS, ("f32", "f16")):
    kernel(ARGS, name="attend_plainly_" + "_".join(_kinds))(partial(_attend, kinds=_kinds))
