"""Layers that carry a state from row to row: short convolutions, gated delta nets and state spaces.

Several texts go on in one step, each from a state of its own: N slots hold one each. Drafts may be
rejected, so what a text has is kept in two parts: its slot of `state` is that after the rows which
are text for certain, and `log` holds what rows of earlier steps would put into it. For each slot a
step says which rows of the log became text (`replay`, in order, -1 ends it), and the last of its
own rows that is text for certain (`certain`, -1: none). Row t of a step continues after its row
`parents[t]`, or, where that is below 0, after the replayed rows of slot -1 - parents[t]; so the
rows of a draft tree have the bits that they have as text. Where `past` of a slot is 0 a text begins
there, whatever the state was. A slot with a past and nothing that became text stays as it is.
The reference refuses indices of what there is not; a kernel takes the last row or slot for what is
beyond it, and replays no further than to there.

Legend: N slots, T rows, L rows of the log, R most replayed rows, P = K - 1 remembered inputs of a
convolution, C channels; H heads of values, G heads of keys, D numbers per key, V per value. A row
of a delta net is k [G*D], v [H*V], gate [H], beta [H] side by side; head h has the key of h mod G.
A state space (Mamba-2) is one that corrects nothing: beta of v is added to the faded state along k,
whatever k finds there already; H / G heads beside each other share a key.
"""

from collections.abc import Sequence

import numpy as np

from ggraph.dtype import F32, I32
from ggraph.errors import InputError
from ggraph.ops.rules import expect, f32, f64, flag, index_type, owns_all, rank, rule
from ggraph.tensor import Arg, Array, Attrs, Cost, Example, Meta, OpSpec, Tensor, apply, register

COURSE = "parents replay past"  # sources that say which rows follow which


def _floats(*tensors: Tensor) -> None:
    for t in tensors:
        expect(t.dtype is F32, f"{t.label}: expected f32, got {t.dtype}")


def _course(state: Tensor, rows: int, parents: Tensor, replay: Tensor, *single: Tensor) -> None:
    """The indices that say which rows follow which, in every slot."""
    slots = state.shape[0]
    for t in (parents, replay, *single):
        index_type(t)
    expect(parents.shape == (rows,), f"expected {parents.label} i32[{rows}]")
    rank(replay, 2, 2)
    expect(replay.shape[0] == slots, f"expected {replay.label} i32[{slots}, R]")
    for t in single:
        expect(t.shape == (slots,), f"expected {t.label} i32[{slots}]")


def _replayed(log: Array, replay: Array) -> Array:
    """The rows of the log that became text in one slot, in order."""
    over = np.flatnonzero(replay < 0)
    count = int(over[0]) if len(over) else len(replay)
    chosen = replay[:count]
    if count and chosen.max() >= len(log):
        raise InputError(f"replay: rows {chosen.tolist()} of a log of {len(log)}")
    found: Array = log[chosen]
    return found


def _path(parents: Array, row: int) -> list[int]:
    """A row's forerunners in this step, first to last, and itself; none where it is below 0. One
    beyond the step is its last."""
    found: list[int] = []
    row = min(row, len(parents) - 1)
    while row >= 0:
        found.append(row)
        row = int(parents[row])
    return found[::-1]


def _slots(state: Array, parents: Array) -> list[int]:
    """The slot whose text each row belongs to."""
    found: list[int] = []
    for row, before in enumerate(parents.tolist()):
        if before >= row:
            raise InputError(f"parents: row {row} follows row {before}")
        if -before > len(state):
            raise InputError(f"parents: row {row} follows slot {-1 - before} of {len(state)}")
        found.append(found[before] if before >= 0 else -1 - before)
    return found


def _conv_shapes(state: Tensor, log: Tensor, x: Tensor) -> None:
    _floats(state, log, x)
    rank(state, 3, 3)
    for t in (log, x):
        rank(t, 2, 2)
    width = x.shape[1]
    good = state.shape[2] == log.shape[1] == width and min(state.shape[:2]) >= 1
    expect(good, f"expected {state.label} [N, P, {width}] and {log.label} [L, {width}]")


def _conv_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, x, w, parents, replay, past = sources
    _conv_shapes(state, log, x)
    _floats(w)
    wanted = (state.shape[1] + 1, x.shape[1])
    expect(w.shape == wanted, f"expected {w.label} {list(wanted)}")
    _course(state, x.shape[0], parents, replay, past)
    return Meta(x.shape, F32)


def _before(state: Array, log: Array, replay: Array, past: Array, slot: int) -> Array:
    """What a slot's convolution remembers before the step's rows, and all that was replayed."""
    held = state[slot] if int(past[slot]) else np.zeros_like(state[slot])
    return np.concatenate([held, _replayed(log, replay[slot])])


def _conv(
    state: Array, log: Array, x: Array, w: Array, parents: Array, replay: Array, past: Array
) -> Array:
    y = np.zeros(x.shape, np.float32)
    for t, slot in enumerate(_slots(state, parents)):
        before = _before(state, log, replay, past, slot)
        seen = np.concatenate([before, x[_path(parents, t)]])[-len(w) :]  # [K, C]
        y[t] = (f64(seen) * f64(w)).sum(0)
    return y


def _conv_next_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, x, parents, replay, past, certain = sources
    _conv_shapes(state, log, x)
    owns_all(state)
    _course(state, x.shape[0], parents, replay, past, certain)
    return Meta(state.shape, F32)


def _conv_next(
    state: Array, log: Array, x: Array, parents: Array, replay: Array, past: Array, certain: Array
) -> Array:
    _slots(state, parents)
    for slot, last in enumerate(certain):
        before = _before(state, log, replay, past, slot)
        seen = np.concatenate([before, x[_path(parents, int(last))]])
        state[slot] = seen[len(seen) - state.shape[1] :]
    return state


def _conv_cost(t: Tensor) -> Cost:
    x = t.sources[2]
    return Cost(2 * x.size * (t.sources[0].shape[1] + 1), 2 * x.nbytes + t.sources[0].nbytes)


def _course_args(n: int, t: int, log: int, past: str, after: bool) -> tuple[Arg, ...]:
    """Sources `parents` to `past`, of an op of what comes `after` also `certain`."""
    which = Arg((t,), I32, f"parents:{n}"), Arg((n, 4), I32, f"replay:{log}")
    found = (*which, Arg((n,), I32, past))
    return (*found, Arg((n,), I32, f"last:{t}")) if after else found


def _conv_examples(after: bool) -> tuple[Example, ...]:
    def example(n: int, p: int, c: int, t: int, log: int, past: str) -> Example:
        rows = (Arg((n, p, c)), Arg((log, c)), Arg((t, c)))
        w = () if after else (Arg((p + 1, c)),)
        return Example((*rows, *w, *_course_args(n, t, log, past, after)))

    return (
        example(1, 3, 8, 5, 6, "ids:9"),
        example(3, 2, 37, 9, 4, "ids:2"),
        example(1, 1, 1, 1, 1, "ids:1"),
        example(4, 3, 8, 0, 6, "ids:9"),
    )


SSM_CONV = register(
    OpSpec(
        "ssm_conv",
        infer=rule("ssm_conv", f"state log x w {COURSE}", _conv_rule),
        reference=_conv,
        ggml="SSM_CONV",
        cost=_conv_cost,
        examples=_conv_examples(False),
        doc="ssm_conv(state, log, x, w, parents, replay, past): each row and its forerunners by w.",
    )
)
SSM_CONV_NEXT = register(
    OpSpec(
        "ssm_conv_next",
        infer=rule("ssm_conv_next", f"state log x {COURSE} certain", _conv_next_rule),
        reference=_conv_next,
        cost=_conv_cost,
        overwrites=0,
        soon=True,
        examples=_conv_examples(True),
        doc="ssm_conv_next(state, log, x, parents, replay, past, certain): what texts end with.",
    )
)


def key_heads(state: Tensor, row: int) -> int:
    """G, from the width of a row. ShapeError where the sizes fit no number of heads."""
    _, h, d, v = state.shape
    heads = (row - h * v - 2 * h) // d if d else 0
    good = heads > 0 and heads * d + h * v + 2 * h == row and h % heads == 0
    expect(good, f"rows of {row} do not fit {state.label} {list(state.shape)}")
    return heads


def _delta_shapes(state: Tensor, log: Tensor, rows: Tensor) -> int:
    _floats(state, log, rows)
    rank(state, 4, 4)
    rank(log, 2, 2)
    rank(rows, 2, 2)
    expect(log.shape[1] == rows.shape[1], f"expected {log.label} [L, {rows.shape[1]}]")
    return key_heads(state, rows.shape[1])


def _delta_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, rows, q, parents, replay, past, certain = sources
    flag(attrs, "corrects")
    heads = _delta_shapes(state, log, rows)
    _floats(q)
    wanted = (rows.shape[0], heads, state.shape[2])
    expect(q.shape == wanted, f"expected {q.label} {list(wanted)}")
    _course(state, rows.shape[0], parents, replay, past, certain)
    return Meta((rows.shape[0], state.shape[1], state.shape[3]), F32)


def _by_head(keys: Array, heads: int, corrects: bool) -> Array:
    """Of keys or queries [G, D] each head's own: [H, D]."""
    h, g = np.arange(heads), len(keys)
    return f64(keys)[h % g if corrects else h * g // heads]


def _parts(row: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """k [G, D], v [H, V], gate [H] and beta [H] of one row."""
    h, d, v = shape
    at = row.size - h * v - 2 * h
    k, rest = row[:at].reshape(-1, d), f64(row[at:])
    return k, rest[: h * v].reshape(h, v), rest[h * v : h * v + h], rest[h * v + h :]


def _advance(s: Array, row: Array, corrects: bool) -> Array:
    """The state [H, D, V] after a row: faded by the gate, then v is added along k, or what is found
    there is corrected towards it."""
    keys, v, gate, beta = _parts(row, s.shape)
    k = _by_head(keys, len(s), corrects)
    faded = s * np.exp(gate)[:, None, None]
    missing = (v - np.einsum("hd,hdv->hv", k, faded) if corrects else v) * beta[:, None]
    after: Array = faded + k[:, :, None] * missing[:, None, :]
    return after


def _begun(
    state: Array, log: Array, replay: Array, past: Array, slot: int, corrects: bool
) -> Array:
    """A slot's state after the replayed rows."""
    s = f64(state[slot]) if int(past[slot]) else np.zeros(state.shape[1:])
    for row in _replayed(log, replay[slot]):
        s = _advance(s, row, corrects)
    return s


def _delta(
    state: Array, log: Array, rows: Array, q: Array, parents: Array, replay: Array, past: Array,
    certain: Array, *, corrects: bool,
) -> Array:  # fmt: skip
    made: list[Array] = []
    heads, v = state.shape[1], state.shape[3]
    y, slots = np.zeros((len(rows), heads, v), np.float32), _slots(state, parents)
    for t, row in enumerate(rows):
        new = parents[t] < 0
        s = _begun(state, log, replay, past, slots[t], corrects) if new else made[parents[t]]
        made.append(_advance(s, row, corrects))
        y[t] = np.einsum("hd,hdv->hv", _by_head(q[t], heads, corrects), made[t])
    return y


def _delta_next_rule(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    state, log, rows, parents, replay, past, certain = sources
    flag(attrs, "corrects")
    _delta_shapes(state, log, rows)
    owns_all(state)
    _course(state, rows.shape[0], parents, replay, past, certain)
    return Meta(state.shape, F32)


def _delta_next(
    state: Array, log: Array, rows: Array, parents: Array, replay: Array, past: Array,
    certain: Array, *, corrects: bool,
) -> Array:  # fmt: skip
    _slots(state, parents)
    for slot, last in enumerate(certain):
        s = _begun(state, log, replay, past, slot, corrects)
        for t in _path(parents, int(last)):
            s = _advance(s, rows[t], corrects)
        state[slot] = s
    return state


def _delta_cost(t: Tensor) -> Cost:
    state, rows = t.sources[0], t.sources[2]
    one = state.size // state.shape[0]
    return Cost(7 * one * rows.shape[0], 2 * state.nbytes + rows.nbytes + t.nbytes)


def _delta_examples(after: bool) -> tuple[Example, ...]:
    def example(
        shape: tuple[int, ...], keys: int, t: int, log: int, past: str, corrects: bool = True
    ) -> Example:
        n, h, d, v = shape
        width = keys * d + h * v + 2 * h
        rows = (Arg(shape), Arg((log, width), fill="small"), Arg((t, width), fill="small"))
        q = () if after else (Arg((t, keys, d)),)
        args = (*rows, *q, *_course_args(n, t, log, past, True))
        return Example(args, {"corrects": corrects}, tolerance=2e-5)

    return (
        example((1, 4, 16, 16), 2, 5, 6, "ids:9"),
        example((2, 3, 20, 24), 3, 9, 4, "ids:2"),
        example((2, 2, 3, 5), 1, 3, 4, "ids:9"),
        example((1, 1, 1, 1), 1, 1, 1, "ids:1"),
        example((3, 4, 16, 16), 2, 0, 6, "ids:9"),
        example((5, 2, 8, 64), 1, 16, 6, "ids:2"),
        example((2, 6, 20, 24), 3, 9, 4, "ids:2", False),
        example((1, 4, 16, 8), 1, 5, 6, "ids:9", False),
        example((2, 2, 3, 5), 2, 3, 4, "ids:9", False),
    )


DELTA_NET = register(
    OpSpec(
        "delta_net",
        infer=rule("delta_net", f"state log rows q {COURSE} certain", _delta_rule),
        reference=lambda *a, corrects: f32(_delta(*a, corrects=corrects)),
        ggml="GATED_DELTA_NET",
        cost=_delta_cost,
        examples=_delta_examples(False),
        doc="delta_net(state, log, rows, q, parents, replay, past, certain): what q finds by row.",
    )
)
DELTA_NET_NEXT = register(
    OpSpec(
        "delta_net_next",
        infer=rule("delta_net_next", f"state log rows {COURSE} certain", _delta_next_rule),
        reference=_delta_next,
        cost=_delta_cost,
        overwrites=0,
        soon=True,
        examples=_delta_examples(True),
        doc="delta_net_next(state, log, rows, parents, replay, past, certain): where texts end.",
    )
)


def ssm_conv(
    state: Tensor, log: Tensor, x: Tensor, w: Tensor, parents: Tensor, replay: Tensor,
    past: Tensor, *, name: str = "",
) -> Tensor:  # fmt: skip
    """Each channel's last K inputs up to row t, by its weights: f32 [T, C].

    state [N, P, C], log [L, C], x [T, C], w [K, C] f32; parents i32 [T], replay i32 [N, R], past
    i32 [N]. ggml: GGML_OP_SSM_CONV, whose state stands before its rows and whose w is [C, K].
    Errors: ShapeError.
    """
    return apply("ssm_conv", state, log, x, w, parents, replay, past, name=name)


def ssm_conv_next(
    state: Tensor, log: Tensor, x: Tensor, parents: Tensor, replay: Tensor, past: Tensor,
    certain: Tensor, *, name: str = "",
) -> Tensor:  # fmt: skip
    """The P inputs that each slot's text ends with, after replayed rows and those up to certain
    i32 [N] of x; overwrites the state. No ggml peer (llama.cpp copies them). Sources as in
    `ssm_conv`. Errors: ShapeError.
    """
    return apply("ssm_conv_next", state, log, x, parents, replay, past, certain, name=name)


def delta_net(
    state: Tensor, log: Tensor, rows: Tensor, q: Tensor, parents: Tensor, replay: Tensor,
    past: Tensor, certain: Tensor, *, corrects: bool = True, name: str = "",
) -> Tensor:  # fmt: skip
    """What q [T, G, D] finds in its text's state after each row: f32 [T, H, V].

    state [N, H, D, V], log [L, W], rows [T, W] f32; after a row S = e^gate S + k (v - k S) beta, or
    S = e^gate S + k v beta unless it `corrects`. `certain` i32 [N] has no part in what is found:
    with it a device comes by what `delta_net_next` of the same sources asks for on its way through
    the rows. ggml: GGML_OP_GATED_DELTA_NET, which scales q itself, and GGML_OP_SSM_SCAN. Errors:
    ShapeError. Sources: Yang et al., arXiv 2412.06464; Dao and Gu, arXiv 2405.21060.
    """
    sources = state, log, rows, q, parents, replay, past, certain
    return apply("delta_net", *sources, name=name, corrects=corrects)


def delta_net_next(
    state: Tensor, log: Tensor, rows: Tensor, parents: Tensor, replay: Tensor, past: Tensor,
    certain: Tensor, *, corrects: bool = True, name: str = "",
) -> Tensor:  # fmt: skip
    """Each slot's state after replayed rows and those up to certain i32 [N] of `rows`; overwrites
    it. No ggml peer (its ops give both). Sources as in `delta_net`. Errors: ShapeError.
    """
    sources = state, log, rows, parents, replay, past, certain
    return apply("delta_net_next", *sources, name=name, corrects=corrects)
