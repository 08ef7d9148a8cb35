"""Vector words on top of `simd.py`: sums, exp, parts of vectors, fields of bits.

Every word has one meaning on every processor. Legend: x8 is 8 lanes of float32 or int32, x32 is 32
lanes of int8.
"""

from collections.abc import Callable, Sequence
from operator import add

from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import F32, F64, I8, I16, I32, I64, Kernel, Val, element, vec

Fold = Callable[[Val, Val], Val]
FLOAT_NAMES = {F32: "f32", F64: "f64"}  # as LLVM's functions end

FOLDED = 4  # vectors whose lanes are folded at once
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts (Cephes), first one exact
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
             4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)  # fmt: skip  # Cephes expf
EXP_LOW = -87.3  # exp is 0 below
LOWEST = -3.4028234663852886e38  # of finite float32: what is taken from -inf leaves that
EXP_INFINITE = 89.0  # from here on exp surely is


def of_floats(k: Kernel, name: str, *values: Val) -> Val:
    """LLVM's own function `name` of floats, one or a vector of each."""
    t = values[0].v.type
    count = f"v{t.count}" if isinstance(t, ir.VectorType) else ""
    return k.intrinsic(f"llvm.{name}.{count}{FLOAT_NAMES[element(t)]}", t, *values)


def fma(k: Kernel, a: Val, b: Val, c: Val) -> Val:
    """a * b + c with one rounding."""
    return of_floats(k, "fma", k.same(a, c), k.same(b, c), c)


def polynomial(k: Kernel, x: Val, terms: Sequence[float]) -> Val:
    """terms[0] * x^n + .. + terms[n], with one rounding a term."""
    total = k.const(terms[0], x.v.type)
    for term in terms[1:]:
        total = fma(k, total, x, k.const(term, x.v.type))
    return total


def floats_of(k: Kernel, codes: Val) -> Val:
    """Signed bytes as float32, in as many lanes."""
    lanes = codes.v.type.count
    return k.cast("sitofp", k.cast("sext", codes, vec(I32, lanes)), vec(F32, lanes))


def broadcast4(k: Kernel, address: Val, lanes: int = 8) -> Val:
    """Four bytes at `address`, repeated in each lane: int8 x32 for 8 lanes."""
    return k.cast("bitcast", k.splat(k.load(address, I32), lanes), vec(I8, 4 * lanes))


def broadcast2(k: Kernel, address: Val, lanes: int = 8) -> Val:
    """Two int16 at `address`, repeated in each lane: int16 x16 for 8 lanes."""
    return k.cast("bitcast", k.splat(k.load(address, I32), lanes), vec(I16, 2 * lanes))


def broadcast(k: Kernel, address: Val, lanes: int = 8) -> Val:
    """One float32 at `address` in each lane."""
    return k.splat(k.load(address, F32), lanes)


def _halved(k: Kernel, x: Val, left: int, fold: Fold) -> Val:
    """The lanes of the second half folded into those of the first, until so many are left."""
    while (lanes := x.v.type.count) > left:
        x = fold(*(k.shuffle(x, x, range(i, i + lanes // 2)) for i in (0, lanes // 2)))
    return x


def across(k: Kernel, x: Val, fold: Fold) -> Val:
    """All lanes folded into one; 8 always as ((0+4)+(2+6)) + ((1+5)+(3+7))."""
    two = _halved(k, x, 2, fold)
    return fold(k.lane(two, 0), k.lane(two, 1))


def hsum(k: Kernel, x: Val) -> Val:
    """Sum of all lanes, in that order."""
    return across(k, x, add)


def hmax(k: Kernel, x: Val) -> Val:
    """Largest of all lanes."""
    return across(k, x, k.maximum)


def neighbours(k: Kernel, a: Val, b: Val, fold: Fold) -> Val:
    """Lanes folded with those beside them: the first two pairs of a, the first two of b, then the
    next, in a vector as wide as they."""
    lanes = a.v.type.count
    even = [i + j for i in range(0, lanes, FOLDED) for j in (0, 2, lanes, lanes + 2)]
    return fold(k.shuffle(a, b, even), k.shuffle(a, b, [i + 1 for i in even]))


def quartered(k: Kernel, x: Sequence[Val], fold: Fold) -> Val:
    """Of each of four vectors every four lanes folded into one, as (0+1)+(2+3): of the first four
    lanes of all, then of the next, in a vector as wide as they."""
    return neighbours(k, neighbours(k, x[0], x[1], fold), neighbours(k, x[2], x[3], fold), fold)


def folded4(k: Kernel, x: Sequence[Val], fold: Fold) -> Val:
    """Of each of four vectors all lanes folded into one, as one x4 vector; of 8 lanes always as
    ((0+1)+(2+3)) + ((4+5)+(6+7))."""
    return _halved(k, quartered(k, x, fold), FOLDED, fold)


def fours(k: Kernel, x: Sequence[Val], fold: Fold) -> Val:
    """Of each of four vectors of 8 or 16 lanes those that are the same modulo four folded into one,
    as one x16 vector."""
    lanes = each = x[0].v.type.count
    while each > FOLDED:
        low = [i for i in range(2 * lanes) if i % each < each // 2]
        high = [i + each // 2 for i in low]
        x = [
            fold(k.shuffle(a, b, low), k.shuffle(a, b, high))
            for a, b in zip(x[::2], x[1::2], strict=True)
        ]
        each //= 2
    return x[0] if len(x) == 1 else k.shuffle(x[0], x[1], range(2 * lanes))


def turned(k: Kernel, rows: Sequence[Val]) -> list[Val]:
    """Vectors, a power of two of them, with rows and columns exchanged in each so many lanes."""
    found, lanes = list(rows), rows[0].v.type.count
    for gap in (1 << i for i in range(len(rows).bit_length() - 1)):
        for i in (i for i in range(len(rows)) if not i & gap):
            a, b = found[i], found[i + gap]
            low = [x if not x & gap else lanes + x - gap for x in range(lanes)]
            high = [x + gap if not x & gap else lanes + x for x in range(lanes)]
            found[i], found[i + gap] = k.shuffle(a, b, low), k.shuffle(a, b, high)
    return found


def size_bits(k: Kernel, x: Val) -> Val:
    """|x| of float32, the sign bit cleared, as the bits: they have the order of the numbers, and of
    what is no number the greatest."""
    return k.cast("bitcast", x, vec(I32, x.v.type.count)) & 0x7FFFFFFF


def absolute(k: Kernel, x: Val) -> Val:
    """|x| of float32."""
    return k.cast("bitcast", size_bits(k, x), x.v.type)


def rounded(k: Kernel, x: Val) -> Val:
    """Nearest int32 of float32, ties to even."""
    count = x.v.type.count
    return k.intrinsic(f"llvm.lrint.v{count}i32.v{count}f32", vec(I32, count), x)


def _exp_parts(k: Kernel, inside: Val) -> tuple[Val, Val]:
    """p and n, a whole number, both f32, with e to the x = p * 2^n, for x that is cut."""
    t = inside.v.type
    n = of_floats(k, "rint", inside * LOG2_E)
    r = fma(k, n, k.const(-LN2_HIGH, t), inside)
    r = fma(k, n, k.const(-LN2_LOW, t), r)
    return fma(k, polynomial(k, r, EXP_TERMS), r * r, r) + 1.0, n


def _power(k: Kernel, n: Val, t: ir.Type) -> Val:
    """2^n as float32, n from -126 to 127."""
    return k.cast("bitcast", (n + 127) << 23, t)


def _cut(k: Kernel, x: Val) -> Val:
    """x, but EXP_LOW of what is below; what is not a number stays so."""
    low = k.const(EXP_LOW, x.v.type)
    return k.select(low > x, low, x)


def exp_below(k: Kernel, x: Val) -> Val:
    """`exp` of an x <= 0 in fewer steps: no power of two is too large."""
    p, n = _exp_parts(k, _cut(k, x))
    y = _scaled(k, p, n) if k.isa.lanes > 8 else p * _power(k, rounded(k, n), x.v.type)
    return k.select(x <= EXP_LOW, k.const(0.0, x.v.type), y)


def exp(k: Kernel, x: Val) -> Val:
    """e to the x, float32 in any number of lanes, within 2 ulp; 0 at and below -87.3, infinite
    where float32 is, not a number where x is none."""
    high = k.const(EXP_INFINITE, x.v.type)
    p, n = _exp_parts(k, _cut(k, k.select(high < x, high, x)))
    y = _scaled(k, p, n) if k.isa.lanes > 8 else _in_halves(k, p, rounded(k, n))
    return k.select(x <= EXP_LOW, k.const(0.0, x.v.type), y)


def _in_halves(k: Kernel, p: Val, whole: Val) -> Val:
    """p times 2^whole, half of the power at a time, as 2^128 is none."""
    half = ((whole + 254) >> 1) - 127
    return p * _power(k, half, p.v.type) * _power(k, whole - half, p.v.type)


def _scaled(k: Kernel, p: Val, n: Val) -> Val:
    """p times 2^n by the processor's own instruction, which gives the same bits."""
    t = p.v.type
    mask, usual = ir.Constant(ir.IntType(t.count), -1), I32(4)  # all lanes, the usual rounding
    name = f"llvm.x86.avx512.mask.scalef.ps.{32 * t.count}"
    rounding = [usual] if t.count == 16 else []
    return k.intrinsic(name, t, p, n, p, mask, *rounding)


def sigmoid(k: Kernel, x: Val) -> Val:
    """1 / (1 + exp(-x)), float32."""
    return k.const(1.0, x.v.type) / (exp(k, -x) + 1.0)


def within(k: Kernel, i: Val, count: Val) -> Val:
    """Whether i is one of 0 .. count - 1; count is not negative."""
    return Val(k, k.b.icmp_unsigned("<", i.v, count.v))


def tail_mask(k: Kernel, left: Val, lanes: int = 8) -> Val:
    """Lanes 0 .. left - 1, as a condition."""
    return k.consts(range(lanes), I32) < k.cast("trunc", left, I32)


def load_tail(k: Kernel, address: Val, left: Val, lanes: int = 8) -> Val:
    """The first `left` float32 at `address`, zeros after; nothing beyond is touched."""
    t, mask = vec(F32, lanes), tail_mask(k, left, lanes)
    name = f"llvm.masked.load.v{lanes}f32.p0"
    return k.intrinsic(name, t, k.pointer(address), I32(1), mask, k.const(0.0, t))


def store_tail(k: Kernel, address: Val, value: Val, left: Val) -> None:
    """Write the first `left` float32."""
    lanes = value.v.type.count
    name, mask = f"llvm.masked.store.v{lanes}f32.p0", tail_mask(k, left, lanes)
    k.intrinsic(name, ir.VoidType(), value, k.pointer(address), I32(1), mask)


def load_some(k: Kernel, address: Val, left: Val | None, lanes: int = 8) -> Val:
    """As `load_tail`, but all of them where no count is given."""
    if left is None:
        return k.load(address, vec(F32, lanes))
    return load_tail(k, address, left, lanes)


def store_some(k: Kernel, address: Val, value: Val, left: Val | None) -> None:
    """As `store_tail`, but all of them where no count is given."""
    if left is None:
        k.store(address, value)
    else:
        store_tail(k, address, value, left)


SIGN = -128  # the sign bit of int8: flipping it adds 128, as an unsigned number


def low_nibbles(packed: Val) -> Val:
    """Low four bits of each byte."""
    return packed & 15


def high_nibbles(k: Kernel, packed: Val) -> Val:
    """High four bits of each byte, as 0 .. 15 (shifted as int16: x86 has no shift of bytes)."""
    lanes = packed.v.type.count // 2
    shifted = k.cast("bitcast", packed, vec(I16, lanes)) >> 4
    return k.cast("bitcast", shifted, packed.v.type) & 15


def field(k: Kernel, stored: Val, start: int, to: int, bits: int) -> Val:
    """`bits` bits of each byte from bit `start` on, moved to bit `to`. Shifted as int16, since x86
    has no shift of bytes: what is carried from one byte into the next never reaches them."""
    if bits == 8:
        return stored
    if to != start and k.isa.moves_bits:
        return _moved(k, stored, start, to, bits)
    wide = k.cast("bitcast", stored, vec(I16, stored.v.type.count // 2))
    moved = wide << (to - start) if to > start else wide >> (start - to)
    kept = stored if to == start else k.cast("bitcast", moved, stored.v.type)
    return kept & (((1 << bits) - 1) << to)


def _moved(k: Kernel, stored: Val, start: int, to: int, bits: int) -> Val:
    """The same in one instruction: each byte times an 8 x 8 matrix of bits, whose row 7 - i chooses
    what becomes bit i."""
    matrix = [0] * 8
    for i in range(bits):
        matrix[7 - (to + i)] = 1 << (start + i)
    signed = [b - 256 * (b > 127) for b in matrix]
    kind, count = stored.v.type, stored.v.type.count
    name = f"llvm.x86.vgf2p8affineqb.{8 * count}"
    return k.intrinsic(name, kind, stored, k.consts(signed * (count // 8), I8), I8(0))


def table(k: Kernel, name: str, numbers: bytes) -> Val:
    """Address of constant bytes, of which a module holds one copy under this name."""
    kind = ir.ArrayType(I8, len(numbers))
    held = k.module.globals.get(name)
    if held is None:
        held = ir.GlobalVariable(k.module, kind, name)
        held.linkage, held.global_constant = "internal", True
        held.initializer = ir.Constant(kind, bytearray(numbers))
    return Val(k, k.b.ptrtoint(held, I64))


def look_up(k: Kernel, table: Sequence[int], less: int, codes: Val) -> Val:
    """What codes of up to 4 bits stand for: bytes of a table, `less` taken off each."""
    values, count = [v - less for v in table], codes.v.type.count
    if not k.isa.is_x86 or k.isa.dot == "plain":
        found = k.const(values[0], codes.v.type)
        for code, value in enumerate(values[1:], 1):
            found = k.select(codes.eq(code), k.const(value, codes.v.type), found)
        return found
    word = "avx2.pshuf.b" if count == 32 else "avx512.pshuf.b.512"
    whole = k.consts(values * (count // len(values)), I8)
    return k.intrinsic("llvm.x86." + word, codes.v.type, whole, codes)
