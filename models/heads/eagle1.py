"""EAGLE-1 and EAGLE-2 heads: the first generation, which guesses the top feature.

Legend: T token rows, E width (the target's), M wanted rows, V vocabulary (the target's).

    feature = the target's final norm;  x = fc([embedding of the NEXT token ; feature])  [T, E]
    h = x + attention(x)  (the first layer has no norm before it);  out = h + mlp(norm(h))
    logits = the target's output matrix on out;  feedback = out

EAGLE-2 uses the same weights with a dynamic tree. Source: Li et al. 2024 (arXiv 2401.15077).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes, input, ops
from ggraph.decode.draft.head import DraftShape
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.lazy_array import Storage

from .. import blocks
from ..architecture import scales_apart
from ..config import DecoderConfig, Keys
from ..hf_config import from_hf
from ..registry import Model, completed
from ..step import Step
from .names import own_or_borrowed

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class FirstHead:
    """A loaded head: implements `ggraph.decode.draft.head.DraftHead`."""

    name: str
    decoder: DecoderConfig
    catalogue: Mapping[str, RawTensor] = field(repr=False)
    borrowed: Mapping[str, RawTensor] = field(repr=False)
    taps: tuple[int, ...]
    target_ids: Array = field(repr=False)

    PREFIX = "draft."

    @property
    def width(self) -> int:
        """E, the width of the fed-back hidden state."""
        return self.decoder.hidden_size

    @property
    def target_vocabulary(self) -> int:
        """V, the number of tokens of the target."""
        return self.decoder.vocab_size

    @property
    def sliding_window(self) -> int | None:
        """Positions that the head sees, None for all."""
        return self.decoder.sliding_window

    def build(self, shape: DraftShape) -> Graph:
        """The graph of one draft step (see `ggraph.decode.draft.head`)."""
        shared = frozenset(self.borrowed) - frozenset(self.catalogue)
        s = Step(self.decoder, {**self.borrowed, **self.catalogue}, shape.step, self.PREFIX, shared)
        name = "hidden" if shape.fed_back else "features"
        feature = input(name, (shape.rows, self.width), dtypes.F32)
        x = _layers(s, feature)
        return _outputs(s, x) if shape.wanted else _read(s, x)

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight of the head, or one borrowed from the target."""
        return own_or_borrowed(t, self.PREFIX, self.catalogue, self.borrowed)


def _layers(s: Step, feature: Tensor) -> Tensor:
    """fc over [embedding ; feature], then the head's layers but for the last: [T, E]."""
    pair = ops.concat([blocks.embed(s), feature], axis=-1)  # [T, 2E]
    x = blocks.linear(s, pair, "fc", s.config.hidden_size)
    for i in range(s.config.num_hidden_layers - 1):
        x = blocks.fed_forward(s, x + blocks.attention(s, _normed(s, x, i), i), i)
    return x


def _normed(s: Step, x: Tensor, i: int) -> Tensor:
    return blocks.norm(s, x, f"blk.{i}.attn_norm") if i else x


def _read(s: Step, x: Tensor) -> Graph:
    """True rows of which nothing is wanted: the last layer only remembers them."""
    last = s.config.num_hidden_layers - 1
    seen = blocks.remembered(s, _normed(s, x, last), last)
    return Graph.of({"read": ops.cont(s.slots)}, also=seen, name="eagle1 read")


def _outputs(s: Step, x: Tensor) -> Graph:
    """Logits and hidden states of the wanted rows; the last layer is computed for these only."""
    last = s.config.num_hidden_layers - 1
    mixed = blocks.attention(s, _normed(s, x, last), last)
    picked = blocks.wanted_rows(s, blocks.fed_forward(s, s.asked(x, last) + mixed, last))
    name = "output.weight" if s.has("output.weight") else "token_embd.weight"
    logits = blocks.product(s, picked, name, s.config.vocab_size)
    outputs = {"logits": logits, "feedback": picked}
    return Graph.of(outputs, name="eagle1 step")


def is_first_generation(tensors: Mapping[str, RawTensor]) -> bool:
    """Whether the tensors are an EAGLE-1 head: fc reads two widths, and nothing norms a feature."""
    fc = tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or fc.shape[1] != 2 * fc.shape[0]:
        return False
    return not any(n.endswith("hidden_norm.weight") for n in tensors)


def open_eagle1(path: Path, checkpoint: Checkpoint, target: Model) -> FirstHead:
    """The head in a folder, fitted to `target`. ModelError when it belongs to another one."""
    found: dict[str, RawTensor] = {}
    for name, t in checkpoint.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is not None and match[2] in _NAMES:
            title = f"blk.{match[1]}.{_NAMES[match[2]]}.{match[3]}"
        elif name in ("fc.weight", "fc.bias"):
            title = name
        elif name == "embed_tokens.weight":
            continue  # a copy of the target's, frozen in training
        elif name.endswith("rotary_emb.inv_freq"):
            continue
        else:
            raise ModelError(f"{path}: unknown tensor {name!r} in an EAGLE-1 head")
        if not np.isfinite(t.float32()).all():
            raise ModelError(f"{path}: {name!r} holds values that are not finite")
        found[title] = replace(t, name=title)
    if found["fc.weight"].shape[0] != target.width:
        raise ModelError(
            f"{path}: the head is {found['fc.weight'].shape[0]} wide, {target.name} is "
            f"{target.width}"
        )
    layers = 1 + max((int(n.split(".")[1]) for n in found if n.startswith("blk.")), default=-1)
    values = {**checkpoint.metadata, "num_hidden_layers": layers, "vocab_size": target.vocab_size}
    Keys(values, str(path)).integer("num_attention_heads")
    names = ("token_embd.weight", "output.weight")
    lacking = [n for n in names if n in target.catalogue and n not in found]
    borrowed = scales_apart({n: target.catalogue[n] for n in lacking})
    ids = np.arange(target.vocab_size, dtype=np.int64)
    config = from_hf(values, "eagle1")
    held = completed(found, config)
    return FirstHead(path.stem, config, held, borrowed, (target.layer_count,), ids)
