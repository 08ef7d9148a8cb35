"""Steps of a draft head as one graph, so that nothing visits the host between them.

Step i + 1 takes the token of step i, its best or one that is drawn, and its hidden state; where
they are written and what they see is known beforehand. On a device that replays captured plans, a
whole chain costs one replay.
Legend: K steps, C visible cache rows, E head width, W draft vocabulary, k candidates of a law.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ggraph import ops
from ggraph.decode.picks import drawn_of, greatest_of
from ggraph.decode.rows import Rows, visibility
from ggraph.decode.sampler import SamplerConfig
from ggraph.dtype import F32, F64, I32, I64
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.tensor import Array, Kind, Tensor, apply, input, weight


def unrolled(
    step: Graph, count: int, target_ids: Tensor, root: Tensor, law: SamplerConfig | None = None
) -> Graph:
    """`count` steps of `step`, a head's graph of one fed-back row.

    target_ids i32 [W, 1] is a weight: the target's token of each draft token. Inputs are those of
    the step, `positions`, `slots`, `mask` and `length` with K rows, but for `hidden`, which begins
    with `root` f32 [1, E]. Output: `drafted` i32 [K]. By a `law` they are drawn by `numbers` f64
    [K], and what their laws are made of is brought back: `best` i32 [K, k], draft tokens, and
    `greatest` f32 [K, k, 1], their logits.
    """
    if count < 1 or "hidden" not in {t.name for t in step}:
        raise InputError(
            f"{step.name}: {count} steps of a graph without `hidden` cannot be drafted"
        )
    rows = given_rows(step, count)
    masks = input("mask", (count, step["mask"].shape[1]), F32)
    numbers = input("numbers", (count,), F64)
    tokens, hidden = step["tokens"], root
    states: dict[str, Tensor] = {}
    said: list[dict[str, Tensor]] = []
    for i in range(count):
        given = {"tokens": tokens, "hidden": hidden, "mask": ops.rows(masks, i, 1), **states}
        done = copied(step, i, rows[i] | given)
        best, found = _taken(done["logits"], ops.rows(numbers, i, 1), law)  # [1]
        tokens = ops.get_rows(target_ids, best, name=f"token.{i}").reshape(1)
        hidden = done["feedback"]
        states = {name: done[last.name] for name, last in step.updates.items()}
        said.append({"drafted": tokens, **found})
    outputs = {name: ops.concat([s[name] for s in said], axis=0, name=name) for name in said[0]}
    return Graph.of(outputs, also=states.values(), name=f"{count} x {step.name}")


def _taken(
    logits: Tensor, number: Tensor, law: SamplerConfig | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The draft token i32 [1] that is taken of logits [1, W], and what its law is made of."""
    if law is None:
        return ops.argmax(logits), {}
    best, greatest = greatest_of(logits, law.top_k)
    found = {"best": best.reshape(1, law.top_k), "greatest": greatest}
    return drawn_of(logits, number, law, always=True), found


def guessing(step: Graph, count: int = 1) -> Graph:
    """`step`, a head's graph, with the `count` best guesses of each wanted row instead of logits.

    Outputs: `best` i32 [M, count], draft tokens, the best first; `chance` f32 [M, count, 1], what
    the head gives them; and all others as before.
    """
    best, chance = guesses(step["logits"], count)
    others = {t.name: t for t in step.outputs if t.name != "logits"}
    outputs = {"best": best, "chance": chance, **others}
    return Graph.of(outputs, also=step.updates.values(), name=f"guess of {step.name}")


def guesses(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best draft tokens i32 [M, count] of logits [M, W], of equals the lowest first,
    and their chances f32 [M, count, 1]."""
    rows, size = logits.shape
    best = ops.argmax(logits).reshape(rows, 1) if count == 1 else ops.top_k(logits, count)
    return best, ops.get_rows(ops.soft_max(logits).reshape(rows, size, 1), best)


def given_rows(step: Graph, count: int) -> list[dict[str, Tensor]]:
    """For each step, its rows of the inputs that all steps share, without masks."""
    each = step["mask"].shape[0]
    shared = {
        "positions": (input("positions", (count * each,), I32), each),
        "slots": (input("slots", (count * each,), I64), each),
        "length": (input("length", (count,), I32), 1),
    }
    return [
        {name: ops.rows(t, i * n, n, name=f"{name}.{i}") for name, (t, n) in shared.items()}
        for i in range(count)
    ]


def copied(step: Graph, i: int, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The step's tensors over other leaves; weights and what is not given stay as they are."""
    done: dict[str, Tensor] = {}
    for t in step:
        if t.is_leaf:
            done[t.name] = given.get(t.name, t)
            assert t.kind is not Kind.INPUT or t.name in {*given, "wanted"}, t
        else:
            sources = [done[s.name] for s in t.sources]
            done[t.name] = apply(t.op, *sources, name=f"{t.name}.step{i}", **t.attrs)
    return done


def table(name: str, ids: Array) -> Tensor:
    """The weight that holds a head's target ids, called after the head."""
    return weight(f"{name}.target_ids", (len(ids), 1), I32)


def feeds(token: int, past: int, count: int, context: int) -> dict[str, Array]:
    """What `unrolled` is fed: the first row's token, and `count` rows of the cache from slot `past`
    on, each of which sees all before it and itself."""
    slots: Sequence[int] = range(past, past + count)
    rows = Rows([0] * count, slots, slots)
    return {
        "tokens": np.array([token], np.int32),
        "positions": np.array(slots, np.int32),
        "slots": np.array(slots, np.int64),
        "mask": visibility(rows, count, context),
        "length": np.array(slots, np.int32) + np.int32(1),
        "wanted": np.zeros(1, np.int32),
    }
