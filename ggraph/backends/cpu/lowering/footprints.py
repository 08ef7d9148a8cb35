"""What memory an instruction touches, computed from its own arguments.

One rule per kernel, written from what the kernel does and not from what a lowering says of it: the
judge holds both against each other. What is touched is a `Patch` (patches.py).

Legend: m rows, n columns or slots, c rows of a cache, k columns of a product; row_of(kind, n):
bytes of n numbers.
"""

from collections.abc import Iterator
from functools import cache

from ggraph.backends.cpu.codegen.simd import ROWS_EACH
from ggraph.backends.cpu.kernels import attention
from ggraph.backends.cpu.kernels.elements import ELEMENT_BYTES
from ggraph.backends.cpu.kernels.elementwise import UNITS
from ggraph.backends.cpu.kernels.nest_form import axes_among, names
from ggraph.backends.cpu.kernels.slots import list_bytes
from ggraph.backends.cpu.kernels.tiles import (
    BLOCK,
    LAYOUTS,
    Q8_BLOCK,
    Q8_BYTES,
    FloatLayout,
    activation_bytes,
    packed_bytes,
)
from ggraph.backends.cpu.lowering.patches import Args, Patch, Rule
from ggraph.backends.cpu.lowering.patches import reads as _reads
from ggraph.backends.cpu.lowering.patches import writes as _writes
from ggraph.dtype import F32


def _row(kind: str, n: int) -> int:
    """Bytes of a cache's or table's row of n numbers."""
    if kind == "q8_0":
        return n // Q8_BLOCK * Q8_BYTES
    return n * ELEMENT_BYTES[kind]


def _pair(a: Args) -> Iterator[Patch]:
    """Two operands of a gated unit, whose columns `Kernel.grid` shares out where rows are few."""
    few, width = a["m"] <= ROWS_EACH, a["n"] * 4
    yield _reads(a, "a", a["m"], a["as"], width, shared=few)
    yield _reads(a, "b", a["m"], a["bs"], width, shared=few)


def _unit(a: Args, _: str) -> Iterator[Patch]:
    yield from _pair(a)
    yield _writes(a, "y", a["m"], a["ys"], a["n"] * 4)


def _one(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["n"] * 4)
    yield _writes(a, "y", a["m"], a["ys"], a["n"] * 4)


def _norm(a: Args, _: str) -> Iterator[Patch]:
    yield from _one(a, _)
    yield _reads(a, "w", 1, 0, a["n"] * 4, "any")


def _norm_quantise(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["n"] * 4, "any")  # every part takes the whole row's sum
    yield _reads(a, "w", 1, 0, a["n"] * 4, "any")
    yield _writes(a, "out", a["m"], a["os"], activation_bytes(a["n"]))


def _unit_quantise(a: Args, _: str) -> Iterator[Patch]:
    yield from _pair(a)
    yield _writes(a, "out", a["m"], a["os"], activation_bytes(a["n"]))


def _quantise(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["k"] * 4)
    yield _writes(a, "out", a["m"], a["os"], activation_bytes(a["k"]))


def _soft_max(a: Args, _: str) -> Iterator[Patch]:
    yield from _one(a, _)
    yield _reads(a, "mask", a["m"], a["ms"], a["n"] * 4)


def _argmax(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["n"] * 4)
    yield _writes(a, "y", a["m"], 4, 4)


def _gather(a: Args, kind: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["limit"], a["xs"], _row(kind, a["n"]), "any")
    yield _reads(a, "ids", a["m"], a["ib"], a["ib"])
    yield _writes(a, "y", a["m"], a["ys"], a["n"] * 4)


def _set_rows(a: Args, kind: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["n"] * 4)
    yield _reads(a, "index", a["m"], a["ib"], a["ib"], "any")
    yield _writes(a, "y", a["limit"], a["ys"], _row(kind, a["n"]), "listed")


def _rope(a: Args, kind: str) -> Iterator[Patch]:
    m, heads, pairs = a["m"], a["heads"] - 1, a["nr"] // 2
    yield _reads(a, "x", m, a["xs"], heads * a["xh"] + a["hd"] * 4)
    yield _reads(a, "pos", m, 4, 4, "any")
    yield _reads(a, "freqs", 1, 0, -(-pairs // 8) * 64, "any")
    yield _reads(a, "factors", 1, 0, pairs * 4, "any")
    yield _reads(a, "index", m, a["ib"], a["ib"], "any")
    rows, whose = (a["limit"], "listed") if a["index"] else (m, "own")
    yield _writes(a, "y", rows, a["ys"], heads * a["yh"] + _row(kind, a["hd"]), whose)


_DTYPES = {layout.name: dtype for dtype, layout in LAYOUTS.items()}


def _matrix(a: Args, layout: str, experts: int = 1, name: str = "w") -> Patch:
    nbytes = packed_bytes(_DTYPES[layout], a["n"], a["k"])
    return _reads(a, name, experts, a.get("es", 0), nbytes, "any")


def _x_row(a: Args, layout: str) -> int:
    floats = isinstance(LAYOUTS[_DTYPES[layout]], FloatLayout)
    return a["k"] * 4 if floats else activation_bytes(a["k"])


def _table(a: Args, layout: str) -> Iterator[Patch]:
    yield _matrix(a, layout)
    yield _reads(a, "ids", a["m"], 4, 4)
    yield _writes(a, "y", a["m"], a["ys"], a["k"] * 4)


def _matmul(a: Args, layout: str) -> Iterator[Patch]:
    yield _matrix(a, layout)
    yield _reads(a, "x", a["m"], a["xs"], _x_row(a, layout), "any")
    yield _reads(a, "add", a["m"], a["adds"], a["n"] * 4)
    shared = a["unit"] * LAYOUTS[_DTYPES[layout]].tile == BLOCK and a["m"] <= ROWS_EACH
    yield _writes(a, "y", a["m"], a["ys"], a["n"] * 4, shared=shared)


def _gated(a: Args, variant: str) -> Iterator[Patch]:
    _, layout = variant.split("_")
    yield from (_matrix(a, layout, name=name) for name in "wv")
    yield _reads(a, "x", a["m"], a["xs"], _x_row(a, layout), "any")
    yield _writes(a, "out", a["m"], a["os"], activation_bytes(a["n"]))


def _gated_id(a: Args, variant: str) -> Iterator[Patch]:
    _, layout = variant.split("_")
    yield from (_matrix(a, layout, a["experts"], name) for name in "wv")
    yield from _pairs(a, layout)
    yield _writes(a, "out", a["m"], a["os"], activation_bytes(a["n"]))


def _lay(a: Args, kind: str) -> Iterator[Patch]:
    reach = sum((a[n] - 1) * a[s] for n, s in (("count", "sb"), ("n", "sn"), ("k", "sk")))
    yield _reads(a, "raw", 1, 0, reach + ELEMENT_BYTES[kind], "any")
    yield _writes(a, "out", a["count"], a["ob"], packed_bytes(F32, a["n"], a["k"]))


def _matmul_each(a: Args, layout: str) -> Iterator[Patch]:
    nbytes, rows = packed_bytes(_DTYPES[layout], a["n"], a["k"]), a["count"] * a["m"]
    yield _reads(a, "w", -(-a["count"] // a["group"]), a["ws"], nbytes, "any")
    reach = (a["count"] - 1) * a["xb"] + (a["m"] - 1) * a["xs"]
    yield _reads(a, "x", 1, 0, reach + a["k"] * 4, "any")
    yield _reads(a, "add", rows, a["adds"], a["n"] * 4)
    yield _writes(a, "y", rows, a["ys"], a["n"] * 4)


def _convolve(a: Args, layout: str) -> Iterator[Patch]:
    yield _matrix(a, layout)
    steps = (("images", "xn"), ("across", "xc"), ("i", "si"), ("h", "sh"), ("width", "sw"))
    reach = sum((a[count] - 1) * a[step] for count, step in steps)
    reach += (a["m"] // max(a["across"], 1) - 1) * a["xr"]
    yield _reads(a, "x", 1, 0, reach + 4, "any")
    yield _writes(a, "y", a["images"] * a["n"], a["m"] * 4, a["m"] * 4)


def _matmul_id(a: Args, layout: str) -> Iterator[Patch]:
    yield _matrix(a, layout, a["experts"])
    yield from _pairs(a, layout)
    yield _writes(a, "y", a["m"], a["ys"], a["n"] * 4)


def _pairs(a: Args, layout: str) -> Iterator[Patch]:
    """Rows of x for pairs of a token and an expert, and which experts those are."""
    used = max(a["u"], 1)
    width = (used - 1) * a["xu"] + _x_row(a, layout)
    yield _reads(a, "x", -(-a["m"] // used), a["xs"], width, "any")
    yield _reads(a, "ids", a["m"], 4, 4, "any")


def _shown(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "mask", a["m"], a["ms"], a["n"] * 4)
    yield _reads(a, "length", 1, 0, 4, "any")
    yield _writes(a, "list", a["m"], list_bytes(a["n"]), list_bytes(a["n"]))


def _listed(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "given", a["m"], a["n"] * 4, a["n"] * 4)
    yield _reads(a, "length", 1, 0, 4, "any")
    yield _writes(a, "list", a["m"], list_bytes(a["n"]), list_bytes(a["n"]))


def _lists(a: Args) -> Patch:
    return _reads(a, "list", a["m"], list_bytes(a["n"]), list_bytes(a["n"]), "any")


def _parts(a: Args) -> int:
    return attention.scratch_bytes(a["m"], a["heads"], a["vd"], a["n"])


def _cached(a: Args, kind: str) -> Iterator[Patch]:
    """Queries, keys and values of attention."""
    yield _reads(a, "q", a["m"], a["qs"], a["heads"] * a["hd"] * 4, "any")
    others = a["kv_heads"] - 1
    yield _reads(a, "k", a["c"], a["ks"], others * a["kh"] + _row(kind, a["hd"]), "any")
    yield _reads(a, "v", a["c"], a["vs"], others * a["vh"] + _row(kind, a["vd"]), "any")
    yield _lists(a)


def _mixed(a: Args) -> Iterator[Patch]:
    """What ends attention: sinks, and the result."""
    yield _reads(a, "sinks", 1, 0, a["heads"] * 4, "any")
    yield _writes(a, "y", a["m"], a["ys"], a["heads"] * a["vd"] * 4)


def _attention(a: Args, kind: str) -> Iterator[Patch]:
    yield from _cached(a, kind)
    yield from _mixed(a)


def _plainly(a: Args, kinds: str) -> Iterator[Patch]:
    """Attention of any layout: rows of heads of numbers at given distances."""
    kind, mask = kinds.split("_")
    sides = (("q", "m", "heads", "hd", "f32"), ("k", "n", "kv_heads", "hd", kind),
             ("v", "n", "kv_heads", "vw", kind))  # fmt: skip
    for name, *counts, size in sides:
        pairs = zip(counts, "rhd", strict=True)
        reach = sum((a[count] - 1) * a[name + axis] for count, axis in pairs)
        yield _reads(a, name, 1, 0, reach + ELEMENT_BYTES[size], "any")
    yield _reads(a, "mask", a["m"], a["n"] * ELEMENT_BYTES[mask], a["n"] * ELEMENT_BYTES[mask])
    yield _reads(a, "length", 1, 0, 4, "any")
    yield _writes(a, "scores", 1, 0, a["m"] * a["heads"] * a["n"] * 4)
    yield _writes(a, "y", a["m"], a["heads"] * a["vw"] * 4, a["heads"] * a["vw"] * 4)


def _row_by_row(a: Args, kind: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["n"] * ELEMENT_BYTES[kind])
    width = a["k"] * 4 if "k" in a else a["n"] * (4 if "rising" in a else ELEMENT_BYTES[kind])
    yield _writes(a, "y", a["m"], a["ys"], width)


def _chunks(a: Args, kind: str) -> Iterator[Patch]:
    yield from _cached(a, kind)
    yield _writes(a, "part", 1, 0, _parts(a))


def _merge(a: Args, _: str) -> Iterator[Patch]:
    yield _lists(a)
    yield _reads(a, "part", 1, 0, _parts(a), "any")
    yield from _mixed(a)


def _shares(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["xs"], a["n"] * 4)
    yield _writes(a, "y", a["m"], a["u"] * 4, a["u"] * 4)
    yield _reads(a, "ids", a["m"], a["u"] * 4, a["u"] * 4)


def _together(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", a["m"], a["u"] * a["n"] * 4, a["u"] * a["n"] * 4, "any")
    yield _reads(a, "shares", a["m"], a["u"] * 4, a["u"] * 4, "any")
    yield _writes(a, "y", a["m"], a["n"] * 4, a["n"] * 4)


def _add_id(a: Args, _: str) -> Iterator[Patch]:
    width = a["n"] * 4
    yield _reads(a, "x", a["m"], width, width)
    yield _reads(a, "rows", a["limit"], width, width, "any")
    yield _reads(a, "ids", a["m"], 4, 4, "any")
    yield _writes(a, "y", a["m"], width, width)


def _solve(a: Args, _: str) -> Iterator[Patch]:
    n, width = a["n"], a["k"] * 4
    yield _reads(a, "a", 1, 0, a["count"] * n * n * 4, "any")
    yield _reads(a, "b", a["count"] * n, width, width)
    yield _writes(a, "y", a["count"] * n, width, width)


def _enlarge(a: Args, _: str) -> Iterator[Patch]:
    yield _reads(a, "x", 1, 0, a["images"] * a["height"] * a["width"] * 4, "any")
    for count, tables in (
        ("rows", ("above", "below", "down")),
        ("columns", ("left", "right", "across")),
    ):
        for table in tables:
            yield _reads(a, table, 1, 0, a[count] * 4, "any")
    yield _writes(a, "y", a["images"] * a["rows"], a["columns"] * 4, a["columns"] * 4)


def _course(a: Args, width: int, x: str) -> Iterator[Patch]:
    """Rows of a step and of its log, and which follows which."""
    yield _reads(a, x, a["m"], width, width, "any")
    yield _reads(a, "log", a["limit"], width, width, "any")
    yield _reads(a, "parents", a["m"], 4, 4, "any")
    yield _reads(a, "replay", a["slots"], a["r"] * 4, a["r"] * 4, "any")
    yield _reads(a, "past", a["slots"], 4, 4, "any")
    if "certain" in a:
        yield _reads(a, "certain", a["slots"], 4, 4, "any")


def _conv(a: Args, _: str) -> Iterator[Patch]:
    width = a["n"] * 4
    yield from _course(a, width, "x")
    yield _reads(a, "state", a["slots"] * (a["taps"] - 1), width, width, "any")
    yield _reads(a, "w", a["taps"], width, width, "any")
    yield _writes(a, "y", a["m"], width, width)


def _conv_next(a: Args, _: str) -> Iterator[Patch]:
    width = a["n"] * 4
    yield from _course(a, width, "x")
    yield _reads(a, "state", a["slots"] * (a["taps"] - 1), width, width)
    yield _writes(a, "y", a["slots"] * (a["taps"] - 1), width, width)


def _delta(a: Args, _: str) -> Iterator[Patch]:
    yield from _course(a, a["width"] * 4, "rows")
    yield _reads(a, "state", a["slots"] * a["heads"] * a["d"], a["v"] * 4, a["v"] * 4, "any")
    row = a["groups"] * a["d"] * 4
    yield _reads(a, "q", a["m"], row, row, "any")
    yield _writes(a, "y", a["m"], a["heads"] * a["v"] * 4, a["heads"] * a["v"] * 4)
    yield _writes(a, "ends", a["slots"] * a["heads"] * a["d"], a["v"] * 4, a["v"] * 4)


def _delta_next(a: Args, _: str) -> Iterator[Patch]:
    yield from _course(a, a["width"] * 4, "rows")
    for held in ("state", "ends"):
        yield _reads(a, held, a["slots"] * a["heads"] * a["d"], a["v"] * 4, a["v"] * 4)
    yield _writes(a, "y", a["slots"] * a["heads"] * a["d"], a["v"] * 4, a["v"] * 4)


def _native(a: Args, _: str) -> Iterator[Patch]:
    """A C function: any thread any byte of its operands."""
    for name in (n for n in a if n + "b" in a):
        yield Patch(name, name == "y", a[name], 1, 0, a[name + "b"], "any")


def _nest(a: Args, variant: str) -> Iterator[Patch]:
    """Operands in the order of their element types: what each shows of the nest's axes."""
    *kinds, _ = variant.split("_")
    extents = {axis: a[axis] for axis in axes_among(tuple(a))}
    for name, kind in zip(names(len(kinds)), kinds, strict=True):
        strides = tuple([a[name + axis] for axis in extents])
        along = list(zip(extents.items(), strides, strict=True))
        # A sum of nothing is written, and its sources are not read; without a place nothing is.
        none = 0 in extents.values() and any(not n and (s or x[0] == "k") for (x, n), s in along)
        size = 0 if none else sum([(n - 1) * s for (_, n), s in along]) + ELEMENT_BYTES[kind]
        yield Patch(name, name == "y", a[name], 1, 0, size, "own", strides)


RULES: dict[str, Rule] = {
    **dict.fromkeys(UNITS, _unit),
    **{f"{unit}_quantise": _unit_quantise for unit in UNITS},
    "rms_norm": _norm, "rms_norm_quantise": _norm_quantise,
    "quantise": _quantise, "soft_max": _soft_max, "argmax": _argmax, "shown_slots": _shown,
    "listed_slots": _listed,
    "merge_chunks": _merge, "attend_chunks_": _chunks, "attention_": _attention,
    "convolve_": _convolve, "lay_": _lay, "matmul_each_": _matmul_each,
    "matmul_id_": _matmul_id, "matmul_": _matmul, "gated_id_": _gated_id, "gated_": _gated,
    "rows_": _table, "gather_": _gather, "set_rows_": _set_rows, "rope_": _rope, "nest_": _nest,
    "native": _native,
    "attend_plainly_": _plainly, "cumsum_": _row_by_row, "argsort_": _row_by_row,
    "top_k_": _row_by_row, "solve_tri": _solve, "enlarge": _enlarge,
    "moe_shares": _shares, "moe_mix": _together, "add_id": _add_id, "ssm_conv": _conv,
    "ssm_conv_next": _conv_next, "delta_net": _delta, "delta_net_next": _delta_next,
    "state_space": _delta, "state_space_next": _delta_next,
}  # fmt: skip


@cache
def rule_of(kernel: str) -> tuple[Rule, str] | None:
    """The rule of a kernel and its variant (type or layout); None where nothing is known of it."""
    if kernel in RULES:
        return RULES[kernel], ""
    for family in sorted((f for f in RULES if f.endswith("_")), key=len, reverse=True):
        if kernel.startswith(family):
            return RULES[family], kernel.removeprefix(family)
    return None


def footprint(kernel: str, arguments: Args) -> tuple[Patch, ...] | None:
    """All memory that a call touches; None for a kernel without a rule. Argument 0: nothing."""
    found = rule_of(kernel)
    if found is None:
        return None
    rule, variant = found
    patches = rule(arguments, variant)
    return tuple(p for p in patches if p.base and p.rows > 0 and p.width > 0)
