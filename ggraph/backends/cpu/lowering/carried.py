"""Lowerings of layers that carry a state from row to row."""

from collections.abc import Sequence
from typing import Any

from ggraph.backends.cpu.kernels import short_conv
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.needs import carries, nets, row_step
from ggraph.backends.protocol import Launch, Ref, Scratch
from ggraph.ops.recurrent import key_heads
from ggraph.ops.rules import flag

# By whether a net corrects: the kernels of what queries find, and of the states after the step.
NETS = {True: ("delta_net", "delta_net_next"), False: ("state_space", "state_space_next")}
NOTHING = {"ends": 0, "change": 0}  # known of the states after a step
COURSE = "parents", "replay", "past", "certain"  # the last of those that overwrite


def _course(low: Lowering, x: Launch, course: Sequence[Ref]) -> dict[str, Any]:
    """The arguments that all four kernels share."""
    (log, rows), (slots, most) = x.sources[1:3], course[1].tensor.shape
    return {
        "state": low.at(x.sources[0]), "log": low.at(log), "y": low.at(x.result),
        **{name: low.at(ref) for name, ref in zip(COURSE, course, strict=False)},
        "slots": slots, "m": rows.tensor.shape[0], "r": most, "limit": log.tensor.shape[0],
    }  # fmt: skip


def _given(name: str, low: Lowering, rows: Ref) -> dict[str, Any]:
    """The arguments that say where rows are, and how far apart."""
    return {name: low.at(rows), f"{name}s": row_step(rows.tensor)}


def ssm_conv(low: Lowering, x: Launch) -> bool:
    """Rows by a short convolution."""
    _, _, rows, w, *course = x.sources
    n, taps = rows.tensor.shape[1], w.tensor.shape[0]
    if not carries(x.result.tensor) or taps > short_conv.MAX_KERNEL:
        return False
    given = {**_given("x", low, rows), "w": low.at(w), **_course(low, x, course)}
    low.add("ssm_conv", n=n, taps=taps, **given)
    return True


def ssm_conv_next(low: Lowering, x: Launch) -> bool:
    """What a convolution remembers of each text, in place."""
    state, _, rows, *course = x.sources
    n, taps = rows.tensor.shape[1], state.tensor.shape[1] + 1
    if not carries(x.result.tensor) or taps > short_conv.MAX_KERNEL:
        return False
    given = {**_given("x", low, rows), **_course(low, x, course)}
    low.add("ssm_conv_next", n=n, taps=taps, **given)
    return True


def _sizes(x: Launch) -> dict[str, Any]:
    """The sizes of a net."""
    state, width = x.sources[0].tensor, x.sources[2].tensor.shape[1]
    _, heads, d, v = state.shape
    return {"heads": heads, "groups": key_heads(state, width), "d": d, "v": v, "width": width}


def _put_down(x: Launch, *, ready: bool) -> dict[str, Scratch]:
    """Rooms of what is known of the states after a step, filled by an earlier launch or this."""
    return {name: room for name, room in x.scratch.items() if room.ready is ready}


def delta_net(low: Lowering, x: Launch) -> bool:
    """What queries find in the state after each row, and beside what is known of those after it."""
    _, _, rows, q, *course = x.sources
    if not nets(x.result.tensor):
        return False
    made = _put_down(x, ready=False)
    given = {"rows": low.at(rows), **_given("q", low, q), **_course(low, x, course)}
    kernel, _ = NETS[flag(x.result.tensor.attrs, "corrects")]
    given |= {**NOTHING, **made, **_sizes(x)}
    low.add(kernel, makes=[*made.values()], result=True, **given)
    return True


def delta_net_next(low: Lowering, x: Launch) -> bool:
    """The states that texts end in, in place."""
    _, _, rows, *course = x.sources
    if not nets(x.result.tensor):
        return False
    known = _put_down(x, ready=True)
    given = {"rows": low.at(rows), **_course(low, x, course)}
    _, kernel = NETS[flag(x.result.tensor.attrs, "corrects")]
    given |= {**NOTHING, **known, **_sizes(x)}
    low.add(kernel, uses=[*known.values()], **given)
    return True
