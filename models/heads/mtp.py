"""Multi-token prediction: layers in a model's own file that only draft (`nextn` in GGUF names).

Legend: T token rows, E width, M wanted rows, V vocabulary.

    feature = the model's final norm                                  [T, E]
    x = eh_proj([enorm(embedding of the NEXT token) ; hnorm(feature)]) [T, E]
    out = one layer of the model's own kind, with a cache of its own
    logits = the output matrix on shared_head_norm(out);  feedback = that norm

The first such layer drafts; it is used again for every further token, as the others were trained to
be. Embedding, norm and output matrix are the model's where the layer has none of its own.
Sources: Gloeckle et al. 2024 (arXiv 2404.19737); DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from dataclasses import dataclass, field

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes, input, ops
from ggraph.decode.draft.head import DraftShape
from ggraph.formats.lazy_array import Storage

from .. import blocks
from ..registry import ARCHITECTURES, Model
from ..step import Step

NEEDED = ("eh_proj", "enorm", "hnorm")


@dataclass(frozen=True, eq=False)
class NextHead:
    """A model's own draft layer: implements `ggraph.decode.draft.head.DraftHead`."""

    model: Model = field(repr=False)
    target_ids: Array = field(repr=False)

    PREFIX = "draft."  # of its caches; weights are the model's

    @property
    def name(self) -> str:
        """What to call it in messages and plan keys."""
        return f"{self.model.name} mtp"

    @property
    def taps(self) -> tuple[int, ...]:
        """The final norm."""
        return (self.model.layer_count,)

    @property
    def width(self) -> int:
        """E, the width of the fed-back hidden state."""
        return self.model.width

    @property
    def target_vocabulary(self) -> int:
        """V, the number of tokens of the target."""
        return self.model.vocab_size

    @property
    def sliding_window(self) -> int | None:
        """Positions that the layer sees, None for all."""
        return self.model.sliding_window

    def build(self, shape: DraftShape) -> Graph:
        """The graph of one draft step (see `ggraph.decode.draft.head`)."""
        everything = self.model.catalogue
        s = Step(self.model.config, everything, shape.step, self.PREFIX, frozenset(everything))
        feature = input("hidden" if shape.fed_back else "features", (shape.rows, self.width),
                        dtypes.F32)  # fmt: skip
        return drafted(s, feature, bool(shape.wanted))

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight."""
        return self.model.weight(t)


def open_mtp(model: Model) -> NextHead:
    """The draft layer in a model's own file. ModelError where it has none, or not all of one."""
    c = model.config
    if not c.num_nextn_predict_layers:
        raise ModelError(f"{model.name} has no layers that draft (multi-token prediction)")
    if ARCHITECTURES[c.architecture].layer is None:
        raise ModelError(f"{model.name}: draft layers of {c.architecture!r} are not known here")
    for part in NEEDED:
        name = f"blk.{c.num_hidden_layers}.nextn.{part}.weight"
        if name not in model.catalogue:
            raise ModelError(f"{model.name}: the draft layer has no tensor {name!r}")
    return NextHead(model, np.arange(model.vocab_size, dtype=np.int64))


def drafted(s: Step, feature: Tensor, wanted: bool = True) -> Graph:
    """One step of the draft layer over rows with the features [T, E]."""
    out = _layer(s, feature)
    return _outputs(s, out) if wanted else _read(s, out)


def _layer(s: Step, feature: Tensor) -> Tensor:
    """The draft layer over [embedding ; feature]: [T, E]."""
    c, i = s.config, s.config.num_hidden_layers
    build, at = ARCHITECTURES[c.architecture].layer, f"blk.{i}.nextn"
    assert build is not None, c.architecture
    if s.has(f"{at}.embed_tokens.weight"):
        embedding = blocks.looked_up(s, f"{at}.embed_tokens.weight")
    else:
        embedding = blocks.embed(s)
    normed = [blocks.norm(s, embedding, f"{at}.enorm"), blocks.norm(s, feature, f"{at}.hnorm")]
    pair = ops.concat(normed, axis=-1)  # [T, 2E]
    return build(s, blocks.linear(s, pair, f"{at}.eh_proj", c.hidden_size), i)


def _read(s: Step, out: Tensor) -> Graph:
    """True rows of which nothing is wanted: the layer only remembers them."""
    seen = Graph.of({"out": out}).updates.values()
    return Graph.of({"read": ops.cont(s.slots)}, also=seen, name="mtp read")


def _outputs(s: Step, out: Tensor) -> Graph:
    """Logits [M, V] of the wanted rows, and what the next draft step starts from [M, E]."""
    c, at = s.config, f"blk.{s.config.num_hidden_layers}.nextn"
    kept = ops.get_rows(out, s.wanted) if s.shape.rows > 1 else out
    own = s.has(f"{at}.shared_head_norm.weight")
    final = blocks.norm(s, kept, f"{at}.shared_head_norm" if own else "output_norm")
    tables = (f"{at}.shared_head_head.weight", "output.weight", "token_embd.weight")
    table = next(n for n in tables if s.has(n))
    logits = blocks.product(s, final, table, c.vocab_size)
    return Graph.of({"logits": logits, "feedback": final}, name="mtp step")
