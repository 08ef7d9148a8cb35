"""Layers that carry a state, on CUDA: short convolutions and gated delta nets.

Legend: m rows, n channels; H heads of values, G of keys, D numbers per key, V per value.
"""

from typing import Any

from ggraph.backends.cuda.layout import is_flat
from ggraph.backends.cuda.lowering import Lowering, Rule
from ggraph.backends.protocol import Launch, Ref
from ggraph.dtype import F32, I32
from ggraph.ops.recurrent import key_heads
from ggraph.tensor import Tensor

MOST_TAPS, MOST_KEY, COLUMNS, PARTS = 8, 256, 32, 4  # as in src/recurrent.cu


def _flat(t: Tensor) -> bool:
    """Whether all numbers are float32, all indices int32, and nothing has gaps."""
    return all(is_flat(s, dtype=s.dtype) and s.dtype in (F32, I32) for s in t.sources)


def _short(t: Tensor) -> bool:
    return _flat(t) and t.sources[0].shape[0] < MOST_TAPS


def _narrow(t: Tensor) -> bool:
    return _flat(t) and t.sources[0].shape[1] <= MOST_KEY


def _course(low: Lowering, x: Launch, log: Ref, replay: Ref, past: Ref) -> dict[str, Any]:
    """The arguments that all four kernels share."""
    return {
        "state": low.at(x.sources[0]), "log": low.at(log), "replay": low.at(replay),
        "past": low.at(past), "y": low.at(x.result), "most": replay.tensor.shape[0],
        "limit": log.tensor.shape[0],
    }  # fmt: skip


def _conv(low: Lowering, x: Launch) -> None:
    _, log, rows, w, parents, replay, past = x.sources
    low.per_element(
        "ssm_conv", rows.tensor.size, x=low.at(rows), w=low.at(w), parents=low.at(parents),
        n=rows.tensor.shape[1], taps=w.tensor.shape[0], **_course(low, x, log, replay, past),
    )  # fmt: skip


def _conv_next(low: Lowering, x: Launch) -> None:
    state, log, rows, replay, past, certain = x.sources
    low.per_element(
        "ssm_conv_next", rows.tensor.shape[1], x=low.at(rows), certain=low.at(certain),
        m=rows.tensor.shape[0], held=state.tensor.shape[0], **_course(low, x, log, replay, past),
    )  # fmt: skip


def _net(low: Lowering, kernel: str, x: Launch, **args: Any) -> None:
    state, rows = x.sources[0].tensor, x.sources[2]
    (heads, d, v), (m, width) = state.shape, rows.tensor.shape
    low.call(
        kernel, (heads, -(-v // COLUMNS), 1), PARTS * COLUMNS, rows=low.at(rows), m=m, heads=heads,
        groups=key_heads(state, width), d=d, v=v, width=width, **args,
    )  # fmt: skip


def _delta(low: Lowering, x: Launch) -> None:
    _, log, _, q, parents, replay, past = x.sources
    given = {"q": low.at(q), "parents": low.at(parents)}
    _net(low, "delta_net", x, **given, **_course(low, x, log, replay, past))


def _delta_next(low: Lowering, x: Launch) -> None:
    _, log, _, replay, past, certain = x.sources
    _net(low, "delta_net_next", x, certain=low.at(certain), **_course(low, x, log, replay, past))


RULES: dict[str, Rule] = {
    "ssm_conv": Rule(_short, _conv),
    "ssm_conv_next": Rule(_short, _conv_next),
    "delta_net": Rule(_narrow, _delta),
    "delta_net_next": Rule(_narrow, _delta_next),
}
