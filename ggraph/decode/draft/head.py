"""What the decoder asks of a draft head that reads target features.

Legend: T token rows, C visible cache rows, M wanted rows, A*G feature width, E head width,
W draft vocabulary.

Inputs as in `ggraph.decode.model`, and either `features` f32 [T, A*G] (true rows: the target's
taps side by side) or `hidden` f32 [T, E] (fed-back rows). `tokens[t]` is the token AFTER the
position that the feature belongs to.
Outputs: `logits` f32 [M, W] and, unless no draft step follows on it, `feedback` f32 [M, E], the
`hidden` for the next one. Where no row is wanted (M = 0, and no input `wanted`) the rows are only
read into the caches; the output `read` is their slots then.
"""

from dataclasses import dataclass
from typing import Protocol

from ggraph.decode.model import StepShape
from ggraph.dtype import F16, DType
from ggraph.formats.lazy_array import Storage
from ggraph.graph import Graph
from ggraph.tensor import Array, Tensor


@dataclass(frozen=True)
class DraftShape:
    """The shape bucket of one draft step."""

    rows: int
    context: int
    wanted: int
    cache_rows: int
    fed_back: bool
    cache_dtype: DType = F16
    listed: int = 0  # entries of the lists of slots that rows see; 0: masks

    @property
    def step(self) -> StepShape:
        """The same as a step of a model."""
        return StepShape(
            self.rows, self.context, self.wanted, self.cache_rows, (), self.cache_dtype, self.listed
        )


@dataclass(frozen=True, eq=False)
class Masked:
    """The row that a head which drafts in parallel takes where nothing is known yet.

    `token` stands for the token and `features` f32 [A*G] for the target's taps.
    """

    token: int
    features: Array


class DraftHead(Protocol):
    """A draft head in the manner of EAGLE."""

    @property
    def name(self) -> str:
        """What to call the head in messages and plan keys."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs make up a feature, in order."""
        ...

    @property
    def width(self) -> int:
        """E, the width of the fed-back hidden state."""
        ...

    @property
    def target_ids(self) -> Array:
        """i64 [W]: the target's token id for each draft token."""
        ...

    @property
    def target_vocabulary(self) -> int:
        """V, the number of tokens of the target."""
        ...

    @property
    def sliding_window(self) -> int | None:
        """Positions that the head sees, None for all. With one, steps have a `window_mask` too."""
        ...

    def build(self, shape: DraftShape) -> Graph:
        """The graph of one draft step."""
        ...

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight."""
        ...
