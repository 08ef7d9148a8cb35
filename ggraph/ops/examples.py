"""Examples of ops as tensors and arrays: for tests on every backend and for benchmarks."""

from collections.abc import Iterator

import numpy as np

from ggraph.errors import GraphError
from ggraph.ops.evaluate import to_logical, to_storage
from ggraph.tensor import OPS, Arg, Array, Example, Kind, OpSpec, Tensor, apply, leaf


def every() -> Iterator[tuple[OpSpec, int, Example]]:
    """Every example of every registered op, with its number within the op."""
    for name in sorted(OPS):
        for i, example in enumerate(OPS[name].examples):
            yield OPS[name], i, example


def leaves(spec: OpSpec, example: Example) -> tuple[Tensor, ...]:
    """One leaf per source: inputs a, b, .., and a state for what the op overwrites."""
    kinds = [Kind.STATE if i == spec.overwrites else Kind.INPUT for i in range(len(example.args))]
    return tuple(
        leaf(kind, chr(ord("a") + i), arg.shape, arg.dtype)
        for i, (kind, arg) in enumerate(zip(kinds, example.args, strict=True))
    )


def build(spec: OpSpec, example: Example) -> Tensor:
    """The op applied to `leaves`; the result is called "y"."""
    return apply(spec.name, *leaves(spec, example), name="y", **example.attrs)


def values(arg: Arg, rng: "np.random.Generator") -> Array:
    """Logical values for one source, as its `fill` asks.

    "normal", "small" (a third of it), "positive" (0.1 to 2.1), "chance" (f64 in [0, 1)), "mask" (0
    or -inf), "ids:N"
    (integers in [0, N)), "replay:N" (in each row some of those, then -1), "parents:N" (an earlier
    row, or -1 - a slot of N), "last:N" (integers in [-1, N)), "triangle" (lower triangular, a
    diagonal of 1 to 2) or "none" (-1).
    """
    word, _, count = arg.fill.partition(":")
    if word == "none":
        return np.full(arg.shape, -1, np.int32)
    if word == "replay":
        drawn = rng.integers(0, int(count), arg.shape)
        *each, most = arg.shape  # no rows: memory that they are a window on
        return np.where(np.arange(most) < rng.integers(0, most + 1, (*each, 1)), drawn, -1)
    if word == "parents":
        before = np.arange(arg.shape[0]) - 1
        other = rng.integers(-int(count), before + 1)
        return np.where((rng.random(arg.shape) < 0.6) & (before >= 0), before, other)
    if word == "last":
        return rng.integers(-1, int(count), arg.shape).astype(np.int32)
    if word == "chance":
        return rng.random(arg.shape)
    if word == "small":
        return (rng.standard_normal(arg.shape) / 3).astype(np.float32)
    if word == "triangle" and len(arg.shape) < 2:  # memory that a matrix is a window on
        flat: Array = (1 + rng.random(arg.shape) / 100).astype(np.float32)
        return flat
    if word == "triangle":
        below = np.tril(rng.standard_normal(arg.shape) / max(arg.shape[-1], 1), -1)
        diagonal = np.tril(np.triu(1 + rng.random(arg.shape)))
        square: Array = (below + diagonal).astype(np.float32)
        return square
    if word == "ids":
        drawn = rng.integers(0, max(int(count), 1), arg.shape)
        return drawn.astype(np.float32) if arg.dtype.is_float else drawn.astype(arg.dtype.np)
    if word == "mask":
        return np.where(rng.random(arg.shape) < 0.5, 0, -np.inf).astype(np.float32)
    if word == "positive":
        return (rng.random(arg.shape) * 2 + 0.1).astype(np.float32)
    if word != "normal":
        raise GraphError(f"unknown fill {arg.fill!r} of {arg}")
    return rng.standard_normal(arg.shape).astype(np.float32)


def feeds(spec: OpSpec, example: Example, seed: int = 0) -> dict[str, Array]:
    """Logical values for `leaves`, already rounded to each leaf's dtype."""
    rng = np.random.default_rng(seed)
    pairs = zip(leaves(spec, example), example.args, strict=True)
    return {t.name: rounded(values(arg, rng), t) for t, arg in pairs}


def rounded(logical: Array, t: Tensor) -> Array:
    """The values that remain when `logical` is stored as `t` and read again."""
    kept = to_logical(to_storage(logical, t), t)
    return np.array(kept)
