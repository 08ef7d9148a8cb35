"""How heads are turned: a config's rotation as an op.

Rows of an image may be turned by three positions, each of which turns some of the pairs (M-RoPE).
That is three rotations, of which each leaves the other pairs as they are, to the bit: whose three
positions are alike is turned as by one.

Sources: Wang et al. 2024 (arXiv 2409.12191); transformers' `modeling_qwen2_vl` and
`modeling_qwen3_vl`.

Legend: T token rows, D head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ggraph import ModelError, Tensor, ops

from .config import DecoderConfig, Rope
from .step import AXES, Step

YARN = "rope_yarn.weight"  # made from the config, and in no file
MADE = frozenset({YARN, *AXES})


def yarn_factors(rope: Rope) -> tuple[float, ...]:
    """What YaRN divides each frequency by where pairs are not counted in whole numbers.

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.2; transformers' `truncate` of gpt-oss.
    """

    def pair(turns: float) -> float:
        """The (real) pair that makes so many turns over the positions of the training."""
        far = math.log(rope.n_ctx_orig / (turns * 2 * math.pi))
        return rope.n_rot * far / (2 * math.log(rope.freq_base))

    low, high = max(pair(rope.beta_fast), 0.0), min(pair(rope.beta_slow), rope.n_rot - 1.0)
    ramp = np.clip((np.arange(rope.n_rot // 2) - low) / max(high - low, 0.001), 0, 1)
    return tuple(float(v) for v in 1 / (ramp * rope.freq_scale + (1 - ramp)))


def axes_of(c: DecoderConfig) -> dict[str, tuple[float, ...]]:
    """What divides the frequencies of each pair for each of three positions: 1 for those that turn
    by it, and for others what leaves no angle. Empty where all turn by one, or sections of these
    pairs do not fit together."""
    sections, pairs = c.mrope_section, c.rope.n_rot // 2
    if len(sections) != len(AXES) or min(sections) < 0 or sum(sections) != pairs:
        return {}
    if c.mrope_interleaved:  # lines and columns take each third pair, as many as they have
        own = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs)]
    else:
        own = [axis for axis, count in enumerate(sections) for _ in range(count)]
    return {
        name: tuple(1.0 if o == axis else math.inf for o in own) for axis, name in enumerate(AXES)
    }


def rotate(s: Step, x: Tensor, rope: Rope, name: str, positions: Sequence[Tensor] = ()) -> Tensor:
    """Rotary embedding of x [T, heads, D] at `positions`, as many as the step's, else at those."""
    positions = positions or s.places
    if len(positions) == 1:
        return _rotated(s, x, rope, name, positions[0])
    if rope.ext_factor or s.has(rope.factors):
        raise ModelError(f"{s.config.architecture}: images, and a rotation that is scaled")
    for at, axis in zip(positions, AXES, strict=True):
        own = replace(rope, factors=axis)
        x = _rotated(s, x, own, name if axis is AXES[-1] else "", at)
    return x


def _rotated(s: Step, x: Tensor, rope: Rope, name: str, positions: Tensor) -> Tensor:
    factors = None
    if rope.ext_factor and rope.truncate is False:  # which ggml's rotation knows by factors alone
        factors = s.w(YARN, rope.n_rot // 2)
        grown = rope.attn_factor * (1 - 0.1 * math.log(rope.freq_scale))
        rope = replace(rope, ext_factor=0.0, freq_scale=1.0, attn_factor=grown)
    elif rope.factors and s.has(rope.factors):
        factors = s.w(rope.factors, rope.n_rot // 2)
    return ops.rope(
        x, positions, factors, name=name,
        n_rot=rope.n_rot, mode=rope.mode, n_ctx_orig=rope.n_ctx_orig,
        freq_base=rope.freq_base, freq_scale=rope.freq_scale,
        ext_factor=rope.ext_factor, attn_factor=rope.attn_factor,
        beta_fast=rope.beta_fast, beta_slow=rope.beta_slow,
    )  # fmt: skip
