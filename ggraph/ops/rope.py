"""Rotary position embedding in both pairings, with every scaling.

Legend: T tokens, H heads, D head size, R = n_rot rotated features, i in [0, R/2) the pair.

angle[t, i] = positions[t] * freq_base^(-2i/R) / factors[i], then scaled:
- none: freq_scale 1, ext_factor 0;           - linear: freq_scale = 1/factor;
- dynamic NTK: another freq_base;             - llama3, longrope: the factors tensor;
- yarn: ext_factor 1, freq_scale = 1/factor, and n_ctx_orig of the training.
Sources: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; ggml's `ggml_rope_ext`.
"""

from collections.abc import Sequence
from math import ceil, floor, log, pi

import numpy as np

from ggraph.dtype import F16, F32, I32
from ggraph.ops.rules import (
    choice,
    expect,
    f64,
    flag,
    index_type,
    integer,
    like,
    plain_float,
    rank,
    real,
    rule,
)
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

MODES = ("normal", "neox")


def _rope_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    x, positions = sources[:2]
    rank(x, 3, 3)
    plain_float(x)
    index_type(positions)
    expect(positions.shape == x.shape[:1], f"expected {positions.label} [{x.shape[0]}]")
    n_rot = integer(attrs, "n_rot")
    even = 0 < n_rot <= x.shape[2] and n_rot % 2 == 0
    expect(even, f"n_rot={n_rot}: expected an even number in (0, {x.shape[2]}]")
    choice(attrs, "mode", MODES)
    for key in ("freq_base", "freq_scale", "attn_factor"):
        expect(real(attrs, key) > 0, f"{key}={attrs[key]}: expected more than 0")
    for key in ("ext_factor", "beta_fast", "beta_slow"):
        real(attrs, key)
    trained = integer(attrs, "n_ctx_orig") > 0 and real(attrs, "freq_base") != 1
    yarn = real(attrs, "ext_factor") != 0
    expect(trained or not yarn, "ext_factor (yarn) needs n_ctx_orig > 0 and freq_base other than 1")
    if flag(attrs, "has_factors"):
        factors = sources[2]
        good = factors.dtype is F32 and factors.shape == (n_rot // 2,)
        expect(good, f"expected {factors.label} f32[{n_rot // 2}]")
    return Meta(x.shape, x.dtype)


def yarn_ramp(
    n_rot: int, freq_base: float, beta_fast: float, beta_slow: float, n_ctx_orig: int
) -> Array:
    """f64 [R/2]: 1 where a pair turns fast enough to be kept, 0 where it is interpolated.

    A pair that makes `beta` turns over n_ctx_orig positions has the (real) index that `at` gives.
    """

    def at(beta: float) -> float:
        return n_rot * log(n_ctx_orig / (beta * 2 * pi)) / (2 * log(freq_base))

    low, high = max(0.0, floor(at(beta_fast))), min(n_rot - 1.0, ceil(at(beta_slow)))
    y = (np.arange(n_rot // 2) - low) / max(0.001, high - low)
    ramp: Array = 1 - np.clip(y, 0, 1)
    return ramp


def rope_angles(positions: Array, factors: Array | None, attrs: Attrs) -> tuple[Array, Array]:
    """Cosines and sines of every pair, both f64 [T, R/2], times the magnitude correction.

    `attrs` are those of a rope op; kernels may tabulate these. Computed in float64, so positions
    up to 2^31 keep all digits of float32.
    """
    turns, magnitude = rope_turns(attrs)
    if factors is not None:
        turns = turns / f64(factors)
    angles = f64(positions)[:, None] * turns  # [T, R/2]
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def rope_turns(attrs: Attrs) -> tuple[Array, float]:
    """Radians per position of every pair, f64 [R/2], and the magnitude correction."""
    n_rot, base, scale = (
        integer(attrs, "n_rot"),
        real(attrs, "freq_base"),
        real(attrs, "freq_scale"),
    )
    ext, magnitude = real(attrs, "ext_factor"), real(attrs, "attn_factor")
    turns = base ** (-2.0 * np.arange(n_rot // 2) / n_rot)
    if ext == 0:
        return turns * scale, magnitude
    beta = real(attrs, "beta_fast"), real(attrs, "beta_slow")
    keep = yarn_ramp(n_rot, base, *beta, integer(attrs, "n_ctx_orig")) * ext
    return turns * (scale * (1 - keep) + keep), magnitude * (1 + 0.1 * log(1 / scale))


def _rope(x: Array, positions: Array, *factors: Array, **attrs: object) -> Array:
    given: Attrs = attrs  # type: ignore[assignment]  # what infer has checked
    half = integer(given, "n_rot") // 2
    cos, sin = rope_angles(positions, factors[0] if factors else None, given)
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, R/2]
    pairs = np.arange(half)
    first, second = (
        (2 * pairs, 2 * pairs + 1) if given["mode"] == "normal" else (pairs, pairs + half)
    )
    out = f64(x)
    a, b = out[:, :, first], out[:, :, second]  # copies, [T, H, R/2]
    out[:, :, first] = a * cos - b * sin
    out[:, :, second] = a * sin + b * cos
    return like(out, x)


def _cost(t: Tensor) -> Cost:
    """Six operations per rotated pair and, once per token, one sine and cosine per pair."""
    half = integer(t.attrs, "n_rot") // 2
    return Cost(t.shape[0] * half * (6 * t.shape[1] + 40), 2 * t.nbytes)


DEFAULTS: Attrs = {
    "n_rot": 8,
    "mode": "normal",
    "freq_base": 10000.0,
    "freq_scale": 1.0,
    "ext_factor": 0.0,
    "attn_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "n_ctx_orig": 0,
    "has_factors": False,
}
YARN: Attrs = {"ext_factor": 1.0, "freq_scale": 0.25, "n_ctx_orig": 4096, "attn_factor": 0.9}


def _example(shape: tuple[int, int, int], changes: Attrs, last: int = 1000) -> Example:
    args = [Arg(shape), Arg(shape[:1], I32, f"ids:{last}")]
    attrs = {**DEFAULTS, "n_rot": shape[2], **changes}
    if attrs["has_factors"]:
        args.append(Arg((shape[2] // 2,), F32, "positive"))
    return Example(tuple(args), attrs, tolerance=1e-5 if last < 2000 else 1e-4)


ROPE = register(
    OpSpec(
        "rope",
        infer=rule("rope", "x positions factors?", _rope_rule),
        reference=_rope,
        ggml="ROPE",
        cost=_cost,
        inplace_ok=(0,),
        examples=(
            _example((3, 2, 8), {}),
            _example((3, 2, 8), {"mode": "neox"}),
            _example((3, 2, 8), {"n_rot": 4}),
            _example((3, 2, 8), {"n_rot": 4, "mode": "neox"}),
            _example((3, 2, 8), {"freq_scale": 0.125}),
            _example((3, 2, 8), {"has_factors": True, "mode": "neox", "freq_base": 5e5}),
            _example((3, 2, 64), YARN),
            _example((3, 2, 64), {**YARN, "mode": "neox", "has_factors": True}),
            _example((4, 1, 64), {"freq_base": 1e6, "mode": "neox"}, last=100_000),
            _example((1, 1, 2), {}),
            _example((0, 2, 8), {}),
            Example((Arg((3, 2, 8), F16), Arg((3,), I32, "ids:9")), DEFAULTS, tolerance=2e-3),
        ),
        doc="rope(x, positions, factors): each pair of features turned by its position's angle.",
    )
)


def rope(
    x: Tensor,
    positions: Tensor,
    factors: Tensor | None = None,
    *,
    n_rot: int | None = None,
    mode: str = "normal",
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    n_ctx_orig: int = 0,
    name: str = "",
) -> Tensor:
    """x [T, H, D] (plain float) with its first n_rot features (all by default) rotated.

    positions i32 [T]; factors f32 [n_rot/2] divide the frequencies. mode "normal" pairs features
    2i and 2i+1, "neox" i and i + n_rot/2. Same shape and dtype. ggml: GGML_OP_ROPE (rope_ext).
    Errors: ShapeError for an odd n_rot, other shapes, or yarn without n_ctx_orig.
    """
    rank(x, 3, 3)
    return apply(
        "rope",
        x,
        positions,
        *([factors] if factors is not None else []),
        name=name,
        n_rot=x.shape[2] if n_rot is None else n_rot,
        mode=mode,
        freq_base=float(freq_base),
        freq_scale=float(freq_scale),
        ext_factor=float(ext_factor),
        attn_factor=float(attn_factor),
        beta_fast=float(beta_fast),
        beta_slow=float(beta_slow),
        n_ctx_orig=n_ctx_orig,
        has_factors=factors is not None,
    )
