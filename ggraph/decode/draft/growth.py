"""The growth of a tree as one graph, so that nothing visits the host between its levels.

Level by level, as `Expansion` does it on the host: the best children of the level's rows, the best
of those go on from the hidden states of their parents, and see what these see and themselves. At
the end the best nodes of all levels. Chances are multiplied, which two devices do alike.
Legend: K best of each row and rows of each level, D levels that are read, C visible cache rows,
E head width, W draft vocabulary, N nodes of the tree, S = K + D*K*K nodes that are scored.

    scored node   0 .. K-1      K + (l*K + r)*K + j, child j of row r of level l
    row r of      level 0: r    level l + 1: child `chosen[l, r]` of level l's K*K
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ggraph import ops
from ggraph.decode.draft.loop import copied, given_rows, guesses
from ggraph.decode.draft.tree import ROOT, Draft, places
from ggraph.decode.rows import Rows, visibility
from ggraph.dtype import F32, I32, I64
from ggraph.errors import InputError
from ggraph.graph import Graph
from ggraph.tensor import Array, Tensor, input, weight


def grown(step: Graph, depth: int, nodes: int, target_ids: Tensor, root: Tensor) -> Graph:
    """A tree of `nodes` nodes from `depth` levels of `step`, a head's graph of K fed-back rows that
    are all wanted. target_ids i32 [W, 1] is a weight: the target's token of each draft token; what
    is hidden behind the tree's root is `root` f32 [1, E].

    Inputs: `best` i32 [1, K] and `chance` f32 [1, K], the root's children; `mask` f32 [1, C] of the
    root; of all D*K rows `positions`, `slots` and `own` i64, where each finds itself in its level's
    masks; `length` [D]; `wanted` [K]. Outputs: `kept` i32 [N], scored nodes, the best first;
    `tokens` i32 [N], theirs; `chosen` i32 [(D - 1) * K], where D > 1.
    """
    k, context = step["mask"].shape
    if depth < 1 or "hidden" not in {t.name for t in step} or step["logits"].shape[0] != k:
        raise InputError(f"{step.name}: no tree grows by {depth} levels of {k} rows of this graph")
    under, shown = (weight(name, t.shape, I32 if t.dtype == np.int32 else F32)
                    for name, t in tables(k).items())  # fmt: skip
    rows = given_rows(step, depth)
    places = input("own", (depth * k,), I64)
    best, chance = input("best", (1, k), I32), input("chance", (1, k), F32)
    hidden = ops.repeat(root, step["hidden"].shape)
    masks = ops.repeat(input("mask", (1, context), F32), (k, context))
    said, scores, chosen = [best.reshape(k)], [chance.reshape(k)], []
    states: dict[str, Tensor] = {}
    for i in range(depth):
        if i:
            picked = ops.top_k(scores[-1], k, name=f"chosen.{i}")  # [K]
            below = ops.get_rows(under, picked).reshape(k)
            hidden, masks = ops.get_rows(hidden, below), ops.get_rows(masks, below)
            best = ops.get_rows(said[-1].reshape(k * k, 1), picked)
            chance = ops.get_rows(scores[-1].reshape(k * k, 1), picked)
            chosen.append(picked)
        itself = ops.rows(places, i * k, k)
        masks = ops.set_rows(masks.reshape(k * context, 1), shown, itself).reshape(k, context)
        tokens = ops.get_rows(target_ids, best.reshape(k)).reshape(k)
        given = {"tokens": tokens, "hidden": hidden, "mask": masks, **states}
        done = copied(step, i, rows[i] | given)
        hidden = done["feedback"]
        states = {name: done[last.name] for name, last in step.updates.items()}
        children, shares = guesses(done["logits"], k)  # [K, K], [K, K, 1]
        said.append(children.reshape(k * k))
        scores.append(ops.mul(shares.reshape(k, k), chance.reshape(k, 1)).reshape(k * k))
    kept = ops.top_k(ops.concat(scores, axis=0), nodes, name="kept")  # [N] of [S]
    all_said = ops.concat(said, axis=0)  # [S]
    own = ops.get_rows(all_said.reshape(all_said.size, 1), kept).reshape(nodes)
    outputs = {"kept": kept, "tokens": ops.get_rows(target_ids, own)}
    if chosen:
        outputs["chosen"] = ops.concat(chosen, axis=0)
    return Graph.of(outputs, also=states.values(), name=f"tree of {depth} x {step.name}")


def tables(k: int) -> dict[str, Array]:
    """Weights that a growth by K knows, by name: the row below which each of a level's K*K children
    lies i32 [K*K, 1], and what a mask says where a row sees itself f32 [K, 1]."""
    under = np.repeat(np.arange(k, dtype=np.int32), k).reshape(k * k, 1)
    return {f"tree.{k}.under": under, f"tree.{k}.shown": np.zeros((k, 1), np.float32)}


def sown(best: Array, chance: Array, past: int, depth: int, context: int) -> dict[str, Array]:
    """What `grown` is fed: guesses [1, K] behind the last of `past` true rows. Each level takes K
    slots behind them, and a position."""
    k = best.shape[1]
    slots = np.arange(past, past + depth * k)
    own = np.tile(np.arange(k) * context, depth) + slots
    before = [past - 1]
    return {
        "best": np.ascontiguousarray(best, np.int32),
        "chance": np.ascontiguousarray(chance, np.float32),
        "positions": (past + np.arange(depth).repeat(k)).astype(np.int32),
        "slots": slots.astype(np.int64),
        "own": own.astype(np.int64),
        "mask": visibility(Rows([0], before, before), 1, context),
        "length": (past + k * np.arange(1, depth + 1)).astype(np.int32),
        "wanted": np.arange(k, dtype=np.int32),
    }


@dataclass(frozen=True)
class Tree:
    """What came back of a growth by `k`: the best nodes by number, the best first, their tokens,
    and which of a level's children went on."""

    k: int
    kept: list[int]
    tokens: list[int]
    chosen: list[int]

    @staticmethod
    def of(out: Mapping[str, Array], k: int) -> "Tree":
        """From the outputs of `grown`."""
        chosen = out["chosen"].tolist() if "chosen" in out else []
        return Tree(k, out["kept"].tolist(), out["tokens"].reshape(-1).tolist(), chosen)

    def parent(self, node: int) -> int:
        """The scored node that a scored node lies below."""
        level, child = divmod(node - self.k, self.k * self.k)
        if level < 0:
            return ROOT
        row = child // self.k
        if level == 0:
            return row
        return self.k + (level - 1) * self.k * self.k + self.chosen[(level - 1) * self.k + row]

    def draft(self, count: int) -> Draft:
        """The `count` best nodes in the order in which they were scored. A node's parent is no
        worse and comes first, so it is among them."""
        best = sorted(zip(self.kept[:count], self.tokens, strict=False))
        place = places([node for node, _ in best])
        parents = tuple(place[self.parent(node)] for node, _ in best)
        return Draft(tuple(token for _, token in best), parents)
