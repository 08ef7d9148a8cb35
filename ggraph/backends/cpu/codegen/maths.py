"""Functions of elements on vectors of float32, by NumPy's names: what traced expressions call.

Each agrees with NumPy's to a few units in the last place, NaN and infinities included; `erf` to
1.2e-7 of 1, so that it has no digits left near 0, nor 1 + erf far below it. Sources: Cephes (log,
tanh), Numerical Recipes 6.2 (erf, a Chebyshev fit).
"""

from collections.abc import Callable, Mapping
from math import factorial
from math import log as natural

from ggraph.backends.cpu.codegen import angles, words
from ggraph.backends.cpu.codegen.simd import F32, F64, I32, I64, Kernel, Val, vec

INF = float("inf")
LEAST_NORMAL = 1.1754943508222875e-38
LOG_TERMS = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1,
             1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1,
             3.3333331174e-1)  # fmt: skip
TANH_TERMS = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
              -3.33332819422e-1)  # fmt: skip
TANH_SMALL = 0.625  # below it the polynomial, above it exponentials
EXPM1_TERMS = (1 / 362880, 1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)  # Taylor
EXPM1_SMALL = 0.5
LN2 = natural(2)
LOG2_TERMS = tuple(2 / (LN2 * n) for n in range(17, 0, -2))  # of f, f**3, .. f**17
EXP2_TERMS = tuple(LN2**n / factorial(n) for n in range(11, -1, -1))  # Taylor
EXP2_MOST = 200.0  # beyond it float32 is infinite, or 0
ERFC_TERMS = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806,
              0.09678418, 0.37409196, 1.00002368, -1.26551223)  # fmt: skip


def _bits(k: Kernel, x: Val) -> Val:
    return k.cast("bitcast", x, vec(I32, x.v.type.count))


def _float(k: Kernel, bits: Val) -> Val:
    return k.cast("bitcast", bits, vec(F32, bits.v.type.count))


def _with_sign(k: Kernel, size: Val, x: Val) -> Val:
    """`size`, which is not negative, with x's sign."""
    return _float(k, _bits(k, size) | (_bits(k, x) & -0x80000000))


def log(k: Kernel, x: Val) -> Val:
    """Natural logarithm; -inf at 0, NaN below."""
    small = x < LEAST_NORMAL
    scaled = k.select(small, x * 8388608.0, x)  # 2**23: out of the subnormal numbers
    bits = _bits(k, scaled)
    exponent = k.cast("sitofp", (bits >> 23) - 126, x.v.type)
    exponent = exponent - k.select(small, k.const(23.0, x.v.type), 0.0)
    part = _float(k, (bits & 0x007FFFFF) | 0x3F000000)  # in [0.5, 1)
    low = part < 0.70710678
    exponent = exponent - k.select(low, k.const(1.0, x.v.type), 0.0)
    m = k.select(low, part + part, part) - 1.0
    square = m * m
    y = words.polynomial(k, m, LOG_TERMS) * m * square
    y = words.fma(k, exponent, k.const(words.LN2_LOW, x.v.type), y) - square * 0.5
    y = words.fma(k, exponent, k.const(words.LN2_HIGH, x.v.type), m + y)
    y = k.select(x.eq(INF), x, y)
    y = k.select(x.eq(0.0), k.const(-INF, x.v.type), y)
    return k.select(x >= 0.0, y, k.const(float("nan"), x.v.type))


def log1p(k: Kernel, x: Val) -> Val:
    """log(1 + x), exact near 0: log(u) scaled by what rounding u = 1 + x lost."""
    u = x + 1.0
    lost = u - 1.0
    near = k.select(lost.eq(0.0), x, log(k, u) * (x / k.select(lost.eq(0.0), u, lost)))
    return k.select(x.eq(INF), x, near)


def expm1(k: Kernel, x: Val) -> Val:
    """e to the x, minus 1, exact near 0."""
    near = words.fma(k, words.polynomial(k, x, EXPM1_TERMS) * x, x, x)
    return k.select(words.absolute(k, x) < EXPM1_SMALL, near, words.exp(k, x) - 1.0)


def tanh(k: Kernel, x: Val) -> Val:
    """Hyperbolic tangent."""
    size, square = words.absolute(k, x), x * x
    near = words.fma(k, words.polynomial(k, square, TANH_TERMS) * square, x, x)
    far = 1.0 - k.const(2.0, x.v.type) / (words.exp(k, size + size) + 1.0)
    return k.select(size < TANH_SMALL, near, _with_sign(k, far, x))


def erf(k: Kernel, x: Val) -> Val:
    """The error function."""
    size = words.absolute(k, x)
    t = k.const(1.0, x.v.type) / (size * 0.5 + 1.0)
    rest = t * words.exp(k, words.polynomial(k, t, ERFC_TERMS) - size * size)
    return k.select(x.is_nan(), x, _with_sign(k, 1.0 - rest, x))


def _turned(which: int) -> Callable[[Kernel, Val], Val]:
    def emit(k: Kernel, x: Val) -> Val:
        return k.cast("fptrunc", angles.sin_cos_of(k, x)[which], x.v.type)

    return emit


def maximum(k: Kernel, a: Val, b: Val) -> Val:
    """The larger; NaN where either is."""
    return k.select(a.is_nan(), a, k.select(a > b, a, b))


def minimum(k: Kernel, a: Val, b: Val) -> Val:
    """The smaller; NaN where either is."""
    return k.select(a.is_nan(), a, k.select(a < b, a, b))


def sign(k: Kernel, x: Val) -> Val:
    """-1, 0 or 1; NaN stays."""
    one = _with_sign(k, k.const(1.0, x.v.type), x)
    return k.select(words.absolute(k, x) > 0.0, one, x)


def power(k: Kernel, a: Val, b: Val) -> Val:
    """a to the b, as C's pow: 2 to the b log2 |a|, in float64, whose rounding the exponent does not
    magnify into float32's; for a < 0 only whole b have a value, but for 0 and infinity."""
    base = words.absolute(k, a)
    size = _exp2(k, _wide(k, b) * _log2(k, base))
    one = k.const(1.0, a.v.type)
    size = k.select(b.eq(0.0), one, k.select(base.eq(1.0), one, size))
    floor = WORDS["floor"]
    whole, half = floor(k, b).eq(b), floor(k, b * 0.5) * 2.0
    odd = k.select(half.eq(b), size, -size)
    ends = k.select(base.eq(base * 0.5), size, k.const(float("nan"), a.v.type))
    below = k.select(whole, odd, ends)
    reciprocal = one / a  # tells -0 from 0
    return k.select(a < 0.0, below, k.select(reciprocal < 0.0, below, size))


def _wide(k: Kernel, x: Val) -> Val:
    return k.cast("fpext", x, vec(F64, x.v.type.count))


def _log2(k: Kernel, x: Val) -> Val:
    """The binary logarithm of float32 x >= 0 in float64, within 1e-14: m = (1 + f) / (1 - f) in
    [sqrt(1/2), sqrt(2)) and the series of log((1 + f) / (1 - f)); x, or -inf, at the ends."""
    wide, lanes = _wide(k, x), x.v.type.count  # of which none is subnormal
    whole, bits = vec(I32, lanes), k.cast("bitcast", wide, vec(I64, lanes))
    exponent = k.cast("sitofp", k.cast("trunc", bits >> 52, whole) - 1023, wide.v.type)
    m = k.cast("bitcast", (bits & 0xFFFFFFFFFFFFF) | (1023 << 52), wide.v.type)
    high = m > 2**0.5
    m = k.select(high, m * 0.5, m)
    exponent = k.select(high, exponent + 1.0, exponent)
    f = (m - 1.0) / (m + 1.0)
    square = f * f
    y = exponent + f * angles.polynomial(k, square, LOG2_TERMS)
    y = k.select(wide.eq(0.0), k.const(-INF, wide.v.type), y)
    return k.select(wide < INF, y, wide)


def _exp2(k: Kernel, x: Val) -> Val:
    """2 to the float64 x as float32, subnormal numbers among them."""
    t, lanes = x.v.type, x.v.type.count
    held = k.select(x.is_nan(), k.const(0.0, t), x)
    held = k.select(held > EXP2_MOST, k.const(EXP2_MOST, t), held)
    held = k.select(held < -EXP2_MOST, k.const(-EXP2_MOST, t), held)
    n = words.of_floats(k, "rint", held)
    total = angles.polynomial(k, held - n, EXP2_TERMS)
    bits = (k.cast("sext", k.cast("fptosi", n, vec(I32, lanes)), vec(I64, lanes)) + 1023) << 52
    y = k.cast("fptrunc", total * k.cast("bitcast", bits, t), vec(F32, lanes))
    return k.select(x.is_nan(), k.const(float("nan"), y.v.type), y)


def where(k: Kernel, condition: Val, then: Val, other: Val) -> Val:
    """`then` where the condition is true, or a number other than 0."""
    holds = condition.ne(0.0) if condition.is_float else condition
    return k.select(holds, then, other)


def _plain(name: str) -> Callable[[Kernel, Val], Val]:
    return lambda k, x: words.of_floats(k, name, x)


WORDS: Mapping[str, Callable[..., Val]] = {
    "fill": lambda k, x: x,
    "rounded": lambda k, x: x,  # to float32, in which numbers come here
    "add": lambda k, a, b: a + b,
    "subtract": lambda k, a, b: a - b,
    "multiply": lambda k, a, b: a * b,
    "divide": lambda k, a, b: a / b,
    "greater": lambda k, a, b: a > b,
    "greater_equal": lambda k, a, b: a >= b,
    "less": lambda k, a, b: a < b,
    "less_equal": lambda k, a, b: a <= b,
    "equal": lambda k, a, b: a.eq(b),
    "not_equal": lambda k, a, b: Val(k, k.b.fcmp_unordered("!=", a.v, b.v)),
    "negative": lambda k, x: -x,
    "absolute": words.absolute,
    "square": lambda k, x: x * x,
    "isnan": lambda k, x: x.is_nan(),
    "floor": _plain("floor"), "ceil": _plain("ceil"), "trunc": _plain("trunc"),
    "rint": _plain("rint"), "sqrt": _plain("sqrt"),
    "sin": _turned(0), "cos": _turned(1),
    "exp": words.exp, "log": log, "log1p": log1p, "expm1": expm1, "tanh": tanh, "erf": erf,
    "maximum": maximum, "minimum": minimum, "sign": sign, "power": power, "where": where,
}  # fmt: skip
