"""The language in which the CPU kernels are written: Python that emits LLVM IR.

A kernel is a Python function that receives a `Kernel` and runs once, at compile time: arithmetic on
`Val` emits instructions, Python loops unroll, `k.loop` and `k.when` emit real control flow. This
file has the scalar and vector core; `words.py` has the words built on it (dot products, exp, half
floats), and `jit.py` compiles. It is not numba: emitting IR directly gives the register tiling that
these kernels live from, compiles in milliseconds, and needs no import of numba at start.

Legend: addresses are plain i64 numbers, so address arithmetic is byte arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeVar

from llvmlite import ir

from ggraph.backends.cpu.codegen.constants import constant
from ggraph.backends.cpu.codegen.isa import Isa

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
FLOATS = (F16, F32, F64)


@cache
def vec(element: ir.Type, lanes: int) -> ir.VectorType:
    """The vector type of `lanes` elements."""
    return ir.VectorType(element, lanes)


F32X8, F64X8, I32X8 = vec(F32, 8), vec(F64, 8), vec(I32, 8)
I16X16, I8X32 = vec(I16, 16), vec(I8, 32)


def element(t: ir.Type) -> ir.Type:
    """The type of one lane (the type itself for a scalar)."""
    return t.element if isinstance(t, ir.VectorType) else t


class Val:
    """One value of the kernel: a scalar or a vector. Operators emit instructions.

    Integers are treated as unsigned by `//`, `%` and `>>`, as signed by comparisons.
    """

    __slots__ = ("k", "v")

    def __init__(self, k: "Kernel", v: ir.Value) -> None:
        self.k = k
        self.v = v

    @property
    def is_float(self) -> bool:
        """Whether the lanes are floating-point numbers."""
        return element(self.v.type) in FLOATS

    def _emit(self, of_int: str, of_float: str | None, other: "Num", swap: bool = False) -> "Val":
        name = of_float if self.is_float else of_int
        if name is None:
            raise TypeError(f"{of_int} is not defined on {self.v.type}")
        pair = (self.v, self.k.same(other, self).v)
        return Val(self.k, getattr(self.k.b, name)(*(pair[::-1] if swap else pair)))

    def __add__(self, other: "Num") -> "Val":
        return self._emit("add", "fadd", other)

    __radd__ = __add__

    def __sub__(self, other: "Num") -> "Val":
        return self._emit("sub", "fsub", other)

    def __rsub__(self, other: "Num") -> "Val":
        return self._emit("sub", "fsub", other, swap=True)

    def __mul__(self, other: "Num") -> "Val":
        return self._emit("mul", "fmul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: "Num") -> "Val":
        return self._emit("udiv", "fdiv", other)

    def __floordiv__(self, other: "Num") -> "Val":
        return self._emit("udiv", None, other)

    def __mod__(self, other: "Num") -> "Val":
        return self._emit("urem", None, other)

    def __and__(self, other: "Num") -> "Val":
        return self._emit("and_", None, other)

    def __or__(self, other: "Num") -> "Val":
        return self._emit("or_", None, other)

    def __xor__(self, other: "Num") -> "Val":
        return self._emit("xor", None, other)

    def __lshift__(self, other: "Num") -> "Val":
        return self._emit("shl", None, other)

    def __rshift__(self, other: "Num") -> "Val":
        return self._emit("lshr", None, other)

    def __neg__(self) -> "Val":
        return Val(self.k, self.k.b.fneg(self.v) if self.is_float else self.k.b.neg(self.v))

    def _compare(self, sign: str, other: "Num") -> "Val":
        b = self.k.b
        emit = b.fcmp_ordered if self.is_float else b.icmp_signed
        return Val(self.k, emit(sign, self.v, self.k.same(other, self).v))

    def __lt__(self, other: "Num") -> "Val":
        return self._compare("<", other)

    def __le__(self, other: "Num") -> "Val":
        return self._compare("<=", other)

    def __gt__(self, other: "Num") -> "Val":
        return self._compare(">", other)

    def __ge__(self, other: "Num") -> "Val":
        return self._compare(">=", other)

    def eq(self, other: "Num") -> "Val":
        """Lane-wise equality (`==` keeps Python's meaning)."""
        return self._compare("==", other)

    def ne(self, other: "Num") -> "Val":
        """Lane-wise inequality."""
        return self._compare("!=", other)

    def is_nan(self) -> "Val":
        """Lanes that are not a number."""
        return Val(self.k, self.k.b.fcmp_unordered("uno", self.v, self.v))


Num = Val | int | float
Count = TypeVar("Count", int, Val)
Branch = AbstractContextManager[object]
Build = Callable[["Kernel"], Val | None]  # what emits a kernel's body, and gives what it returns


class Var:
    """A value that loops may change; lives in registers once compiled."""

    __slots__ = ("k", "slot", "type")

    def __init__(self, k: "Kernel", first: Val) -> None:
        self.k = k
        self.type = first.v.type
        with k.b.goto_entry_block():
            self.slot = k.b.alloca(self.type)
        self.value = first

    @property
    def value(self) -> Val:
        """The present value."""
        return Val(self.k, self.k.b.load(self.slot, typ=self.type))

    @value.setter
    def value(self, new: Num) -> None:
        self.k.b.store((new if isinstance(new, Val) else self.k.const(new, self.type)).v, self.slot)


@dataclass(frozen=True)
class KernelSpec:
    """A kernel: its name, the names of its arguments, and the function that emits its body.

    Arguments are 64-bit words of an instruction; a name ending in ":f" is a float64 number.
    """

    name: str
    args: tuple[str, ...]
    build: Build
    returns: bool = False  # a word, which `build` gives

    @cached_property
    def words(self) -> dict[str, bool]:
        """Its arguments' plain names in order, and whether each is a float64 number."""
        return {a.removesuffix(":f"): a.endswith(":f") for a in self.args}


KERNELS: dict[str, KernelSpec] = {}


def kernel(args: str, *, name: str = "", returns: bool = False) -> Callable[[Build], KernelSpec]:
    """Register a kernel under its function's name or `name`; `args` names its words in order."""

    def add(build: Build) -> KernelSpec:
        spec = KernelSpec(name or build.__name__, tuple(args.split()), build, returns)
        if KERNELS.setdefault(spec.name, spec) is not spec:
            raise ValueError(f"a second CPU kernel {spec.name!r}")
        return spec

    return add


HEADER_WORDS = 2  # an instruction starts with its kernel's address and its flags
ROWS_EACH = 8  # rows for each thread from which rows are shared out, not what each of them has
BARRIER, STREAM = 1, 2  # flags: all threads meet afterwards; weights are too many to stay in caches


class Kernel:
    """One function under construction: `void name(i64 instruction, i64 thread, i64 threads)`."""

    def __init__(self, module: ir.Module, spec: KernelSpec, isa: Isa) -> None:
        self.isa = isa
        self.spec = spec
        self.module = module
        kind = ir.FunctionType(I64 if spec.returns else ir.VoidType(), [I64, I64, I64])
        self.function = ir.Function(module, kind, spec.name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.instruction, self.thread, self.threads = (Val(self, a) for a in self.function.args)

    def keep_order(self) -> None:
        """A line that the compiler moves no memory access across (it costs no instruction).

        Register tiles need it: without, LLVM's scheduler gathers all loads first and spills.
        """
        self.b.fence("acq_rel", "singlethread")

    def const(self, value: float, t: ir.Type) -> Val:
        """A constant of type `t` (the same in every lane)."""
        return Val(self, constant(t, float(value) if element(t) in FLOATS else int(value)))

    def consts(self, values: Sequence[float], e: ir.Type) -> Val:
        """A constant vector."""
        return Val(self, constant(vec(e, len(values)), list(values)))

    def same(self, value: Num, like: Val) -> Val:
        """`value` as a `Val`: a Python number takes `like`'s type, a scalar fills its lanes."""
        if not isinstance(value, Val):
            return self.const(value, like.v.type)
        if isinstance(like.v.type, ir.VectorType) and not isinstance(value.v.type, ir.VectorType):
            return self.splat(value, like.v.type.count)
        return value

    def arg(self, name: str) -> Val:
        """The instruction's word called `name`: i64, or f32 where it is a number."""
        at = self.instruction + 8 * (HEADER_WORDS + list(self.spec.words).index(name))
        if not self.spec.words[name]:
            return self.load(at, I64)
        return Val(self, self.b.fptrunc(self.load(at, F64).v, F32))

    def flag(self, bit: int) -> Val:
        """Whether the instruction has a flag."""
        return (self.load(self.instruction + 8, I64) & bit).ne(0)

    def words(self, names: str) -> list[Val]:
        """Several arguments at once, in the order asked for."""
        return [self.arg(n) for n in names.split()]

    def pointer(self, address: Val) -> ir.Value:
        """The address as LLVM's pointer."""
        return self.b.inttoptr(address.v, PTR)

    def load(self, address: Val, t: ir.Type) -> Val:
        """A value of type `t` at any address (no alignment assumed)."""
        return Val(self, self.b.load(self.pointer(address), align=1, typ=t))

    def store(self, address: Val, value: Val) -> None:
        """Write a value at any address."""
        self.b.store(value.v, self.pointer(address), align=1)

    def splat(self, value: Val, lanes: int) -> Val:
        """A vector with `value` in every lane."""
        t = vec(value.v.type, lanes)
        none, zeros = constant(t, ir.Undefined), constant(vec(I32, lanes), 0)
        one = self.b.insert_element(none, value.v, constant(I32, 0))
        return Val(self, self.b.shuffle_vector(one, none, zeros))

    def shuffle(self, a: Val, b: Val, lanes: Sequence[int]) -> Val:
        """Lanes picked from a (0 ..) and b (a's count ..)."""
        mask = constant(vec(I32, len(lanes)), list(lanes))
        return Val(self, self.b.shuffle_vector(a.v, b.v, mask))

    def joined(self, a: Val, b: Val) -> Val:
        """The lanes of a, then those of b."""
        return self.shuffle(a, b, range(2 * a.v.type.count))

    def lane(self, value: Val, index: int | Val) -> Val:
        """One lane as a scalar."""
        at = index.v if isinstance(index, Val) else I32(index)
        return Val(self, self.b.extract_element(value.v, at))

    def cast(self, op: str, value: Val, t: ir.Type) -> Val:
        """A conversion by its LLVM name: sext, zext, trunc, sitofp, fptosi, fpext, bitcast ..."""
        return Val(self, getattr(self.b, op)(value.v, t))

    def opaque(self, value: Val) -> Val:
        """The same value, kept in a register: the compiler does not see what it was made of.

        Without, LLVM computes addresses of rows anew at each use.
        """
        kind = ir.FunctionType(value.v.type, [value.v.type])
        return Val(self, self.b.call(ir.InlineAsm(kind, "", "=r,0"), [value.v]))

    def settle(self, values: Sequence[Val]) -> list[Val]:
        """The same x86 vectors, all of them computed at this point: arithmetic does not move
        across either, as memory accesses do not across `keep_order`."""
        kinds = [v.v.type for v in values]
        both = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
        places = ["=x"] * len(values) + [str(i) for i in range(len(values))]
        found = self.b.call(ir.InlineAsm(both, "", ",".join(places), True), [v.v for v in values])
        return [Val(self, self.b.extract_value(found, i)) for i in range(len(values))]

    def select(self, condition: Val, then: Val, other: Num) -> Val:
        """`then` where the condition holds, else `other`."""
        return Val(self, self.b.select(condition.v, then.v, self.same(other, then).v))

    def minimum(self, a: Val, b: Num) -> Val:
        """The smaller; b where either is not a number."""
        return self.select(a < b, a, b)

    def maximum(self, a: Val, b: Num) -> Val:
        """The larger; b where either is not a number."""
        return self.select(a > b, a, b)

    def intrinsic(self, name: str, t: ir.Type, *values: Val | ir.Value) -> Val:
        """A call of an LLVM intrinsic that returns `t`."""
        args = [v.v if isinstance(v, Val) else v for v in values]
        kind = ir.FunctionType(t, [a.type for a in args])
        found = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return Val(self, self.b.call(found, args))

    def var(self, first: Num, t: ir.Type = I64) -> Var:
        """A variable that starts as `first` (`t` is the type of a Python number)."""
        return Var(self, first if isinstance(first, Val) else self.const(first, t))

    def scratch(self, nbytes: int) -> Val:
        """Address of `nbytes` of this thread's stack, aligned to 64."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(I8, nbytes))
            slot.align = 64
            return Val(self, self.b.ptrtoint(slot, I64))

    def loop(self, start: Num, stop: Num, step: int = 1) -> Iterator[Val]:
        """`for i in k.loop(a, b)`: a counted loop whose body is emitted once."""
        first = start if isinstance(start, Val) else self.const(start, I64)
        last = self.same(stop, first)
        before = self.b.block
        head, body, done = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(first.v.type)
        i.add_incoming(first.v, before)
        self.b.cbranch((Val(self, i) < last).v, body, done)
        self.b.position_at_end(body)
        yield Val(self, i)
        after = Val(self, i) + step
        i.add_incoming(after.v, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(done)

    def part(self, count: Val, unit: Num = 1) -> tuple[Val, Val]:
        """The part of range(count) that this thread does, first and end, in whole units."""
        units = (count + (self.same(unit, count) - 1)) // unit
        first, end = (units * (self.thread + i) // self.threads * unit for i in (0, 1))
        return first, self.minimum(end, count)

    def share(self, count: Val) -> Iterator[Val]:
        """The numbers of that part."""
        return self.loop(*self.part(count))

    def grid(self, rows: Val, units: Val) -> tuple[tuple[Val, Val], tuple[Val, Val]]:
        """This thread's rows and units of each, first and end: all units of a part of the rows
        where rows are many; else of every row the part whose columns it made in a product."""
        many = self.threads * ROWS_EACH

        def own(count: Val, split: Val) -> tuple[Val, Val]:
            first, end = self.part(count)
            return self.select(split, first, 0), self.select(split, end, count)

        return own(rows, rows >= many), own(units, rows < many)

    def when(self, condition: Val) -> Branch:
        """The body runs only where the scalar condition holds."""
        branch: Branch = self.b.if_then(condition.v)
        return branch

    def if_else(self, condition: Val) -> AbstractContextManager[tuple[Branch, Branch]]:
        """Gives two contexts: `with k.if_else(c) as (then, other)`, then `with then: ...`."""
        both: AbstractContextManager[tuple[Branch, Branch]] = self.b.if_else(condition.v)
        return both

    @contextmanager
    def while_(self, condition: Callable[[], Val]) -> Iterator[None]:
        """The body runs as long as the condition, emitted before each turn, holds."""
        head, body, done = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition().v, body, done)
        self.b.position_at_end(body)
        yield
        self.b.branch(head)
        self.b.position_at_end(done)
