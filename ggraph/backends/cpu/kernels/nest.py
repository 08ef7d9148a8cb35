"""Kernels by rule: a loop nest around an expression, emitted for any number of axes and operands.

`register` makes a kernel of a `Nest` (nest_form.py), named by what it is, so that ops alike share
one. Extents, strides and numbers are words of the instruction.

One thread makes all that depends on a place of the kept axes, in one order: bits never depend on
threads or on how many places there are.

Legend: y is operand 0, sources follow; k0 .. kept extents, r0 .. reduced ones, the last innermost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from llvmlite import ir

from ggraph.backends.cpu.codegen import maths, words
from ggraph.backends.cpu.codegen.simd import (
    F32,
    F64,
    I1,
    I32,
    I64,
    KERNELS,
    Kernel,
    KernelSpec,
    Val,
    Var,
    element,
    vec,
)
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES, STORED, as_computed, as_stored
from ggraph.backends.cpu.kernels.nest_form import Nest, Operand, names
from ggraph.backends.cpu.runtime.taking import SHARES
from ggraph.ops.steps import PLAIN, WIDE

LANES = 8  # of vectors whose sums have one order on every processor
PIECE = 512  # columns that one thread takes at a time, at most: 128 to 2,048 took as long
BESIDE = 4  # vectors of columns that are reduced together: 8 and 16 gained nothing (2026-11-23)
SUMS = 4  # partial sums along vectors, of which one need not wait for another
FIRST = {"sum": 0.0, "mean": 0.0, "dot": 0.0, "max": float("-inf"), "min": float("inf")}


def register(nest: Nest) -> KernelSpec:
    """The kernel of a nest, known to the language from now on."""
    known = KERNELS.get(nest.name)
    if known is not None:
        return known
    spec = KernelSpec(nest.name, nest.args, lambda k: _Emitter(k, nest).emit())
    return KERNELS.setdefault(nest.name, spec)


@dataclass
class _Place:
    """Where operands are read: addresses, the partial last vector's lanes, and what is known."""

    at: list[Val]
    left: Val | None
    known: dict[int, Val] = field(default_factory=dict)
    parts: dict[int, tuple[Val, Val]] = field(default_factory=dict)  # of known sums: `_parts`

    def moved(self, at: list[Val], left: Val | None = None) -> "_Place":
        """Another place; what holds for all of them stays known."""
        return _Place(at, left, dict(self.known), self.parts)


class _Emitter:
    """Emits one nest."""

    def __init__(self, k: Kernel, nest: Nest) -> None:
        self.k, self.nest = k, nest
        called = names(len(nest.operands))
        self.extent = {axis: k.arg(axis) for axis in nest.axes}
        self.base = [k.arg(o) for o in called]
        self.stride = [{axis: k.arg(o + axis) for axis in nest.axes} for o in called]
        # Sums along vectors have one order everywhere; lanes by themselves may be as many as fit.
        self.lanes = k.isa.lanes if nest.along == "kept" else LANES
        self.floats, self.doubles = vec(F32, self.lanes), vec(F64, self.lanes)
        self.numbers = [k.splat(k.arg(f"c{i}"), self.lanes) for i in range(nest.numbers)]
        kept = nest.axes[: nest.kept]
        self.reduced = nest.axes[nest.kept :]
        self.vector = kept[-1] if nest.along == "kept" else self.reduced[-1]
        self.outer = kept[:-1] if nest.along == "kept" else kept
        self.reductions = [i for i, (op, _) in enumerate(nest.steps) if op in FIRST]
        self.is_held = False  # what the code at hand follows: whether the result's memory has it

    def emit(self) -> None:
        """The whole body."""
        total = self.k.const(1, I64)
        for axis in self.outer:
            total = total * self.extent[axis]
        if self.nest.along == "reduced":
            for item in self.k.share(total):
                self._row(self._begun(item))
            return
        n = self.extent[self.vector]
        piece = self._piece(total * n) if self.reductions else self.k.const(PIECE, I64)
        pieces = (n + piece - 1) // piece
        for item in self.k.share(total * pieces):
            at = self._begun(item % total)  # rows run fastest: they may share cache lines
            start = item // total * piece
            stop = self.k.minimum(start + piece, n)
            self._columns(at, start, stop)

    def _piece(self, places: Val) -> Val:
        """Columns of a piece: fewer where whole pieces would leave threads without work."""
        wide = self.lanes * BESIDE
        shared = places // (self.k.threads * SHARES) // wide * wide
        return self.k.maximum(self.k.minimum(shared, PIECE), wide)

    def _begun(self, item: Val) -> list[Val]:
        """Addresses at a place of the outer axes."""
        at, rest = list(self.base), item
        for i, axis in reversed(list(enumerate(self.outer))):
            index = rest if i == 0 else rest % self.extent[axis]
            at = [a + s[axis] * index for a, s in zip(at, self.stride, strict=True)]
            rest = rest // self.extent[axis] if i else rest
        return at

    def _along(self, at: Sequence[Val], index: Val, axis: str = "") -> list[Val]:
        axis = axis or self.vector
        moved = []
        for a, s, o in zip(at, self.stride, self.nest.operands, strict=True):
            if axis != self.vector or o.lies == "g":
                moved.append(a + s[axis] * index)
            else:
                moved.append(a + index * ELEMENT_BYTES[o.kind] if o.lies == "v" else a)
        return moved

    def _vectors(self, start: Val, stop: Val) -> Iterator[tuple[Val, Val | None]]:
        """A vector of columns at a time, with the count of those in the last, partial one."""
        whole = start + (stop - start) // self.lanes * self.lanes
        for c in self.k.loop(start, whole, self.lanes):
            yield c, None
        with self.k.when(whole < stop):
            yield whole, stop - whole

    def _settle(self, place: _Place, step: int, total: Val) -> None:
        """A reduction is known, and with it all that is made of reductions and numbers alone."""
        place.known[step] = total
        made = (
            i
            for i, (op, args) in enumerate(self.nest.steps)
            if op == "number" or (op not in (*FIRST, "load") and set(args) <= set(place.known))
        )
        for i in chain((step,), made):  # each may be an operand of the next
            v = self.value(i, place)
            if element(v.v.type) == F64 and i not in place.parts:
                place.parts[i] = self._parts(v)

    def _inside(self, at: list[Val], axes: Sequence[str]) -> Iterator[list[Val]]:
        """Loops over further axes."""
        if not axes:
            yield at
            return
        for i in self.k.loop(0, self.extent[axes[0]]):
            yield from self._inside(self._along(at, i, axes[0]), axes[1:])

    def _columns(self, at: list[Val], start: Val, stop: Val) -> None:
        """Places of the kept axes along vectors; where there are reductions, several vectors side
        by side: what they read together lies together."""
        if self.reductions:
            wide = self.lanes * BESIDE
            whole = start + (stop - start) // wide * wide
            for c in self.k.loop(start, whole, wide):
                places = [self._along(at, c + self.lanes * i) for i in range(BESIDE)]
                self._beside([_Place(p, None) for p in places])
            start = whole
        for c, left in self._vectors(start, stop):
            self._beside([_Place(self._along(at, c), left)])

    def _beside(self, places: Sequence[_Place]) -> None:
        """Vectors of places of the kept axes: reduced axes are plain loops."""
        self.is_held = False
        for step in self.reductions:
            totals = [self.k.var(self._first(step)) for _ in places]
            holds = False
            for inner in self._at_each(places, self.reduced):
                for total, place in zip(totals, inner, strict=True):
                    self._gather(step, total, self.value(self._argument(step), place))
                    holds = self._hold(place)
            self.is_held |= holds
            for total, place in zip(totals, places, strict=True):
                self._settle(place, step, self._total(step, total.value))
        for inner in self._at_each(places, self.reduced if self.nest.whole else ()):
            for place in inner:
                self._store(place)

    def _at_each(self, places: Sequence[_Place], axes: Sequence[str]) -> Iterator[Sequence[_Place]]:
        """Loops over further axes, all places moving together."""
        if not axes:
            yield [p.moved(p.at, p.left) for p in places]
            return
        for i in self.k.loop(0, self.extent[axes[0]]):
            moved = [p.moved(self._along(p.at, i, axes[0]), p.left) for p in places]
            yield from self._at_each(moved, axes[1:])

    def _row(self, at: list[Val]) -> None:
        """One place of the kept axes, vectors along the last reduced one."""
        n, place = self.extent[self.vector], _Place(at, None)
        self.is_held = False
        for step in self.reductions:
            self._settle(place, step, self._reduced(step, place, n))
        if not self.nest.whole:
            value = self.k.lane(self._number(self.value(len(self.nest.steps) - 1, place)), 0)
            self._put_one(
                place.at[0],
                as_stored(self.k, value, self.nest.operands[0].kind, self.nest.computes),
            )
            return
        for rest in self._inside(at, self.reduced[:-1]):
            for c, left in self._vectors(self.k.const(0, I64), n):
                self._store(place.moved(self._along(rest, c), left))

    def _reduced(self, step: int, place: _Place, n: Val) -> Val:
        """A reduction over all reduced axes, in every lane."""
        k, argument, holds = self.k, self._argument(step), False
        sums = [k.var(self._first(step)) for _ in range(SUMS)]
        for rest in self._inside(place.at, self.reduced[:-1]):
            whole = n // (self.lanes * SUMS) * (self.lanes * SUMS)
            for c in k.loop(0, whole, self.lanes * SUMS):
                for i, s in enumerate(sums):
                    inner = place.moved(self._along(rest, c + self.lanes * i))
                    self._gather(step, s, self.value(argument, inner))
                    holds = self._hold(inner)
            for c, left in self._vectors(whole, n):
                inner = place.moved(self._along(rest, c), left)
                value = self._number(self.value(argument, inner))
                self._hold(inner)
                if left is not None:
                    value = k.select(
                        words.tail_mask(k, left, self.lanes), value, FIRST[self._op(step)]
                    )
                self._gather(step, sums[0], value)
        self.is_held |= holds
        a, b, c, d = (s.value for s in sums)
        join = self._joining(step)
        one = words.across(k, join(join(a, b), join(c, d)), join)
        return k.splat(self._total(step, one), self.lanes)

    def _total(self, step: int, total: Val) -> Val:
        """What was gathered, one or a vector, divided where it is a mean."""
        if self._op(step) != "mean":
            return total
        k, count = self.k, self.k.const(1, I64)
        for axis in self.reduced:
            count = count * self.extent[axis]
        many = k.cast("sitofp", count, F64)
        return total / (many if total.v.type == F64 else k.splat(many, self.lanes))

    def _op(self, step: int) -> str:
        return self.nest.steps[step][0]

    def _argument(self, step: int) -> int:
        return self.nest.steps[step][1][0]

    def _first(self, step: int) -> Val:
        first = FIRST[self._op(step)]
        return self.k.const(first, self.doubles if self._op(step) in WIDE else self.floats)

    def _joining(self, step: int) -> words.Fold:
        word = {"max": "maximum", "min": "minimum"}.get(self._op(step), "add")
        return lambda a, b: maths.WORDS[word](self.k, a, b)

    def _gather(self, step: int, total: Var, value: Val) -> None:
        value = self._number(value)
        value = self._double(value) if self._op(step) in WIDE else value
        total.value = self._joining(step)(total.value, value)

    def value(self, step: int, place: _Place) -> Val:
        """The value of a step at a place, in all lanes."""
        if step not in place.known:
            op, args = self.nest.steps[step]
            if step == self.nest.held and self.is_held:
                place.known[step] = self._load(0, place)
            elif op == "load":
                place.known[step] = self._load(args[0], place)
            elif op == "number":
                place.known[step] = self.numbers[args[0]]
            else:
                given = [self.value(a, place) for a in args]
                place.known[step] = self._applied(step, given, place)
        return place.known[step]

    def _applied(self, step: int, given: list[Val], place: _Place) -> Val:
        """An op of elements. Of sums and numbers alone it is one of float64 too."""
        op, args = self.nest.steps[step]
        sums = [element(v.v.type) == F64 for v in given]
        if op in PLAIN and any(sums):
            known = [s or self._op(a) == "number" for s, a in zip(sums, args, strict=True)]
            if all(known):
                return maths.WORDS[op](self.k, *map(self._double, given))
            if op in ("add", "subtract"):
                at = sums.index(True)
                return self._beside_a_sum(op, given, place.parts[args[at]], at)
        truths = 1 if op == "where" else 0
        numbers = [self._number(v) for v in given[truths:]]
        return maths.WORDS[op](self.k, *given[:truths], *numbers)

    def _beside_a_sum(self, op: str, given: list[Val], parts: tuple[Val, Val], at: int) -> Val:
        """A sum, number `at`, and an element: first what float32 has of the sum, then the rest. A
        mean rounded before it is subtracted is far off beside what is left of large numbers."""
        first, rest = parts
        numbers = [first if i == at else self._number(v) for i, v in enumerate(given)]
        found = maths.WORDS[op](self.k, *numbers)
        return maths.WORDS[op if at else "add"](self.k, found, rest)

    def _parts(self, total: Val) -> tuple[Val, Val]:
        """What float32 has of a sum, and the rest."""
        k, first = self.k, self._number(total)
        rest = k.cast("fptrunc", total - self._double(first), self.floats)
        return first, k.select(words.absolute(k, first) < float("inf"), rest, 0.0)

    def _double(self, v: Val) -> Val:
        return v if element(v.v.type) == F64 else self.k.cast("fpext", v, self.doubles)

    def _number(self, v: Val) -> Val:
        """Truths as 0 and 1, sums as float32."""
        if element(v.v.type) == I1:
            return self.k.select(v, self.k.const(1.0, self.floats), 0.0)
        if element(v.v.type) == F64:
            return self.k.cast("fptrunc", v, self.floats)
        return v

    def _load(self, operand: int, place: _Place) -> Val:
        k, o, at = self.k, self.nest.operands[operand], place.at[operand]
        stored = STORED[o.kind]
        if o.lies == "s":
            raw = k.splat(k.load(at, stored), self.lanes)
        elif o.lies == "v" and place.left is None:
            raw = k.load(at, vec(stored, self.lanes))
        elif o.lies == "v" and o.kind == "f32" and place.left is not None:
            raw = words.load_tail(k, at, place.left, self.lanes)
        else:
            raw = self._picked(o, at, self.stride[operand][self.vector], place.left)
        return as_computed(k, raw, o.kind, self.nest.computes)

    def _picked(self, o: Operand, at: Val, stride: Val, left: Val | None) -> Val:
        """Lanes one by one; those beyond the last repeat it."""
        k, t = self.k, STORED[o.kind]
        step: Val = k.const(ELEMENT_BYTES[o.kind], I64) if o.lies == "v" else stride
        found = Val(k, ir.Constant(vec(t, self.lanes), ir.Undefined))
        for lane in range(self.lanes):
            index = k.const(lane, I64) if left is None else k.minimum(k.const(lane, I64), left - 1)
            one = k.load(at + step * index, t)
            found = Val(k, k.b.insert_element(found.v, one.v, I32(lane)))
        return found

    def _hold(self, place: _Place) -> bool:
        """Leave the held step, if it was computed just now, where the result will be."""
        fresh = not self.is_held and self.nest.held in place.known
        if fresh:
            self._store(place, self.nest.held)
        return fresh

    def _store(self, place: _Place, step: int | None = None) -> None:
        """The value of a step, of the last one by default, into the result."""
        k, o, at = self.k, self.nest.operands[0], place.at[0]
        value = self.value(len(self.nest.steps) - 1 if step is None else step, place)
        value = self._number(value) if self.nest.computes == "f32" else value
        value = as_stored(k, value, o.kind, self.nest.computes)
        if o.lies == "v" and place.left is None:
            k.store(at, value)
        elif o.lies == "v" and o.kind == "f32" and place.left is not None:
            words.store_tail(k, at, value, place.left)
        else:
            self._scatter(at, value, place.left)

    def _scatter(self, at: Val, value: Val, left: Val | None) -> None:
        k, o = self.k, self.nest.operands[0]
        stride = self.stride[0][self.vector]
        step: Val = k.const(ELEMENT_BYTES[o.kind], I64) if o.lies == "v" else stride
        for lane in range(self.lanes):
            one = k.lane(value, lane)
            if left is None:
                self._put_one(at + step * lane, one)
                continue
            with k.when(left > lane):
                self._put_one(at + step * lane, one)

    def _put_one(self, at: Val, value: Val) -> None:
        self.k.store(at, value)
