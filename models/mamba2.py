"""Mamba-2 layers: a state space over convolved values, keys and queries, between two products.

Legend: T rows, I numbers of all values, H heads of values, P numbers per value, G heads of keys, N
numbers per key. What files call B and C are keys and queries, x is values, D what each head keeps
of its own value.
Sources: Dao and Gu 2024 (arXiv 2405.21060); transformers' `Mamba2Mixer`.
"""

import numpy as np

from ggraph import Tensor, dtypes, ops
from ggraph.formats.checkpoint import RawTensor

from . import blocks
from .architecture import Tensors, changed
from .config import DecoderConfig
from .families.lfm2 import kernel
from .recurrent import convolved, delta_net
from .step import Step

UNLIMITED = [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]  # time steps, in JSON


def mixed(s: Step, x: Tensor, i: int, *, bare: bool = False) -> Tensor:
    """What layer i makes of x [T, E]: [T, E], of the last layer as `Step.asked` says. What is
    found is normalised behind its gate unless it is left `bare`."""
    c, blk, rows = s.config, f"blk.{i}", x.shape[0]
    g, n, h = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads
    inner, p = c.linear_inner_size, c.linear_value_head_dim
    both = inner + 2 * g * n
    parts = blocks.linear(s, x, f"{blk}.ssm_in", inner + both + h)
    held = convolved(s, ops.columns(parts, inner, both), i, _filter(s, i, both))
    if s.has(f"{blk}.ssm_conv1d.bias"):
        held = held + s.w(f"{blk}.ssm_conv1d.bias", both)
    held = ops.silu(held)  # [T, I + 2GN]
    values, k = ops.columns(held, 0, inner), ops.columns(held, inner, g * n)
    q = ops.columns(held, inner + g * n, g * n).reshape(rows, g, n)
    step = ops.columns(parts, inner + both, h) + s.w(f"{blk}.ssm_dt.bias", h)
    step = ops.softplus(step)  # [T, H], above 0
    row = ops.concat([k, values, step * s.w(f"{blk}.ssm_a", h), step], axis=-1)
    found = delta_net(s, i, q, row, h, p, corrects=False)  # [T, H, P]
    kept = values.reshape(rows, h, p) * s.w(f"{blk}.ssm_d", h).reshape(h, 1)
    y = s.asked((found + kept).reshape(rows, inner), i)
    z = s.asked(ops.columns(parts, 0, inner), i)
    opened = ops.swiglu(z, y)
    even = opened if bare else _even(s, opened, i)
    return blocks.linear(s, even, f"{blk}.ssm_out", c.hidden_size)


def _filter(s: Step, i: int, width: int) -> Tensor:
    return s.w(f"blk.{i}.ssm_conv1d.weight", s.config.linear_conv_kernel_dim, width)


def _even(s: Step, x: Tensor, i: int) -> Tensor:
    """RMS norm of x [T, I], of the heads of each key by themselves."""
    (rows, inner), g = x.shape, s.config.linear_num_key_heads
    even = ops.rms_norm(x.reshape(rows, g, inner // g), eps=s.config.rms_norm_eps)
    return even.reshape(rows, inner) * s.w(f"blk.{i}.ssm_norm.weight", inner)


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Decays as what multiplies."""
    return {n: _decay(t) if n.endswith(".ssm_a") else t for n, t in tensors.items()}


def _decay(t: RawTensor) -> RawTensor:
    return changed(t.widened(), -np.exp(t.float32()))


def load(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Convolutions as rows of channels; vectors, which files hold as columns and norms in rows."""
    found: Tensors = {}
    for name, t in tensors.items():
        if name.endswith(".ssm_conv1d.weight"):
            t = kernel(t)
        elif name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
            t = _shaped(t, -1)
        found[name] = t
    return found


def store(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """The other way."""
    found: Tensors = {}
    for name, t in tensors.items():
        if name.endswith(".ssm_conv1d.weight"):
            t = kernel(t)
        elif name.endswith((".ssm_a", ".ssm_d")):
            t = _shaped(t, -1, 1)
        elif name.endswith(".ssm_norm.weight"):
            t = _shaped(t, c.linear_num_key_heads, -1)
        found[name] = t
    return found


def _shaped(t: RawTensor, *shape: int) -> RawTensor:
    values = t.float32().reshape(shape)
    return RawTensor(t.name, dtypes.F32, values.shape, values)


def names(mixer: str) -> dict[str, str]:
    """A layer's Hugging Face names, whose mixer is called so."""
    return {
        f"{mixer}.in_proj": "ssm_in", f"{mixer}.conv1d": "ssm_conv1d", f"{mixer}.A_log": "ssm_a",
        f"{mixer}.dt_bias": "ssm_dt.bias", f"{mixer}.D": "ssm_d", f"{mixer}.norm": "ssm_norm",
        f"{mixer}.out_proj": "ssm_out",
    }  # fmt: skip
