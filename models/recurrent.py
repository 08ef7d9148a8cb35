"""Layers with a state, as functions on a `Step`: short convolutions, gated delta nets and state
spaces.

Legend: T token rows, C channels, K inputs of a convolution; H heads of values, G of keys, D numbers
per key, V per value. `ggraph.ops.recurrent` says how drafts leave the state alone.
"""

from ggraph import Tensor, ops, state
from ggraph.decode.model import LOG

from .step import Step


def _log(s: Step, name: str, rows: Tensor) -> Tensor:
    """The log that the layer reads; its rows of this step take their places behind that."""
    log = state(f"{s.prefix}{name}", (LOG, rows.shape[1]))
    if s.shape.rows <= LOG:
        s.kept.append(ops.set_rows(log, rows, s.log_slots, name=f"{name}.new"))
    return log


def convolved(s: Step, x: Tensor, i: int, w: Tensor) -> Tensor:
    """x [T, C], each channel with its forerunners by w [K, C]: [T, C]."""
    name = f"cache.conv.{i}"
    log = _log(s, f"{name}.log", x)
    held = state(s.prefix + name, (s.shape.texts, w.shape[0] - 1, x.shape[1]))
    course = s.parents, s.replay, s.past
    s.kept.append(ops.ssm_conv_next(held, log, x, *course, s.certain, name=f"{name}.new"))
    return ops.ssm_conv(held, log, x, w, *course, name=f"blk.{i}.conv")


def delta_net(
    s: Step, i: int, q: Tensor, rows: Tensor, values: int, width: int, *, corrects: bool = True
) -> Tensor:
    """What q [T, G, D] finds after each of the rows [T, G*D + H*V + 2H]: [T, H, V]. What they find
    there is corrected, or added to."""
    name = f"cache.delta.{i}"
    log = _log(s, f"{name}.log", rows)
    held = state(s.prefix + name, (s.shape.texts, values, q.shape[2], width))
    course = s.parents, s.replay, s.past, s.certain
    after = ops.delta_net_next(held, log, rows, *course, corrects=corrects, name=f"{name}.new")
    s.kept.append(after)
    return ops.delta_net(held, log, rows, q, *course, corrects=corrects, name=f"blk.{i}.delta")
