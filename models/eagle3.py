"""EAGLE-3: a one-layer draft model that reads the target's features.

Legend: T token rows, A taps per token, G width of the target, E width of the head, H heads,
K key-value heads, D head_dim, W draft vocabulary, M wanted rows.

    target features [T, A*G] --fc--> g [T, E]      (true rows; fed-back rows start at g)
    e = norm(embedding of the NEXT token),  f = norm(g),  x = [e ; f]  [T, 2E]
    h = residual + attention(x);  out = h + mlp(norm(h))
    logits = head(norm(out)) over the draft vocabulary;  feedback g' = out, before that norm

Source: Li et al. 2025 (arXiv 2503.01840). `python -m models.eagle3 "PROMPT"` runs the runner.
"""

import runpy
import sys

if __name__ == "__main__":  # before the imports: the runner has its own, and answers to Ctrl-C
    sys.argv.insert(1, "eagle3")
    runpy.run_module(f"{__package__}", run_name="__main__", alter_sys=True)

from collections.abc import Mapping
from dataclasses import dataclass, field

from ggraph import Array, Graph, ModelError, Tensor, dtypes, input, ops
from ggraph.decode.draft.head import DraftShape, Masked
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import Storage

from . import blocks, latent
from .config import DecoderConfig
from .heads.names import own_or_borrowed
from .latent import Latent
from .step import Step


@dataclass(frozen=True)
class HeadConfig:
    """What varies between heads. `taps` are layer-INPUT indices of the target."""

    decoder: DecoderConfig
    target_hidden_size: int
    taps: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool = False  # the residual is the normed feature (RedHat)
    norm_before_fc: bool = False  # one norm over all features before fc (NVIDIA v3)
    fc_norm: bool = False  # one norm per tap (EAGLE-3.1)
    norm_output: bool = False  # the feedback is normed (EAGLE-3.1)
    qk_norm: bool = False  # a norm on each head of q and k (Qwen3 heads)
    latent: Latent | None = None  # latent attention (heads for DeepSeek and Kimi)

    def __post_init__(self) -> None:
        if not self.taps:
            raise ModelError("eagle3: the head has no taps")
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("eagle3: norm_before_fc and fc_norm exclude one another")
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ModelError(
                f"eagle3: draft vocabulary {self.draft_vocab_size} of {self.decoder.vocab_size}"
            )


@dataclass(frozen=True, eq=False)
class Head:
    """A loaded head: implements `ggraph.decode.draft.head.DraftHead`.

    `catalogue` has GGUF names; what is missing there and stands in `borrowed` (embedding, output
    matrix) is the target's. `target_ids[i]` is the target's token for draft token i. `masked` is
    what stands in for rows whose feature is not known yet, in heads that draft in parallel.
    """

    name: str
    config: HeadConfig
    catalogue: Mapping[str, RawTensor] = field(repr=False)
    borrowed: Mapping[str, RawTensor] = field(repr=False)
    target_ids: Array = field(repr=False)
    masked: Masked | None = field(default=None, repr=False)

    PREFIX = "draft."

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs the head reads."""
        return self.config.taps

    @property
    def width(self) -> int:
        """E, the width of the fed-back hidden state."""
        return self.config.decoder.hidden_size

    @property
    def target_vocabulary(self) -> int:
        """V, the number of tokens of the target."""
        return self.config.decoder.vocab_size

    @property
    def sliding_window(self) -> int | None:
        """Positions that the head sees, None for all."""
        return self.config.decoder.sliding_window

    def build(self, shape: DraftShape) -> Graph:
        """The graph of one draft step (see `ggraph.decode.draft.head`)."""
        return build(self, shape)

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight of the head, or one borrowed from the target."""
        return own_or_borrowed(t, self.PREFIX, self.catalogue, self.borrowed)


def build(head: Head, shape: DraftShape) -> Graph:
    """Encoder (for true features) and decoder of one step."""
    everything = {**head.borrowed, **head.catalogue}
    c = head.config
    borrowed = frozenset(head.borrowed) - frozenset(head.catalogue)
    s = Step(c.decoder, everything, shape.step, head.PREFIX, borrowed)
    if shape.fed_back:
        g = input("hidden", (shape.rows, c.decoder.hidden_size), dtypes.F32)
    else:
        g = encoder(s, c)
    x, residual = decoder(s, c, g)
    return outputs(s, c, x, residual) if shape.wanted else _read(s, c, x)


def encoder(s: Step, c: HeadConfig) -> Tensor:
    """Features of A taps fused into one vector per token: [T, A*G] -> [T, E]."""
    rows, wide = s.shape.rows, len(c.taps) * c.target_hidden_size
    x = input("features", (rows, wide), dtypes.F32)
    if c.norm_before_fc:
        x = blocks.norm(s, x, "enc.output_norm")
    if c.fc_norm:
        g = c.target_hidden_size
        chunks = [ops.columns(x, i * g, g) for i in range(len(c.taps))]  # each [T, G]
        normed = [blocks.norm(s, t, f"fc_norm.{i}") for i, t in enumerate(chunks)]
        x = ops.concat(normed, axis=-1)
    return blocks.linear(s, x, "fc", c.decoder.hidden_size)


def decoder(s: Step, c: HeadConfig, g: Tensor) -> tuple[Tensor, Tensor]:
    """The draft layer over [embedding ; feature], then plain layers if there are more, up to the
    last: what that attends with [T, n], and what its result is added to [T, E]."""
    feature = blocks.norm(s, g, "blk.0.attn_norm_2")
    embedding = blocks.norm(s, blocks.embed(s), "blk.0.attn_norm")
    x = ops.concat([embedding, feature], axis=-1, name="blk.0.attn_in")  # [T, 2E]
    h = feature if c.norm_before_residual else g
    for i in range(1, c.decoder.num_hidden_layers):
        h = blocks.fed_forward(s, h + _attention(s, c, x, i - 1), i - 1)
        x = blocks.norm(s, h, f"blk.{i}.attn_norm")
    return x, h


def normed_by(c: HeadConfig) -> str:
    """What a norm of queries and keys goes over."""
    return "head" if c.qk_norm else ""


def _attention(s: Step, c: HeadConfig, x: Tensor, i: int) -> Tensor:
    """Attention of layer i in the head's form: x [T, n] -> [T, E], of the last layer [M, E]."""
    if c.latent is None:
        return blocks.attention(s, x, i, qk_norm=normed_by(c))
    return latent.attention(s, x, i, c.latent)


def _read(s: Step, c: HeadConfig, x: Tensor) -> Graph:
    """True rows of which nothing is wanted: the last layer only remembers them."""
    last = c.decoder.num_hidden_layers - 1
    if c.latent is None:
        seen = blocks.remembered(s, x, last, qk_norm=normed_by(c))
    else:
        seen = latent.remembered(s, x, last, c.latent)
    return Graph.of({"read": ops.cont(s.slots)}, also=seen, name="eagle3 read")


def outputs(s: Step, c: HeadConfig, x: Tensor, residual: Tensor) -> Graph:
    """Draft logits [M, W] and the hidden state [M, E] that the next draft step starts from. The
    last layer is computed for wanted rows; of the others it remembers keys and values."""
    last = c.decoder.num_hidden_layers - 1
    mixed = _attention(s, c, x, last)
    out = blocks.wanted_rows(s, blocks.fed_forward(s, s.asked(residual, last) + mixed, last))
    final = blocks.norm(s, out, "output_norm")
    name = "output.weight" if s.has("output.weight") else "token_embd.weight"
    logits = blocks.product(s, final, name, c.draft_vocab_size)
    feedback = final if c.norm_output else out
    return Graph.of({"logits": logits, "feedback": feedback}, name="eagle3 step")
