"""Launches to instructions: which kernel computes which op, on which addresses. Floor 6.

`LOWERINGS[op]` either appends instructions and returns True, or returns False where shapes, types
or layouts are not what its kernel takes; such a launch runs by its NumPy reference. A program is
thus a list of flat programs and Python steps, in the order of the launches.

Legend: m rows, n columns of the result, k columns of a product, T token rows, C cache rows,
H heads, K key-value heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ggraph.backends.cpu import attention, cache, elementwise, matmul, pack, quantise  # noqa: F401
from ggraph.backends.cpu.pool import Pool
from ggraph.backends.cpu.program import Assembler
from ggraph.backends.cpu.tiles import (
    LAYOUTS,
    FloatLayout,
    activation_bytes,
    layout_of,
    packed_bytes,
)
from ggraph.backends.protocol import Launch, Ref
from ggraph.dtype import F16, F32, I32, I64, DType
from ggraph.formats.quants import dequantize
from ggraph.tensor import Array, Kind, Tensor

GUARD = 1 << 14  # bytes after the last tile that prefetches may name
FEW_ROWS = 8  # up to here attention splits the cache among threads


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight matrix [n, k] as the kernels want it."""

    dtype: DType
    data: Array


@dataclass(eq=False)
class Lowering:
    """Turns launches into instructions. `packed` is shared by all programs of a backend."""

    pool: Pool
    exact: bool
    packed: dict[tuple[int, int, str], Packed]
    asm: Assembler = field(init=False)
    quantised: dict[int, Array] = field(default_factory=dict)  # address of a source -> its blocks

    def __post_init__(self) -> None:
        self.asm = Assembler(self.pool.jit)

    def lower(self, launch: Launch) -> bool:
        """Append the instructions of one launch, or say that there is no kernel for it."""
        lowering = LOWERINGS.get(launch.result.tensor.op)
        if lowering is None or not lowering(self, launch):
            return False
        self._forget(launch.result)
        return True

    def at(self, ref: Ref) -> int:
        """Address of a tensor's first element; the memory is kept alive with the program."""
        self.asm.kept.append(ref.memory.handle)
        return int(ref.memory.handle.ctypes.data) + ref.offset

    def weight(self, ref: Ref) -> Packed:
        """The packed form of a weight, made on first use."""
        t = ref.tensor
        dtype = F32 if self.exact and t.dtype.is_block else t.dtype
        key = (id(ref.memory), ref.offset, dtype.name)
        if key not in self.packed:
            raw = ref.memory.handle[ref.offset : ref.offset + t.nbytes].reshape(t.shape[0], -1)
            raw = dequantize(raw, t.dtype).view(np.uint8) if dtype is not t.dtype else raw
            self.packed[key] = self._pack(raw, dtype, t.shape)
        return self.packed[key]

    def blocks(self, ref: Ref, m: int, k: int) -> Array:
        """The 8-bit activation blocks of m rows, computed once while the source stands."""
        address = self.at(ref)
        if address not in self.quantised:
            out = np.zeros((m, activation_bytes(k)), np.uint8)
            self.asm.add("quantise", x=address, out=out, m=m, k=k, xs=k * 4, os=out.strides[0])
            self.quantised[address] = out
        return self.quantised[address]

    def _pack(self, raw: Array, dtype: DType, shape: tuple[int, ...]) -> Packed:
        n, k = shape
        out = np.zeros(packed_bytes(dtype, n, k) + GUARD, np.uint8)
        asm = Assembler(self.pool.jit)
        asm.add(f"pack_{dtype.name}", raw=raw, out=out, n=n, k=k, row_bytes=raw.strides[0])
        self.pool.run(asm.freeze())
        return Packed(dtype, out)

    def _forget(self, result: Ref) -> None:
        """Blocks of sources that the result may have overwritten are no longer theirs."""
        start = int(result.memory.handle.ctypes.data) + result.offset
        stop = start + result.tensor.nbytes
        for address in [a for a in self.quantised if start <= a < stop]:
            del self.quantised[address]


Lower = Callable[[Lowering, Launch], bool]


def is_weight(ref: Ref) -> bool:
    """Whether a source is a stored weight, which never changes."""
    return ref.tensor.is_leaf and ref.tensor.kind is Kind.WEIGHT


def is_rows(t: Tensor) -> bool:
    """Whether a tensor is float32 without gaps."""
    return t.dtype is F32 and t.is_contiguous and len(t.shape) >= 1


def _mul_mat(low: Lowering, x: Launch) -> bool:
    """A stored matrix times float rows, plus a third source where there is one.

    Other products are rare and stay with the reference.
    """
    w, a, *rest = x.sources
    k = w.tensor.shape[-1]
    if not is_weight(w) or len(w.tensor.shape) != 2 or not is_rows(a.tensor):
        return False
    if w.tensor.dtype not in LAYOUTS or (w.tensor.dtype.is_block and k % 32):
        return False
    m, n = a.tensor.size // k, w.tensor.shape[0]
    if rest and not is_rows(rest[0].tensor):
        return False
    packed = low.weight(w)
    layout = layout_of(packed.dtype)
    plain = isinstance(layout, FloatLayout)
    source = low.at(a) if plain else low.blocks(a, m, k)
    step = k * 4 if plain else activation_bytes(k)
    low.asm.add(
        "matmul_" + layout.name, w=packed.data, x=source, y=low.at(x.result), n=n, k=k, m=m,
        xs=step, ys=n * 4, add=low.at(rest[0]) if rest else 0, adds=n * 4 if rest else 0,
    )  # fmt: skip
    return True


def _get_rows(low: Lowering, x: Launch) -> bool:
    """Rows of a stored table. Ids are checked by the caller: kernels trust them."""
    table, ids = x.sources
    t = table.tensor
    if not is_weight(table) or len(t.shape) != 2 or t.dtype not in LAYOUTS:
        return False
    if ids.tensor.dtype is not I32 or not ids.tensor.is_contiguous:
        return False
    packed = low.weight(table)
    n, k = t.shape
    low.asm.add(
        "rows_" + layout_of(packed.dtype).name, w=packed.data, ids=low.at(ids),
        y=low.at(x.result), n=n, k=k, m=ids.tensor.size, ys=k * 4,
    )  # fmt: skip
    return True


def _set_rows(low: Lowering, x: Launch) -> bool:
    """Float rows into a float32 or float16 cache, in place."""
    held, rows, index = (s.tensor for s in x.sources)
    if held.dtype not in (F32, F16) or not held.is_contiguous or not is_rows(rows):
        return False
    if index.dtype is not I64 or not index.is_contiguous:
        return False
    n = prod(rows.shape[1:])
    kind = "f32" if held.dtype is F32 else "f16"
    low.asm.add(
        "set_rows_" + kind, x=low.at(x.sources[1]), y=low.at(x.result), index=low.at(x.sources[2]),
        m=rows.shape[0], n=n, xs=n * 4, ys=held.dtype.row_bytes(n),
    )  # fmt: skip
    return True


def _rms_norm(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not is_rows(a):
        return False
    n = a.shape[-1]
    w = low.at(x.sources[1]) if len(x.sources) > 1 else 0
    low.asm.add(
        "rms_norm", x=low.at(x.sources[0]), w=w, y=low.at(x.result), m=a.size // n, n=n,
        xs=n * 4, ys=n * 4, eps=float(_number(x, "eps")),
    )  # fmt: skip
    return True


def _number(x: Launch, name: str) -> float:
    value = x.result.tensor.attrs[name]
    assert isinstance(value, (int, float)), f"{name} = {value!r}"
    return float(value)


def _binary(kernel: str) -> Lower:
    """Two float tensors of one shape, or a vector that repeats over the rows."""

    def lower(low: Lowering, x: Launch) -> bool:
        a, b = (s.tensor for s in x.sources)
        if not (is_rows(a) and is_rows(b)):
            return False
        n = a.shape[-1]
        if b.shape != a.shape and (b.size != n or b.shape[-1] != n):
            return False
        m = a.size // n
        steps: dict[str, Any] = {"as": n * 4, "bs": n * 4 if b.size == a.size else 0, "ys": n * 4}
        sources: dict[str, Any] = {"a": low.at(x.sources[0]), "b": low.at(x.sources[1])}
        low.asm.add(kernel, y=low.at(x.result), m=m, n=n, **sources, **steps)
        return True

    return lower


def _unary(kernel: str) -> Lower:
    def lower(low: Lowering, x: Launch) -> bool:
        a, y = x.sources[0].tensor, x.result.tensor
        if not (is_rows(a) and is_rows(y)):
            return False
        n = a.shape[-1]
        low.asm.add(
            kernel, x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n,
            xs=n * 4, ys=n * 4,
        )  # fmt: skip
        return True

    return lower


def _concat(low: Lowering, x: Launch) -> bool:
    """Float rows side by side: one strided copy per source."""
    y = x.result.tensor
    axis = x.result.tensor.attrs["axis"]
    last = len(y.shape) - 1
    if axis not in (-1, last) or not all(is_rows(s.tensor) for s in x.sources):
        return False
    start, width = low.at(x.result), y.shape[-1]
    for s in x.sources:
        n = s.tensor.shape[-1]
        low.asm.add("copy", x=low.at(s), y=start, m=s.tensor.size // n, n=n, xs=n * 4, ys=width * 4)
        start += n * 4
    return True


def _scale(low: Lowering, x: Launch) -> bool:
    a = x.sources[0].tensor
    if not is_rows(a):
        return False
    n = a.shape[-1]
    low.asm.add(
        "scale", x=low.at(x.sources[0]), y=low.at(x.result), m=a.size // n, n=n, xs=n * 4,
        ys=n * 4, scale=_number(x, "scale"), bias=_number(x, "bias"),
    )  # fmt: skip
    return True


def _rope(low: Lowering, x: Launch) -> bool:
    a = x.sources[0]
    dim = a.tensor.shape[2] * 4
    return _rotate(low, x, a, x.sources[1], None, x.sources[2:], "f32", dim)


def _rope_set_rows(low: Lowering, x: Launch) -> bool:
    """Rotated rows straight into a float32 or float16 cache, in place."""
    held, a, positions, index, *factors = x.sources
    t = held.tensor
    if t.dtype not in (F32, F16) or not t.is_contiguous:
        return False
    if index.tensor.dtype is not I64 or not index.tensor.is_contiguous:
        return False
    kind = "f32" if t.dtype is F32 else "f16"
    return _rotate(low, x, a, positions, index, factors, kind, t.dtype.row_bytes(t.shape[2]))


def _rotate(
    low: Lowering,
    x: Launch,
    a: Ref,
    positions: Ref,
    index: Ref | None,
    factors: Sequence[Ref],
    kind: str,
    head_bytes: int,
) -> bool:
    """Rotate [T, H, D] rows; `head_bytes` is the distance of heads in the result."""
    attrs = x.result.tensor.attrs
    if not is_rows(a.tensor) or attrs["ext_factor"] != 0 or positions.tensor.dtype is not I32:
        return False
    rows, heads, dim = a.tensor.shape
    rotated = int(_number(x, "n_rot"))
    if rotated > min(dim, cache.MAX_ROTATED):
        return False
    exponent = -np.arange(0, rotated, 2, dtype=np.float64) / rotated
    freqs = _number(x, "freq_scale") * _number(x, "freq_base") ** exponent
    padded = np.zeros(-(-len(freqs) // 8) * 8, np.float64)
    padded[: len(freqs)] = freqs
    low.asm.add(
        "rope_" + kind, x=low.at(a), y=low.at(x.result), pos=low.at(positions),
        index=low.at(index) if index is not None else 0, freqs=padded,
        factors=low.at(factors[0]) if factors else 0, m=rows, heads=heads, hd=dim, nr=rotated,
        halves=int(attrs["mode"] == "neox"), xs=heads * dim * 4, xh=dim * 4,
        ys=heads * head_bytes, yh=head_bytes, mscale=_number(x, "attn_factor"),
    )  # fmt: skip
    return True


def _flash_attn(low: Lowering, x: Launch) -> bool:
    """Attention over a float cache; what the mask hides is skipped, so `length` adds nothing."""
    q, k, v = (s.tensor for s in x.sources[:3])
    attrs = x.result.tensor.attrs
    rows, heads, dim = q.shape
    shown = x.sources[3].tensor if attrs["has_mask"] else None
    if not is_rows(q) or attrs["softcap"] or shown is None or not is_rows(shown):
        return False
    if k.dtype is not v.dtype or k.dtype not in (F32, F16) or k.shape != v.shape:
        return False
    if dim % 8 or dim > attention.MAX_HEAD or k.strides[-1] != k.dtype.block_bytes:
        return False
    kind = "f32" if k.dtype is F32 else "f16"
    context = k.shape[0]
    few = rows <= FEW_ROWS
    part = np.zeros(attention.scratch_bytes(rows, heads, dim, context) if few else 64, np.uint8)
    values: dict[str, Any] = {
        "q": low.at(x.sources[0]), "k": low.at(x.sources[1]), "v": low.at(x.sources[2]),
        "mask": low.at(x.sources[3]), "y": low.at(x.result), "m": rows, "heads": heads,
        "kv_heads": k.shape[1], "hd": dim, "n": context, "qs": heads * dim * 4,
        "ks": k.strides[0], "kh": k.strides[1], "vs": v.strides[0], "vh": v.strides[1],
        "ms": context * 4, "ys": heads * dim * 4, "part": part, "scale": _number(x, "scale"),
    }  # fmt: skip
    for name in ("attend_chunks_" + kind, "merge_chunks") if few else ("attention_" + kind,):
        low.asm.add(name, **values)
    return True


LOWERINGS: dict[str, Lower] = {
    "mul_mat": _mul_mat,
    "mul_mat_add": _mul_mat,
    "get_rows": _get_rows,
    "set_rows": _set_rows,
    "rms_norm": _rms_norm,
    "rms_norm_mul": _rms_norm,
    "add": _binary("add"),
    "sub": _binary("sub"),
    "mul": _binary("mul"),
    "div": _binary("div"),
    "swiglu": _binary("silu_mul"),
    "silu": _unary("silu"),
    "sigmoid": _unary("sigmoid"),
    "gelu": _unary("gelu"),
    "relu": _unary("relu"),
    "exp": _unary("exp"),
    "neg": _unary("neg"),
    "cont": _unary("copy"),
    "dup": _unary("copy"),
    "scale": _scale,
    "concat": _concat,
    "rope": _rope,
    "rope_set_rows": _rope_set_rows,
    "flash_attn": _flash_attn,
}
