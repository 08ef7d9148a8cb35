"""Layers that carry a state from row to row: short convolutions and gated delta nets.

Drafts may be rejected, so the state of a text is kept in two parts: `state` is that after the rows
which are text for certain, and `log` holds what the rows of the last step put into it. A step says
which rows of the log became text (`replay`, in order, -1 ends it), and of its own rows how many are
text for certain. Row t of a step continues after its row `parents[t]`, or, where that is -1, after
the replayed rows; so the rows of a draft tree have the bits that they have as text. Where `past` is
0 a text begins, whatever the state was.

Legend: T rows, L rows of the log, R most replayed rows, P = K - 1 remembered inputs of a
convolution, C channels; H heads of values, G heads of keys (head h has those of h mod G), D numbers
per key, V per value. A row of a delta net is k [G*D], v [H*V], gate [H], beta [H] side by side.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32, I32
from ggraph.errors import InputError
from ggraph.ops.rules import expect, f32, f64, index_type, owns_all, rank, rule
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register


def _floats(*tensors: Tensor) -> None:
    for t in tensors:
        expect(t.dtype is F32, f"%{t.name}: expected f32, got {t.dtype}")


def _course(rows: int, parents: Tensor | None, replay: Tensor, *single: Tensor) -> None:
    """The indices that say which rows follow which."""
    for t in (replay, *single):
        index_type(t)
    rank(replay, 1, 1)
    for t in single:
        expect(t.shape == (1,), f"expected %{t.name} i32[1]")
    if parents is not None:
        index_type(parents)
        expect(parents.shape == (rows,), f"expected %{parents.name} i32[{rows}]")


def _replayed(log: Array, replay: Array) -> Array:
    """The rows of the log that became text, in order."""
    over = np.flatnonzero(replay < 0)
    count = int(over[0]) if len(over) else len(replay)
    chosen = replay[:count]
    if count and chosen.max() >= len(log):
        raise InputError(f"replay: rows {chosen.tolist()} of a log of {len(log)}")
    found: Array = log[chosen]
    return found


def _path(parents: Array, row: int) -> list[int]:
    """A row's forerunners in this step, first to last, and itself."""
    found = [row]
    while (before := int(parents[found[-1]])) >= 0:
        if before >= found[-1]:
            raise InputError(f"parents: row {found[-1]} follows row {before}")
        found.append(before)
    return found[::-1]


def _conv_shapes(state: Tensor, log: Tensor, x: Tensor) -> None:
    _floats(state, log, x)
    for t in (state, log, x):
        rank(t, 2, 2)
    width = x.shape[1]
    good = state.shape[1] == log.shape[1] == width and state.shape[0] >= 1
    expect(good, f"expected %{state.name} [P, {width}] and %{log.name} [L, {width}]")


def _conv_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, x, w, parents, replay, past = sources
    _conv_shapes(state, log, x)
    _floats(w)
    wanted = (state.shape[0] + 1, x.shape[1])
    expect(w.shape == wanted, f"expected %{w.name} {list(wanted)}")
    _course(x.shape[0], parents, replay, past)
    return Meta(x.shape, F32)


def _before(state: Array, log: Array, replay: Array, past: Array) -> Array:
    """What the convolution remembers before the step's first row, and all that was replayed."""
    held = state if int(past[0]) else np.zeros_like(state)
    return np.concatenate([held, _replayed(log, replay)])


def _conv(
    state: Array, log: Array, x: Array, w: Array, parents: Array, replay: Array, past: Array
) -> Array:
    before, reach = _before(state, log, replay, past), len(w)
    y = np.zeros(x.shape, np.float32)
    for t in range(len(x)):
        seen = np.concatenate([before, x[_path(parents, t)]])[-reach:]  # [K, C]
        y[t] = (f64(seen) * f64(w)).sum(0)
    return y


def _conv_next_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, x, replay, past, certain = sources
    _conv_shapes(state, log, x)
    owns_all(state)
    _course(x.shape[0], None, replay, past, certain)
    return Meta(state.shape, F32)


def _conv_next(
    state: Array, log: Array, x: Array, replay: Array, past: Array, certain: Array
) -> Array:
    seen = np.concatenate([_before(state, log, replay, past), x[: max(int(certain[0]), 0)]])
    state[:] = seen[len(seen) - len(state) :]
    return state


def _conv_cost(t: Tensor) -> Cost:
    x = t.sources[2]
    return Cost(2 * x.size * (t.sources[0].shape[0] + 1), 2 * x.nbytes + t.sources[0].nbytes)


def _conv_example(p: int, c: int, t: int, log: int, replay: str, past: str) -> Example:
    return Example(
        (
            Arg((p, c)), Arg((log, c)), Arg((t, c)), Arg((p + 1, c)),
            Arg((t,), I32, "parents"), Arg((4,), I32, replay), Arg((1,), I32, past),
        )
    )  # fmt: skip


def _conv_next_example(p: int, c: int, t: int, log: int, replay: str, past: str) -> Example:
    return Example(
        (
            Arg((p, c)), Arg((log, c)), Arg((t, c)), Arg((4,), I32, replay),
            Arg((1,), I32, past), Arg((1,), I32, f"ids:{t + 1}"),
        )
    )  # fmt: skip


SSM_CONV = register(
    OpSpec(
        "ssm_conv",
        infer=rule("ssm_conv", "state log x w parents replay past", _conv_rule),
        reference=_conv,
        ggml="SSM_CONV",
        cost=_conv_cost,
        examples=(
            _conv_example(3, 8, 5, 6, "replay:6", "ids:9"),
            _conv_example(2, 37, 9, 4, "replay:4", "ids:2"),
            _conv_example(1, 1, 1, 1, "replay:1", "ids:1"),
            _conv_example(3, 8, 0, 6, "replay:6", "ids:9"),
        ),
        doc="ssm_conv(state, log, x, w, parents, replay, past): each row and its forerunners by w.",
    )
)
SSM_CONV_NEXT = register(
    OpSpec(
        "ssm_conv_next",
        infer=rule("ssm_conv_next", "state log x replay past certain", _conv_next_rule),
        reference=_conv_next,
        cost=_conv_cost,
        overwrites=0,
        examples=(
            _conv_next_example(3, 8, 5, 6, "replay:6", "ids:9"),
            _conv_next_example(2, 37, 9, 4, "replay:4", "ids:2"),
            _conv_next_example(1, 1, 1, 1, "replay:1", "ids:1"),
            _conv_next_example(3, 8, 0, 6, "replay:6", "ids:9"),
        ),
        doc="ssm_conv_next(state, log, x, replay, past, certain): the inputs that text ended with.",
    )
)


def key_heads(state: Tensor, row: int) -> int:
    """G, from the width of a row. ShapeError where the sizes fit no number of heads."""
    h, d, v = state.shape
    heads = (row - h * v - 2 * h) // d if d else 0
    good = heads > 0 and heads * d + h * v + 2 * h == row and h % heads == 0
    expect(good, f"rows of {row} do not fit %{state.name} {list(state.shape)}")
    return heads


def _delta_shapes(state: Tensor, log: Tensor, rows: Tensor) -> int:
    _floats(state, log, rows)
    rank(state, 3, 3)
    rank(log, 2, 2)
    rank(rows, 2, 2)
    expect(log.shape[1] == rows.shape[1], f"expected %{log.name} [L, {rows.shape[1]}]")
    return key_heads(state, rows.shape[1])


def _delta_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, rows, q, parents, replay, past = sources
    heads = _delta_shapes(state, log, rows)
    _floats(q)
    wanted = (rows.shape[0], heads, state.shape[1])
    expect(q.shape == wanted, f"expected %{q.name} {list(wanted)}")
    _course(rows.shape[0], parents, replay, past)
    return Meta((rows.shape[0], state.shape[0], state.shape[2]), F32)


def _parts(row: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """k [H, D], v [H, V], gate [H] and beta [H] of one row."""
    h, d, v = shape
    at = row.size - h * v - 2 * h
    k = f64(row[:at]).reshape(-1, d)
    each = k[np.arange(h) % len(k)]
    rest = f64(row[at:])
    return each, rest[: h * v].reshape(h, v), rest[h * v : h * v + h], rest[h * v + h :]


def _advance(s: Array, row: Array) -> Array:
    """The state [H, D, V] after a row: faded by the gate, then corrected towards v along k."""
    k, v, gate, beta = _parts(row, s.shape)
    faded = s * np.exp(gate)[:, None, None]
    missing = (v - np.einsum("hd,hdv->hv", k, faded)) * beta[:, None]
    after: Array = faded + k[:, :, None] * missing[:, None, :]
    return after


def _states(state: Array, log: Array, replay: Array, past: Array) -> Array:
    """The state after the replayed rows."""
    s = f64(state) if int(past[0]) else np.zeros(state.shape)
    for row in _replayed(log, replay):
        s = _advance(s, row)
    return s


def _delta(
    state: Array, log: Array, rows: Array, q: Array, parents: Array, replay: Array, past: Array
) -> Array:
    made: list[Array] = []
    base = _states(state, log, replay, past)
    y = np.zeros((len(rows), state.shape[0], state.shape[2]), np.float32)
    each = np.arange(state.shape[0]) % q.shape[1]
    for t, row in enumerate(rows):
        before = _path(parents, t)[-2:-1]
        made.append(_advance(made[before[0]] if before else base, row))
        y[t] = np.einsum("hd,hdv->hv", f64(q[t])[each], made[t])
    return y


def _delta_next_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, rows, replay, past, certain = sources
    _delta_shapes(state, log, rows)
    owns_all(state)
    _course(rows.shape[0], None, replay, past, certain)
    return Meta(state.shape, F32)


def _delta_next(
    state: Array, log: Array, rows: Array, replay: Array, past: Array, certain: Array
) -> Array:
    s = _states(state, log, replay, past)
    for row in rows[: max(int(certain[0]), 0)]:
        s = _advance(s, row)
    state[:] = s
    return state


def _delta_cost(t: Tensor) -> Cost:
    state, rows = t.sources[0], t.sources[2]
    return Cost(7 * state.size * rows.shape[0], 2 * state.nbytes + rows.nbytes + t.nbytes)


def _delta_example(
    shape: tuple[int, int, int], keys: int, t: int, log: int, replay: str, past: str, after: bool
) -> Example:
    h, d, v = shape
    width = keys * d + h * v + 2 * h
    start = (Arg(shape), Arg((log, width), fill="small"), Arg((t, width), fill="small"))
    end = (Arg((4,), I32, replay), Arg((1,), I32, past))
    if after:
        return Example((*start, *end, Arg((1,), I32, f"ids:{t + 1}")), tolerance=2e-5)
    own = (Arg((t, keys, d)), Arg((t,), I32, "parents"))
    return Example((*start, *own, *end), tolerance=2e-5)


def _delta_examples(after: bool) -> tuple[Example, ...]:
    return (
        _delta_example((4, 16, 16), 2, 5, 6, "replay:6", "ids:9", after),
        _delta_example((3, 20, 24), 3, 9, 4, "replay:4", "ids:2", after),
        _delta_example((2, 3, 5), 1, 3, 4, "replay:4", "ids:9", after),
        _delta_example((1, 1, 1), 1, 1, 1, "replay:1", "ids:1", after),
        _delta_example((4, 16, 16), 2, 0, 6, "replay:6", "ids:9", after),
    )


DELTA_NET = register(
    OpSpec(
        "delta_net",
        infer=rule("delta_net", "state log rows q parents replay past", _delta_rule),
        reference=lambda *a: f32(_delta(*a)),
        ggml="GATED_DELTA_NET",
        cost=_delta_cost,
        examples=_delta_examples(False),
        doc="delta_net(state, log, rows, q, parents, replay, past): what q finds after each row.",
    )
)
DELTA_NET_NEXT = register(
    OpSpec(
        "delta_net_next",
        infer=rule("delta_net_next", "state log rows replay past certain", _delta_next_rule),
        reference=_delta_next,
        cost=_delta_cost,
        overwrites=0,
        examples=_delta_examples(True),
        doc="delta_net_next(state, log, rows, replay, past, certain): the state that text ends in.",
    )
)


def ssm_conv(
    state: Tensor, log: Tensor, x: Tensor, w: Tensor, parents: Tensor, replay: Tensor,
    past: Tensor, *, name: str = "",
) -> Tensor:  # fmt: skip
    """Each channel's last K inputs up to row t, by its weights: f32 [T, C].

    state [P, C], log [L, C], x [T, C], w [K, C] f32; parents i32 [T], replay i32 [R], past i32 [1].
    ggml: GGML_OP_SSM_CONV, whose state stands before its rows and whose w is [C, K].
    Errors: ShapeError; InputError at run time for rows that no log or step has.
    """
    return apply("ssm_conv", state, log, x, w, parents, replay, past, name=name)


def ssm_conv_next(
    state: Tensor, log: Tensor, x: Tensor, replay: Tensor, past: Tensor, certain: Tensor,
    *, name: str = "",
) -> Tensor:  # fmt: skip
    """The P inputs that the text ends with, after replayed rows and certain[0] of x; overwrites
    the state. No ggml peer (llama.cpp copies them). Sources as in `ssm_conv`. Errors: ShapeError.
    """
    return apply("ssm_conv_next", state, log, x, replay, past, certain, name=name)


def delta_net(
    state: Tensor, log: Tensor, rows: Tensor, q: Tensor, parents: Tensor, replay: Tensor,
    past: Tensor, *, name: str = "",
) -> Tensor:  # fmt: skip
    """What q [T, G, D] finds in the state after each row: f32 [T, H, V].

    state [H, D, V], log [L, W], rows [T, W] f32; after a row S = e^gate S + k (v - k S) beta.
    ggml: GGML_OP_GATED_DELTA_NET, which scales q itself. Errors: ShapeError; InputError at run
    time for rows that no log or step has. Source: Yang et al., arXiv 2412.06464.
    """
    return apply("delta_net", state, log, rows, q, parents, replay, past, name=name)


def delta_net_next(
    state: Tensor, log: Tensor, rows: Tensor, replay: Tensor, past: Tensor, certain: Tensor,
    *, name: str = "",
) -> Tensor:  # fmt: skip
    """The state after replayed rows and certain[0] of `rows`; overwrites it. No ggml peer (its op
    gives both). Sources as in `delta_net`. Errors: ShapeError.
    """
    return apply("delta_net_next", state, log, rows, replay, past, certain, name=name)
