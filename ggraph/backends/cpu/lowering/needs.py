"""What the CPU's kernels take, what they need beside operands, what is kept of weights.

All of it is decided by tensors and the processor alone, so that planning can ask without a device.
`exact` is the backend's: matrices of block types are then kept as float32, and rows not made 8
bits.

Legend: m rows, n slots of a cache, k columns of a product.
"""

from itertools import pairwise
from math import prod

from ggraph.backends.cpu.codegen.isa import host
from ggraph.backends.cpu.codegen.simd import ROWS_EACH
from ggraph.backends.cpu.kernels import attention, cache, courses, gated, recurrent
from ggraph.backends.cpu.kernels.elements import FLOATS
from ggraph.backends.cpu.kernels.elementwise import UNITS
from ggraph.backends.cpu.kernels.slots import list_bytes
from ggraph.backends.cpu.kernels.sweeps import MAX_HEAD, MAX_KEY
from ggraph.backends.cpu.kernels.tiles import (
    LAYOUTS,
    FloatLayout,
    activation_bytes,
    layout_of,
    packed_bytes,
)
from ggraph.backends.cpu.lowering.loops import rooms
from ggraph.device import Need
from ggraph.dtype import A8, F32, I32, DType
from ggraph.formats.checkpoint import RawTensor
from ggraph.ops.rules import flag, integer
from ggraph.strides import contiguous
from ggraph.tensor import Kind, Tensor

INDEX_OPS = ("argmax", "argsort", "top_k")  # ops whose results are indices of a row


def is_weight(t: Tensor) -> bool:
    """Whether a source is a stored weight or a view of one, which never changes."""
    root = t if t.view_src is None else t.view_src
    return root.kind is Kind.WEIGHT and root.spec is None


def is_matrix(t: Tensor) -> bool:
    """Whether a source is a weight that can be packed: blocks lie as the file has them, numbers as
    they like, transposed for one."""
    return is_weight(t) and t.dtype in LAYOUTS and (t.is_contiguous or not t.dtype.is_block)


def is_rows(t: Tensor) -> bool:
    """Whether a tensor is float32 without gaps."""
    return t.dtype is F32 and t.is_contiguous and len(t.shape) >= 1


def step_of(t: Tensor, axes: int = 1) -> int | None:
    """Bytes from a row of t, float32, to the next: a row is the last `axes` axes and has no gaps.
    None where it has, or rows do not follow one another evenly."""
    if t.dtype is not F32 or len(t.shape) < axes:
        return None
    cut, whole = len(t.shape) - axes, contiguous(t.shape, F32)
    if t.is_contiguous:
        return prod(t.shape[cut:]) * F32.block_bytes
    steps = list(zip(t.shape, t.strides, whole, strict=True))
    even = all(a == n * b for (_, a, _), (n, b, _) in pairwise(steps[:cut]))
    flat = all(n == 1 or s == w for n, s, w in steps[cut:])
    return t.strides[cut - 1] if flat and even and cut else None


def row_step(t: Tensor) -> int | None:
    """The same of what stands at each place of the first axis."""
    return step_of(t, len(t.shape) - 1)


def kept_as(dtype: DType, exact: bool) -> DType:
    """The type in which a weight's matrix is packed."""
    return F32 if exact and dtype.is_block else dtype


def takes_floats(w: Tensor, exact: bool) -> bool:
    """Whether the kernel of a packed matrix reads float rows, not rows of 8 bits."""
    return isinstance(layout_of(kept_as(w.dtype, exact)), FloatLayout)


def multiplies(t: Tensor, exact: bool) -> bool:
    """Whether a kernel computes this mul_mat or mul_mat_add: a stored matrix times flat rows."""
    w, a, *rest = t.sources
    return _meets(w, a, exact) and all(map(is_rows, rest))


def _meets(w: Tensor, a: Tensor, exact: bool, axes: int = 2) -> bool:
    """Whether a kernel multiplies flat rows by a stored matrix, or by one of those of each expert
    where there are three `axes`."""
    in_8_bits = a.dtype is A8 and a.is_contiguous
    if not is_matrix(w) or len(w.shape) != axes or not w.shape[-1]:
        return False
    floats = takes_floats(w, exact)
    if w.dtype.is_block and a.shape[-1] % 32:
        return False
    return is_rows(a) if floats else in_8_bits or step_of(a) is not None


def multiplies_by_id(t: Tensor, exact: bool) -> bool:
    """Whether a kernel computes this mul_mat_id."""
    w, a, ids = t.sources
    return _meets(w, a, exact, axes=3) and ids.dtype is I32 and ids.is_contiguous


def gates(t: Tensor, exact: bool) -> bool:
    """Whether kernels compute this mul_mat_gated or mul_mat_gated_quantise: both products, which
    read the same rows, and the unit of few rows."""
    return joins(t, exact) and t.attrs["unit"] in UNITS


def gates_at_once(t: Tensor, exact: bool) -> bool:
    """Whether one kernel computes such an op, products and unit, and needs room for neither."""
    gate, other = (layout_of(kept_as(s.dtype, exact)) for s in factors(t))
    matrices = 1 if chosen(t) is None else max(t.sources[0].shape[0], 1)
    each = t.size // t.shape[-1] // matrices  # rows that a matrix meets; an expert's, if all alike
    return t.dtype is A8 and gated.at_once(host(), gate, other, each)


def joins(t: Tensor, exact: bool) -> bool:
    """Whether kernels compute all products of this op, which read the same rows."""
    a, ids, matrices = t.sources[1], chosen(t), factors(t)
    if ids is not None and not (ids.dtype is I32 and ids.is_contiguous):
        return False
    whole = all(_meets(w, a, exact, 2 if ids is None else 3) for w in matrices)
    return whole and len({takes_floats(w, exact) for w in matrices}) == 1


JOINED = {"mul_mat_gated": gates, "mul_mat_gated_quantise": gates, "mul_mats": joins}
# Products of rows with stored matrices in their packed form, and whether a kernel computes one.
PRODUCTS = {
    "mul_mat": multiplies, "mul_mat_add": multiplies, "mul_mat_id": multiplies_by_id, **JOINED
}  # fmt: skip


def chosen(t: Tensor) -> Tensor | None:
    """The ids of the experts whose products are joined, where they are experts'."""
    return t.sources[3] if t.attrs.get("has_ids") else None


def factors(t: Tensor) -> tuple[Tensor, ...]:
    """The matrices of a product, a convolution or a look-up."""
    if t.op not in JOINED:
        return t.sources[:1]
    return (t.sources[0], *t.sources[2 : 3 if chosen(t) is not None else None])


def multiplies_each(t: Tensor) -> bool:
    """Whether a kernel computes this mul_mat or mul_mat_add as products of plain numbers, with
    matrices that are computed or repeat over leading axes: rows may lie as they like."""
    w, x, *rest = t.sources
    plain = w.dtype.name in FLOATS and w.size > 0 and x.dtype is F32 and t.is_contiguous
    beside = x.strides[-1] == F32.block_bytes or x.shape[-1] == 1
    return plain and beside and all(map(is_rows, rest))


def stores(w: Tensor) -> bool:
    """Whether the matrices of such a product are a weight that is packed once."""
    return is_matrix(w) and not w.dtype.is_block and len(w.shape) <= 3


def lays(t: Tensor) -> bool:
    """Whether kernels of this product or convolution lay source 0 out as tiles in every run."""
    w, x = t.sources[:2]
    if t.op != "conv_2d":
        return multiplies_each(t) and not stores(w)
    plain = w.dtype.name in FLOATS and w.size > 0 and w.is_contiguous
    return plain and x.dtype is F32 and t.is_contiguous and not convolves(t)


def rounds(t: Tensor, *, exact: bool) -> str:
    """What the kernel of a product rounds by itself: float rows, where the matrix is in blocks."""
    if t.op not in PRODUCTS or t.sources[1].dtype is A8 or not PRODUCTS[t.op](t, exact):
        return ""
    return "" if takes_floats(t.sources[0], exact) else "rows to 8 bits"


def convolves(t: Tensor) -> bool:
    """Whether a kernel computes this conv_2d: stored kernels over float32 images of any layout."""
    w, x = t.sources
    return is_matrix(w) and not w.dtype.is_block and x.dtype is F32 and t.is_contiguous


def matrices(weight: Tensor | RawTensor) -> tuple[int, int, int]:
    """A weight as (matrices, n, k): experts [E, n, k], or a convolution's kernels [O, I, h, w]."""
    if len(weight.shape) == 4:
        return 1, weight.shape[0], prod(weight.shape[1:])
    *experts, n, k = weight.shape
    return prod(experts), n, k


def looks_up(t: Tensor) -> bool:
    """Whether a kernel takes the rows of this get_rows from a packed matrix."""
    table, ids = t.sources
    flat = len(table.shape) == 2 and ids.dtype is I32 and ids.is_contiguous
    return flat and is_matrix(table)


def bounded(t: Tensor) -> bool:
    """Whether the indices of `t` are held against its rows before it runs: those of a feed are, and
    places that a sort finds cannot be beyond. NumPy refuses others; a kernel could not say so."""
    limits = t.spec.limits(t) if t.spec is not None and t.spec.limits is not None else {}
    for slot, limit in limits.items():
        ids = t.sources[slot]
        while ids.op == "copy":  # to the device that wants them
            ids = ids.sources[0]
        made = ids.root
        places = made.op in INDEX_OPS and made.sources[0].shape[-1] <= limit
        if made.kind is not Kind.INPUT and not places:
            return False
    return True


def lists_slots(mask: Tensor) -> bool:
    """Whether a mask is given as lists of slots."""
    return mask.dtype is I32 and mask.is_contiguous


def attends(t: Tensor) -> bool:
    """Whether the fast kernels compute this flash_attn: heads of whole eights, over a float or
    8-bit cache."""
    q, k, v, *rest = t.sources
    attrs = t.attrs
    if step_of(q, 2) is None:
        return False
    if attrs["has_mask"] and not is_rows(rest[0]) and not lists_slots(rest[0]):
        return False
    if attrs["has_length"] and rest[bool(attrs["has_mask"])].dtype is not I32:
        return False
    if k.dtype is not v.dtype or k.dtype.name not in attention.KINDS or k.shape[:2] != v.shape[:2]:
        return False
    fit = q.shape[2] <= MAX_KEY and v.shape[2] <= MAX_HEAD
    whole = all(s.strides[-1] == s.dtype.block_bytes for s in (k, v))
    whole = whole and all(s.is_contiguous for s in rest[bool(attrs["has_mask"]) :])
    return whole and fit and q.shape[2] % 8 == v.shape[2] % 8 == 0


def attends_plainly(t: Tensor) -> bool:
    """Whether the kernel for all other shapes computes this flash_attn: over plain numbers."""
    q, k, v, *rest = t.sources
    floats = k.dtype is v.dtype and k.dtype.name in FLOATS
    if not floats or q.dtype is not F32 or t.attrs["has_sinks"]:
        return False
    if t.attrs["has_mask"] and not (rest[0].is_contiguous and rest[0].dtype.name in ("f32", "f16")):
        return False
    return not t.attrs["has_length"] or (rest[-1].dtype is I32 and rest[-1].is_contiguous)


def turns(t: Tensor, x: Tensor, positions: Tensor, *factors: Tensor) -> bool:
    """Whether a kernel rotates x [T, H, D] as the rope or rope_set_rows `t` asks."""
    beside = x.dtype is F32 and x.strides[-1] == F32.block_bytes
    if not (beside and all(map(is_rows, factors))):
        return False
    if positions.dtype is not I32 or not positions.is_contiguous:
        return False
    return integer(t.attrs, "n_rot") <= min(x.shape[2], cache.MAX_ROTATED)


def turns_into(t: Tensor) -> bool:
    """Whether kernels compute this rope_set_rows."""
    held, x, positions, index, *factors = t.sources
    known = held.dtype.name in attention.KINDS and held.is_contiguous
    return known and index.is_contiguous and turns(t, x, positions, *factors)


WINDOWS = {"ssm_conv": 2, "ssm_conv_next": 2, "delta_net": 3}  # the source that may be one


def carries(t: Tensor) -> bool:
    """Whether what a layer with a state reads lies as its kernels want it: numbers are float32,
    indices int32, and nothing has gaps but what is convolved, and queries, between rows."""
    numbers = 3 + (t.op in ("ssm_conv", "delta_net"))
    window = WINDOWS.get(t.op)
    return all(
        (row_step(s) is not None if i == window else s.is_contiguous)
        and s.dtype is (F32 if i < numbers else I32)
        for i, s in enumerate(t.sources)
    )


def nets(t: Tensor) -> bool:
    """Whether a kernel computes this delta_net or delta_net_next."""
    (_, _, d, v), rows = t.sources[0].shape, t.sources[2].shape[0]
    return carries(t) and v % 8 == 0 and d <= recurrent.MAX_KEY and rows <= courses.MAX_ROWS


def needs(t: Tensor, exact: bool) -> tuple[Need, ...]:
    """What the kernels of a launch of `t` touch beside its operands.

    "rows": rows of a product in 8 bits; "gate", "up": what a unit takes; "slots": lists of what
    each row of a mask shows; "parts": attention by chunks; "turned": rotated rows on their way to a
    cache of blocks; "ends": the states that texts end in; "change": what the only row adds to one.
    """
    if not t.size:
        return ()
    if t.op in PRODUCTS and PRODUCTS[t.op](t, exact):
        return _product_needs(t, exact)
    if t.op in ("mul_mat", "mul_mat_add") or (t.op == "conv_2d" and not convolves(t)):
        return _tiles(t)
    if t.op == "flash_attn" and attends(t):
        return _attention_needs(t)
    if t.op == "flash_attn" and attends_plainly(t):
        return (Need("scores", prod(t.shape[:2]) * t.sources[1].shape[0] * 4),)
    if t.op == "rope_set_rows" and t.dtype.is_block and turns_into(t):
        return (Need("turned", t.sources[1].size * F32.block_bytes),)
    if t.op in ("delta_net", "delta_net_next") and nets(t):
        return _state_needs(t)
    return rooms(t)


def _state_needs(t: Tensor) -> tuple[Need, ...]:
    """Of a delta net. The state after one row is put down as what the row adds to it, which is of
    rank 1: to put down all of it and take it up costs as much as computing it again."""
    state, rows = t.sources[0], t.sources[2].shape[0]
    _, heads, _, v = state.shape
    course = range(len(t.sources) - 4, len(t.sources))
    how = "corrected" if flag(t.attrs, "corrects") else "added"
    if rows > 1:
        return (Need("ends", state.nbytes, (0, 1, 2, *course), how=how),)
    change = Need("change", heads * v * F32.block_bytes, (0, 1, 2, *course), how=how)
    return (change,) if rows else ()


def _product_needs(t: Tensor, exact: bool) -> tuple[Need, ...]:
    rows, room = _row_needs(t, exact), t.size * F32.block_bytes
    if PRODUCTS[t.op] is not gates or gates_at_once(t, exact):
        return rows
    return (*rows, Need("gate", room), Need("up", room))


def _row_needs(t: Tensor, exact: bool) -> tuple[Need, ...]:
    w, x = t.sources[:2]
    if takes_floats(w, exact) or x.dtype is A8:
        return ()
    k = x.shape[-1]
    return (Need("rows", x.size // k * activation_bytes(k), (1,)),)


def _tiles(t: Tensor) -> tuple[Need, ...]:
    """Of a product or convolution: tiles, or what nests need."""
    w, kernels = t.sources[0], t.op == "conv_2d"
    if not lays(t):
        return () if not kernels and multiplies_each(t) else rooms(t)
    count, n, k = matrices(w) if kernels else (prod(w.shape[:-2]), *w.shape[-2:])
    how = f"[{count}x{n}x{k}]"  # matrices of a product, and of a convolution, lie otherwise
    return (Need("tiles", count * packed_bytes(F32, n, k), (0,), how=how),)


def _attention_needs(t: Tensor) -> tuple[Need, ...]:
    m, heads, _ = t.sources[0].shape
    masked, bounded = bool(t.attrs["has_mask"]), bool(t.attrs["has_length"])
    n = t.sources[3].shape[1] if masked else t.sources[2].shape[0]
    dim = t.sources[2].shape[2]
    how = f"[{'masked ' * masked}{m}x{n} of {t.sources[1].shape[0]}]"
    listed = Need("slots", m * list_bytes(n), tuple(range(3, 3 + masked + bounded)), how=how)
    if m > ROWS_EACH:  # 8 rows by parts of a cache are as quick on one thread, 12 take 8 % longer
        return (listed,)
    return listed, Need("parts", attention.scratch_bytes(m, heads, dim, n))


def held_bytes(weight: Tensor, users: tuple[Tensor, ...], exact: bool) -> int:
    """Bytes of memory that a weight takes for those who read it, through views or not: its packed
    forms where kernels want them (the file's own pages are given back), its bytes where not, and a
    float32 copy for what has no kernel."""
    packing = [u for u in users if packs(u, weight, exact)]
    views = [w for u in packing for w in factors(u) if w.root is weight]
    found = 0
    for count, n, k in {(v.shape, v.strides, v.offset): matrices(v) for v in views}.values():
        found += packed_bytes(kept_as(weight.dtype, exact), n, k) * count
    others = [u for u in users if u not in packing]
    if others or not users:
        found += weight.nbytes
    if weight.dtype is not F32 and any(not u.is_view for u in others):
        found += weight.size * 4
    return found


def packs(t: Tensor, weight: Tensor, exact: bool) -> bool:
    """Whether computing `t` reads `weight` in its packed form."""
    if not t.size or not any(w.root is weight for w in factors(t)) or not bounded(t):
        return False
    if t.op in PRODUCTS and PRODUCTS[t.op](t, exact):
        return True
    if t.op in ("mul_mat", "mul_mat_add"):
        return multiplies_each(t) and stores(t.sources[0])
    if t.op == "conv_2d":
        return convolves(t)
    return t.op == "get_rows" and looks_up(t)
