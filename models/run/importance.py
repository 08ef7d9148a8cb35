"""How much each column of a model's matrices counts, seen while it reads a text.

Legend: T rows of a step, K columns of a matrix, X experts, U experts of a row.

A step's graph gets a state for each matrix, to which it adds the squares of what the matrix is
multiplied by; of experts, only of the rows that chose them. The output matrix is left out: it is
kept in more bits than the others.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ggraph import Graph, InputError, Session, Tensor, dtypes, ops, state
from ggraph.decode.given import pieces
from ggraph.decode.model import StepShape
from ggraph.decode.rows import row_bucket
from ggraph.decode.runner import Runner
from ggraph.formats.imatrix import Importance
from ggraph.tensor import Kind

from ..registry import ARCHITECTURES, Model
from .perplexity import Report

STEP = 512  # tokens of a step
OUTPUTS = {"", "output.weight", "token_embd.weight"}
# What a file has in one matrix, and the part of it whose rows are multiplied by the same
JOINED = {
    "attn_qkv": "attn_q", "attn_v_b": "attn_kv_b", "ffn_gate_up_exps": "ffn_gate_exps",
    "ssm_ba": "ssm_alpha",
}  # fmt: skip
SUMS, ROWS = "importance.", "importance rows."  # before a tensor's name: its states


def seen(
    model: Model,
    session: Session,
    chunks: Sequence[Sequence[int]],
    report: Report = lambda done, total: None,
) -> dict[str, Importance]:
    """What the model's matrices met, by their names in GGUF, while it read each chunk from an empty
    cache, in a session that knows nothing of it yet. InputError for chunks of a length that no step
    has: rows that fill one up would count."""
    size = len(chunks[0])
    if any(row_bucket(len(part)) != len(part) for part in pieces(chunks[0], STEP)):
        raise InputError(f"chunks of {size} tokens: expected a power of 2 from 32 on")
    watched = _Watched(**{f.name: getattr(model, f.name) for f in fields(model)})
    runner = Runner(watched, session, size, batch=STEP)
    for i, ids in enumerate(chunks):
        runner.past = 0
        runner.text(ids, every=True)
        report(i + 1, len(chunks))
    step = watched.build(runner.shape(size, size, size))
    found = dict(_found(session, step.leaves(Kind.STATE)))
    stored = ARCHITECTURES[model.config.architecture].stored(dict(model.catalogue), model.config)
    parts = {n: n if n in found else part_of(n) for n in stored}
    return {n: found[part] for n, part in parts.items() if part in found}


def part_of(name: str) -> str:
    """The part of a joined matrix that is multiplied by what all of it is; of another, itself."""
    return re.sub(r"\w+(?=\.weight$)", lambda m: JOINED.get(m[0], m[0]), name)


@dataclass(frozen=True)
class _Watched(Model):
    """A model whose steps note what its matrices meet."""

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step, with a state for each matrix."""
        return watching(super().build(shape), self.prefix)


def watching(step: Graph, prefix: str = "") -> Graph:
    """A model's step that adds to the state "importance.NAME" f32 [X or 1, K] the squares of what
    its matrix NAME is multiplied by, and to "importance rows.NAME" f32 [X or 1] how many rows."""
    watched, updates = set[str](), list[Tensor]()
    for t in step.nodes:
        name = (_matrix(t) or "").removeprefix(prefix)
        if name in watched | OUTPUTS:  # a matrix in parts meets the same in each
            continue
        watched.add(name)
        met = _experts(t) if t.op == "mul_mat_id" else _plain(t)
        for before, new in zip((SUMS, ROWS), met, strict=True):
            old = state(f"{before}{name}", new.shape, dtypes.F32)
            updates.append(ops.cpy(old + new, old))
    also = [t for t in step.updates.values() if not t.is_leaf]
    outputs = {t.name: t for t in step.outputs}
    return Graph.of(outputs, also=[*also, *updates], name=step.name)


def _matrix(t: Tensor) -> str | None:
    """The name of the weight of which a product multiplies whole rows; None for another op."""
    if t.op not in ("mul_mat", "mul_mat_id"):
        return None
    w = t.sources[0]
    weight = w.root
    whole = weight.kind is Kind.WEIGHT and w.shape[-1] == weight.shape[-1]
    return weight.name if whole else None


def _plain(t: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares [1, K] and the number of rows [1]; of products by heads [B, K]."""
    w, x = t.sources
    heads, k = (w.shape[0] if len(w.shape) > 2 else 1), x.shape[-1]
    squares = (x * x).reshape(heads, x.size // (heads * k), k)
    return squares.sum(1), ops.fill((1,), float(squares.shape[1]))


def _experts(t: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares [X, K] of the rows that chose each expert, and how many these are [X]."""
    w, x, ids = t.sources
    (rows, used), experts, k = ids.shape, w.shape[0], x.shape[-1]
    each = ops.cast(ids, dtypes.F32).reshape(rows, used, 1)
    numbers = ops.arange(0, experts).reshape(1, 1, experts)
    chosen = ops.equal(ops.repeat(each, (rows, used, experts)), numbers)
    squares = x * x
    if x.shape[1] < used:  # all experts of a row read the same
        chosen = chosen.sum(1)
    chosen = chosen.reshape(squares.size // k, experts)
    return ops.out_prod(squares.reshape(squares.size // k, k), chosen), chosen.sum(0)


def _found(session: Session, states: Iterable[Tensor]) -> Iterator[tuple[str, Importance]]:
    """What the states hold by now, by the matrices' names."""
    for t in states:
        name = t.name.removeprefix(SUMS)
        if name != t.name:
            sums, rows = (
                session.read_state(f"{before}{name}").view(np.float32) for before in (SUMS, ROWS)
            )
            yield name, Importance(sums.reshape(t.shape), rows)
