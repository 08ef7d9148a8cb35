"""Products of bytes, added up in integers.

`Dot` has variants by processor, whose results are equal bit by bit. Legend: x8 is 8 lanes of int32,
x16 is 16 lanes of int16.
"""

from collections.abc import Sequence

from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import I1, I8X32, I16X16, I32, Kernel, Val, vec
from ggraph.backends.cpu.kernels.tiles import GROUPS


def _dpbusd(k: Kernel, total: Val, unsigned: Val, signed: Val) -> Val:
    """total and, in each int32 lane, four products of unsigned and signed bytes."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.v.type.count}"  # bytes from LLVM 20 on
    return k.intrinsic(name, total.v.type, total, unsigned, signed)


def widened(k: Kernel, pairs: Val, factor: int) -> Val:
    """Each two int16 beside each other times a factor, and added up, as int32."""
    lanes = pairs.v.type.count // 2
    if k.isa.is_x86 and k.isa.dot != "plain":
        word = "avx2.pmadd.wd" if lanes == 8 else "avx512.pmaddw.d.512"
        return k.intrinsic(
            "llvm.x86." + word, vec(I32, lanes), pairs, k.const(factor, pairs.v.type)
        )
    wide = k.cast("sext", pairs, vec(I32, 2 * lanes))
    even, odd = (k.shuffle(wide, wide, range(i, 2 * lanes, 2)) for i in (0, 1))
    return (even + odd) * factor


class Dot:
    """Sums, in each int32 lane, products of four weights and four activations per step.

    Vectors have `k.isa.lanes` lanes: 8, or 16 where the processor multiplies 512 bits at once.

    Weights are unsigned and less than 2**bits, or, of 8 bits where there is no VNNI, signed.
    Activations lie in [-127, 127]. pmaddubsw adds pairs of products in int16, so `room` steps fit
    before they must be widened: a pair of 4-bit products is at most 15 x 127 x 2 = 3810, and eight
    of them 30480.

    Where weights have `zero` added, `sums` are those of the block's activations by pairs, as
    `broadcast2` finds them. int16 then need not be widened until the end, though it overflows on
    the way: without `zero`, a lane's whole sum fits, and that is all that counts modulo 2**16.
    """

    def __init__(self, k: Kernel, bits: int, zero: int = 0, sums: Val | None = None) -> None:
        self.k = k
        self.signed = bits == 8 and k.isa.dot != "vnni"
        self.room = 128 >> bits if bits < 8 else 1
        self.steps = 0
        self.pairs: Val | None = None  # int16 x16, not yet widened
        self.total: Val | None = None  # int32 x8
        if sums is not None and k.isa.dot == "avx2":
            self.room, self.pairs = GROUPS, sums * -zero
        elif sums is not None:
            self.total = widened(k, sums, -zero)

    def step(self, w: Val, x: Val) -> None:
        """Add the products of int8 weights and activations, four per lane."""
        {"avx2": self._avx2, "vnni": self._vnni, "sdot": self._sdot}.get(
            self.k.isa.dot, self._plain
        )(w, x)

    def result(self) -> Val:
        """The sums so far, int32."""
        self._widen()
        return self._sum()

    @staticmethod
    def settle(dots: "Sequence[Dot]") -> None:
        """All steps so far are computed here, where the compiler would keep products for later."""
        k = dots[0].k
        both = any(d.pairs is not None and d.total is not None for d in dots)
        if k.isa.dot != "avx2" or both:  # registers do not hold both
            return
        name = "total" if dots[0].pairs is None else "pairs"
        for d, value in zip(dots, k.settle([getattr(d, name) for d in dots]), strict=True):
            setattr(d, name, value)

    def _sum(self) -> Val:
        zero = self.k.const(0, vec(I32, self.k.isa.lanes))
        return self.total if self.total is not None else zero

    def _add(self, wide: Val) -> None:
        self.total = wide if self.total is None else self.total + wide

    def _widen(self) -> None:
        if self.pairs is not None:
            self._add(widened(self.k, self.pairs, 1))
        self.pairs, self.steps = None, 0

    def _magnitude(self, w: Val, x: Val) -> tuple[Val, Val]:
        """|w| and x with w's sign: the same products with an unsigned left factor."""
        if not self.signed:
            return w, x
        k = self.k
        size = k.intrinsic("llvm.abs.v32i8", w.v.type, w, ir.Constant(I1, 0))
        return size, k.intrinsic("llvm.x86.avx2.psign.b", I8X32, x, w)

    def _avx2(self, w: Val, x: Val) -> None:
        pair = self.k.intrinsic("llvm.x86.avx2.pmadd.ub.sw", I16X16, *self._magnitude(w, x))
        self.pairs = pair if self.pairs is None else self.pairs + pair
        self.steps += 1
        if self.steps == self.room:
            self._widen()

    def _vnni(self, w: Val, x: Val) -> None:
        self.total = _dpbusd(self.k, self._sum(), w, x)

    def _sdot(self, w: Val, x: Val) -> None:
        k, halves = self.k, []
        for at in (0, 4):
            part = k.shuffle(self._sum(), self._sum(), range(at, at + 4))
            pair = (k.shuffle(v, v, range(4 * at, 4 * at + 16)) for v in (w, x))
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            halves.append(k.intrinsic(name, vec(I32, 4), part, *pair))
        self.total = k.shuffle(halves[0], halves[1], range(8))

    def _plain(self, w: Val, x: Val) -> None:
        """Byte by byte of each lane: shifts in place, where widening would move them about."""
        k, lanes = self.k, vec(I32, self.k.isa.lanes)
        words = [k.cast("bitcast", v, lanes) for v in (w, x)]
        for left in (24, 16, 8, 0):
            a, b = (Val(k, k.b.ashr((v << left).v, k.const(24, lanes).v)) for v in words)
            self._add(a * b)
