"""What the decoder asks of a model: a graph per step shape.

Legend: T token rows of one step, C cache rows that attention may see, R cache rows in all,
M rows for which logits are wanted, V vocabulary, E width of the residual stream.

Inputs of every step graph: `tokens` i32 [T], `positions` i32 [T], `slots` i64 [T] (cache row that
each token is written to), `mask` f32 [T, C] (added to the scores: 0 or -inf), `length` i32 [1]
(cache rows in use, at most C), `wanted` i32 [M] (rows of this step that get logits).
Outputs: `logits` f32 [M, V], and `layer_input.{i}` f32 [T, E] for every tap i.
"""

from dataclasses import dataclass
from typing import Protocol

from ggraph.dtype import F16, DType
from ggraph.graph import Graph
from ggraph.tensor import Array, Tensor


@dataclass(frozen=True)
class StepShape:
    """The shape bucket of one decoding step; one plan is made for each."""

    rows: int  # T
    context: int  # C
    wanted: int  # M
    cache_rows: int  # R; the last one takes the writes of padding rows
    taps: tuple[int, ...] = ()
    cache_dtype: DType = F16


class CausalModel(Protocol):
    """A checkpoint that can be decoded."""

    @property
    def name(self) -> str:
        """What to call the model in messages."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        ...

    @property
    def context_length(self) -> int:
        """Most positions that the model was trained for."""
        ...

    @property
    def layer_count(self) -> int:
        """Number of decoder layers."""
        ...

    @property
    def width(self) -> int:
        """E, the width of the residual stream."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """How many positions some layers see, which then have an input `window_mask` beside `mask`;
        None where every layer sees all."""
        ...

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step, with the inputs and outputs named above."""
        ...

    def weight(self, t: Tensor) -> Array:
        """Raw storage of the weight `t` of a built graph."""
        ...
