"""Hyperparameters in the keys of a GGUF file, both ways.

Keys are those of llama.cpp. Sources: the GGUF specification, the `gguf` package's constants.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import ModelError
from ggraph.errors import shown

from .config import (
    LONG_FACTORS,
    SCALARS,
    SHORT_FACTORS,
    DecoderConfig,
    Keys,
    Rope,
    layer_range,
    scalar,
    yarn_magnitude,
)

KV_HEADS = "attention.head_count_kv"
LEADING = "leading_dense_block_count"
STEP = "interleave_moe_layer_step"  # each so-manieth layer has experts
WINDOW = "attention.sliding_window"
KINDS = ("none", "linear", "yarn", "longrope")  # how a rotation is scaled


def from_gguf(
    metadata: Mapping[str, Any], architecture: str, rope_mode: str, *, causal: bool = True
) -> DecoderConfig:
    """The `{architecture}.*` keys of a GGUF file. ModelError for one whose rows do not see what
    those of `causal` models, or of the others, do."""
    k = Keys(metadata, "GGUF metadata", architecture + ".")
    if k.flag("attention.causal", causal) != causal:
        known = "never" if causal else "always"
        raise ModelError(
            f"GGUF metadata: attention.causal is {str(not causal).lower()}: rows of "
            f"{architecture!r} {known} see later ones"
        )
    heads, hidden = k.integer("attention.head_count"), k.integer("embedding_length")
    head_dim = _head_dim(k, hidden // max(heads, 1))
    tokens = metadata.get("tokenizer.ggml.tokens")
    context, layers = k.integer("context_length", 2048), k.integer("block_count")
    layers -= k.integer("nextn_predict_layers", 0)
    window = _window_from_gguf(k, rope_mode, head_dim, layers)
    kv = per_layer(k, KV_HEADS, heads)
    return DecoderConfig(
        architecture=architecture,
        causal=causal,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        norm_topk_prob=k.flag("expert_weights_norm", True),
        **_kv_heads(k, kv, window.get("windowed_layers", ())),
        head_dim=head_dim,
        rms_norm_eps=_epsilon(k),
        vocab_size=k.integer("vocab_size", len(tokens) if tokens is not None else None),
        max_position_embeddings=context,
        rope=rope_from_gguf(k, rope_mode, head_dim, context),
        **window,
        **_widths(k),
        **_recurrent(k, layers, kv),
        mrope_section=_sections(k),
        dense_layers=_dense(k, layers),
        **_scalars(k),
    )


def _dense(k: Keys, layers: int) -> tuple[bool, ...]:
    """Which layers have no experts, where others have: the first ones, and all but each
    so-manieth."""
    first, step = k.integer(LEADING, 0), k.integer(STEP, 1)
    if step < 1:
        raise ModelError(f"GGUF metadata: {STEP} = {step}: expected 1 or more")
    found = tuple(i < first or (i + 1) % step > 0 for i in layer_range(layers))
    return found if any(found) else ()


def _scalars(k: Keys) -> dict[str, Any]:
    """The plain numbers. What every row takes may be told as so many experts' width."""
    found = {s.name: scalar(k, s, s.gguf) for s in SCALARS if k.has(s.gguf)}
    count = k.integer("expert_shared_count", 0)
    if count and "shared_intermediate_size" not in found:
        found["shared_intermediate_size"] = count * found.get("moe_intermediate_size", 0)
    return found


def per_layer(k: Keys, key: str, default: int | None = None) -> list[int]:
    """The value of each layer, or a list of the one for all."""
    value = k.get(key)
    if isinstance(value, (np.ndarray, list, tuple)):
        found = value.tolist() if isinstance(value, np.ndarray) else list(value)
        if not found or not all(isinstance(v, int) for v in found):
            raise ModelError(f"GGUF metadata: {key} = {shown(found)} are not integers")
        return found
    return [k.integer(key, default)]


def _kv_heads(k: Keys, kv: Sequence[int], slides: Sequence[bool]) -> dict[str, Any]:
    """The number of key-value heads, and of sliding layers where they have another."""
    if len(set(kv) - {0}) <= 1:
        alone = isinstance(k.get(KV_HEADS), (int, np.integer))
        # told of each layer, none need have any
        return {"num_key_value_heads": max(kv) or int(not alone)}
    pairs = set(zip(slides, kv, strict=False))
    own, others = ({n for slid, n in pairs if slid == kind} for kind in (True, False))
    if len(kv) < len(slides) or 0 in kv or (len(own), len(others)) != (1, 1):
        raise ModelError(f"GGUF metadata: {KV_HEADS} differs from layer to layer {shown(list(kv))}")
    return {"num_key_value_heads": others.pop(), "window_kv_heads": own.pop()}


def _sections(k: Keys) -> tuple[int, ...]:
    """Pairs by what they turn by; a file tells of 4, of which the last may be none."""
    key = "rope.dimension_sections"
    found = per_layer(k, key) if k.has(key) else []
    return tuple(found[:-1] if found[-1:] == [0] else found)


def _head_dim(k: Keys, default: int) -> int:
    if k.has("attention.key_length_mla"):
        return k.integer("attention.key_length_mla")
    head_dim = k.integer("attention.key_length", default)
    own = k.integer("attention.value_length", head_dim)
    if own != head_dim and not k.has("attention.kv_lora_rank"):
        raise ModelError("GGUF metadata: attention.value_length differs from key_length")
    return head_dim


def _widths(k: Keys) -> dict[str, Any]:
    """The width of the feed-forwards, of layers that have one; at the end they may be twice as
    wide."""
    told = per_layer(k, "feed_forward_length", 0 if k.has("expert_count") else None)
    found = [width for width in told if width] or [0]
    if len(set(found)) > 1 and set(found) != {found[0], 2 * found[0]}:
        raise ModelError(
            f"GGUF metadata: feed_forward_length differs from layer to layer {shown(told)}"
        )
    return {"intermediate_size": found[0], "use_double_wide_mlp": len(set(found)) > 1}


def _epsilon(k: Keys) -> float:
    plain = k.real("attention.layer_norm_epsilon", 1e-5)
    return k.real("attention.layer_norm_rms_epsilon", plain)


def _window_from_gguf(k: Keys, mode: str, head_dim: int, layers: int) -> dict[str, Any]:
    """The sliding layers: which, how far they see, what else is theirs. A window of 0 is none."""
    window = k.integer(WINDOW, 0)
    if not window:
        return {}
    found: dict[str, Any] = {"sliding_window": window}
    key = "attention.sliding_window_pattern"
    pattern = k.get(key)
    if isinstance(pattern, (np.ndarray, list, tuple)):
        if len(pattern) != layers:
            raise ModelError(f"GGUF metadata: {len(pattern)} sliding layers told of {layers}")
        found["windowed_layers"] = tuple(map(bool, per_layer(k, key)))
    elif pattern is not None:
        found["windowed_layers"] = every(k.integer(key), layers)
    own = k.integer("attention.key_length_swa", head_dim)
    if own != head_dim:
        found["window_head_dim"] = own
    if k.integer("attention.value_length_swa", own) != own:
        raise ModelError("GGUF metadata: attention.value_length_swa differs from key_length_swa")
    if k.has("rope.freq_base_swa"):
        turned = k.integer("rope.dimension_count_swa", own)
        found["window_rope"] = Rope(mode, turned, k.real("rope.freq_base_swa"), factors="")
    return found


def told_window(k: Keys) -> None:
    """ModelError where a file tells of no window, and llama.cpp must have one."""
    if k.integer(WINDOW) < 1:
        raise ModelError(f"GGUF metadata: {WINDOW} = {k.integer(WINDOW)}: expected 1 or more")


def every(period: int, layers: int) -> tuple[bool, ...]:
    """All layers but each `period`-th; none where the period is 0 or 1."""
    return tuple(period > 1 and i % period < period - 1 for i in layer_range(layers))


def types_every(period: int, layers: int, other: str = "sliding") -> list[str]:
    """The same as config.json's `layer_types`."""
    return [f"{other if own else 'full'}_attention" for own in every(period, layers)]


def _recurrent(k: Keys, layers: int, kv: Sequence[int]) -> dict[str, Any]:
    """Layers with a state: those without key-value heads, or told of by their number."""
    if 0 in kv:
        if len(kv) < layers:
            raise ModelError(f"GGUF metadata: {len(kv)} values of head_count_kv, {layers} layers")
        return {"recurrent_layers": tuple(n == 0 for n in kv[:layers])}
    key = "attention.recurrent_layers"
    if k.has(key):
        flags = [*map(bool, per_layer(k, key))]
        if len(flags) < layers:
            raise ModelError(f"GGUF metadata: {len(flags)} recurrent layers told of {layers}")
        return {"recurrent_layers": tuple(flags[:layers])}
    if k.has("full_attention_interval"):
        return {"recurrent_layers": every(k.integer("full_attention_interval"), layers)}
    return {}


def rope_from_gguf(k: Keys, mode: str, head_dim: int, context: int) -> Rope:
    """The `rope.*` keys of a GGUF file. ModelError for a scaling that we do not know.

    As in llama.cpp a factor is linear where no type is told, none where it is 0, and LongRoPE's own
    factors are tensors.
    """
    told, whole_pairs = "rope.scaling.original_context_length", "rope.scaling.yarn_truncate"
    rope = Rope(
        mode,
        k.integer("rope.dimension_count", head_dim),
        k.real("rope.freq_base", 10000.0),
        attn_factor=k.real("rope.scaling.attn_factor", 1.0),
        n_ctx_orig=k.integer(told) if k.has(told) else 0,
    )
    kind = k.get("rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise ModelError(f"GGUF metadata: rope.scaling.type {shown(kind)}; known: {known}")
    older = k.real("rope.scale_linear", 0.0)
    factor = k.real("rope.scaling.factor", older)
    if factor < 0:
        raise ModelError(f"GGUF metadata: rope.scaling.factor = {factor}")
    if kind == "none" or factor == 0:
        return rope
    rope = replace(rope, freq_scale=1 / factor)
    if kind != "yarn":
        return rope
    return replace(
        rope,
        ext_factor=1.0,
        attn_factor=rope.attn_factor * _yarn_share(k, factor),
        beta_fast=k.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=k.real("rope.scaling.yarn_beta_slow", 1.0),
        n_ctx_orig=rope.n_ctx_orig or context,
        truncate=k.flag(whole_pairs) if k.has(whole_pairs) else None,
    )


def _yarn_share(k: Keys, factor: float) -> float:
    """What of the magnitude that YaRN implies is meant. llama.cpp's converter writes transformers'
    `attention_factor`, the whole of it, as `yarn_attn_factor`, and llama.cpp does not read that."""
    whole, extrapolated = "rope.scaling.yarn_attn_factor", k.real("rope.scaling.yarn_ext_factor", 1)
    if extrapolated != 1:
        raise ModelError(f"GGUF metadata: rope.scaling.yarn_ext_factor = {extrapolated}; known: 1")
    if k.has(whole):
        return k.real(whole) / yarn_magnitude(factor, 1.0)
    return 1 / yarn_magnitude(factor, k.real("rope.scaling.yarn_log_multiplier", 0.0))


def to_gguf(c: DecoderConfig, architecture: str) -> dict[str, Any]:
    """The keys that say what the config does, for files of `architecture`."""
    a, rope = architecture, c.rope
    keys: dict[str, Any] = {
        "general.architecture": a,
        "general.alignment": 32,
        f"{a}.block_count": c.num_hidden_layers + c.num_nextn_predict_layers,
        f"{a}.context_length": c.max_position_embeddings,
        f"{a}.embedding_length": c.hidden_size,
        f"{a}.feed_forward_length": c.intermediate_size,
        f"{a}.attention.head_count": c.num_attention_heads,
        f"{a}.{KV_HEADS}": c.kv_heads if c.window_kv_heads else c.num_key_value_heads,
        f"{a}.attention.key_length": c.head_dim,
        f"{a}.attention.value_length": c.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        f"{a}.rope.dimension_count": rope.n_rot,
        f"{a}.rope.freq_base": float(rope.freq_base),
        f"{a}.vocab_size": c.vocab_size,
        **{f"{a}.{key}": value for key, value in _rope_keys(rope).items()},
        **{f"{a}.{key}": value for key, value in _window_keys(c).items()},
    }
    if not c.num_experts or c.n_group < 2:  # llama.cpp ends where groups have no experts
        c = replace(c, n_group=0, topk_group=0)
    for s in SCALARS:
        value = getattr(c, s.name)
        if value != DecoderConfig.__dataclass_fields__[s.name].default:
            keys[f"{a}.{s.gguf}"] = value
    if not c.causal:
        keys[f"{a}.attention.causal"] = False
    if not c.norm_topk_prob:
        keys[f"{a}.expert_weights_norm"] = False
    return keys


def _rope_keys(rope: Rope) -> dict[str, Any]:
    long = rope.factors in (SHORT_FACTORS, LONG_FACTORS)
    found: dict[str, Any] = {}
    if rope.freq_scale != 1.0 or long:
        kind = "yarn" if rope.ext_factor else "longrope" if long else "linear"
        found["rope.scaling.type"] = kind
    if rope.freq_scale != 1.0:
        found["rope.scaling.factor"] = 1.0 / rope.freq_scale
    if rope.n_ctx_orig:
        found["rope.scaling.original_context_length"] = rope.n_ctx_orig
    if rope.ext_factor or rope.attn_factor != 1.0:
        found["rope.scaling.attn_factor"] = float(rope.attn_factor)
    if rope.ext_factor:
        found["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        found["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
        if rope.truncate is False:
            found["rope.scaling.yarn_truncate"] = False
    return found


def _window_keys(c: DecoderConfig) -> dict[str, Any]:
    if c.sliding_window is None:
        return {}
    found: dict[str, Any] = {WINDOW: c.sliding_window}
    if c.windowed_layers:  # all of them, too: left out, some families mean every so-manieth
        found["attention.sliding_window_pattern"] = np.array(c.windowed_layers, np.bool_)
    if c.window_head_dim:
        found["attention.key_length_swa"] = c.window_head_dim
        found["attention.value_length_swa"] = c.window_head_dim
    if c.window_rope is not None:
        if c.window_rope.freq_scale != 1.0:
            raise ModelError(f"{c.architecture}: GGUF cannot say how sliding layers scale a rope")
        found["rope.freq_base_swa"] = float(c.window_rope.freq_base)
        found["rope.dimension_count_swa"] = c.window_rope.n_rot
    return found
