"""What the decoder asks of a model: a graph per step shape.

Legend: T token rows of one step, C cache rows that attention may see, R cache rows in all,
M rows for which logits are wanted, V vocabulary, E width of the residual stream, S slots of a list.

Inputs of every step graph: `tokens` i32 [T], `positions` i32 [T], `slots` i64 [T] (cache row that
each token is written to), `mask` f32 [T, C] (added to the scores: 0 or -inf), `length` i32 [1]
(cache rows in use, at most C), `wanted` i32 [M] (rows of this step that get logits).
With `listed` the masks are lists i32 [T, S] of the slots that each row sees, up to a number below
0; C is then R, so that what a step costs does not grow with the cache.
With `given` some rows are no tokens' (`ggraph.decode.given`): `given` f32 [T, E] are those, and
`which` i32 [T] says of each row t whether it is t, the embedding's, or T + t, the given one.
Outputs: `logits` f32 [M, V], and `layer_input.{i}` f32 [T, E] for every tap i.

Models with recurrent layers have a state for each of N texts, and more inputs
(`ggraph.ops.recurrent`): `parents` i32 [T], `replay` i32 [N, REPLAYED], `past` i32 [N] (rows of
text before the step), `certain` i32 [N] (the last row that is text), and `log_slots` i64 [T] where
T is at most LOG. A step leaves the states after the rows that are text for certain, and in a log of
LOG rows what the others would put into them; `replay` names those that became text.

Encoders have neither cache nor logits. Their lists name rows of the step, `wanted` is a row of each
of M texts, and there is an input `types` i32 [T], the part of its text that a row stands in. The
output is `vectors` f32 [2M, V] (`ggraph.serving.encoder`).
"""

from dataclasses import dataclass
from typing import Protocol

from ggraph.door import fit
from ggraph.dtype import F16, DType
from ggraph.formats.lazy_array import Storage
from ggraph.graph import Graph
from ggraph.tensor import Tensor

LONGEST_DRAFT = 64  # nodes; where no layer is recurrent a step may verify a larger tree
REPLAYED = LONGEST_DRAFT + 1  # most rows of a step with a draft: the text's last token has one, too
LOG = 96  # rows that such a step may be padded to


@dataclass(frozen=True)
class StepShape:
    """The shape bucket of one decoding step; one plan is made for each."""

    rows: int  # T
    context: int  # C
    wanted: int  # M
    cache_rows: int  # R; the last one takes the writes of padding rows
    taps: tuple[int, ...] = ()
    cache_dtype: DType = F16
    listed: int = 0  # S; 0: masks
    texts: int = 1  # N, which recurrent layers have a state for
    given: bool = False  # whether rows may stand in the place of tokens

    def __post_init__(self) -> None:
        fit(self)
        object.__setattr__(self, "taps", tuple(self.taps))  # a key must have a hash


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
        None where every layer sees all; a `Chunk` of `ggraph.decode.rows` where it begins anew
        at each multiple of its size."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether some layers have a state in place of a cache, and the inputs named above."""
        ...

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step, with the inputs and outputs named above."""
        ...

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of the weight `t` of a built graph."""
        ...
