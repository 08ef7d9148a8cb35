"""DFlash: a small decoder that drafts a whole block in one step, from the target's features.

Legend: T token rows, A taps, G width of the target and of the drafter, M wanted rows, V vocabulary,
B rows of a block.

    feature g = norm(fc(taps side by side))                    [T, A*G] -> [T, G]
    true rows: each layer's keys and values are those of g, at the rows' own positions
    block: the text's last token, whose feature is not known yet, then B - 1 masked tokens; layers
    as Qwen3's, whose rows see the text and one another, in sliding layers their forerunners alone
    logits of masked row i guess the token at its own position

Embedding and output matrix are the target's where the drafter has none. Files of DFlash 2, which
choose among candidates, are refused.
Source: arXiv 2602.06036; the `dflash` package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import Array, Graph, ModelError, Tensor, dtypes, input, ops
from ggraph.decode.draft.head import DraftShape
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.lazy_array import Storage

from .. import blocks
from ..architecture import scales_apart
from ..config import DecoderConfig, Keys
from ..families import qwen3
from ..gguf_config import from_gguf
from ..hf_config import from_hf
from ..registry import Model, applied, completed, sanitize
from ..step import Step
from .names import own_or_borrowed
from .tried import attempt

NAME = "dflash"
HF_NAMES = ("DFlashDraftModel", "DFlash2DraftModel")
MASK = "tokenizer.ggml.mask_token_id"
BLOCK = 16  # rows, where the file does not say
ARCHITECTURE = replace(
    qwen3.QWEN3, name=NAME, hf=HF_NAMES, layer_prefix=r"(?:model\.)?layers\.",
    top_names={
        "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight", "embed_tokens.weight": "token_embd.weight",
    },
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class BlockHead:
    """A drafter fitted to its target: implements `ggraph.decode.draft.head.DraftHead`.

    A block has `block` rows at most, of which all but the first take the token `mask`. `causal`
    says that rows of a block do not see later ones, in any layer.
    """

    name: str
    config: DecoderConfig
    catalogue: Mapping[str, RawTensor] = field(repr=False)
    borrowed: Mapping[str, RawTensor] = field(repr=False)
    taps: tuple[int, ...]
    block: int
    mask: int
    causal: bool
    target_ids: Array = field(repr=False)

    PREFIX = "draft."

    @property
    def width(self) -> int:
        """G, the width of a row."""
        return self.config.hidden_size

    @property
    def target_vocabulary(self) -> int:
        """V, the number of tokens of the target."""
        return self.config.vocab_size

    @property
    def sliding_window(self) -> int | None:
        """Positions that sliding layers see."""
        return self.config.sliding_window

    def build(self, shape: DraftShape) -> Graph:
        """True rows are read, fed-back ones are a block (see `ggraph.decode.draft.head`)."""
        everything = {**self.borrowed, **self.catalogue}
        s = Step(self.config, everything, shape.step, self.PREFIX, frozenset(self.borrowed))
        return self._drafted(s) if shape.fed_back else self._read(s)

    def _read(self, s: Step) -> Graph:
        """Keys and values of true rows."""
        c = self.config
        x = input("features", (s.shape.rows, len(self.taps) * c.hidden_size), dtypes.F32)
        g = blocks.norm(s, blocks.linear(s, x, "fc", c.hidden_size), "enc.output_norm")
        layers = range(c.num_hidden_layers)
        pairs = [blocks.remembered(s, g, i, qk_norm="head") for i in layers]
        seen = {f"{r}.{i}": t for i, p in enumerate(pairs) for r, t in zip("kv", p, strict=True)}
        written = Graph.of(seen).updates.values()
        return Graph.of({"read": ops.cont(s.slots)}, also=written, name="block read")

    def _drafted(self, s: Step) -> Graph:
        """Logits [M, V] of the wanted rows of a block."""
        c = self.config
        x = blocks.embed(s)  # [T, G]
        for i in range(c.num_hidden_layers):
            x = blocks.fed_forward(s, blocks.attended(s, x, i, qk_norm="head"), i)
        final = blocks.norm(s, blocks.wanted_rows(s, x), "output_norm")
        own = s.has("output.weight")
        table = "output.weight" if own else "token_embd.weight"
        logits = blocks.capped(s, blocks.product(s, final, table, c.vocab_size))
        return Graph.of({"logits": logits}, name="block step")

    def weight(self, t: Tensor) -> Storage:
        """Raw storage of a weight of the drafter, or one borrowed from the target."""
        return own_or_borrowed(t, self.PREFIX, self.catalogue, self.borrowed)


def is_block_drafter(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds a drafter of this kind."""
    named = checkpoint.metadata.get("architectures")
    told = isinstance(named, list) and any(n in HF_NAMES for n in named)
    return checkpoint.architecture == NAME or told


def open_dflash(path: Path, checkpoint: Checkpoint, target: Model) -> BlockHead:
    """The drafter in a folder or GGUF file. ModelError for one of another target, for DFlash 2, and
    for a tensor that is missing or misshapen."""
    second = [n for n in checkpoint.tensors if "selector" in n or "_conv" in n or n == "d2t"]
    if second:
        raise ModelError(f"{path}: {second[0]!r} is of a DFlash variant that is not built here")
    read = _from_gguf if checkpoint.format == "gguf" else _from_hf
    config, tensors, told = read(path, checkpoint)
    held = completed(applied(ARCHITECTURE, ARCHITECTURE.loaded, tensors, config), config)
    if config.hidden_size != target.width or config.vocab_size != target.vocab_size:
        raise ModelError(
            f"{path}: {config.vocab_size} tokens of {config.hidden_size} numbers, {target.name} "
            f"has {target.vocab_size} of {target.width}: it was made for another model"
        )
    taps = told.pop("taps")
    if not taps or any(not 0 <= i <= target.layer_count for i in taps):
        raise ModelError(f"{path}: tapped layers {taps}, the target has {target.layer_count}")
    _checked(path, told, config)
    ids = np.arange(target.vocab_size, dtype=np.int64)
    borrowed = _borrowed(held, target)
    name = path.stem if path.is_file() else path.name
    head = BlockHead(name, config, held, borrowed, taps, target_ids=ids, **told)
    attempt(head, path, "drafter")
    return head


def _checked(path: Path, told: Mapping[str, Any], c: DecoderConfig) -> None:
    if not 2 <= told["block"] <= 64:
        raise ModelError(f"{path}: blocks of {told['block']} rows; expected 2 to 64")
    if not 0 <= told["mask"] < c.vocab_size:
        raise ModelError(f"{path}: masked token {told['mask']} of {c.vocab_size}")


def _borrowed(held: Mapping[str, RawTensor], target: Model) -> dict[str, RawTensor]:
    """The target's embedding and output matrix, where the drafter has none."""
    names = ("token_embd.weight", "output.weight")
    own = "token_embd.weight" in held  # then its output matrix is its own, too
    lacking = [n for n in names if n not in held and not (own and n == "output.weight")]
    return scales_apart({n: target.catalogue[n] for n in lacking if n in target.catalogue})


Told = tuple[DecoderConfig, dict[str, RawTensor], dict[str, Any]]


def _from_hf(path: Path, checkpoint: Checkpoint) -> Told:
    """Keys of `dflash_config` come before those beside it."""
    own = Keys(checkpoint.metadata, str(path)).mapping("dflash_config")
    values = {**checkpoint.metadata, **{n: v for n, v in own.items() if v is not None}}
    k = Keys(values, str(path))
    if k.flag("use_swa"):
        raise ModelError(f"{path}: use_swa is a DFlash variant that is not built here")
    if not values.get("layer_types"):
        values.pop("sliding_window", None)
    renamed = {"input_embedding_scale": "embedding_multiplier"}
    values |= {new: values[old] for old, new in renamed.items() if values.get(old) is not None}
    if k.has("output_multiplier"):
        values["logits_scaling"] = _divisor(k.real("output_multiplier"), path)
    config = from_hf(values, NAME)
    ids = k.get("target_layer_ids")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ModelError(f"{path}: target_layer_ids {ids!r:.60} are no list of integers")
    causal = k.flag("is_causal") if k.has("is_causal") else k.flag("causal")
    if k.has("is_causal") and not causal and any(config.windowed_layers):
        raise ModelError(f"{path}: sliding layers that see later rows are not built here")
    told = {
        "taps": tuple(i + 1 for i in ids), "block": k.integer("block_size", BLOCK),
        "mask": k.integer("mask_token_id"), "causal": causal,
    }  # fmt: skip
    return config, sanitize(dict(checkpoint.tensors), config, ARCHITECTURE), told


def _divisor(factor: float, path: Path) -> float:
    if factor <= 0:
        raise ModelError(f"{path}: logits times {factor}")
    return 1 / factor


def _from_gguf(path: Path, checkpoint: Checkpoint) -> Told:
    """The keys of llama.cpp, which tells inputs of layers."""
    md = checkpoint.metadata
    k = Keys(md, str(path), f"{NAME}.")
    config = ARCHITECTURE.complete(from_gguf(md, NAME, ARCHITECTURE.rope_mode))
    if k.has("logit_scale"):
        config = replace(config, logits_scaling=_divisor(k.real("logit_scale"), path))
    listed = np.asarray(k.get("target_layers", ())).reshape(-1).tolist()
    told = {
        "taps": tuple(int(i) for i in listed), "block": k.integer("block_size", BLOCK),
        "mask": Keys(md, str(path)).integer(MASK), "causal": k.flag("attention.causal"),
    }  # fmt: skip
    return config, dict(checkpoint.tensors), told


def gguf_told(head: BlockHead) -> dict[str, Any]:
    """What a GGUF file tells of a drafter beyond its config."""
    own: dict[str, Any] = {
        f"{NAME}.block_size": head.block, MASK: head.mask,
        f"{NAME}.target_layers": np.asarray(head.taps, np.int32),
    }  # fmt: skip
    if head.causal:
        own[f"{NAME}.attention.causal"] = True
    if head.config.logits_scaling != 1.0:
        own[f"{NAME}.logit_scale"] = 1 / head.config.logits_scaling
    return own
