"""Layers that carry a state, on CUDA: short convolutions, gated delta nets and state spaces.

Legend: m rows, n channels; H heads of values, G of keys, D numbers per key, V per value.
"""

from collections.abc import Sequence
from typing import Any

from ggraph.backends.cuda.layout import is_flat
from ggraph.backends.cuda.lowering import Lowering, Rule
from ggraph.backends.protocol import Launch, Ref
from ggraph.dtype import F32, I32
from ggraph.ops.recurrent import key_heads
from ggraph.ops.rules import flag
from ggraph.tensor import Tensor

MOST_TAPS, MOST_KEY, MOST_ROWS, COLUMNS, PARTS = 8, 256, 512, 32, 4  # as in src/recurrent.cu

COURSE = "parents", "replay", "past", "certain"  # the last of those that overwrite


def _flat(t: Tensor) -> bool:
    """Whether all numbers are float32, all indices int32, and nothing has gaps."""
    return all(is_flat(s, dtype=s.dtype) and s.dtype in (F32, I32) for s in t.sources)


def _short(t: Tensor) -> bool:
    return _flat(t) and t.sources[0].shape[1] < MOST_TAPS


def _narrow(t: Tensor) -> bool:
    state, _, rows = t.sources[:3]
    return _flat(t) and state.shape[2] <= MOST_KEY and rows.shape[0] <= MOST_ROWS


def _course(low: Lowering, x: Launch, course: Sequence[Ref]) -> dict[str, Any]:
    """The arguments that all four kernels share."""
    log, most = x.sources[1], course[1].tensor.shape[1]
    return {
        "state": low.at(x.sources[0]), "log": low.at(log), "y": low.at(x.result),
        **{name: low.at(ref) for name, ref in zip(COURSE, course, strict=False)},
        "most": most, "limit": log.tensor.shape[0],
    }  # fmt: skip


def _conv(low: Lowering, x: Launch) -> None:
    state, _, rows, w, *course = x.sources
    taps, n = w.tensor.shape
    low.per_element(
        "ssm_conv", rows.tensor.size, x=low.at(rows), w=low.at(w), slots=state.tensor.shape[0],
        n=n, taps=taps, **_course(low, x, course),
    )  # fmt: skip


def _conv_next(low: Lowering, x: Launch) -> None:
    state, _, rows, *course = x.sources
    slots, held, n = state.tensor.shape
    low.per_element(
        "ssm_conv_next", slots * n, x=low.at(rows), m=rows.tensor.shape[0], n=n, held=held,
        **_course(low, x, course),
    )  # fmt: skip


def _net(low: Lowering, kernel: str, x: Launch, deep: int, **args: Any) -> None:
    state, (m, width) = x.sources[0].tensor, x.sources[2].tensor.shape
    _, heads, d, v = state.shape
    low.call(
        kernel, (heads, -(-v // COLUMNS), deep), PARTS * COLUMNS, rows=low.at(x.sources[2]), m=m,
        heads=heads, groups=key_heads(state, width), d=d, v=v, width=width,
        corrects=int(flag(x.result.tensor.attrs, "corrects")), **args,
    )  # fmt: skip


def _delta(low: Lowering, x: Launch) -> None:
    state, _, _, q, *course, _ = x.sources  # where texts end is found by the other kernel
    slots = state.tensor.shape[0]
    _net(low, "delta_net", x, 1, q=low.at(q), slots=slots, **_course(low, x, course))


def _delta_next(low: Lowering, x: Launch) -> None:
    state, _, _, *course = x.sources
    _net(low, "delta_net_next", x, state.tensor.shape[0], **_course(low, x, course))


RULES: dict[str, Rule] = {
    "ssm_conv": Rule(_short, _conv),
    "ssm_conv_next": Rule(_short, _conv_next),
    "delta_net": Rule(_narrow, _delta),
    "delta_net_next": Rule(_narrow, _delta_next),
}
