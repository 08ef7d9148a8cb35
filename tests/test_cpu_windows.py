"""Ops whose rows are windows of wider ones: the kernels that rows without gaps have take them."""

from collections.abc import Callable

import numpy as np
import pytest
from stored_weights import raw_weight

from ggraph import Graph, Options, Session, input, open_backend, ops, state, weight
from ggraph.backends.cpu import cpu_spec
from ggraph.backends.cpu.lowering.needs import step_of
from ggraph.dtype import F16, I32, I64, Q8_0
from ggraph.pipeline import make_plan
from ggraph.tensor import Array, Kind, Tensor

ROWS, HEADS, WIDE = 5, 2, 64  # windows are of [ROWS, 3 * WIDE]
RNG = np.random.default_rng(3)
FEEDS: dict[str, Array] = {
    "x": RNG.normal(size=(ROWS, 3 * WIDE)).astype(np.float32),
    "at": np.array([4, 0, 2, 1, 7]), "of": np.array([3, 0, 3], np.int32),
    "pos": np.arange(ROWS, dtype=np.int32) + 9,
    "parents": np.arange(ROWS, dtype=np.int32) - 1, "past": np.array([0], np.int32),
    "replay": np.array([[-1]], np.int32), "certain": np.array([ROWS - 1], np.int32),
    "keys": RNG.normal(size=(8, 1, WIDE // HEADS)).astype(np.float32),
}  # fmt: skip
WEIGHTS: dict[str, Array] = {
    "w": raw_weight(Q8_0, 40, WIDE), "scale": RNG.normal(size=WIDE).astype(np.float32),
    "taps": RNG.normal(size=(4, WIDE)).astype(np.float32),
}  # fmt: skip


def heads(x: Tensor) -> Tensor:
    return x.reshape(ROWS, HEADS, -1)


def places() -> Tensor:
    return input("at", (ROWS,), I64)


def normed(x: Tensor) -> Tensor:
    return ops.rms_norm(x, eps=1e-6) * weight("scale", (WIDE,))


def times(x: Tensor) -> Tensor:
    return ops.mul_mat(weight("w", (40, WIDE), Q8_0), x)


def turned(x: Tensor) -> Tensor:
    return ops.rope(heads(x), input("pos", (ROWS,), I32), n_rot=16, mode="neox")


def kept(rows: Tensor, *shape: int) -> Tensor:
    return ops.cont(ops.set_rows(state("cache", (8, *shape), F16), rows, places()))


def attended(x: Tensor) -> Tensor:
    keys = input("keys", (8, 1, WIDE // HEADS))
    return ops.flash_attn(heads(x), keys, keys, scale=0.2)


def course(*names: str) -> list[Tensor]:
    return [input(n, FEEDS[n].shape, I32) for n in names]


def convolved(x: Tensor) -> Tensor:
    held, log = state("conv", (1, 3, WIDE)), state("log", (2, WIDE))
    given = course("parents", "replay", "past", "certain")
    ended = ops.ssm_conv_next(held, log, x, *given)
    y = ops.ssm_conv(held, log, x, weight("taps", (4, WIDE)), *given[:3])
    return ops.concat([y, ended.reshape(3, WIDE)], axis=0)


def asked(q: Tensor, rows: Tensor) -> Tensor:
    """Two heads of keys and values of 14 and 16 numbers: rows of 2 * 14 + 2 * 16 + 4."""
    held, log = state("net", (1, HEADS, 14, 16)), state("log", (2, WIDE))
    keys = heads(ops.columns(q, 0, HEADS * 14))
    given = course("parents", "replay", "past", "certain")
    return ops.delta_net(held, log, ops.cont(ops.tanh(rows)), keys, *given, corrects=True)


MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda a, b: ops.rms_norm(a, eps=1e-6),
    "norm and weight": lambda a, b: normed(a),
    "norm of a product": lambda a, b: times(normed(a)),
    "product": lambda a, b: times(a),
    "unit": lambda a, b: ops.swiglu(a, b),
    "unit of a product": lambda a, b: times(ops.swiglu(a, b)),
    "soft-max": lambda a, b: ops.soft_max(a, scale=0.5),
    "largest": lambda a, b: ops.argmax(a),
    "taken": lambda a, b: ops.get_rows(a, input("of", (3,), I32)),
    "rotated": lambda a, b: turned(a),
    "rotated and kept": lambda a, b: kept(turned(a), HEADS, WIDE // HEADS),
    "kept": lambda a, b: kept(a, WIDE),
    "heads kept": lambda a, b: kept(heads(a), HEADS, WIDE // HEADS),
    "attention": lambda a, b: attended(a),
    "convolution": lambda a, b: convolved(a),
    "net": lambda a, b: asked(a, b),
}


def run(y: Tensor) -> Array:
    """By kernels alone."""
    graph = Graph.of({"y": y})
    feeds = {n: a for n, a in FEEDS.items() if any(t.name == n for t in graph.leaves(Kind.INPUT))}
    with Session({"cpu": open_backend("cpu", threads=2)}, options=Options(strict=True)) as session:
        session.prepare("step", graph, lambda t: WEIGHTS[t.name])
        return session.run("step", feeds)["y"]


@pytest.mark.parametrize("name", MADE)
def test_windows_have_the_kernels_of_rows(name: str) -> None:
    """The same bits as of copies, and the planner makes none."""
    x = input("x", (ROWS, 3 * WIDE))
    windows = [ops.columns(x, at, WIDE) for at in (WIDE, 2 * WIDE)]
    y = MADE[name](*windows)
    plan = make_plan(Graph.of({"y": y}), [cpu_spec("cpu")]).plan
    assert not any(t.name.endswith("@whole") for t in plan.graph.nodes)
    assert np.array_equal(run(y), run(MADE[name](*map(ops.cont, windows))))


@pytest.mark.parametrize(
    ("window", "axes", "step"),
    [
        (lambda x: x, 0, 4),
        (lambda x: x, 1, 16),
        (lambda x: x, 2, 96),
        (lambda x: ops.columns(x, 1, 2), 1, 16),
        (lambda x: ops.columns(x, 1, 2), 2, None),
        (lambda x: ops.rows(x, 1, 2), 1, 16),
        (lambda x: ops.narrow(x, 1, 1, 2), 1, None),
        (lambda x: ops.narrow(x, 1, 1, 2), 2, 96),
        (lambda x: ops.narrow(x, 1, 1, 1), 1, None),
        (lambda x: ops.permute(x, 1, 0, 2), 1, None),
        (lambda x: ops.permute(x, 0, 2, 1), 1, None),
        (lambda x: ops.cast(x, F16), 1, None),
    ],
)
def test_how_far_rows_are_apart(
    window: Callable[[Tensor], Tensor], axes: int, step: int | None
) -> None:
    x = window(input("x", (3, 6, 4)))
    assert step_of(x, axes) == step
