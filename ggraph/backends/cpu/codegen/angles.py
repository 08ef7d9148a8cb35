"""Sine and cosine of vectors, whatever the size of the angle.

Coefficients and the parts of pi / 2: fdlibm. Large angles: Payne and Hanek, Radian reduction for
trigonometric functions, SIGNUM 18 (1983).
"""

import math
from collections.abc import Sequence

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F64, I32, I64, Kernel, Val, vec

HALF_PI = (1.5707963267341256, 6.077100506506192e-11)  # pi / 2 in two parts (fdlibm)
SIN_TERMS = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
COS_TERMS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def polynomial(k: Kernel, x: Val, terms: Sequence[float]) -> Val:
    """terms[0] * x^n + .. + terms[n] of float64, with two roundings a term."""
    total = k.const(terms[0], x.v.type)
    for term in terms[1:]:
        total = total * x + term
    return total


TWO_OVER_PI = (
    0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB,
    0xDEBBC561,
)  # fmt: skip  # its bits from weight 2**31 down to 2**-256
TURNED = 2.0**20  # from here on, two parts of pi / 2 do not tell an angle's place in its turn


def sin_cos(k: Kernel, x: Val) -> tuple[Val, Val]:
    """Sine and cosine of float64, |x| < TURNED, within 1e-12 (coefficients: fdlibm)."""
    return _of_quarter(k, *_near(k, x))


def sin_cos_of(k: Kernel, x: Val) -> tuple[Val, Val]:
    """Sine and cosine of float32 of any size, as float64; of what is infinite, not a number."""
    size = words.absolute(k, x)
    small = size < TURNED
    quarter, r = _near(k, k.cast("fpext", k.select(small, x, 0.0), vec(F64, x.v.type.count)))
    quarters, rests = k.var(quarter), k.var(r)
    with k.when(words.hmax(k, k.select(small, k.const(0.0, x.v.type), 1.0)) > 0.0):
        quarter, r = _far(k, size)
        back = x < 0.0
        quarters.value = k.select(small, quarters.value, k.select(back, -quarter, quarter))
        rests.value = k.select(small, rests.value, k.select(back, -r, r))
    rest = k.select(size < float("inf"), rests.value, float("nan"))
    return _of_quarter(k, quarters.value, rest)


def _near(k: Kernel, x: Val) -> tuple[Val, Val]:
    """The nearest multiple of pi / 2, as a count, and the way from there to float64 x."""
    lanes = x.v.type.count
    n = words.of_floats(k, "rint", x * (2.0 / math.pi))
    return k.cast("fptosi", n, vec(I32, lanes)), (x - n * HALF_PI[0]) - n * HALF_PI[1]


def _far(k: Kernel, x: Val) -> tuple[Val, Val]:
    """The same for float32 x >= TURNED, the count within four: x is m 2**s with a whole m below
    2**24, and of 2 / pi only the 128 bits from weight 2**(1 - s) on matter (Payne and Hanek).
    Numbers are whole, in units of 2**-62 quarters, modulo four quarters."""
    lanes = x.v.type.count
    wide, whole = vec(I64, lanes), vec(I32, lanes)
    bits = k.cast("zext", k.cast("bitcast", x, whole), wide)
    first = (bits >> 23) - 120  # of those bits in TWO_OVER_PI: s + 30
    m = (bits & 0x7FFFFF) | 0x800000
    word, shift = first >> 5, first & 31

    def bits_of(i: int) -> Val:
        """32 of the 128 bits."""
        pair = k.const(0, wide)
        for j in range(len(TWO_OVER_PI) - 4):
            two = TWO_OVER_PI[j + i] << 32 | TWO_OVER_PI[j + i + 1]
            pair = k.select(word.eq(j), k.const(two, wide), pair)
        return (pair >> (32 - shift)) & 0xFFFFFFFF

    a, b, c, d = (bits_of(i) for i in range(4))
    turned = m * (a << 32 | b) + ((m * c + ((m * d) >> 32)) >> 32)
    quarter = ((turned + (1 << 61)) >> 62) & 3
    r = k.cast("sitofp", turned - (quarter << 62), vec(F64, lanes)) * (math.pi / 2 * 2.0**-62)
    return k.cast("trunc", quarter, whole), r


def _of_quarter(k: Kernel, count: Val, r: Val) -> tuple[Val, Val]:
    """Sine and cosine of count * pi / 2 + r, |r| <= pi / 4."""
    z = r * r
    sine = r + r * z * polynomial(k, z, SIN_TERMS)
    cosine = (1.0 - z * 0.5) + z * z * polynomial(k, z, COS_TERMS)
    quarter = count & 3
    swapped = (quarter & 1).eq(1)
    s, c = k.select(swapped, cosine, sine), k.select(swapped, sine, cosine)
    negative_s, negative_c = (quarter & 2).eq(2), ((quarter + 1) & 2).eq(2)
    return k.select(negative_s, -s, s), k.select(negative_c, -c, c)
