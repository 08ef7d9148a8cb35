"""A step whose matrices are cut over several devices (tensor parallelism).

Legend: P devices, C chunks (a multiple of P), T token rows, E hidden_size, H heads, F width of the
feed-forward, V vocabulary.

Matrices that widen are cut by rows (columns of what they make): heads of queries, keys and values,
`ffn_gate`, `ffn_up`, and the logits. Those that narrow are cut by columns: `attn_output`,
`ffn_down`. So a chunk needs nothing of the others until its share [T, E] of a half layer is there,
and these are summed: twice a layer. A device holds C / P chunks that follow one another, and all
that is not cut (norms, the residual stream) is on every device.

The sum is a binary tree over the C chunks, whoever holds them. A device adds up what is whole on
it, gets P - 1 subtotals from the others as copies of their own in the plan, and adds those itself,
so that all have the same bits. Since the tree depends on C alone, which follows from the model and
not from P, 1, 2, 4, .. C devices make the same bytes. They are not those of the model that is not
cut, whose sums run otherwise.

Source: Shoeybi et al. 2019 (arXiv 1909.08053).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ggraph import Graph, ModelError, Tensor, ops, scope
from ggraph.decode.model import StepShape
from ggraph.dtype import DType
from ggraph.formats.checkpoint import SCALE
from ggraph.formats.lazy_array import Storage, columns_taken, row_numbers, taken
from ggraph.tensor import Kind

from . import blocks
from .config import DecoderConfig
from .families import llama, qwen3
from .registry import ARCHITECTURES, Model
from .step import Step, Stored

MOST_CHUNKS = 8
QK_NORM: Mapping[Callable[[Step], Graph], str] = {
    blocks.Stack(llama.layer): "", blocks.Stack(qwen3.layer): "head"
}  # fmt: skip
"""Graphs that can be cut, and how they normalise queries and keys (as `blocks.attention`)."""
WIDE = tuple(f"ffn_{part}{end}" for part in ("gate", "up") for end in ("", "_exps", "_shexp"))
ROWS = ("attn_q", "attn_k", "attn_v", *WIDE)
COLUMNS = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")


def qk_norm_of(architecture: str) -> str | None:
    """How the graph of an architecture normalises queries and keys, None where it cannot be cut."""
    return QK_NORM.get(ARCHITECTURES[architecture].build)


@dataclass(frozen=True)
class Cut:
    """A part of a stored tensor: `count` of its entries along `axis`, from `first` on."""

    shape: tuple[int, ...]
    dtype: DType
    axis: int = 0
    first: int = 0
    count: int = 0

    def of(self, whole: Storage) -> Storage:
        """This part of the storage of the whole."""
        if not self.count:
            return whole
        entries = np.arange(*self._bounds())
        if self.axis == len(self.shape) - 1 > 0:
            return columns_taken(whole, entries)
        return taken(whole, np.take(row_numbers(whole), entries, self.axis))

    def _bounds(self) -> tuple[int, int]:
        """Entries of the storage: bytes along the last axis of blocks, elements else."""
        last = self.axis == len(self.shape) - 1
        if not (last and self.dtype.is_block):
            return self.first, self.first + self.count
        bytes_of = self.dtype.row_bytes
        return bytes_of(self.first), bytes_of(self.first + self.count)


def cut(config: DecoderConfig, stored: Stored, name: str, chunk: int, chunks: int) -> Cut:
    """The part of a tensor that a chunk has. ModelError where it cannot be cut so."""
    shape, role = tuple(stored.shape), name.split(".")[-2]
    axis = -1
    if name.endswith(SCALE):
        return Cut(shape, stored.dtype)
    if role in ROWS or name in ("output.weight", "token_embd.weight"):
        axis = len(shape) - 2 if len(shape) > 1 else 0
    elif role in COLUMNS and name.endswith(".weight"):
        axis = len(shape) - 1
    if axis < 0:
        return Cut(shape, stored.dtype)
    kv = config.num_key_value_heads
    at, of = chunk, chunks
    if role in ("attn_k", "attn_v") and chunks > kv:  # chunks share a head
        at, of = chunk * kv // chunks, kv
    count = shape[axis] // of
    unit = stored.dtype.block if axis == len(shape) - 1 else 1
    if count * of != shape[axis] or count % unit:
        raise ModelError(
            f"{name!r}: {shape[axis]} entries of axis {axis} ({stored.dtype.name}) cannot be cut "
            f"into {of} parts"
        )
    part = (*shape[:axis], count, *shape[axis + 1 :])
    return Cut(part, stored.dtype, axis, at * count, count)


@dataclass(frozen=True)
class Sharding:
    """Which devices hold the chunks of a model."""

    config: DecoderConfig
    catalogue: Mapping[str, Stored]
    devices: tuple[str, ...]
    chunks: int

    def __post_init__(self) -> None:
        c, n = self.config, self.chunks
        if qk_norm_of(c.architecture) is None:
            known = ", ".join(name for name in ARCHITECTURES if qk_norm_of(name) is not None)
            raise ModelError(f"{c.architecture} cannot be cut; known: {known}")
        if not self.devices or n % len(self.devices) or n & (n - 1):
            raise ModelError(
                f"of {c.num_attention_heads} heads {n} chunks, a power of two, on "
                f"{len(self.devices)} devices: each must hold as many as the others"
            )
        kv = c.num_key_value_heads
        if c.num_attention_heads % n or (kv % n and n % kv):
            raise ModelError(f"{c.num_attention_heads} heads, {kv} of keys: no {n} equal parts")

    @property
    def pins(self) -> tuple[str, ...]:
        """Where everything is, for `Options`."""
        each = self.chunks // len(self.devices)
        own = [(f"d{p}", d) for p, d in enumerate(self.devices)]
        parts = [(f"c{i}", self.devices[i // each]) for i in range(self.chunks)]
        return tuple(rf"^{name}\.={device}" for name, device in (*own, *parts))

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step, with the inputs, states and logits of the uncut one; states and
        weights of a chunk begin with its name."""
        own = [Step(self.config, self.catalogue, shape) for _ in self.devices]
        parts = [Step(self._part(), self._catalogue(i), shape) for i in range(self.chunks)]
        with scope("d0"):
            x = blocks.embed(own[0])
        xs = [x for _ in self.devices]
        for i in range(self.config.num_hidden_layers):
            xs = self._half(own, parts, xs, i, "attn_norm", self._attention)
            xs = self._half(own, parts, xs, i, "ffn_norm", blocks.feed_forward)
        return self._head(own, parts, xs)

    def part_of(self, name: str) -> tuple[str, Cut]:
        """The stored tensor that a weight of `build` is a part of, and which part."""
        place, _, rest = name.partition(".")
        stored = self.catalogue[rest]
        if place[0] == "d":
            return rest, Cut(tuple(stored.shape), stored.dtype)
        return rest, cut(self.config, stored, rest, int(place[1:]), self.chunks)

    def _part(self) -> DecoderConfig:
        """What one chunk is like as a model."""
        c, n = self.config, self.chunks
        return replace(
            c,
            num_attention_heads=c.num_attention_heads // n,
            num_key_value_heads=max(1, c.num_key_value_heads // n),
            intermediate_size=c.intermediate_size // n,
            moe_intermediate_size=c.moe_intermediate_size // n,
            shared_intermediate_size=c.shared_intermediate_size // n,
        )

    def _catalogue(self, chunk: int) -> dict[str, Cut]:
        """What a chunk has. Biases of matrices that are cut by columns are added once."""
        once = tuple(f".{role}.bias" for role in COLUMNS)
        held = {n: t for n, t in self.catalogue.items() if not chunk or not n.endswith(once)}
        return {n: cut(self.config, t, n, chunk, self.chunks) for n, t in held.items()}

    def _half(
        self,
        own: Sequence[Step],
        parts: Sequence[Step],
        xs: Sequence[Tensor],
        i: int,
        norm: str,
        what: Callable[[Step, Tensor, int], Tensor],
    ) -> list[Tensor]:
        """Half a layer, added to what came in, on every device: P times [T, E]."""
        each, subtotals = self.chunks // len(self.devices), list[Tensor]()
        name = f"blk.{i}.{norm.removesuffix('_norm')}"
        for p, s in enumerate(own):
            with scope(f"d{p}"):
                n = blocks.norm(s, xs[p], f"blk.{i}.{norm}")
            shares = []
            for c in range(p * each, (p + 1) * each):
                with scope(f"c{c}"):
                    shares.append(what(parts[c], n, i))
            with scope(f"d{p}"):
                subtotals.append(_sum(shares, f"{name}.sum", p * each))
        factor = self.config.residual_multiplier
        found = []
        for p, x in enumerate(xs):
            with scope(f"d{p}"):
                total = _sum(subtotals, f"{name}.all", 0)
                kept = own[p].asked(x, i)
                found.append(ops.add(kept, blocks.scaled(total, factor), name=f"{name}.out"))
        return found

    def _attention(self, s: Step, x: Tensor, i: int) -> Tensor:
        return blocks.attention(s, x, i, qk_norm=qk_norm_of(self.config.architecture) or "")

    def _head(self, own: Sequence[Step], parts: Sequence[Step], xs: Sequence[Tensor]) -> Graph:
        """Logits, a part of the vocabulary from each chunk, side by side on the first device."""
        each, found = self.chunks // len(self.devices), list[Tensor]()
        tied = "output.weight" not in self.catalogue
        table = "token_embd.weight" if tied else "output.weight"
        rows = self.config.vocab_size // self.chunks
        for p, s in enumerate(own):
            with scope(f"d{p}"):
                final = blocks.norm(s, blocks.wanted_rows(s, xs[p]), "output_norm")
            for c in range(p * each, (p + 1) * each):
                with scope(f"c{c}"):
                    found.append(blocks.product(parts[c], final, table, rows, "logits"))
        with scope("d0"):
            logits = ops.concat(found, name="logits.all")  # [M, V]
            if own[0].has("output.bias"):
                logits = logits + own[0].w("output.bias", self.config.vocab_size)
            logits = blocks.capped(own[0], logits)
        return Graph.of({"logits": logits}, name=f"{self.config.architecture} step, cut")


def _sum(shares: Sequence[Tensor], name: str, first: int) -> Tensor:
    """The sum of a power of two of tensors, as a binary tree."""
    level, width = list(shares), 1
    while len(level) > 1:
        width *= 2
        level = [
            ops.add(a, b, name=f"{name}.{first + k * width}.{width}")
            for k, (a, b) in enumerate(zip(level[::2], level[1::2], strict=True))
        ]
    return level[0]


@dataclass(frozen=True, eq=False)
class ShardedModel(Model):
    """A model whose steps are cut over devices; a session needs `sharding.pins` in its options."""

    sharding: Sharding = field(kw_only=True)

    @staticmethod
    def of(model: Model, devices: Sequence[str], chunks: int = 0) -> "ShardedModel":
        """The same model, cut, into as many chunks as its heads allow, up to `MOST_CHUNKS`, or into
        `chunks`. ModelError where it cannot be."""
        heads = model.config.num_attention_heads
        chunks = chunks or min(MOST_CHUNKS, heads & -heads)  # the power of two in it
        given: dict[str, Any] = {k: getattr(model, k) for k in model.__dataclass_fields__}
        sharding = Sharding(model.config, model.catalogue, tuple(devices), chunks)
        return ShardedModel(**given, sharding=sharding)

    def build(self, shape: StepShape) -> Graph:
        """The graph of one step."""
        graph = self.sharding.build(shape)
        self.check_used(self.sharding.part_of(t.name)[0] for t in graph.leaves(Kind.WEIGHT))
        return graph

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight, or of a part of one."""
        whole, part = self.sharding.part_of(t.name)
        return part.of(self.catalogue[whole].storage)
