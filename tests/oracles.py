"""A second meaning of every op: loops over elements in float64, written from ggml's semantics.

Not written from the references of `ggraph.ops`, and sharing no code with them: a reference is
never tested against itself. Arrays come in logical form and results are float64 or integers; what
an op overwrites is copied, never changed. Legend: indices as in the op's own file.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Oracle = Callable[..., Array]
ORACLES: dict[str, Oracle] = {}


def oracle(*names: str) -> Callable[[Oracle], Oracle]:
    """Register a function as the meaning of the ops called `names`."""

    def keep(function: Oracle) -> Oracle:
        ORACLES.update(dict.fromkeys(names, function))
        return function

    return keep


def places(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every index of an array of `shape`, last axis fastest."""
    return iter(np.ndindex(*shape))


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float64)


def spread(b: Array, at: tuple[int, ...]) -> float:
    """The element of b that meets index `at` of a larger array: aligned right, size 1 repeats."""
    tail = at[len(at) - b.ndim :]
    return float(b[tuple(0 if n == 1 else i for i, n in zip(tail, b.shape, strict=True))])


# --- elements ------------------------------------------------------------------------------------


def _erf_gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def _tanh_gelu(x: float) -> float:
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _quick_gelu(x: float) -> float:
    return x / (1 + math.exp(-1.702 * x))


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _hard(x: float) -> float:
    return min(1.0, max(0.0, (x + 3) / 6))


UNARY: dict[str, Callable[[float], float]] = {
    "neg": lambda x: -x,
    "abs": lambda x: x if x >= 0 else -x,
    "sgn": lambda x: (x > 0) - (x < 0),
    "step": lambda x: 1 if x > 0 else 0,
    "sqr": lambda x: x * x,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "expm1": math.expm1,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "relu": lambda x: x if x > 0 else 0,
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "silu": _silu,
    "gelu": _tanh_gelu,
    "gelu_erf": _erf_gelu,
    "gelu_quick": _quick_gelu,
    "softplus": lambda x: x if x > 20 else math.log(1 + math.exp(x)),
    "hardsigmoid": _hard,
    "hardswish": lambda x: x * _hard(x),
    "floor": math.floor,
    "ceil": math.ceil,
    "round": lambda x: math.floor(x + 0.5) if x > 0 else math.ceil(x - 0.5),
    "trunc": lambda x: int(x),
}
BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": lambda a, b: a if a > b else b,
    "minimum": lambda a, b: a if a < b else b,
    "pow": lambda a, b: a**b,
}
GLU: dict[str, Callable[[float], float]] = {
    "swiglu": _silu,
    "geglu": _tanh_gelu,
    "geglu_erf": _erf_gelu,
    "geglu_quick": _quick_gelu,
    "reglu": lambda x: max(x, 0.0),
}


def _of_one(f: Callable[[float], float]) -> Oracle:
    def meaning(x: Array) -> Array:
        y = zeros(*x.shape)
        for i in places(x.shape):
            y[i] = f(float(x[i]))
        return y

    return meaning


def _of_two(f: Callable[[float, float], float]) -> Oracle:
    def meaning(a: Array, b: Array) -> Array:
        y = zeros(*a.shape)
        for i in places(a.shape):
            y[i] = f(float(a[i]), spread(b, i))
        return y

    return meaning


def _gated(f: Callable[[float], float]) -> Callable[[float, float], float]:
    return lambda gate, up: f(gate) * up


ORACLES.update({name: _of_one(f) for name, f in UNARY.items()})
ORACLES.update({name: _of_two(f) for name, f in BINARY.items()})
ORACLES.update({name: _of_two(_gated(f)) for name, f in GLU.items()})


@oracle("scale")
def scale(a: Array, *, scale: float, bias: float) -> Array:
    return _of_one(lambda x: x * scale + bias)(a)


@oracle("clamp")
def clamp(a: Array, *, low: float, high: float) -> Array:
    return _of_one(lambda x: low if x < low else high if x > high else x)(a)


# --- norms and reductions ------------------------------------------------------------------------


def _normed(row: list[float], eps: float) -> list[float]:
    mean = math.fsum(row) / len(row)
    variance = math.fsum((v - mean) ** 2 for v in row) / len(row)
    return [(v - mean) / math.sqrt(variance + eps) for v in row]


def _rows(x: Array) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    for lead in places(x.shape[:-1]):
        yield lead, [float(v) for v in x[lead]]


@oracle("norm")
def norm(x: Array, *, eps: float) -> Array:
    y = zeros(*x.shape)
    for lead, row in _rows(x):
        y[lead] = _normed(row, eps)
    return y


@oracle("rms_norm")
def rms_norm(x: Array, *, eps: float) -> Array:
    y = zeros(*x.shape)
    for lead, row in _rows(x):
        factor = 1 / math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        y[lead] = [v * factor for v in row]
    return y


@oracle("l2_norm")
def l2_norm(x: Array, *, eps: float) -> Array:
    y = zeros(*x.shape)
    for lead, row in _rows(x):
        length = math.sqrt(math.fsum(v * v for v in row))
        y[lead] = [v / max(length, eps) for v in row]
    return y


@oracle("group_norm")
def group_norm(x: Array, *, groups: int, eps: float) -> Array:
    y = zeros(*x.shape)
    c, h, w = x.shape[-3:]
    size = c // groups
    for lead in places(x.shape[:-3]):
        for g in range(groups):
            cells = [(*lead, g * size + i, j, k) for i, j, k in places((size, h, w))]
            for cell, v in zip(cells, _normed([float(x[i]) for i in cells], eps), strict=True):
                y[cell] = v
    return y


@oracle("sum")
def sum_all(x: Array) -> Array:
    return np.array([math.fsum(float(x[i]) for i in places(x.shape))])


@oracle("sum_rows")
def sum_rows(x: Array) -> Array:
    y = zeros(*x.shape[:-1], 1)
    for lead, row in _rows(x):
        y[lead] = math.fsum(row)
    return y


@oracle("mean")
def mean(x: Array) -> Array:
    y = zeros(*x.shape[:-1], 1)
    for lead, row in _rows(x):
        y[lead] = math.fsum(row) / len(row)
    return y


@oracle("cumsum")
def cumsum(x: Array) -> Array:
    y = zeros(*x.shape)
    for lead, row in _rows(x):
        y[lead] = [math.fsum(row[: i + 1]) for i in range(len(row))]
    return y


# --- orders --------------------------------------------------------------------------------------


def _order(row: list[float], descending: bool, most: int | None = None) -> list[int]:
    """Selection sort: again and again the first of the best that are left, `most` of them."""
    left, out = list(range(len(row))), []
    while left and len(out) != most:
        best = left[0]
        for i in left:
            if (row[i] > row[best]) if descending else (row[i] < row[best]):
                best = i
        left.remove(best)
        out.append(best)
    return out


@oracle("argsort")
def argsort(x: Array, *, order: str) -> Array:
    y = np.zeros(x.shape, np.int64)
    for lead, row in _rows(x):
        y[lead] = _order(row, order == "desc")
    return y


@oracle("top_k")
def top_k(x: Array, *, k: int) -> Array:
    y = np.zeros((*x.shape[:-1], k), np.int64)
    for lead, row in _rows(x):
        y[lead] = _order(row, True, k)
    return y


@oracle("draw")
def draw(
    logits: Array, numbers: Array, *, k: int, always: bool, temp: float, top_p: float, min_p: float
) -> Array:
    y = np.zeros(len(logits), np.int64)
    for row, (scores, u) in enumerate(zip(logits.astype(float).tolist(), numbers, strict=True)):
        kept = _order(scores, True, k)
        chances = [math.exp(scores[i] - scores[kept[0]]) for i in kept]
        before = [sum(chances[:n]) / sum(chances) for n in range(k)]
        kept = [i for i, share in zip(kept, before, strict=True) if share < top_p or i == kept[0]]
        kept = [i for i in kept if math.exp(scores[i] - scores[kept[0]]) >= min_p]
        law = {i: math.exp((scores[i] - scores[kept[0]]) / temp) for i in sorted(kept)}
        sums = [sum(list(law.values())[: n + 1]) for n in range(len(law))]
        y[row] = next(i for i, total in zip(law, sums, strict=True) if total > u * sums[-1])
    return y


@oracle("argmax")
def argmax(x: Array) -> Array:
    y = np.zeros(x.shape[:-1], np.int64)
    for lead, row in _rows(x):
        y[lead] = _order(row, True, 1)[0]
    return y


# --- products ------------------------------------------------------------------------------------


def _source_slice(w: Array, x: Array, lead: tuple[int, ...]) -> Array:
    """The matrix of w that meets leading index `lead` of x: ggml's i2 / (ne12 / ne02)."""
    extra = x.ndim - w.ndim
    at = [i // (x.shape[extra + a] // w.shape[a]) for a, i in enumerate(lead[extra:])]
    found: Array = w[tuple(at)]
    return found


def _dot(a: Array, b: Array) -> float:
    return math.fsum(float(p) * float(q) for p, q in zip(a, b, strict=True))


@oracle("mul_mat")
def mul_mat(w: Array, x: Array) -> Array:
    y = zeros(*x.shape[:-1], w.shape[-2])
    for *lead, i, j in places(y.shape):
        at = tuple(lead)
        y[(*at, i, j)] = _dot(_source_slice(w, x, at)[j], x[(*at, i)])
    return y


@oracle("mul_mat_id")
def mul_mat_id(w: Array, x: Array, ids: Array) -> Array:
    y = zeros(*ids.shape, w.shape[1])
    for t, u, j in places(y.shape):
        y[t, u, j] = _dot(w[ids[t, u], j], x[t, u if x.shape[1] > 1 else 0])
    return y


@oracle("moe_shares")
def moe_shares(chances: Array, ids: Array, *, normalise: bool, scale: float) -> Array:
    y = zeros(*ids.shape)
    for t in range(ids.shape[0]):
        own = [float(chances[t, e]) for e in ids[t]]
        whole = math.fsum(own) if normalise else 1.0
        y[t] = [v / whole * scale for v in own]
    return y


@oracle("moe_mix")
def moe_mix(values: Array, shares: Array) -> Array:
    y = zeros(values.shape[0], values.shape[2])
    for t, j in places(y.shape):
        y[t, j] = math.fsum(float(values[t, u, j]) * float(s) for u, s in enumerate(shares[t]))
    return y


@oracle("add_id")
def add_id(x: Array, rows: Array, ids: Array) -> Array:
    y = zeros(*x.shape)
    for t, u, j in places(x.shape):
        y[t, u, j] = float(x[t, u, j]) + float(rows[ids[t, u], j])
    return y


@oracle("swiglu_oai")
def swiglu_oai(gate: Array, up: Array, *, alpha: float, limit: float) -> Array:
    def meaning(g: float, u: float) -> float:
        g, u = min(g, limit), max(-limit, min(u, limit))
        return g / (1 + math.exp(-alpha * g)) * (u + 1)

    return _of_two(meaning)(gate, up)


@oracle("out_prod")
def out_prod(a: Array, b: Array) -> Array:
    y = zeros(*b.shape[:-2], b.shape[-1], a.shape[-1])
    for *lead, i, j in places(y.shape):
        at = tuple(lead)
        y[(*at, i, j)] = _dot(_source_slice(a, b, at)[:, j], b[at][:, i])
    return y


# --- rope ----------------------------------------------------------------------------------------


def _yarn_bounds(
    n_dims: int, n_ctx_orig: int, base: float, fast: float, slow: float
) -> tuple[float, float]:
    def dim(turns: float) -> float:
        return n_dims * math.log(n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(base))

    return max(0, math.floor(dim(fast))), min(n_dims - 1, math.ceil(dim(slow)))


def _pair_angle(
    position: int, pair: int, factor: float, attrs: dict[str, Any]
) -> tuple[float, float]:
    """Angle and magnitude of one pair, step by step as rope_yarn does it."""
    extrapolated = position * math.pow(attrs["freq_base"], -2 * pair / attrs["n_rot"]) / factor
    interpolated = attrs["freq_scale"] * extrapolated
    magnitude = attrs["attn_factor"]
    if attrs["ext_factor"] == 0:
        return interpolated, magnitude
    low, high = _yarn_bounds(
        attrs["n_rot"],
        attrs["n_ctx_orig"],
        attrs["freq_base"],
        attrs["beta_fast"],
        attrs["beta_slow"],
    )
    y = (pair - low) / max(0.001, high - low)
    mix = (1 - min(1, max(0, y))) * attrs["ext_factor"]
    magnitude *= 1 + 0.1 * math.log(1 / attrs["freq_scale"])
    return interpolated * (1 - mix) + extrapolated * mix, magnitude


@oracle("rope")
def rope(x: Array, positions: Array, *factors: Array, **attrs: Any) -> Array:
    y = x.astype(np.float64)
    half = attrs["n_rot"] // 2
    for t, h, pair in places((x.shape[0], x.shape[1], half)):
        factor = float(factors[0][pair]) if attrs["has_factors"] else 1.0
        angle, magnitude = _pair_angle(int(positions[t]), pair, factor, attrs)
        i, j = (2 * pair, 2 * pair + 1) if attrs["mode"] == "normal" else (pair, pair + half)
        a, b = float(x[t, h, i]), float(x[t, h, j])
        y[t, h, i] = magnitude * (a * math.cos(angle) - b * math.sin(angle))
        y[t, h, j] = magnitude * (a * math.sin(angle) + b * math.cos(angle))
    return y


# --- attention -----------------------------------------------------------------------------------


def _slope(head: int, heads: int, max_bias: float) -> float:
    if max_bias == 0:
        return 1.0
    n = 2 ** int(math.log2(heads))
    if head < n:
        return float(2.0 ** (-max_bias / n * (head + 1)))
    return float(2.0 ** (-max_bias / 2 / n * (2 * (head - n) + 1)))


def _chances(scores: list[float], extra: list[float]) -> list[float]:
    top = max([*scores, *extra], default=-math.inf)
    if top == -math.inf:
        return [0.0] * len(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum([*weights, *(math.exp(e - top) for e in extra)])
    return [w / total for w in weights]


@oracle("soft_max")
def soft_max(
    x: Array, *rest: Array, scale: float, max_bias: float, has_mask: bool, has_sinks: bool
) -> Array:
    mask = rest[0] if has_mask else np.zeros(1)
    heads = x.shape[-3] if x.ndim > 2 else 1
    y = zeros(*x.shape)
    for lead, row in _rows(x):
        head = lead[-2] if x.ndim > 2 else 0
        slope = _slope(head, heads, max_bias)
        scores = [v * scale + slope * spread(mask, (*lead, c)) for c, v in enumerate(row)]
        y[lead] = _chances(scores, [float(rest[-1][head])] if has_sinks else [])
    return y


@oracle("flash_attn")
def flash_attn(q: Array, k: Array, v: Array, *rest: Array, **attrs: Any) -> Array:
    t_count, heads, _ = q.shape
    group = heads // k.shape[1]
    count = int(rest[int(attrs["has_mask"])][0]) if attrs["has_length"] else k.shape[0]
    listed = attrs["has_mask"] and rest[0].dtype == np.int32
    y = zeros(t_count, heads, v.shape[2])
    for t, h in places((t_count, heads)):
        scores = []
        seen = [int(c) for c in rest[0][t] if c < count] if listed else list(range(count))
        for c in seen:
            s = _dot(q[t, h], k[c, h // group]) * attrs["scale"]
            if attrs["softcap"] != 0:
                s = attrs["softcap"] * math.tanh(s / attrs["softcap"])
            shown = attrs["has_mask"] and not listed
            scores.append(s + (float(rest[0][t, c]) if shown else 0.0))
        extra = [float(rest[-1][h])] if attrs["has_sinks"] else []
        for c, p in zip(seen, _chances(scores, extra), strict=True):
            if p > 0:
                for j in range(v.shape[2]):
                    y[t, h, j] += p * float(v[c, h // group, j])
    return y


def _causal(x: Array, n_past: int, value: float) -> Array:
    y = x.astype(np.float64)
    for *lead, t, c in places(x.shape):
        if c > n_past + t:
            y[(*lead, t, c)] = value
    return y


@oracle("diag_mask_inf")
def diag_mask_inf(x: Array, *, n_past: int) -> Array:
    return _causal(x, n_past, -math.inf)


@oracle("diag_mask_zero")
def diag_mask_zero(x: Array, *, n_past: int) -> Array:
    return _causal(x, n_past, 0.0)


# --- rows and copies -----------------------------------------------------------------------------


@oracle("get_rows")
def get_rows(table: Array, ids: Array) -> Array:
    if ids.ndim > 1 and table.ndim > 2:
        y = np.zeros((*ids.shape, table.shape[-1]), table.dtype)
        for at in places(ids.shape):
            y[at] = table[at[:-1]][ids[at]]
        return y
    y = np.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    for at in places(ids.shape):
        y[at] = table[ids[at]]
    return y


@oracle("set_rows")
def set_rows(cache: Array, rows: Array, index: Array) -> Array:
    y = cache.copy()
    for t in range(index.shape[0]):
        y[index[t]] = rows[t]
    return y


@oracle("set")
def set_part(x: Array, part: Array, *, starts: tuple[int, ...]) -> Array:
    y = x.copy()
    for at in places(part.shape):
        y[tuple(a + i for a, i in zip(starts, at, strict=True))] = part[at]
    return y


@oracle("cpy")
def cpy(x: Array, into: Array) -> Array:
    y = into.copy()
    for source, target in zip(places(x.shape), places(into.shape), strict=True):
        y[target] = x[source]
    return y


@oracle("cont", "dup", "copy", "cast")
def same(x: Array, *used: Array, **attrs: Any) -> Array:
    y = np.zeros(x.shape, x.dtype)
    for at in places(x.shape):
        y[at] = x[at]
    return y


# --- views ---------------------------------------------------------------------------------------


@oracle("reshape")
def reshape(x: Array, *, shape: tuple[int, ...]) -> Array:
    known = math.prod(n for n in shape if n != -1)
    sizes = tuple(x.size // known if n == -1 else n for n in shape)
    y = np.zeros(sizes, x.dtype)
    for source, target in zip(places(x.shape), places(sizes), strict=True):
        y[target] = x[source]
    return y


@oracle("permute")
def permute(x: Array, *, axes: tuple[int, ...]) -> Array:
    order = [a % x.ndim for a in axes]
    y = np.zeros(tuple(x.shape[a] for a in order), x.dtype)
    for at in places(y.shape):
        source = [0] * x.ndim
        for i, a in enumerate(order):
            source[a] = at[i]
        y[at] = x[tuple(source)]
    return y


@oracle("transpose")
def transpose(x: Array) -> Array:
    y = np.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)
    for *lead, i, j in places(y.shape):
        y[(*lead, i, j)] = x[(*lead, j, i)]
    return y


@oracle("slice")
def box(
    x: Array, *, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    y = np.zeros(sizes, x.dtype)
    for at in places(sizes):
        y[at] = x[tuple(a + i * s for a, i, s in zip(starts, at, steps, strict=True))]
    return y


@oracle("view")
def view(
    x: Array, *, shape: tuple[int, ...], steps: tuple[int, ...], start: tuple[int, ...]
) -> Array:
    flat = [x[at] for at in places(x.shape)]
    y = np.zeros(shape, x.dtype)
    for at in places(shape):
        y[at] = flat[start[0] + sum(i * s for i, s in zip(at, steps, strict=True))]
    return y


# --- joining and creating ------------------------------------------------------------------------


@oracle("concat")
def concat(*parts: Array, axis: int) -> Array:
    axis %= parts[0].ndim
    shape = list(parts[0].shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    y = np.zeros(tuple(shape), parts[0].dtype)
    before = 0
    for p in parts:
        for at in places(p.shape):
            y[tuple(i + before * (a == axis) for a, i in enumerate(at))] = p[at]
        before += p.shape[axis]
    return y


@oracle("repeat")
def repeat(x: Array, *, shape: tuple[int, ...]) -> Array:
    y = np.zeros(shape, x.dtype)
    for at in places(shape):
        tail = at[len(shape) - x.ndim :]
        y[at] = x[tuple(i % n for i, n in zip(tail, x.shape, strict=True))]
    return y


@oracle("pad")
def pad(x: Array, *, before: tuple[int, ...], after: tuple[int, ...]) -> Array:
    y = np.zeros(tuple(b + n + a for b, n, a in zip(before, x.shape, after, strict=True)), x.dtype)
    for at in places(x.shape):
        y[tuple(b + i for b, i in zip(before, at, strict=True))] = x[at]
    return y


@oracle("roll")
def roll(x: Array, *, shifts: tuple[int, ...]) -> Array:
    y = np.zeros(x.shape, x.dtype)
    for at in places(x.shape):
        y[tuple((i + s) % n for i, s, n in zip(at, shifts, x.shape, strict=True))] = x[at]
    return y


@oracle("arange")
def arange(*, start: float, stop: float, step: float) -> Array:
    out, i = [], 0
    while (start + i * step < stop) if step > 0 else (start + i * step > stop):
        out.append(start + i * step)
        i += 1
    return np.array(out, np.float64)


@oracle("fill")
def fill(*, shape: tuple[int, ...], value: float, dtype: str) -> Array:
    y = zeros(*shape)
    for at in places(shape):
        y[at] = value
    return y


@oracle("tri")
def tri(x: Array, *, kind: str) -> Array:
    y = zeros(*x.shape)
    for *lead, i, j in places(x.shape):
        keep = {"lower": j < i, "lower_diag": j <= i, "upper": j > i, "upper_diag": j >= i}[kind]
        if keep:
            y[(*lead, i, j)] = x[(*lead, i, j)]
    return y


# --- images --------------------------------------------------------------------------------------


def _count(n: int, k: int, s: int, p: int, d: int) -> int:
    return (n + 2 * p - d * (k - 1) - 1) // s + 1


@oracle("im2col")
def im2col(
    x: Array,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Array:
    n, channels, height, width = x.shape
    h, w = kernel
    rows = _count(height, h, stride[0], padding[0], dilation[0])
    columns = _count(width, w, stride[1], padding[1], dilation[1])
    y = zeros(n, rows, columns, channels * h * w)
    for b, i, j, c, u, v in places((n, rows, columns, channels, h, w)):
        r = i * stride[0] + u * dilation[0] - padding[0]
        q = j * stride[1] + v * dilation[1] - padding[1]
        if 0 <= r < height and 0 <= q < width:
            y[b, i, j, (c * h + u) * w + v] = x[b, c, r, q]
    return y


@oracle("conv_2d")
def conv_2d(w: Array, x: Array, *, stride: tuple[int, int], dilation: tuple[int, int]) -> Array:
    images, channels, height, width = x.shape
    kernels, _, h, v = w.shape
    rows = _count(height, h, stride[0], 0, dilation[0])
    columns = _count(width, v, stride[1], 0, dilation[1])
    y = zeros(images, kernels, rows, columns)
    for n, o, i, j, c, a, b in places((*y.shape, channels, h, v)):
        r, q = i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]
        y[n, o, i, j] += float(x[n, c, r, q]) * float(w[o, c, a, b])
    return y


@oracle("conv_2d_dw")
def conv_2d_dw(w: Array, x: Array, *, stride: tuple[int, int], dilation: tuple[int, int]) -> Array:
    own = [
        conv_2d(w[c : c + 1], x[:, c : c + 1], stride=stride, dilation=dilation)
        for c in range(len(w))
    ]
    return np.concatenate(own, 1)


@oracle("upscale")
def upscale(x: Array, *, factor: tuple[int, int], mode: str) -> Array:
    *lead, height, width = x.shape
    y = zeros(*lead, height * factor[0], width * factor[1])

    def near(at: int, step: int, n: int) -> list[tuple[int, float]]:
        if mode == "nearest":
            return [(at // step, 1.0)]
        place = (at + 0.5) / step - 0.5
        low = math.floor(place)
        way = place - low
        return [(max(low, 0), 1 - way), (min(low + 1, n - 1), way)]

    for *rest, i, j in places(y.shape):
        for r, a in near(i, factor[0], height):
            for q, b in near(j, factor[1], width):
                y[(*rest, i, j)] += a * b * float(x[(*rest, r, q)])
    return y


@oracle("solve_tri")
def solve_tri(a: Array, b: Array) -> Array:
    x = zeros(*b.shape)
    for *rest, column in places((*b.shape[:-2], b.shape[-1])):
        for i in range(b.shape[-2]):
            known = sum(float(a[(*rest, i, j)]) * float(x[(*rest, j, column)]) for j in range(i))
            total = float(b[(*rest, i, column)]) - known
            x[(*rest, i, column)] = total / float(a[(*rest, i, i)])
    return x


@oracle("pool_2d")
def pool_2d(
    x: Array,
    *,
    kind: str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Array:
    height, width = x.shape[-2:]
    rows = _count(height, kernel[0], stride[0], padding[0], 1)
    columns = _count(width, kernel[1], stride[1], padding[1], 1)
    y = zeros(*x.shape[:-2], rows, columns)
    for *lead, i, j in places(y.shape):
        seen = [
            float(x[(*lead, r, q)])
            for r in range(i * stride[0] - padding[0], i * stride[0] - padding[0] + kernel[0])
            for q in range(j * stride[1] - padding[1], j * stride[1] - padding[1] + kernel[1])
            if 0 <= r < height and 0 <= q < width
        ]
        y[(*lead, i, j)] = max(seen) if kind == "max" else sum(seen) / (kernel[0] * kernel[1])
    return y


@oracle("where")
def where(condition: Array, a: Array, b: Array) -> Array:
    y = zeros(*a.shape)
    for i in places(a.shape):
        y[i] = a[i] if condition[i] else spread(b, i)
    return y


@oracle("reduce")
def reduce(x: Array, *, kind: str, axes: tuple[int, ...]) -> Array:
    y = zeros(*(1 if i in axes else n for i, n in enumerate(x.shape)))
    seen: dict[tuple[int, ...], list[float]] = {at: [] for at in places(y.shape)}
    for at in places(x.shape):
        seen[tuple(0 if i in axes else p for i, p in enumerate(at))].append(float(x[at]))
    for at, values in seen.items():
        if kind in ("sum", "mean"):
            y[at] = math.fsum(values) / (len(values) if kind == "mean" else 1)
        else:
            y[at] = max(values) if kind == "max" else min(values)
    return y


# --- fused ---------------------------------------------------------------------------------------


@oracle("rms_norm_mul")
def rms_norm_mul(x: Array, w: Array, *, eps: float) -> Array:
    y = rms_norm(x, eps=eps)
    for at in places(y.shape):
        y[at] *= float(w[at[-1]])
    return y


@oracle("mul_mat_add")
def mul_mat_add(w: Array, x: Array, rest: Array) -> Array:
    y = mul_mat(w, x)
    for at in places(y.shape):
        y[at] += float(rest[at])
    return y


@oracle("mul_mat_gated", "mul_mat_gated_quantise")
def mul_mat_gated(w: Array, x: Array, up: Array, *ids: Array, unit: str, has_ids: bool) -> Array:
    product = ORACLES["mul_mat_id" if has_ids else "mul_mat"]
    return ORACLES[unit](product(w, x, *ids), product(up, x, *ids))


@oracle("mul_mats")
def mul_mats(w: Array, x: Array, *more: Array) -> Array:
    return np.concatenate([mul_mat(v, x).reshape(-1) for v in (w, *more)])


@oracle("rope_set_rows")
def rope_set_rows(
    cache: Array, x: Array, positions: Array, index: Array, *factors: Array, **attrs: Any
) -> Array:
    return set_rows(cache.astype(np.float64), rope(x, positions, *factors, **attrs), index)


@oracle("quantise")
def quantise(x: Array) -> Array:
    return x.astype(np.float64)


@oracle("rms_norm_quantise")
def rms_norm_quantise(x: Array, w: Array, *, eps: float) -> Array:
    return rms_norm_mul(x, w, eps=eps)


@oracle("swiglu_quantise")
def swiglu_quantise(gate: Array, up: Array) -> Array:
    return ORACLES["swiglu"](gate, up)


@oracle("chain")
def chain(*sources: Array, program: str) -> Array:
    """The steps by the oracles of their ops, one after the other."""
    known = {chr(ord("a") + i): s for i, s in enumerate(sources)}
    for i, step in enumerate(program.split("; ")):
        op, rest = step.split("(", 1)
        args, _, numbers = rest.partition(")")
        pairs = (p.split("=") for p in numbers.strip("{}").split())
        attrs = {k: _attribute(v) for k, v in pairs}
        known[str(i)] = ORACLES[op](*(known[a] for a in args.split(", ")), **attrs)
    return known[str(i)]


def _attribute(text: str) -> float | str | tuple[int, ...]:
    """A number, a word, or whole numbers in brackets."""
    if text[0] == "[":
        return tuple(int(v) for v in text[1:-1].split(",") if v)
    return text if text in ("sum", "mean", "max", "min") else float(text)


# --- states --------------------------------------------------------------------------------------


def _course(rows: Array, log: Array, parents: Array, replay: Array, t: int) -> list[Array]:
    """Everything that stands before row t since its state, and itself."""
    before = int(parents[t])
    told = _course(rows, log, parents, replay, before) if before >= 0 else []
    return [*(told or _became(log, replay[-1 - before])), rows[t]]


def _became(log: Array, replay: Array) -> list[Array]:
    """The rows of the log that became text in one slot."""
    found: list[Array] = []
    for i in replay:
        if i < 0:
            break
        found.append(log[i])
    return found


def _slot(parents: Array, t: int) -> int:
    while t >= 0:
        t = int(parents[t])
    return -1 - t


def _since(rows: Array, log: Array, parents: Array, replay: Array, last: int) -> list[Array]:
    """What became text in a slot: replayed rows, and those of this step up to `last`."""
    course: list[Array] = []
    while last >= 0:
        course, last = [rows[last], *course], int(parents[last])
    return _became(log, replay) + course


@oracle("ssm_conv")
def ssm_conv(state: Array, log: Array, x: Array, w: Array, *course: Array) -> Array:
    parents, replay, past = course
    y = zeros(*x.shape)
    for t in range(len(x)):
        slot = _slot(parents, t)
        known = [row if past[slot] else row * 0 for row in state[slot]]
        held = known + _course(x, log, parents, replay, t)
        for c in range(x.shape[1]):
            for j in range(len(w)):
                y[t, c] += float(w[-1 - j, c]) * float(held[-1 - j][c])
    return y


@oracle("ssm_conv_next")
def ssm_conv_next(state: Array, log: Array, x: Array, *course: Array) -> Array:
    parents, replay, past, certain = course
    found = []
    for slot, known in enumerate(state):
        rows = _since(x, log, parents, replay[slot], int(certain[slot]))
        held = [row if past[slot] else row * 0 for row in known] + rows
        found.append(held[len(held) - len(known) :])
    return np.array(found, np.float64)


def _key_of(h: int, heads: int, groups: int, corrects: bool) -> int:
    return h % groups if corrects else h // (heads // groups)


def _delta_after(state: Array, rows: list[Array], past: int, corrects: bool) -> Array:
    h_count, d_count, v_count = state.shape
    s = state.astype(np.float64) if past else zeros(*state.shape)
    for row in rows:
        width = len(row) - h_count * v_count - 2 * h_count
        groups = width // d_count
        for h in range(h_count):
            at = _key_of(h, h_count, groups, corrects) * d_count
            k = [float(row[at + d]) for d in range(d_count)]
            fade = math.exp(float(row[width + h_count * v_count + h]))
            beta = float(row[width + h_count * v_count + h_count + h])
            for j in range(v_count):
                faded = [float(s[h, d, j]) * fade for d in range(d_count)]
                known = math.fsum(a * b for a, b in zip(k, faded, strict=True)) if corrects else 0.0
                change = beta * (float(row[width + h * v_count + j]) - known)
                for d in range(d_count):
                    s[h, d, j] = faded[d] + k[d] * change
    return s


@oracle("delta_net")
def delta_net(
    state: Array, log: Array, rows: Array, q: Array, *course: Array, corrects: bool
) -> Array:
    parents, replay, past, _ = course
    y = zeros(len(rows), state.shape[1], state.shape[3])
    for t in range(len(rows)):
        slot = _slot(parents, t)
        seen = _course(rows, log, parents, replay, t)
        s = _delta_after(state[slot], seen, int(past[slot]), corrects)
        for h, j in places(y.shape[1:]):
            own = q[t, _key_of(h, y.shape[1], q.shape[1], corrects)]
            y[t, h, j] = _dot(own, s[h, :, j])
    return y


@oracle("delta_net_next")
def delta_net_next(state: Array, log: Array, rows: Array, *course: Array, corrects: bool) -> Array:
    parents, replay, past, certain = course
    found = []
    for i, s in enumerate(state):
        seen = _since(rows, log, parents, replay[i], int(certain[i]))
        found.append(_delta_after(s, seen, int(past[i]), corrects))
    return np.array(found)
