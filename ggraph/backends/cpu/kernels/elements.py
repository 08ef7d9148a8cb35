"""Elements as nests keep and compute them: their types, sizes, and the ways from one to another."""

from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import F16, F32, I8, I16, I32, I64, Kernel, Val, vec

ELEMENT_BYTES = {
    "f32": 4, "f16": 2, "bf16": 2, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "b1": 1, "b2": 2, "b8": 8,
}  # fmt: skip  # b: bytes that are only moved
MOVED = ("b1", "b2", "b8")
FLOATS = ("f32", "f16", "bf16")  # what is called a plain float type
STORED: dict[str, ir.Type] = {
    "f32": F32, "f16": F16, "bf16": I16, "i8": I8, "i16": I16, "i32": I32, "i64": I64,
    "b1": I8, "b2": I16, "b8": I64,
}  # fmt: skip


def as_computed(k: Kernel, raw: Val, kind: str, computes: str) -> Val:
    """What was loaded, one or a vector, in the type of the computation."""
    if computes == kind:
        return raw
    if computes == "i64":
        return k.cast("sext", raw, _like(raw, I64))
    if kind == "f16":
        return k.cast("fpext", raw, _like(raw, F32))
    if kind == "bf16":
        return k.cast("bitcast", k.cast("zext", raw, _like(raw, I32)) << 16, _like(raw, F32))
    return k.cast("sitofp", raw, _like(raw, F32))


def as_stored(k: Kernel, value: Val, kind: str, computes: str) -> Val:
    """A computed value, one or a vector, in the type that is stored."""
    if computes == kind:
        return value
    if computes == "i64":
        return k.cast("trunc", value, _like(value, STORED[kind]))
    if kind == "f16":
        return k.cast("fptrunc", value, _like(value, F16))
    if kind == "bf16":
        return _to_bf16(k, value)
    through = I64 if kind == "i64" else I32
    whole = k.cast("fptosi", value, _like(value, through))
    return whole if kind in ("i32", "i64") else k.cast("trunc", whole, _like(value, STORED[kind]))


def number(k: Kernel, kind: str, at: Val) -> Val:
    """One number of a plain float type as float32."""
    return as_computed(k, k.load(at, STORED[kind]), kind, "f32")


def numbers(k: Kernel, kind: str, at: Val, lanes: int = 8) -> Val:
    """So many of them, side by side."""
    return as_computed(k, k.load(at, vec(STORED[kind], lanes)), kind, "f32")


def put(k: Kernel, kind: str, at: Val, value: Val) -> None:
    """Store float32, one or a vector, as numbers of a plain float type, to nearest even."""
    k.store(at, as_stored(k, value, kind, "f32"))


def _like(value: Val, t: ir.Type) -> ir.Type:
    """One or as many of a type."""
    return vec(t, value.v.type.count) if isinstance(value.v.type, ir.VectorType) else t


def _to_bf16(k: Kernel, value: Val) -> Val:
    """The upper half of the bits, rounded to nearest even; NaN stays one."""
    bits = k.cast("bitcast", value, _like(value, I32))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return k.cast("trunc", k.select(value.is_nan(), quiet, rounded), _like(value, I16))
