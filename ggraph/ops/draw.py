"""Drawing tokens from logits: the law of every sampler, with the same bits on every device.

A law is made of float64 additions, products and quotients, each rounded by itself, in one order;
its e^x is a series, since no two libraries agree in the last bit of theirs. So the host's sampler
(`ggraph.decode.sampler`), the op's reference and a GPU draw the same tokens from the same numbers.
Legend: T rows, V tokens in the vocabulary, k candidates, m those in question, by id; laws f64.
"""

import math
from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32, F64, I32
from ggraph.ops.rules import expect, flag, integer, rank, real, rule
from ggraph.ops.sort import TOP_K, argmax
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

MOST = 1024  # candidates of a row: a GPU holds them in its shared memory
NONE = -1  # the token of logits that are no law
_HEAD = 256  # candidates that top-p sorts first, of more than MOST
_PEAKS = 64  # values of which the greatest stands for all, where few of many are sought
_CHUNK = 1 << 14  # numbers that stay in the cache while powers are made of them

# e^x = 2^n e^r, |r| <= ln 2 / 2, by the terms of its series; ln 2 in two numbers, of which n times
# the first is exact. What is below e^-700 is 0, so that every number on the way is a normal one.
_LEAST = -700.0
_PER_E = 1.4426950408889634  # 1 / ln 2
_HIGH = float.fromhex("0x1.62e42feep-1")
_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_TERMS = [1.0 / math.factorial(i) for i in range(12, -1, -1)]


def powers(x: Array) -> Array:
    """e^x f64 [n] of x f64 [n], at most 0: within 3 ulp, and 0 below e^-700."""
    if x.size > _CHUNK:
        some, found = np.flatnonzero(x >= _LEAST), np.zeros(x.shape)
        for i in range(0, some.size, _CHUNK):
            found[some[i : i + _CHUNK]] = powers(x[some[i : i + _CHUNK]])
        return found
    clipped = np.maximum(x, _LEAST)
    n = np.rint(clipped * _PER_E)
    r = clipped - n * _HIGH
    r -= n * _LOW
    y = np.full(x.shape, _TERMS[0])
    for term in _TERMS[1:]:
        y *= r
        y += term
    bits = n.astype(np.int64)
    bits += 1023
    bits <<= 52
    y *= bits.view(np.float64)  # 2^n
    y[x < _LEAST] = 0.0
    return y


def weights(scores: Array, temp: float, top_p: float, min_p: float) -> Array:
    """The law [m] of candidates' scores f64 [m], by id, times its sum.

    Those stay whose better ones sum to less than `top_p`, and whose chance is at least `min_p` of
    the greatest; then `temp` > 0.
    """
    best = scores.max()
    behind = scores - best
    stays = scores >= best + (math.log(min_p) if min_p > 0 else -math.inf)
    if top_p < 1:
        stays &= _nucleus(scores, powers(behind), top_p)
    behind[~stays] = -np.inf
    with np.errstate(over="ignore"):  # a tiny temperature leaves the best alone
        return powers(behind / temp)


def _nucleus(scores: Array, law: Array, top_p: float) -> Array:
    """Mask [m] of the fewest best candidates whose share of the law is `top_p`; at least one."""
    enough = top_p * np.cumsum(law)[-1]
    mask = np.zeros(scores.shape, np.bool_)
    best = _HEAD if len(scores) > MOST else MOST
    while True:  # sorting all of a large vocabulary is dear, and the head mostly suffices
        ids = greatest(scores, best)
        order = ids[np.argsort(-scores[ids], kind="stable")]
        total = np.cumsum(law[order])
        if total[-1] >= enough or len(ids) == len(scores):
            mask[order[: int(np.searchsorted(total, enough, side="left")) + 1]] = True
            return mask
        best *= 16


def greatest(values: Array, k: int) -> Array:
    """Places i64 of the k greatest of values [n], ascending; of equal ones at the border the first
    stay. All where k is 0 or less. No NaN."""
    size = len(values)
    if k <= 0 or k >= size:
        return np.arange(size, dtype=np.int64)
    groups = size // _PEAKS
    if groups > 2 * k:  # k groups have a value as great as the border, so all sought are
        peaks = values[: groups * _PEAKS].reshape(_PEAKS, groups).max(0)
        least = np.partition(peaks, groups - k)[groups - k]
        ids = np.flatnonzero(values >= least)
        if 2 * len(ids) < size:
            return ids[greatest(values[ids], k)]
    ids = np.argpartition(values, size - k)[size - k :]
    border = values[ids].min()
    above = ids[values[ids] > border]
    equal = np.flatnonzero(values == border)[: k - len(above)]
    return np.sort(np.concatenate((above, equal)))


def first_beyond(law: Array, number: float) -> int:
    """The first place at which the summed `law` exceeds `number` of [0, 1), as a share of it all;
    never one of chance 0."""
    total = np.cumsum(law)
    at = int(np.searchsorted(total, number * total[-1], side="right"))
    # The share may round up to the sum itself; then the last possible place is meant.
    return at if at < len(law) else int(np.flatnonzero(law)[-1])


def _draw_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    logits, numbers = sources
    rank(logits, 2, 2)
    t, v = logits.shape
    most, k = min(v, MOST), integer(attrs, "k")
    expect(logits.dtype is F32, f"{logits.label}: expected f32, got {logits.dtype}")
    expect(numbers.dtype is F64, f"{numbers.label}: expected f64, got {numbers.dtype}")
    expect(numbers.shape == (t,), f"{numbers.label}: expected [{t}], got {list(numbers.shape)}")
    expect(1 <= k <= most, f"k={k}: expected 1 to {most}")
    expect(real(attrs, "temp") > 0, f"temp={attrs['temp']}: expected more than 0")
    expect(real(attrs, "top_p") >= 0, f"top_p={attrs['top_p']}: expected 0 or more")
    expect(0 <= real(attrs, "min_p") <= 1, f"min_p={attrs['min_p']}: expected 0 to 1")
    flag(attrs, "always")
    return Meta((t,), I32)


def _draw(
    logits: Array, numbers: Array, *, k: int, always: bool, temp: float, top_p: float, min_p: float
) -> Array:
    found = TOP_K.reference(logits, k=k)  # [T, k]
    drawn = found[:, 0].copy() if always else np.full(len(logits), NONE, np.int32)
    for row, (ids, number) in enumerate(zip(np.sort(found), numbers, strict=True)):
        scores = logits[row, ids].astype(np.float64)
        if np.isfinite(scores.max()):  # NaN where one of them is
            law = weights(scores, temp, top_p, min_p)
            drawn[row] = ids[first_beyond(law, number)]
    return drawn


def _drawing_cost(t: Tensor) -> Cost:
    """A comparison per logit; the rest is small."""
    return Cost(t.sources[0].size, t.nbytes + sum(s.nbytes for s in t.sources))


_STAGES = {"temp": 0.8, "top_p": 0.95, "min_p": 0.05, "always": False}
DRAW = register(
    OpSpec(
        "draw",
        infer=rule("draw", "logits numbers", _draw_rule),
        reference=_draw,
        cost=_drawing_cost,
        examples=(
            Example((Arg((5, 37)), Arg((5,), F64, "chance")), {"k": 12, **_STAGES}),
            Example((Arg((40, 300)), Arg((40,), F64, "chance")), {"k": 300, **_STAGES, "temp": 2}),
            Example(
                (Arg((9, 20), F32, "ids:4"), Arg((9,), F64, "chance")),
                {"k": 7, "temp": 1.0, "top_p": 1.0, "min_p": 0.0, "always": True},
            ),
            Example((Arg((2, 5000)), Arg((2,), F64, "chance")), {"k": 40, **_STAGES, "top_p": 0.5}),
            Example((Arg((1, 1)), Arg((1,), F64, "chance")), {"k": 1, **_STAGES}),
            Example((Arg((0, 5)), Arg((0,), F64)), {"k": 3, **_STAGES}),
        ),
        doc="draw(logits, numbers): a token of each row, by the sampler's law.",
    )
)


def draw(
    logits: Tensor,
    numbers: Tensor,
    *,
    temp: float = 0.8,
    best: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    always: bool = False,
    name: str = "",
) -> Tensor:
    """A token of each row: logits f32 [T, V], numbers f64 [T] in [0, 1) -> i32 [T].

    Of the `best` greatest logits those stay whose better ones sum to less than `top_p`, and whose
    chance is at least `min_p` of the greatest; with `temp` the token is the first, in order of ids,
    at which the summed law exceeds the number. Where the greatest logit is infinite, or one of the
    `best` no number, there is no law: -1, or `always` the best token. `temp` <= 0 takes that.
    Errors: ShapeError unless `best` is in 1 .. min(V, 1024). llama.cpp: `llama_sampler_chain`.
    """
    if temp <= 0:
        rank(logits, 2, 2)
        return argmax(logits, name=name)
    stages = {"temp": float(temp), "top_p": float(top_p), "min_p": float(min_p)}
    return apply("draw", logits, numbers, name=name, k=best, always=always, **stages)
