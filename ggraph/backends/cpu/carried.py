"""Lowerings of layers that carry a state from row to row."""

from typing import Any

from ggraph.backends.cpu import recurrent
from ggraph.backends.cpu.lowering import Lowering
from ggraph.backends.cpu.needs import is_rows
from ggraph.backends.protocol import Launch, Ref
from ggraph.dtype import F32, I32


def _sound(x: Launch) -> bool:
    """Whether all numbers are float32, all indices int32, and nothing has gaps."""
    plain = all(s.tensor.is_contiguous and s.tensor.dtype in (F32, I32) for s in x.sources)
    return plain and all(is_rows(s.tensor) for s in x.sources[:3])


def _course(low: Lowering, log: Ref, replay: Ref, past: Ref) -> dict[str, Any]:
    """The arguments that all four kernels share."""
    return {
        "log": low.at(log), "replay": low.at(replay), "past": low.at(past),
        "r": replay.tensor.shape[0], "limit": log.tensor.shape[0],
    }  # fmt: skip


def ssm_conv(low: Lowering, x: Launch) -> bool:
    """Rows by a short convolution."""
    state, log, rows, w, parents, replay, past = x.sources
    (m, n), taps = rows.tensor.shape, w.tensor.shape[0]
    if not _sound(x) or taps > recurrent.MAX_KERNEL or m > recurrent.MAX_ROWS:
        return False
    low.add(
        "ssm_conv", state=low.at(state), x=low.at(rows), w=low.at(w), y=low.at(x.result),
        parents=low.at(parents), m=m, n=n, taps=taps, **_course(low, log, replay, past),
    )  # fmt: skip
    return True


def ssm_conv_next(low: Lowering, x: Launch) -> bool:
    """What a convolution remembers of a text, in place."""
    state, log, rows, replay, past, certain = x.sources
    (m, n), taps = rows.tensor.shape, state.tensor.shape[0] + 1
    if not _sound(x) or taps > recurrent.MAX_KERNEL:
        return False
    low.add(
        "ssm_conv_next", state=low.at(state), x=low.at(rows), y=low.at(x.result),
        certain=low.at(certain), m=m, n=n, taps=taps, **_course(low, log, replay, past),
    )  # fmt: skip
    return True


def _sizes(x: Launch) -> dict[str, Any] | None:
    """The sizes of a delta net, None where the kernels do not take them."""
    heads, d, v = x.sources[0].tensor.shape
    m, width = x.sources[2].tensor.shape
    if not _sound(x) or v % 8 or d > recurrent.MAX_KEY or m > recurrent.MAX_ROWS:
        return None
    groups = (width - heads * v - 2 * heads) // d
    return {"m": m, "heads": heads, "groups": groups, "d": d, "v": v, "width": width}


def delta_net(low: Lowering, x: Launch) -> bool:
    """What queries find in the state after each row."""
    state, log, rows, q, parents, replay, past = x.sources
    sizes = _sizes(x)
    if sizes is None:
        return False
    low.add(
        "delta_net", state=low.at(state), rows=low.at(rows), q=low.at(q), y=low.at(x.result),
        parents=low.at(parents), **sizes, **_course(low, log, replay, past),
    )  # fmt: skip
    return True


def delta_net_next(low: Lowering, x: Launch) -> bool:
    """The state that a text ended in, in place."""
    state, log, rows, replay, past, certain = x.sources
    sizes = _sizes(x)
    if sizes is None:
        return False
    low.add(
        "delta_net_next", state=low.at(state), rows=low.at(rows), y=low.at(x.result),
        certain=low.at(certain), **sizes, **_course(low, log, replay, past),
    )  # fmt: skip
    return True
