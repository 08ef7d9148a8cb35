"""Matrix products on CUDA: few rows by a kernel of our own, many by cuBLASLt.

Up to FEW_ROWS rows, as many as a tree has nodes, a row's bits do not depend on how many rows are
computed with it, so that verifying a draft gives what one-by-one decoding gives. Legend: n outputs,
k inner size, m rows.
"""

from math import inf, prod
from typing import Any

from ggraph.backends.cuda.driver import WIDEST, Grid, Product
from ggraph.backends.cuda.elementwise import BINARY, convert, decode
from ggraph.backends.cuda.kernels import TEMPLATES, WEIGHTS
from ggraph.backends.cuda.layout import PLAIN, fits, four, is_flat, is_plain
from ggraph.backends.cuda.lowering import (
    MAX_GRID_Y,
    Lowering,
    Rule,
    coded,
    codes_of,
    offered,
    parts_of,
)
from ggraph.backends.protocol import Launch
from ggraph.device import Need
from ggraph.dtype import BF16, F16, F32, I32, DType
from ggraph.ops.fused import FEW_ROWS, MOST_MATRICES
from ggraph.tensor import Tensor

PASS_ROWS = 8  # rows per pass over the weights
WARPS, OUTPUTS = 4, 2  # of a block, and per warp (OUTPUTS of src/lanes.cuh)
TILE, FEW_WARPS = 16, 8  # outputs and warps of a block of src/tiles.cu for up to PASS_ROWS
FEW_BLOCKS = 2  # of them on a multiprocessor, as registers allow
WIDE_TILE, WIDE_WARPS, WIDE_ROWS = 64, 8, 32  # the same for more, by so many rows
TILED = frozenset(TEMPLATES["tiles"][1])  # weight types of which tensor cores take few rows
MOST_EXPERTS = 1024  # as in src/experts.cu
SLICE_BYTES = 1 << 26  # of dequantised weights at a time
LIBRARY_TILE = 256  # outputs: the widest tile of cuBLASLt's that is common
HALF_MOST = 65504.0  # the largest number of float16
WORK_SPACE = 32 << 20  # bytes; what cuBLAS recommends for sm_90


def _is_stored(w: Tensor) -> bool:
    """Whether the block kernels can read w [n, k]: any float type, rows without gaps."""
    return w.dtype.name in WEIGHTS and w.is_contiguous


def _product(t: Tensor) -> bool:
    w, x, *rest = t.sources
    if rest and not is_flat(*rest):
        return False
    if len(w.shape) == 2 and _is_stored(w) and is_flat(x):
        return True
    return is_plain(w, x) and fits(x) and fits(w)


def _mul_mat(low: Lowering, x: Launch) -> None:
    w, a, *rest = x.sources
    k = w.tensor.shape[-1]
    add = low.at(rest[0]) if rest else 0
    if not (len(w.tensor.shape) == 2 and _is_stored(w.tensor) and is_flat(a.tensor)):
        _any(low, x, add)
        return
    m = prod(a.tensor.shape[:-1])
    if m <= FEW_ROWS or not k:
        _few(low, x, low.at(x.result), m, add)
    else:
        _many(low, x, low.at(x.result), m, add)


def _is_tiled(w: Tensor) -> bool:
    """Whether src/tiles.cu can read w: whole groups of columns, rows where it expects them, and no
    more than a grid has blocks for."""
    n, k = w.shape[-2:]
    here = w.dtype.name in TILED and k % 32 == 0 and k > 0 and w.offset % WIDEST == 0
    return here and _blocks(n) <= MAX_GRID_Y


def _blocks(*counts: int) -> int:
    """The most blocks that take so many outputs of each of several matrices."""
    return sum(-(-n // TILE) for n in counts)


def _rows_need(w: Tensor, x: Tensor) -> Need:
    """What src/tiles.cu takes x in: "parts" for plain weights, "codes" for blocks."""
    if w.dtype.is_block:
        return coded(x, 1)
    return Need("parts", x.nbytes, (1,), flat=True)


def _rows(low: Lowering, launch: Launch) -> int:
    """Source 1 as src/tiles.cu takes it: made once for all products that read it, by what makes it
    where that can."""
    w, x = launch.sources[:2]
    coded = w.tensor.dtype.is_block
    room = launch.room("codes" if coded else "parts")
    at, fours = low.at(room), x.tensor.size // 4
    if not room.ready and coded:
        low.per_element("code_rows", fours, x=low.at(x), codes=at, k=w.tensor.shape[-1])
    elif not room.ready:
        low.per_element("split_rows", fours, x=low.at(x), parts=at)
    return at


def _product_needs(t: Tensor) -> tuple[Need, ...]:
    """Few rows: "parts" or "codes" of them. Many: "work", cuBLASLt's; rows in the type in which it
    multiplies, under its name; and "decoded", a slice of w in it."""
    w, x = t.sources[:2]
    m, k = prod(x.shape[:-1]), w.shape[-1]
    if not (len(w.shape) == 2 and _is_stored(w) and is_flat(x)):
        return ()
    if m <= FEW_ROWS or not k:
        return (_rows_need(w, x),) if _is_tiled(w) else ()
    kind = _fast_type(w.dtype)
    needs = [Need("work", WORK_SPACE)]
    if kind is not F32:
        needs.append(Need(kind.name, m * k * kind.block_bytes, (1,), flat=True))
    if kind is not w.dtype:
        needs.append(Need("decoded", _slice_rows(*w.shape, kind) * k * kind.block_bytes))
    return tuple(needs)


def rounds(t: Tensor) -> str:
    """What a product rounds by itself: many rows, to the type in which cuBLASLt multiplies."""
    if t.op not in ("mul_mat", "mul_mat_add"):
        return ""
    w, x = t.sources[:2]
    kind = _fast_type(w.dtype)
    many = len(w.shape) == 2 and _is_stored(w) and prod(x.shape[:-1]) > FEW_ROWS
    return f"rows to {kind}" if many and is_flat(x) and kind is not F32 else ""


def _slice_rows(n: int, k: int, kind: DType) -> int:
    """Outputs of a slice: whole tiles of the library, so that no slice ends amid one."""
    most = SLICE_BYTES // (k * kind.block_bytes)
    return max(1, min(n, most - most % LIBRARY_TILE if most > LIBRARY_TILE else most))


def _few(low: Lowering, launch: Launch, y: int, m: int, add: int) -> None:
    w = launch.sources[0]
    n, k = w.tensor.shape
    if _is_tiled(w.tensor):
        end, grid, threads = _tile_of(low, w.tensor, m, n)
        low.call(
            f"mul_mat_{end}", grid, threads, type=w.tensor.dtype.name,
            w=low.at(w), x=_rows(low, launch), y=y, rest=add, n=n, k=k, m=m,
        )  # fmt: skip
        return
    rows = min(m, PASS_ROWS)
    grid = (-(-n // (WARPS * OUTPUTS)), -(-m // PASS_ROWS) if m else 0, 1)
    low.call(
        f"mul_mat_{max(rows, 1)}", grid, WARPS * 32, type=w.tensor.dtype.name,
        w=low.at(w), x=low.at(launch.sources[1]), y=y, rest=add, n=n, k=k, m=m,
    )  # fmt: skip


def _tile_of(
    low: Lowering, w: Tensor, m: int, *counts: int, few: int = TILE, wide: int = WIDE_TILE
) -> tuple[str, Grid, int]:
    """Which kernel of src/tiles.cu takes m rows and so many outputs of each of matrices like w,
    `few` or `wide` at a time: the end of its name, its blocks, and threads of a block. Few rows
    of block types: as many blocks as run at once, each of which reads ahead from tile to tile.
    Passes over the weights of many rows run side by side."""
    if m > PASS_ROWS:
        return "wide", (-(-m // WIDE_ROWS), sum(-(-n // wide) for n in counts), 1), WIDE_WARPS * 32
    blocks = sum(-(-n // few) for n in counts)
    if w.dtype.is_block:
        blocks = min(blocks, FEW_BLOCKS * low.keeper.driver.processors)
    return "tile", (1, blocks, 1), FEW_WARPS * 32


def _joins(t: Tensor) -> bool:
    """Few rows, matrices of one type that the tensor cores take."""
    w, x, *more = t.sources
    stored = all(len(a.shape) == 2 and _is_stored(a) and _is_tiled(a) for a in (w, *more))
    alike = stored and all(a.dtype is w.dtype for a in more)
    if not alike or _blocks(*(a.shape[0] for a in (w, *more))) > MAX_GRID_Y:
        return False
    return is_flat(x) and prod(x.shape[:-1]) <= FEW_ROWS


def _joined(low: Lowering, launch: Launch) -> None:
    w, x, *more = launch.sources
    matrices, m = (w, *more), prod(x.tensor.shape[:-1])
    counts = [a.tensor.shape[0] for a in matrices]
    end, grid, threads = _tile_of(low, w.tensor, m, *counts)
    missing = (0,) * (MOST_MATRICES - len(matrices))
    given: dict[str, Any] = {"all": _blocks(*counts)} if end == "tile" else {}
    low.call(
        f"mul_mats_{end}", grid, threads,
        type=w.tensor.dtype.name, w=(*map(low.at, matrices), *missing),
        x=_rows(low, launch), y=low.at(launch.result), n=(*counts, *missing),
        k=w.tensor.shape[1], m=m, **given,
    )  # fmt: skip


def _joined_needs(t: Tensor) -> tuple[Need, ...]:
    """ "parts" or "codes" of the rows."""
    return (_rows_need(*t.sources[:2]),)


def _gated_needs(t: Tensor) -> tuple[Need, ...]:
    """The same, and of the result for the product that reads it."""
    return *_joined_needs(t), *offered(t)


def _gated(low: Lowering, launch: Launch) -> None:
    w, _, up = launch.sources
    n, k = w.tensor.shape
    t = launch.result.tensor
    m = t.size // n
    codes = codes_of(low, launch)
    tiles = 2 if codes else 1  # at once: of whole groups codes are made
    end, grid, threads = _tile_of(low, w.tensor, m, n, few=tiles * TILE, wide=WIDE_TILE // 2)
    given: dict[str, Any] = {"tiles": tiles} if end == "tile" else {}
    low.call(
        f"mul_mat_gated_{end}", grid, threads, type=w.tensor.dtype.name,
        w=low.at(w), up=low.at(up), x=_rows(low, launch), y=low.at(launch.result),
        parts=parts_of(low, launch), codes=codes, op=BINARY.index(str(t.attrs["unit"])), n=n, k=k,
        m=m, **given,
    )  # fmt: skip


def _fast_type(dtype: DType) -> DType:
    """The type in which cuBLASLt multiplies. Block types go to bf16, which holds every scale."""
    return dtype if dtype in (F32, F16, BF16) else BF16


def _rows_as(low: Lowering, launch: Launch, kind: DType) -> int:
    """Source 1 in the type in which cuBLASLt multiplies, made once for all that read it."""
    x, room = launch.sources[1], launch.room(kind.name)
    if not room.ready:
        most = HALF_MOST if kind is F16 else inf
        convert(low, low.at(x), low.at(room), x.tensor.size, kind, most)
    return low.at(room)


def _many(low: Lowering, launch: Launch, y: int, m: int, add: int) -> None:
    """Weights in slices, decoded on the way where they are blocks, against rows of their type."""
    w, a = launch.sources[:2]
    n, k = w.tensor.shape
    kind = _fast_type(w.tensor.dtype)
    decoded = kind is not w.tensor.dtype
    rows = _slice_rows(n, k, kind) if decoded else n
    work = low.at(launch.room("work"))
    x = low.at(a) if kind is F32 else _rows_as(low, launch, kind)
    slices = low.at(launch.room("decoded")) if decoded else 0
    for n0 in range(0, n, rows):
        count, beside = min(rows, n - n0), 4 * n0
        source = low.at(w) + n0 * w.tensor.dtype.row_bytes(k)
        if decoded:
            decode(low, w.tensor.dtype, source, slices, count * k, kind)
            source = slices
        made = Product(
            source, x, y + beside, count, m, k, n, kind.name, add + beside if add else 0, work,
            WORK_SPACE,
        )  # fmt: skip
        low.steps.append(low.keeper.driver.product(made))


def _any(low: Lowering, x: Launch, add: int) -> None:
    """Plain types of any strides, with leading axes."""
    w, a = x.sources[0], x.sources[1]
    t = x.result.tensor
    lead = four(a.tensor.shape[:-2], 1)[2:]
    own = four(w.tensor.shape[:-2], 1)[2:]
    times = [big // small if small else 1 for big, small in zip(lead, own, strict=True)]
    low.call(
        "mul_mat_any", (-(-t.size // WARPS), 1, 1), WARPS * 32, w=low.at(w), x=low.at(a),
        y=low.at(x.result), shape=four(t.shape, 1), w_strides=four(w.tensor.strides, 0),
        x_strides=four(a.tensor.strides, 0), k=w.tensor.shape[-1], repeat1=max(times[0], 1),
        repeat0=max(times[1], 1), w_type=PLAIN[w.tensor.dtype], x_type=PLAIN[a.tensor.dtype],
        rest=add,
    )  # fmt: skip


def _by_id(t: Tensor) -> bool:
    w, x, ids = t.sources
    few = ids.size <= MAX_GRID_Y or _is_grouped(w)  # whose blocks are as many as experts
    return _is_stored(w) and is_flat(x) and is_flat(ids, dtype=I32) and few


def _mul_mat_id(low: Lowering, x: Launch) -> None:
    w, a, ids = x.sources
    experts, n, k = w.tensor.shape
    used = ids.tensor.shape[1]
    if _is_grouped(w.tensor):
        _grouped(low, x)
        return
    low.call(
        "mul_mat_id", (-(-n // (WARPS * OUTPUTS)), ids.tensor.size, 1), WARPS * 32,
        type=w.tensor.dtype.name, w=low.at(w), x=low.at(a), y=low.at(x.result), ids=low.at(ids),
        n=n, k=k, experts=experts, used=used, each=int(a.tensor.shape[1] == used),
    )  # fmt: skip


def _is_grouped(w: Tensor) -> bool:
    return _is_tiled(w) and w.shape[0] <= MOST_EXPERTS


def _id_needs(t: Tensor) -> tuple[Need, ...]:
    """ "pairs": the lists of each expert's pairs, once for all that choose by them among so many;
    "parts" or "codes" of the rows."""
    w, x, ids = t.sources
    if not _is_grouped(w):
        return ()
    experts = w.shape[0]
    pairs = Need("pairs", 4 * (ids.size + 2 * (experts + 2)), (2,), flat=True, how=f"[{experts}]")
    return pairs, _rows_need(w, x)


def _grouped(low: Lowering, x: Launch) -> None:
    """Pairs by expert, then each expert's weights against eight of its pairs at a time."""
    w, a, ids = x.sources
    experts, n, k = w.tensor.shape
    pairs, used = ids.tensor.size, ids.tensor.shape[1]
    rows, room = _rows(low, x), x.room("pairs")
    order = low.at(room)
    starts = order + 4 * pairs
    active = starts + 4 * (experts + 2)
    if not room.ready:
        low.call(
            "group_pairs", (1, 1, 1), 256, ids=low.at(ids), order=order, starts=starts,
            active=active, pairs=pairs, experts=experts,
        )  # fmt: skip
    low.call(
        "mul_mat_id_tile", (-(-n // TILE), min(pairs, experts + 1), 1), FEW_WARPS * 32,
        type=w.tensor.dtype.name, w=low.at(w), x=rows, y=low.at(x.result), order=order,
        starts=starts, active=active, n=n, k=k, experts=experts, used=used,
        each=int(a.tensor.shape[1] == used),
    )  # fmt: skip


RULES: dict[str, Rule] = {
    "mul_mat": Rule(_product, _mul_mat, _product_needs),
    "mul_mat_add": Rule(_product, _mul_mat, _product_needs),
    "mul_mats": Rule(_joins, _joined, _joined_needs),
    "mul_mat_gated": Rule(_joins, _gated, _gated_needs),
    "mul_mat_id": Rule(_by_id, _mul_mat_id, _id_needs),
}
