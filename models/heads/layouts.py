"""EAGLE-3 heads from every layout in the wild, and from GGUF, to one form.

Legend: A taps, G target width, E head width, W draft vocabulary, V target vocabulary.

Layouts read: SafeAILab (`midlayer.*`), SpecForge and SGLang, NVIDIA ModelOpt, RedHat speculators
(`layers.0.*`, nested config), AngelSlim, DeepSpec; GGUF of llama.cpp, also its older key set.
Where a layout says the same thing in two ways the tensors decide; what cannot be told is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import Array, ModelError
from ggraph.decode.draft.head import DraftShape, Masked
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import Checkpoint, RawTensor

from .. import latent
from ..architecture import scales_apart
from ..config import DecoderConfig, Keys
from ..eagle3 import Head, HeadConfig
from ..gguf_config import rope_from_gguf
from ..hf_config import LONGROPE, rope_from_hf, rope_kind, scaling_of
from ..latent import Latent
from ..registry import Model, completed
from .assistant import AssistantHead, is_assistant, open_assistant
from .dflash import BlockHead, is_block_drafter, open_dflash
from .eagle1 import FirstHead, is_first_generation, open_eagle1
from .mtp import NextHead, open_mtp
from .names import sanitize_head, target_ids, tensor_of
from .tried import attempt

_REFUSED = {
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
}
_PROMISED = {
    "norm_before_fc": "enc.output_norm.weight",
    "fc_norm": "fc_norm.0.weight",
    "use_aux_norm": "fc_norm.0.weight",
}
_SPARE = re.compile(r"blk\.[1-9]\d*\.attn_norm_2\.weight")  # made for each layer, read by none
_MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")


AnyHead = Head | FirstHead | NextHead | AssistantHead | BlockHead


def open_head(path: Path, target: Model) -> AnyHead:
    """The head in a folder or GGUF file, fitted to `target`; the target's own file holds layers
    that draft.

    Raises ModelError for a head of another target, a missing or misshapen tensor, a bad vocabulary
    map, and for variants that are not built here.
    """
    if path == Path(target.checkpoint.path):
        return open_mtp(target)
    checkpoint = open_checkpoint(path)
    if is_assistant(checkpoint):
        return open_assistant(path, checkpoint, target)
    if is_block_drafter(checkpoint):
        return open_dflash(path, checkpoint, target)
    if checkpoint.format == "gguf":
        return _from_gguf(path, checkpoint, target)
    if rope_kind(scaling_of(Keys(_flattened(checkpoint.metadata), str(path)))) in LONGROPE:
        raise ModelError(f"{path}: heads with LongRoPE are not built here")
    if is_first_generation(checkpoint.tensors):
        return open_eagle1(path, checkpoint, target)
    return _from_hf(path, checkpoint, target)


def default_taps(layers: int) -> tuple[int, ...]:
    """Layer inputs 2, N/2 and N-3 of N: SafeAILab's choice."""
    return (2, layers // 2, layers - 3)


def _from_hf(path: Path, checkpoint: Checkpoint, target: Model) -> Head:
    values = _flattened(checkpoint.metadata)
    tensors, mapping = sanitize_head(checkpoint.tensors, path)
    _check_flags(values, tensors, path)
    k = Keys({"max_position_embeddings": 2048, **values}, str(path))
    sizes = latent.sizes(tensors, k, k.integer("num_attention_heads"), path)
    wide = tensor_of(tensors, "fc.weight", path).shape[-1]
    config = HeadConfig(
        decoder=_decoder_from_hf(k, tensors, sizes, target, path),
        target_hidden_size=target.width,
        taps=_taps(checkpoint.metadata, wide, target, path),
        draft_vocab_size=_draft_vocabulary(tensors, mapping, target),
        norm_before_residual=k.flag(
            "norm_before_residual", "speculators_model_type" in checkpoint.metadata
        ),
        norm_before_fc="enc.output_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=k.flag("norm_output"),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        latent=sizes,
    )
    hint = checkpoint.tensors.get("t2d")
    truth = hint.data if hint is not None else None
    ids = target_ids(mapping, truth, config.draft_vocab_size, target.vocab_size, path)
    masked = _masked(values, checkpoint.tensors, config, path)
    return _head(path, config, tensors, ids, target, masked)


def _check_flags(values: Mapping[str, Any], tensors: Mapping[str, RawTensor], where: Path) -> None:
    """ModelError for a variant that is not built here, and for one whose tensor is missing."""
    for flag, refused in _REFUSED.items():
        if values.get(flag) is refused:
            raise ModelError(f"{where}: {flag} = {refused} is a variant that is not built here")
    for flag, name in _PROMISED.items():
        if values.get(flag) is True and name not in tensors:
            raise ModelError(f"{where}: {flag} is set, but the head has no tensor {name!r}")


def _masked(
    values: Mapping[str, Any], tensors: Mapping[str, RawTensor], c: HeadConfig, where: Path
) -> Masked | None:
    """What a P-EAGLE head puts where nothing is known yet; None for heads that draft in turn."""
    row = tensors.get("mask_hidden", tensors.get("model.mask_hidden"))
    if row is None:
        if values.get("parallel_drafting") or values.get("speculators_model_type") == "peagle":
            raise ModelError(f"{where}: the head drafts in parallel, but has no 'mask_hidden'")
        return None
    named = [values.get(k) for k in _MASK_TOKENS]
    named.append(_nested(values, "dflash_config").get("mask_token_id"))
    tokens = [t for t in named if t is not None]
    if not tokens or any(t != tokens[0] for t in tokens):
        raise ModelError(
            f"{where}: tokens {tokens} for rows that are masked; expected one, as "
            f"{', '.join(_MASK_TOKENS)}"
        )
    token, vocabulary = tokens[0], c.decoder.vocab_size
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
        raise ModelError(f"{where}: masked token {token!r} of {vocabulary}")
    features = row.float32().reshape(-1)
    if features.size != len(c.taps) * c.target_hidden_size:
        raise ModelError(
            f"{where}: 'mask_hidden' holds {features.size} values, fc reads "
            f"{len(c.taps) * c.target_hidden_size}"
        )
    if not np.isfinite(features).all():
        raise ModelError(f"{where}: 'mask_hidden' holds values that are not finite")
    return Masked(token, features)


def _flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Nested parts over the top level: speculators' layer config, ModelOpt's eagle_config."""
    merged = dict(config)
    for name in ("transformer_layer_config", "eagle_config"):
        merged.update({k: v for k, v in _nested(config, name).items() if v is not None})
    return merged


def _nested(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A config inside the config, empty where it is missing."""
    part = config.get(name) or {}
    if not isinstance(part, Mapping):
        raise ModelError(f"config.json: {name} = {part!r} is no mapping")
    return part


def _decoder_from_hf(
    k: Keys, tensors: Mapping[str, RawTensor], sizes: Latent | None, target: Model, where: Path
) -> DecoderConfig:
    """Sizes from the tensors where they can tell, else from the config."""
    heads = k.integer("num_attention_heads")
    hidden = tensor_of(tensors, "fc.weight", where).shape[0]
    if k.has("hidden_size") and k.integer("hidden_size") != hidden:
        raise ModelError(f"{where}: hidden_size {k.integer('hidden_size')}, but fc gives {hidden}")
    if sizes is not None:
        kv_heads, head_dim, rope = heads, sizes.key, rope_from_hf(k, sizes.rotated)
        rope = rope if k.get("rope_interleave") is False else replace(rope, mode="normal")
    else:
        q = tensor_of(tensors, "blk.0.attn_q.weight", where)
        kv_heads, head_dim = k.integer("num_key_value_heads", heads), q.shape[0] // max(heads, 1)
        rope = rope_from_hf(k, head_dim)
    return DecoderConfig(
        architecture="eagle3",
        hidden_size=hidden,
        intermediate_size=tensor_of(tensors, "blk.0.ffn_gate.weight", where).shape[0],
        num_hidden_layers=1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blk.")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=k.real("rms_norm_eps", 1e-6),
        vocab_size=target.vocab_size,
        max_position_embeddings=k.integer("max_position_embeddings", 2048),
        rope=rope,
        sliding_window=k.integer("sliding_window") if k.has("sliding_window") else None,
    )


def _taps(config: Mapping[str, Any], wide: int, target: Model, where: Path) -> tuple[int, ...]:
    """Layer-input indices. Lists at the top level hold inputs, nested ones outputs (add one)."""
    if wide % target.width:
        raise ModelError(
            f"{where}: fc reads {wide} values, which is no multiple of the target's width "
            f"{target.width}: the head belongs to another target"
        )
    count = wide // target.width
    name = "eagle_aux_hidden_state_layer_ids"
    nested = _nested(config, "eagle_config").get(name)
    if config.get(name):
        taps = _indices(config[name], where)
    elif nested:
        taps = tuple(i + 1 for i in _indices(nested, where))
    elif count == 3:
        taps = default_taps(target.layer_count)
    else:
        raise ModelError(f"{where}: fc reads {count} layers, but the config does not say which")
    return _checked_taps(taps, count, target, where)


def _indices(listed: object, where: Path) -> tuple[int, ...]:
    if not isinstance(listed, Sequence) or any(type(i) is not int for i in listed):
        raise ModelError(f"{where}: tapped layers {listed!r} are no list of integers")
    return tuple(listed)


def _checked_taps(taps: tuple[int, ...], count: int, target: Model, where: Path) -> tuple[int, ...]:
    if len(taps) != count:
        raise ModelError(f"{where}: {len(taps)} tapped layers {taps}, but fc reads {count}")
    if any(not 0 <= i < target.layer_count for i in taps):
        raise ModelError(f"{where}: tapped layers {taps}, but the target has {target.layer_count}")
    return taps


def _draft_vocabulary(
    tensors: Mapping[str, RawTensor], mapping: Array | None, target: Model
) -> int:
    own = tensors.get("output.weight")
    if own is not None:
        return own.shape[0]
    return len(mapping) if mapping is not None else target.vocab_size


def _head(
    path: Path,
    config: HeadConfig,
    tensors: dict[str, RawTensor],
    ids: Array,
    target: Model,
    masked: Masked | None = None,
) -> Head:
    """Check widths, add what is computed from the config, and borrow what is missing."""
    for name, t in tensors.items():
        if t.dtype.is_float and not t.dtype.is_block and not np.isfinite(t.float32()).all():
            raise ModelError(f"{path}: {name!r} holds values that are not finite")
    tensors = completed(tensors, config.decoder)
    borrowed = _borrowed(path, config, tensors, target)
    head = Head(path.stem, config, tensors, borrowed, ids, masked)
    attempt(head, path, "head", (DraftShape(1, 1, 1, 2, fed_back=False),), _SPARE.fullmatch)
    return head


def _borrowed(
    path: Path, config: HeadConfig, tensors: Mapping[str, RawTensor], target: Model
) -> dict[str, RawTensor]:
    """The target's embedding and output matrix, as far as the head has none and widths agree."""
    wanted = {}
    if "token_embd.weight" not in tensors:
        wanted["token_embd.weight"] = target.catalogue["token_embd.weight"]
    if "output.weight" not in tensors:
        tied = "output.weight" not in target.catalogue
        name = "token_embd.weight" if tied else "output.weight"
        wanted[name] = target.catalogue[name]
    for name, t in wanted.items():
        if t.shape[-1] != config.decoder.hidden_size:
            raise ModelError(
                f"{path}: the head is {config.decoder.hidden_size} wide and has no {name!r} of its "
                f"own; the target's is {t.shape[-1]} wide"
            )
    return scales_apart(wanted)


def _from_gguf(path: Path, checkpoint: Checkpoint, target: Model) -> Head:
    md = checkpoint.metadata
    if checkpoint.architecture != "eagle3":
        raise ModelError(f"{path}: architecture {checkpoint.architecture!r} is not eagle3")
    renamed = {"blk.0.hidden_norm.weight": "blk.0.attn_norm_2.weight"}
    tensors = {
        renamed.get(n, n): replace(t, name=renamed.get(n, n))
        for n, t in checkpoint.tensors.items()
        if n not in ("d2t", "t2d")
    }
    k = Keys(md, str(path), "eagle3.")
    decoder = _decoder_from_gguf(k, tensors, target, path)
    wide = tensor_of(tensors, "fc.weight", path).shape[-1]
    if k.has("target_hidden_size") and k.integer("target_hidden_size") != target.width:
        raise ModelError(
            f"{path}: made for a target {k.integer('target_hidden_size')} wide, this one is "
            f"{target.width}"
        )
    listed = k.get("target_layers", k.get("extract_layers"))
    taps = default_taps(target.layer_count)
    if listed is not None:
        taps = _indices(np.asarray(listed).tolist(), path)
    mapping = checkpoint.tensors.get("d2t")
    ids = np.asarray(mapping.data).reshape(-1).astype(np.int64) if mapping is not None else None
    config = HeadConfig(
        decoder=decoder,
        target_hidden_size=target.width,
        taps=_checked_taps(taps, wide // target.width, target, path),
        draft_vocab_size=_draft_vocabulary(tensors, ids, target),
        norm_before_residual=k.flag("norm_before_residual"),
        norm_before_fc="enc.output_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=k.flag("norm_output"),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    ids = target_ids(ids, None, config.draft_vocab_size, target.vocab_size, path)
    return _head(path, config, tensors, ids, target)


def _decoder_from_gguf(
    k: Keys, tensors: Mapping[str, RawTensor], target: Model, where: Path
) -> DecoderConfig:
    heads = k.integer("attention.head_count")
    q = tensor_of(tensors, "blk.0.attn_q.weight", where)
    head_dim = k.integer("attention.key_length", q.shape[0] // max(heads, 1))
    context, window = k.integer("context_length", 2048), "attention.sliding_window"
    return DecoderConfig(
        architecture="eagle3",
        hidden_size=k.integer("embedding_length"),
        intermediate_size=k.integer("feed_forward_length"),
        num_hidden_layers=k.integer("block_count", 1),
        num_attention_heads=heads,
        num_key_value_heads=k.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=k.real("attention.layer_norm_rms_epsilon", 1e-6),
        vocab_size=target.vocab_size,
        max_position_embeddings=context,
        rope=rope_from_gguf(k, "normal", head_dim, context),
        sliding_window=k.integer(window) if k.has(window) else None,
    )
