"""How heads are turned: a config's rotation as an op.

Legend: T token rows, D head_dim.
"""

import math
from dataclasses import replace

from ggraph import Tensor, ops

from .config import Rope
from .step import Step

YARN = "rope_yarn.weight"  # made from the config, and in no file


def rotate(s: Step, x: Tensor, rope: Rope, name: str, positions: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] at `positions` [T]."""
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
