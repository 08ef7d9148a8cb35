"""A step's graph under construction: what the parts of a model (`blocks`) are given.

Legend: T token rows, C visible cache rows, M rows with logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from ggraph import ModelError, Tensor, dtypes, input, ops, weight
from ggraph.decode.given import PLACES
from ggraph.decode.model import LOG, REPLAYED, StepShape

from .config import DecoderConfig

# Made from the config, and in no file: see `rotation.axes_of`
AXES = tuple(f"rope_{axis}.weight" for axis in ("time", "line", "column"))


class Stored(Protocol):
    """What the builder must know of a checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in NumPy order."""
        ...

    @property
    def dtype(self) -> dtypes.DType:
        """How the elements are stored."""
        ...


@dataclass
class Step:
    """A graph under construction: config, checkpoint catalogue, shape bucket, and its inputs."""

    config: DecoderConfig
    catalogue: Mapping[str, Stored]
    shape: StepShape
    prefix: str = ""  # of weight and state names, so that two models can share a session
    shared: frozenset[str] = frozenset()  # weights of another model, taken without the prefix
    taps: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, seen = self.shape.rows, self.shape.listed or self.shape.context
        self.tokens = input("tokens", (rows,), dtypes.I32)
        self.places = self._places()
        self.positions = self.places[0]
        self.types = input("types", (rows,), dtypes.I32)
        self.slots = input("slots", (rows,), dtypes.I64)
        kind = dtypes.I32 if self.shape.listed else dtypes.F32
        self.mask = input("mask", (rows, seen), kind)
        self.window_mask = self.mask
        if self.config.sliding_window is not None:
            self.window_mask = input("window_mask", (rows, seen), kind)
        self.length = input("length", (1,), dtypes.I32)
        self.wanted = input("wanted", (self.shape.wanted,), dtypes.I32)
        self.kept: list[Tensor] = []  # what states become
        if any(self.config.recurrent_layers):
            self.parents = input("parents", (rows,), dtypes.I32)
            texts = self.shape.texts
            self.replay = input("replay", (texts, REPLAYED), dtypes.I32)
            self.past = input("past", (texts,), dtypes.I32)
            self.certain = input("certain", (texts,), dtypes.I32)
            if rows <= LOG:
                self.log_slots = input("log_slots", (rows,), dtypes.I64)

    def _places(self) -> tuple[Tensor, ...]:
        """Where the rows are turned, i32 [T]: the time, and where rows may be an image's, and the
        model tells these apart, line and column."""
        names = PLACES if self.shape.given and self.has(AXES[0]) else PLACES[:1]
        return tuple(input(name, (self.shape.rows,), dtypes.I32) for name in names)

    @cached_property
    def given(self) -> Tensor:
        """Rows in the place of tokens, and what each of the first layers adds: f32 [T, n * E]."""
        c = self.config
        return input("given", (self.shape.rows, (1 + c.n_deepstack_layers) * c.hidden_size))

    def given_part(self, i: int) -> Tensor:
        """The i-th part of each of these rows: [T, E]."""
        e = self.config.hidden_size
        return self.given if self.given.shape[1] == e else ops.columns(self.given, i * e, e)

    @cached_property
    def growth(self) -> Tensor:
        """By how much each row's queries are longer than in the first context of the training, f32
        [T]: 1 + g * ln(1 + how many such contexts are behind it), or stretches with itself in one.

        Sources: transformers' `get_llama_4_attn_scale` and `modeling_llama4`.
        """
        c = self.config
        at = ops.cast(self.positions, dtypes.F32)
        length = c.growth_length or c.rope.n_ctx_orig or c.max_position_embeddings
        behind = ops.floor((at + 1.0 if c.growth_length else at) / length)
        return ops.log(behind + 1.0) * c.query_growth + 1.0

    def asked(self, x: Tensor, i: int) -> Tensor:
        """Of x [T, n] or [T] the rows of which layer i's result is read: all T; of a decoder's last
        layer the M with logits, unless a tap wants every row's final norm. It only remembers the
        others."""
        shape, layers = self.shape, self.config.num_hidden_layers
        few = shape.wanted < shape.rows and i == layers - 1 and layers not in shape.taps
        if not few or not self.config.causal or x.shape[0] != shape.rows:
            return x
        rows = ops.get_rows(x.reshape(x.shape[0], -1), self.wanted)
        return rows if len(x.shape) > 1 else rows.reshape(-1)

    def w(self, name: str, *shape: int) -> Tensor:
        """The weight `name` of the checkpoint. ModelError when absent or of another shape."""
        stored = self.catalogue.get(name)
        if stored is None:
            raise ModelError(f"{self.config.architecture}: the checkpoint has no tensor {name!r}")
        if tuple(stored.shape) != shape:
            raise ModelError(f"{name!r}: expected {list(shape)}, got {list(stored.shape)}")
        title = name if name in self.shared else self.prefix + name
        return self.weights.setdefault(title, weight(title, shape, stored.dtype))

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self.catalogue

    def has_sinks(self, i: int) -> bool:
        """Whether the heads of layer i have a score that takes part in the sum alone."""
        return self.has(f"blk.{i}.attn_sinks.weight")
