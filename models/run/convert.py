"""Checkpoints to GGUF: target models and EAGLE-3 heads, in any type that we can write.

Legend: E width, H heads, D head_dim.

Keys and tensor names are those that llama.cpp reads. Llama's q and k rows are re-ordered from
half-split to interleaved rotary pairs, as every llama GGUF has them.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ggraph import Array, InputError, ModelError, dtypes
from ggraph.errors import FormatError, FormatWarning
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.gguf import Progress, write_gguf
from ggraph.formats.imatrix import Importance
from ggraph.formats.lazy_array import LazyArray, row_numbers, rows_of, taken, windows_of
from ggraph.formats.quants import quantize
from ggraph.text.gguf_keys import gguf_keys
from ggraph.text.hf import tokenizer_file

from ..architecture import Architecture, by_pairs, with_own_scales
from ..config import DecoderConfig
from ..eagle3 import Head
from ..families.gemma4 import GEMMA4
from ..gguf_config import LEADING, STEP, to_gguf
from ..heads import dflash
from ..heads.assistant import ASSISTANT, COUNT, AssistantHead
from ..pooling import gguf_pooling
from ..registry import ARCHITECTURES, Model
from ..rotation import MADE
from ..tower import MEAN, Tower
from ..tower_files import MMPROJ, stored
from ..tower_files import told as tower_told

FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14,
    "q2_k": 10, "q3_k": 11, "q3_k_m": 12, "q4_k_m": 15, "q5_k": 16, "q5_k_m": 17, "q6_k": 18,
    "iq4_nl": 25, "iq4_xs": 30, "bf16": 32, "tq1_0": 36, "tq2_0": 37, "mxfp4": 38, "nvfp4": 39,
}  # fmt: skip
KEPT = "nvfp4"  # of whose files all that is not in these codes is F16
# Of which llama.cpp multiplies by scales of matrices; of others it passes over them (2026-10).
SCALED = {
    "cohere2", "gemma4", "llama", "mistral3", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35",
    "qwen35moe", "qwen3moe", "qwen3next",
}  # fmt: skip
_MADE_ANEW = ("general.architecture", "general.alignment")
PRECISE = (  # small, and read as float32 by everybody
    "ffn_gate_inp.weight", ".bias", ".ssm_conv1d.weight", ".shortconv.conv.weight", ".ssm_a",
    ".ssm_d", ".altup_router.weight", ".altup_predict_coef.weight", ".altup_correct_coef.weight",
    "position_embd.weight", "token_types.weight",
)  # fmt: skip
_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
_VALUES = (".attn_v.weight", ".attn_qkv.weight", ".attn_kv_b.weight")
_WIDER = {
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
    "tq1_0": "q4_0", "tq2_0": "q4_0",
}  # fmt: skip


def model_to_gguf(
    model: Model,
    out: Path,
    type_name: str,
    progress: Progress | None = None,
    importance: Mapping[str, Importance] | None = None,
) -> None:
    """Write a target model, whose matrices are fitted by the importance of their columns where that
    is known. ModelError for what GGUF cannot say, FormatError for the disk and for an importance of
    another model; FormatWarning where llama.cpp will make another model of it."""
    a, c = ARCHITECTURES[model.config.architecture], model.config
    metadata = told(a, c) | _general(model.name, model.checkpoint, type_name)
    metadata.update(tokenizer_keys(model))
    metadata.update(gguf_pooling(model.checkpoint, model.catalogue, a.gguf, causal=a.causal))
    held = list(_normal_order(a.stored(dict(model.catalogue), c), c, a.rope_mode))
    if importance is not None and importance.keys().isdisjoint(t.name for t in held):
        raise FormatError(f"{model.name} has none of the tensors that the importance names")
    tensors = list(_typed(held, type_name, importance or {}))
    if a.gguf not in SCALED and any(t.scale is not None for t in tensors):
        warnings.warn(
            f"{out}: llama.cpp passes over scales of matrices of {a.gguf!r}, so that its texts "
            "mean nothing; --type f16 has them in the matrices",
            FormatWarning,
            stacklevel=2,
        )
    write_gguf(out, metadata, tensors, progress)


def told(a: Architecture, c: DecoderConfig) -> dict[str, Any]:
    """What a GGUF file tells of a config."""
    own = {key if key in a.bare else f"{a.gguf}.{key}": v for key, v in a.keys(c).items()}
    if c.dense_layers and f"{a.gguf}.{STEP}" not in own:
        own[f"{a.gguf}.{LEADING}"] = c.leading_dense
    return {k: v for k, v in {**to_gguf(c, a.gguf), **own}.items() if v is not None}


def assistant_to_gguf(
    head: AssistantHead, out: Path, type_name: str, progress: Progress | None = None
) -> None:
    """Write an assistant of Gemma 4 with the keys and names that llama.cpp reads, and its target's
    tokenizer."""
    c = head.config
    metadata = told(ASSISTANT, c) | _general(head.name, None, type_name)
    metadata[COUNT] = c.num_hidden_layers
    metadata[f"{ASSISTANT.name}.embedding_length_out"] = head.width
    metadata.update(tokenizer_keys(head.target))
    tensors = _normal_order(ASSISTANT.stored(dict(head.catalogue), c), c, ASSISTANT.rope_mode)
    write_gguf(out, metadata, _typed(tensors, type_name), progress)


def dflash_to_gguf(
    head: dflash.BlockHead,
    target: Model,
    out: Path,
    type_name: str,
    progress: Progress | None = None,
) -> None:
    """Write a block drafter with the keys and names that llama.cpp reads, and its target's
    tokenizer."""
    a, c = dflash.ARCHITECTURE, head.config
    metadata = told(a, c) | _general(head.name, None, type_name)
    metadata.update(tokenizer_keys(target))
    metadata.update(dflash.gguf_told(head))
    tensors = _normal_order(a.stored(dict(head.catalogue), c), c, a.rope_mode)
    write_gguf(out, metadata, _typed(tensors, type_name), progress)


def head_to_gguf(
    head: Head, target: Model, out: Path, type_name: str, progress: Progress | None = None
) -> None:
    """Write an EAGLE-3 head with the keys and names that llama.cpp reads.

    The target's tokenizer goes along; the draft vocabulary map is written as absolute ids.
    ModelError for heads that GGUF has no form for.
    """
    c = head.config
    if len(c.taps) != 3:
        raise ModelError(f"{head.name}: GGUF heads tap 3 layers, this one taps {c.taps}")
    if c.latent is not None or head.masked is not None:
        kind = "latent attention" if c.latent is not None else "masked rows"
        raise ModelError(f"{head.name}: GGUF has no form for a head with {kind}")
    metadata = to_gguf(c.decoder, "eagle3")
    metadata.update(
        {
            "eagle3.target_layers": np.asarray(c.taps, np.int32),
            "eagle3.target_hidden_size": c.target_hidden_size,
            "eagle3.norm_before_residual": c.norm_before_residual,
            "eagle3.norm_before_fc": c.norm_before_fc,
        }
    )
    metadata |= _general(head.name, None, type_name)
    if c.norm_output or c.fc_norm:
        metadata.update({"eagle3.norm_output": c.norm_output, "eagle3.fc_norm": c.fc_norm})
    metadata.update(tokenizer_keys(target))
    held = _normal_order(with_own_scales(dict(head.catalogue)), c.decoder, "normal")
    tensors = list(_typed(held, type_name))
    if c.draft_vocab_size != c.decoder.vocab_size:
        ids = np.asarray(head.target_ids, np.int64)
        tensors.append(RawTensor("d2t", dtypes.I64, ids.shape, ids))
    write_gguf(out, metadata, tensors, progress)


def tower_to_gguf(
    tower: Tower, out: Path, type_name: str, progress: Progress | None = None
) -> None:
    """Write a tower with the keys and names that llama.cpp reads (its mmproj). ModelError for what
    GGUF has no form for."""
    if tower.config.exact_gelu:
        raise ModelError(f"{tower.name}: GGUF has no form for a tower with exact GELU")
    metadata = {"general.architecture": MMPROJ, "general.type": "mmproj", **tower_told(tower)}
    metadata |= _general(tower.name, None, type_name)
    kernel = dtypes.F32 if type_name == "f32" else dtypes.F16  # a convolution's, to llama.cpp
    tensors = list[RawTensor]()
    for t in stored(tower).values():
        whole = len(t.shape) == 4 or t.name == f"{MEAN}.weight"  # or read the other way
        title = kernel if whole else tensor_type(t.name, t.shape, type_name)
        tensors.append(converted(t, title))
    write_gguf(out, metadata, tensors, progress)


def tokenizer_keys(model: Model) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file: as the model's own file has them, or made from its
    folder; nothing where neither has one. FormatError for a tokenizer that GGUF cannot say."""
    checkpoint = model.checkpoint
    if checkpoint.format == "gguf":
        return {k: v for k, v in checkpoint.metadata.items() if k.startswith("tokenizer.")}
    folder = Path(checkpoint.path)
    found = tokenizer_file(folder) is not None
    ranked = model.config.architecture == GEMMA4.name
    return gguf_keys(folder, model.vocab_size, ranked=ranked) if found else {}


def _general(name: str, source: Checkpoint | None, type_name: str) -> dict[str, Any]:
    """What the file says of itself: what a GGUF file said of itself before, and the new type."""
    before = source.metadata if source is not None and source.format == "gguf" else {}
    kept = {k: v for k, v in before.items() if k.startswith("general.") and k not in _MADE_ANEW}
    made = {"general.file_type": _file_type(type_name), "general.quantization_version": 2}
    return {"general.name": name, **kept, **made}


def _file_type(type_name: str) -> int:
    if type_name not in FILE_TYPES:
        raise InputError(f"type {type_name!r}; known: {', '.join(FILE_TYPES)}")
    return FILE_TYPES[type_name]


def _normal_order(
    tensors: Mapping[str, RawTensor], c: DecoderConfig, wanted: str
) -> Iterator[RawTensor]:
    """Each tensor by its name, rows in the order of the pairing that its architecture wants."""
    permuted = c.rope.mode == "neox" and wanted == "normal"
    for name, t in tensors.items():
        if name in MADE:
            continue
        rows = row_numbers(t.storage)
        order = by_pairs(name, rows, c) if permuted else rows
        yield replace(t, name=name, storage=t.storage if order is rows else taken(t.storage, order))


def _typed(
    tensors: Iterable[RawTensor],
    type_name: str,
    importance: Mapping[str, Importance] = MappingProxyType({}),
) -> Iterator[RawTensor]:
    """Tensors in the types that a file of type `type_name` has."""
    every = list(tensors)
    if type_name == KEPT and all(t.dtype is not dtypes.NVFP4 for t in every):
        raise InputError(f"type {KEPT!r} keeps matrices that are in it; here are none")
    types = tensor_types({t.name: t.shape for t in every}, type_name)
    for t in every:
        kept = type_name != KEPT or t.dtype is dtypes.NVFP4
        own = importance[t.name].columns(t.name, t.shape) if t.name in importance else None
        yield converted(t, types[t.name] if kept else tensor_type(t.name, t.shape, "f16"), own)


def converted(t: RawTensor, dtype: dtypes.DType, importance: Array | None = None) -> RawTensor:
    """A tensor in another type, whose rows are made when they are read; its columns' importance is
    [1, n], or [matrices, n]."""
    if t.dtype is dtype:
        return t
    if len(t.shape) < 2 or not t.storage.size:
        return replace(t, dtype=dtype, storage=_storage(t.float32(), dtype), scale=None)
    read, k = rows_of(t.storage), t.shape[-1]
    scales = None if t.scale is None else t.scale.repeat(prod(t.shape[:-1]) // len(t.scale))

    own_rows = prod(t.shape[:-1]) // (1 if importance is None else len(importance))

    def made(i: int, j: int) -> Array:
        own = None if scales is None else scales[i:j]  # each row has that of its matrix
        rows = replace(t, shape=(j - i, k), storage=read(i, j), scale=own)
        counts = None if importance is None else importance[np.arange(i, j) // own_rows]
        return _storage(rows.float32(), dtype, counts)

    shape = (*t.shape[:-1], dtype.row_bytes(k) if dtype.is_block else k)
    storage = LazyArray(shape, dtype.np, made, windows_of(t.storage))
    return replace(t, dtype=dtype, storage=storage, scale=None)


def _storage(values: Array, dtype: dtypes.DType, importance: Array | None = None) -> Array:
    """Float32 values as a type has them."""
    return quantize(values, dtype, importance).view(dtype.np)


def tensor_types(shapes: Mapping[str, tuple[int, ...]], type_name: str) -> dict[str, dtypes.DType]:
    """The types of all tensors of a file of type `type_name`, by their names in GGUF.

    Those of `_MIXES` are the mixes that llama.cpp writes under these names (`_mixed`; IQ4_XS as for
    few key-value heads, without importance); files of three bits and fewer keep the output matrix
    and the embedding in Q6_K. InputError for a type not known.
    """
    _file_type(type_name)
    titles = dict.fromkeys(shapes, type_name)
    if type_name in _MIXES:
        titles = _mixed(shapes, type_name)
    elif type_name.startswith(("tq", "q2", "q3")):
        titles |= {n: "q6_k" for n in ("output.weight", "token_embd.weight") if n in shapes}
    return {n: tensor_type(n, shape, titles[n]) for n, shape in shapes.items()}


def _mixed(shapes: Mapping[str, tuple[int, ...]], type_name: str) -> dict[str, str]:
    """llama.cpp's mixes, by names: Q6_K for what gives logits, and finer types for the v and down
    projections of some layers. Where a layer has eight experts, attention is finer."""
    mix = _MIXES[type_name]
    titles = dict.fromkeys(shapes, mix.most)
    layer = {n: int(m[1]) for n in shapes if (m := re.match(r"blk\.(\d+)\.", n))}
    inner = sorted(layer, key=layer.__getitem__)
    values = [n for n in inner if n.endswith(_VALUES)]
    downs = [n for n in inner if re.search(r"\.ffn_down\w*\.weight$", n)]
    experts = {s[0] for n, s in shapes.items() if n.endswith(".ffn_gate_inp.weight")}
    layers = 1 + max(layer.values(), default=-1)
    titles |= {n: mix.values(i, len(values)) for i, n in enumerate(values)}
    # of layers with experts by their number, else counted
    titles |= {n: mix.down(layer[n] if experts else i, layers) for i, n in enumerate(downs)}
    outputs = [n for n in inner if n.endswith(".attn_output.weight")]
    titles |= dict.fromkeys(outputs, mix.output)
    last = {"output.weight"} if "output.weight" in shapes else set(_TABLES)
    titles |= dict.fromkeys(last & shapes.keys(), "q6_k")
    if experts == {8}:
        titles |= {n: "q8_0" for n in inner if n.endswith((*_VALUES, ".attn_k.weight"))}
        titles |= dict.fromkeys(outputs, "q5_k")
    return titles


@dataclass(frozen=True)
class _Mix:
    """A mix of types: that of most matrices, of attention's output, and of the v and the down
    projection of layer i of so many."""

    most: str
    output: str
    values: Callable[[int, int], str]
    down: Callable[[int, int], str]


def _wider(most: str) -> _Mix:
    """Q6_K for v and down projections of the layers of `_is_wide`."""

    def of(i: int, count: int) -> str:
        return "q6_k" if _is_wide(i, count) else most

    return _Mix(most, most, of, of)


def _is_wide(i: int, count: int) -> bool:
    """Whether llama.cpp's mixes keep a layer finer: an eighth at either end, and every third
    between."""
    eighth = count // 8
    return i < eighth or i >= 7 * count // 8 or (i - eighth) % 3 == 2


_MIXES = {
    "iq4_xs": _Mix(
        "iq4_xs", "iq4_xs",
        lambda i, count: "q5_k",
        lambda i, count: "q5_k" if i < count // 8 else "iq4_xs",
    ),
    "q3_k_m": _Mix(
        "q3_k", "q4_k",
        lambda i, count: "q5_k" if i < 2 else "q4_k",
        lambda i, count: "q5_k" if i < count // 16 else "q4_k",
    ),
    "q4_k_m": _wider("q4_k"),
    "q5_k_m": _wider("q5_k"),
}  # fmt: skip


def tensor_type(name: str, shape: tuple[int, ...], title: str) -> dtypes.DType:
    """The type of one tensor that is to be `title`: vectors and `PRECISE` stay float32, and rows
    that are not whole blocks take a type with shorter blocks."""
    if len(shape) == 1 or "norm" in name or name.endswith(PRECISE):
        return dtypes.F32
    wanted = dtypes.dtype(title)
    while shape[-1] % wanted.block:
        wanted = dtypes.dtype(_WIDER.get(wanted.name, "f16"))
    return wanted
