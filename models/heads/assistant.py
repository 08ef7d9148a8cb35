"""Gemma 4's assistant: a small model beside the target that drafts from the target's own caches.

Legend: T rows, E the assistant's width, G the target's, C visible cache rows, V vocabulary.

    x = pre_projection([target's embedding of the NEXT token ; feature])     [T, 2G] -> [T, E]
    layers of Gemma 4 without keys and values: each reads those of the target's last layer of its
    kind that has some
    logits = own embedding on the final norm;  feedback = post_projection of that norm  [T, G]

A feature is the target's final norm. All rows of a draft stand at the position of the text's last
token and see the text before it: nothing of a draft is ever written anywhere. Tables that some of
these files have for choosing among clusters of tokens are not needed: all logits are computed.
Source: transformers `modeling_gemma4_assistant`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes, input, ops, state, weight
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.model import StepShape
from ggraph.formats.checkpoint import Checkpoint, RawTensor, scale_name
from ggraph.formats.lazy_array import Storage

from .. import blocks
from ..config import DecoderConfig
from ..families import gemma2, gemma4
from ..gguf_config import from_gguf
from ..registry import Model, applied, completed, config_from_hf, sanitize, text_part
from ..step import Step
from .tried import attempt

NAME = "gemma4-assistant"
HF_NAME = "Gemma4AssistantForCausalLM"
COUNT = f"{NAME}.nextn_predict_layers"  # which for others are layers behind those of the model
CLUSTERS = ("masked_embedding.", "masked_embd_")
PARTS = ("pre_projection", "post_projection")
ASSISTANT = replace(
    gemma4.GEMMA4, name=NAME, hf=(HF_NAME,),
    top_names={f"{p}.weight": f"nextn.{p}.weight" for p in PARTS},
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class AssistantHead:
    """An assistant fitted to its target: implements `ggraph.decode.draft.head.DraftHead`."""

    name: str
    config: DecoderConfig
    catalogue: Mapping[str, RawTensor] = field(repr=False)
    target: Model = field(repr=False)
    target_ids: Array = field(repr=False)

    PREFIX = "draft."

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's final norm."""
        return (self.target.layer_count,)

    @property
    def width(self) -> int:
        """G, the width of the fed-back hidden state."""
        return self.target.width

    @property
    def target_vocabulary(self) -> int:
        """V, the number of tokens of the target."""
        return self.target.vocab_size

    @property
    def sliding_window(self) -> int | None:
        """Positions that sliding layers see."""
        return self.config.sliding_window

    def build(self, shape: DraftShape) -> Graph:
        """The graph of one draft step (see `ggraph.decode.draft.head`)."""
        step = StepShape(
            shape.rows, shape.context, shape.wanted, shape.cache_rows, (), shape.cache_dtype
        )
        s = Step(self.config, self.catalogue, step, self.PREFIX)
        name = "hidden" if shape.fed_back else "features"
        feature = input(name, (shape.rows, self.width), dtypes.F32)
        pair = ops.concat([self._embedding(s), feature], axis=-1)  # [T, 2G]
        x = blocks.linear(s, pair, "nextn.pre_projection", self.config.hidden_size)
        for i in range(self.config.num_hidden_layers):
            x = self._layer(s, x, i)
        final = blocks.norm(s, blocks.wanted_rows(s, x), "output_norm")
        feedback = blocks.linear(s, final, "nextn.post_projection", self.width)
        logits = blocks.product(s, final, "token_embd.weight", self.config.vocab_size)
        outputs = {"logits": logits, "feedback": feedback}
        return Graph.of(outputs, name="assistant step")

    def _embedding(self, s: Step) -> Tensor:
        """The target's embedding of the step's tokens: [T, G]."""
        stored, t = self.target.catalogue["token_embd.weight"], self.target
        table = weight(f"{t.prefix}token_embd.weight", stored.shape, stored.dtype)
        x = ops.get_rows(table, s.tokens)
        if (title := scale_name("token_embd.weight")) in t.catalogue:
            x = x * weight(t.prefix + title, (1,), dtypes.F32)
        return blocks.scaled(x, t.config.embedding_multiplier)

    def _layer(self, s: Step, x: Tensor, i: int) -> Tensor:
        """Layer i, whose keys and values are the target's: [T, E] -> [T, E], the last [M, E]."""
        x = s.asked(x, i)
        normed = blocks.norm(s, x, f"blk.{i}.attn_norm")
        heads = blocks.heads(s, normed, i, "q", s.config.num_attention_heads, "head")
        seen = self._seen(s, i, "k"), self._seen(s, i, "v")
        q = blocks.turned(s, heads, i, "q")
        mixed = blocks.attend(s, q, seen, blocks.mask_of(s, i), i)
        out = blocks.linear(s, mixed, f"blk.{i}.attn_output", x.shape[1])
        h = x + blocks.norm(s, out, f"blk.{i}.post_attention_norm")
        y = gemma2.second_half(s, h, i)
        return ops.mul(y, s.w(f"blk.{i}.layer_output_scale.weight", x.shape[1]))

    def _seen(self, s: Step, i: int, role: str) -> Tensor:
        """The target's keys or values that layer i reads: [C, K, D]."""
        t, shape = self.target, s.shape
        made = read_by(self.config, t.config, i)
        sizes = (shape.cache_rows, t.config.kv_heads_of(made), s.config.head_dim_of(i))
        cache = state(f"{t.prefix}cache.{role}.{made}", sizes, shape.cache_dtype)
        return ops.rows(cache, 0, shape.context)

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight of the assistant, or of the target's embedding."""
        if t.name.startswith(self.PREFIX):
            return self.catalogue[t.name.removeprefix(self.PREFIX)].storage
        return self.target.weight(t)


def read_by(own: DecoderConfig, target: DecoderConfig, i: int) -> int:
    """The target's layer whose caches layer i reads: the last of its kind that has some. ModelError
    where there is none, its heads are of another size, or the assistant's cannot share them."""
    made = target.num_hidden_layers - target.num_kv_shared_layers
    alike = [j for j in range(made) if target.slides(j) == own.slides(i)]
    if not alike:
        raise ModelError(f"{NAME}: layer {i} reads keys of a kind that the target has not")
    if target.head_dim_of(alike[-1]) != own.head_dim_of(i):
        raise ModelError(
            f"{NAME}: layer {i} has heads of {own.head_dim_of(i)}, the target's layer {alike[-1]} "
            f"of {target.head_dim_of(alike[-1])}"
        )
    count, kv = own.num_attention_heads, target.kv_heads_of(alike[-1])
    if count % kv:
        raise ModelError(
            f"{NAME}: layer {i} has {count} heads, which cannot share the {kv} key-value heads of "
            f"the target's layer {alike[-1]}"
        )
    return alike[-1]


def is_assistant(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds an assistant rather than a head or a model."""
    named = checkpoint.metadata.get("architectures")
    return checkpoint.architecture == NAME or (isinstance(named, list) and HF_NAME in named)


def open_assistant(path: Path, checkpoint: Checkpoint, target: Model) -> AssistantHead:
    """The assistant in a folder or GGUF file. ModelError for one of another target, or with a
    tensor that is missing or misshapen."""
    if checkpoint.format == "gguf":
        told = {k: v for k, v in checkpoint.metadata.items() if k != COUNT}
        config = ASSISTANT.complete(from_gguf(told, NAME, ASSISTANT.rope_mode))
        tensors = dict(checkpoint.tensors)
    else:
        values, found = text_part(checkpoint)
        config = config_from_hf(ASSISTANT, values)
        own = {n: t for n, t in found.items() if not n.startswith(CLUSTERS)}
        tensors = sanitize(own, config, ASSISTANT)
    held = completed(applied(ASSISTANT, ASSISTANT.loaded, tensors, config), config)
    name = path.stem if path.is_file() else path.name
    _check(name, config, held, target)
    ids = np.arange(target.vocab_size, dtype=np.int64)
    head = AssistantHead(name, config, held, target, ids)
    attempt(head, name, "assistant", spare=lambda n: n.startswith(CLUSTERS))
    return head


def _check(name: str, config: DecoderConfig, held: Mapping[str, RawTensor], target: Model) -> None:
    """ModelError where the assistant does not fit the target."""
    if target.config.architecture != "gemma4":
        raise ModelError(f"{name} is an assistant of Gemma 4, {target.name} is none")
    for part, axis, wanted in (("pre", 1, 2 * target.width), ("post", 0, target.width)):
        title = f"nextn.{part}_projection.weight"
        if title not in held:
            raise ModelError(f"{name}: the assistant has no tensor {title!r}")
        if held[title].shape[axis] != wanted:
            raise ModelError(
                f"{name}: {title!r} has {held[title].shape[axis]} numbers for the target's "
                f"{wanted}: it was made for another model than {target.name}"
            )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"{name} has {config.vocab_size} tokens, {target.name} {target.vocab_size}"
        )
    for i in range(config.num_hidden_layers):
        read_by(config, target.config, i)
