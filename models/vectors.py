"""What stands behind the layers of an encoder: pooling, and the modules behind it.

Legend: T token rows, M texts of the step, E hidden_size, H heads, D head_dim, V numbers of a
vector.
"""

from collections.abc import Mapping

from ggraph import Graph, Tensor, ops

from .blocks import Norm, linear
from .step import Step, Stored

DENSE = ("dense_2", "dense_3")
"""Products behind the pooling, as EmbeddingGemma has them, and as GGUF calls them."""
INNER, SCORE = "cls", "cls.output"
"""The two products that make a score of a first row, as GGUF calls them."""


def width(catalogue: Mapping[str, Stored], hidden: int) -> int:
    """V, where rows have `hidden` numbers."""
    held = [n for n in DENSE if f"{n}.weight" in catalogue]
    return catalogue[f"{held[-1]}.weight"].shape[0] if held else hidden


def bare(s: Step, x: Tensor, name: str) -> Tensor:
    """x, where the last layer ends with a norm of its own."""
    return x


def vectors(s: Step, x: Tensor, normed: Norm) -> Graph:
    """The end of an encoder's step, x [T, E], behind its norm: of each text the row `wanted`, then
    of each the mean of all that this row sees, through what comes behind: `vectors` f32 [2M, V].

    The mean is attention that finds all rows alike, by scores of 0: its bits follow, like those of
    other rows, from the rows of the text alone, in their order.
    """
    c, (rows, wide), texts = s.config, x.shape, s.shape.wanted
    x = normed(s, x, "output_norm")
    heads = c.num_attention_heads if wide % c.num_attention_heads == 0 else 1
    parts = x.reshape(rows, heads, wide // heads)  # [T, H, D]
    row, seen = ops.get_rows(x, s.wanted), ops.get_rows(s.mask, s.wanted)
    mean = ops.flash_attn(row.reshape(texts, *parts.shape[1:]), parts, parts, seen, scale=0.0)
    both = ops.concat((row, mean.reshape(texts, wide)), 0)  # [2M, E]
    return Graph.of({"vectors": through(s, both)}, name=f"{c.architecture} step")


def through(s: Step, x: Tensor) -> Tensor:
    """Pooled rows [M, E] through what comes behind: [M, V]."""
    for name in DENSE:
        if s.has(f"{name}.weight"):
            x = linear(s, x, name, s.catalogue[f"{name}.weight"].shape[0])
    if not s.has(f"{SCORE}.weight"):
        return x
    inner = ops.tanh(linear(s, x, INNER, s.config.hidden_size))
    return linear(s, inner, SCORE, 1)
