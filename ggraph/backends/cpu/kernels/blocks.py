"""One block of a packed matrix, as kernels meet it: where its parts lie, and what they mean.

Legend: lanes are rows of the tile, from row `first` on; j number of the block in its run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from llvmlite import ir

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, I8, I32, STREAM, Kernel, Num, Val, vec
from ggraph.backends.cpu.kernels.elements import numbers
from ggraph.backends.cpu.kernels.tiles import (
    BLOCK,
    GROUP,
    GROUP_BYTES,
    HALF,
    TILE,
    X_BLOCK,
    Layout,
    Scale,
)
from ggraph.backends.cpu.runtime.pages import LINE

SMALLEST = 0x00200000  # the bits of 2^-128 as float32, below its normal numbers


def lifted(k: Kernel, layout: Layout) -> bool:
    """Whether products take codes and values as they are stored, `zero` added. Only VNNI takes the
    largest so: other products want them signed."""
    return layout.bits < 8 or k.isa.dot == "vnni"


@dataclass(frozen=True)
class Block:
    """Block `j` of the run of 16 rows at address `run`.

    What the compiler is not shown of addresses, it does not take a register for each group of codes
    for, of which it then has too few.
    """

    k: Kernel
    layout: Layout
    run: Val
    j: Val

    def behind(self, nbytes: int) -> Val:
        """Address of the block's part of the run, where each block has so many bytes."""
        step = self.j * nbytes
        return self.run + (self.k.opaque(step) if self.layout.blocks > 1 else step)

    @cached_property
    def _scales_at(self) -> Val:
        return self.behind(self.layout.scales_bytes) + self.layout.scales_at

    def scales_of(self, sub: int) -> Val:
        """Address of the scales of a part of the columns."""
        return self._scales_at + sub * TILE * self.layout.scale.nbytes

    @cached_property
    def minimum_at(self) -> Val:
        """Address of the minimums that lie apart from the scales."""
        return self.behind(self.layout.minimums_bytes) + self.layout.minimums_at

    @cached_property
    def codes_at(self) -> Val:
        """Address of the codes."""
        return self.behind(self.layout.codes_bytes) + self.layout.codes_at

    def scales(self, sub: int, first: Val | int, lanes: int) -> Val:
        """Scales of a part of the columns, float32."""
        k, kind, address = self.k, self.layout.scale, self.scales_of(sub)
        if kind is Scale.HALF:
            return self._halves(address, first, lanes)
        if kind in (Scale.SIX, Scale.FOUR):
            own = 63 if kind is Scale.SIX else 15
            return self._times_super(0, first, self._bytes(address, first, lanes) & own)
        bytes_ = k.load(address + first, vec(I8, lanes))
        if kind is Scale.EXPONENT:
            e = k.cast("zext", bytes_, vec(I32, lanes))
            tiny = k.const(SMALLEST, e.v.type) << (e & 1)
            return k.cast("bitcast", k.select(e < 2, tiny, (e - 1) << 23), vec(F32, lanes))
        return self._times_super(0, first, k.cast("sext", bytes_, vec(I32, lanes)))

    def minimums(self, sub: int, first: Val | int, lanes: int) -> Val:
        """What is added to a weight in a part of the columns, float32."""
        if self.layout.scale is Scale.HALF:
            return self._halves(self.minimum_at, first, lanes)
        with_scales = self._bytes(self.scales_of(sub), first, lanes)
        if self.layout.scale is Scale.FOUR:
            return self._times_super(1, first, with_scales >> 4)
        upper = (with_scales >> 2) & 48
        return self._times_super(1, first, self._lower(first, lanes) | upper)

    def _lower(self, first: Val | int, lanes: int) -> Val:
        """The lower four bits of minimums, int32: of the second eight rows above the first's."""
        k = self.k
        if lanes == TILE:
            both = k.load(self.minimum_at, vec(I8, HALF))
            found = k.cast("zext", k.shuffle(both, both, [*range(HALF)] * 2), vec(I32, lanes))
            shifts = k.consts([0] * HALF + [4] * HALF, I32)
            return Val(k, k.b.lshr(found.v, shifts.v)) & 15
        row = k.same(first, self.minimum_at)
        found = self._bytes(self.minimum_at, row % HALF, lanes)
        return k.select(row < HALF, found, found >> 4) & 15

    def _halves(self, address: Val, first: Val | int, lanes: int) -> Val:
        """Half floats from one on as float32."""
        return numbers(self.k, "f16", address + self.k.same(first, address) * 2, lanes)

    def _bytes(self, address: Val, first: Val | int, lanes: int) -> Val:
        """Bytes from one on as int32, without a sign."""
        return self.k.cast("zext", self.k.load(address + first, vec(I8, lanes)), vec(I32, lanes))

    def _times_super(self, which: int, first: Val | int, integers: Val) -> Val:
        """Integers times the super-scales of scales, or of minimums, as float32."""
        lanes = integers.v.type.count
        supers = self._halves(self.run + which * 2 * TILE, first, lanes)
        found = supers * self.k.cast("sitofp", integers, vec(F32, lanes))
        return found if self.layout.unit == 1 else found * self.layout.unit

    @property
    def outputs(self) -> int:
        """Rows of the matrix in it."""
        return TILE

    def codes(self, group: int, part: int) -> Val:
        """Codes or values of columns 4 * group .. + 3 of a part of the tile, one vector of bytes;
        without `zero` where they are not `lifted`."""
        k, a, width = self.k, self.layout, self.k.isa.lanes * GROUP
        found, low, plane = None, 0, self.codes_at
        for bits in a.planes:
            at = plane + (group % bits * GROUP_BYTES + part * width)
            own = words.field(k, k.load(at, vec(I8, width)), group // bits * bits, low, bits)
            found = own if found is None else found | own
            low, plane = low + bits, plane + bits * GROUP_BYTES
        assert found is not None, f"layout {a.name} has no planes"
        if a.values:
            return words.look_up(k, a.values, 0 if lifted(k, a) else a.zero, found)
        return found if lifted(k, a) else found ^ words.SIGN


class Weights(Protocol):
    """A block, however it lies: `outputs` of its rows, all its columns."""

    @property
    def k(self) -> Kernel:
        """The kernel that is made."""
        ...

    @property
    def layout(self) -> Layout:
        """How the matrix is packed."""
        ...

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        ...

    def codes(self, group: int, part: int) -> Val:
        """Codes or values of columns 4 * group .. + 3 of a part, one vector of bytes."""
        ...

    def scales(self, sub: int, first: int, lanes: int) -> Val:
        """Scales of a part of the columns, float32, from output `first` on."""
        ...

    def minimums(self, sub: int, first: int, lanes: int) -> Val:
        """What is added to a weight in a part of the columns, float32."""
        ...


@dataclass(frozen=True)
class Abreast:
    """The same block of several tiles, as one block of all their rows."""

    blocks: Sequence[Weights]

    @property
    def k(self) -> Kernel:
        """The kernel that is made."""
        return self.blocks[0].k

    @property
    def layout(self) -> Layout:
        """How the tiles are packed."""
        return self.blocks[0].layout

    @property
    def outputs(self) -> int:
        """Rows of the matrix in it."""
        return TILE * len(self.blocks)

    def codes(self, group: int, part: int) -> Val:
        """As a block's, of the tile in which the part is."""
        each = TILE // self.k.isa.lanes
        return self.blocks[part // each].codes(group, part % each)

    def scales(self, sub: int, first: int, lanes: int) -> Val:
        """As a block's, of the tile in which output `first` is."""
        return self.blocks[first // TILE].scales(sub, first % TILE, lanes)

    def minimums(self, sub: int, first: int, lanes: int) -> Val:
        """What is added to a weight in a part of the columns, float32."""
        return self.blocks[first // TILE].minimums(sub, first % TILE, lanes)


FAR_AHEAD = 8192  # bytes between use and prefetch


def ahead(k: Kernel, near: int) -> int:
    """Bytes between use and prefetch: `near` with vectors of 256 bits where what is read once
    passes the caches by, since lines would have left the nearest cache; else all of `FAR_AHEAD`."""
    return near if k.isa.bypasses and k.isa.lanes == HALF else FAR_AHEAD


ONCE, SECOND, NEAREST = 0, 2, 3  # for how long a line is kept: read once, or in which cache


def ask(k: Kernel, address: Val, keep: int | None = None) -> None:
    """Ask for a cache line: unless told, for the nearest cache, or the second, where the nearest
    has few lines on their way at once."""
    if keep is None:
        keep = NEAREST if k.isa.bypasses else SECOND
    at = k.pointer(address)
    k.intrinsic("llvm.prefetch.p0", ir.VoidType(), at, I32(0), I32(keep), I32(1))


def prefetch(k: Kernel, address: Val, nbytes: int, *, near: bool = False) -> None:
    """Ask for the cache lines that `nbytes` at `address` touch: to be read once, or to be kept as
    by `ask`, or in the nearest cache if it is `near`."""
    lines = range(0, nbytes, LINE)
    if not k.isa.bypasses:
        for line in lines:
            ask(k, address + line, NEAREST if near else None)
        return
    with k.if_else(k.flag(STREAM)) as (once, again):
        for branch, keep in ((once, ONCE), (again, NEAREST)):
            with branch:
                for line in lines:
                    ask(k, address + line, keep)


def ask_ahead(block: Block, ahead: Num, *, near: bool = False) -> None:
    """Ask for what lies `ahead` bytes behind a block's share of its run, as by `prefetch`."""
    share = -(-block.layout.run_bytes // block.layout.blocks)
    prefetch(block.k, block.behind(share) + ahead, share, near=near)


class Following:
    """The lines of so many blocks from an address on, which are asked for a share at a time."""

    def __init__(self, k: Kernel, layout: Layout, at: Val, count: Val) -> None:
        self._k, self._at, self._asked = k, at, k.var(0)
        self._lines = count * layout.run_bytes // (layout.blocks * LINE) + 1

    def ask(self, done: Val, whole: Val) -> None:
        """Ask for what is due where `done` of a `whole` are, and was not asked for before."""
        due = self._lines * done // whole
        for line in self._k.loop(self._asked.value, due):
            ask(self._k, self._at + line * LINE)
        self._asked.value = due


def blocks_of(
    k: Kernel, layout: Layout, tiles: Sequence[Val], ahead: Num
) -> Iterator[tuple[Abreast, Val]]:
    """A loop over the blocks of some tiles, all of them abreast, each with the offset of its block
    in a row of x; what lies `ahead` bytes further is asked for."""
    for i in k.loop(0, k.arg("k") // (BLOCK * layout.blocks)):
        runs = [k.opaque(tile + i * layout.run_bytes) for tile in tiles]
        for j in k.loop(0, layout.blocks):
            blocks = [Block(k, layout, run, j) for run in runs]
            for block in blocks:
                ask_ahead(block, ahead)
            yield Abreast(blocks), (i * layout.blocks + j) * X_BLOCK
