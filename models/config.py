"""Hyperparameters of a decoder, read from GGUF metadata or a Hugging Face config.

Field names are the Hugging Face keys. Both config forms of transformers are read: the older
`rope_theta` + `rope_scaling` and the newer `rope_parameters`.
Sources: transformers `modeling_rope_utils`, the GGUF specification.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph import ModelError


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, in the terms of ggml's `rope_ext`.

    `mode` "normal" rotates neighbours (GGUF of llama), "neox" rotates halves (Hugging Face).
    `freq_factors`, where present, divide each of the n_rot / 2 frequencies (llama3 scaling).
    """

    mode: str
    n_rot: int
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder-only transformer. Sizes are element counts."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope: Rope = field(repr=False)
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()  # which layers slide; empty: all, if there is a window
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ModelError(f"{self.architecture}: {name} = {getattr(self, name)}")
        if not 1 <= self.num_hidden_layers <= 4096:
            raise ModelError(f"{self.architecture}: {self.num_hidden_layers} layers")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"{self.architecture}: {self.num_attention_heads} heads cannot share "
                f"{self.num_key_value_heads} key-value heads"
            )
        if not math.isfinite(self.rms_norm_eps) or not 0 < self.rms_norm_eps < 1:
            raise ModelError(f"{self.architecture}: rms_norm_eps = {self.rms_norm_eps}")
        if not math.isfinite(self.rope.freq_base) or self.rope.freq_base <= 0:
            raise ModelError(f"{self.architecture}: rope base = {self.rope.freq_base}")

    def slides(self, layer: int) -> bool:
        """Whether this layer sees only the last `sliding_window` positions."""
        if self.sliding_window is None:
            return False
        return self.windowed_layers[layer] if self.windowed_layers else True


class Keys:
    """Typed reading of a config mapping; every refusal names the key and the value."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values, self._where, self._prefix = values, where, prefix

    def has(self, key: str) -> bool:
        """Whether the key is present with a value other than null."""
        return self._values.get(self._prefix + key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ModelError(f"{self._where}: {key} = {value!r} is not an integer")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise ModelError(f"{self._where}: {key} = {value!r} is not a number")
        if not math.isfinite(float(value)):
            raise ModelError(f"{self._where}: {key} = {value!r} is not finite")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Yes or no."""
        value = self._get(key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise ModelError(f"{self._where}: {key} = {value!r} is neither true nor false")
        return bool(value)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        return self._values.get(self._prefix + key, default)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._where}: {self._prefix}{key} is missing")
        return value


def from_hf(values: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """A config.json of llama, mistral, qwen2, qwen3 or qwen3_moe."""
    k = Keys(values, "config.json")
    heads = k.integer("num_attention_heads")
    hidden = k.integer("hidden_size")
    head_dim = k.integer("head_dim", hidden // max(heads, 1))
    layers = k.integer("num_hidden_layers")
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=k.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=k.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=k.real("rms_norm_eps", 1e-6),
        vocab_size=k.integer("vocab_size"),
        max_position_embeddings=k.integer("max_position_embeddings", 2048),
        rope=rope_from_hf(k, head_dim),
        **_window_from_hf(k, layers),
        **_experts_from_hf(k),
    )


def _window_from_hf(k: Keys, layers: int) -> dict[str, Any]:
    if not k.has("sliding_window") or k.get("use_sliding_window", True) is False:
        return {}
    types = k.get("layer_types") or ()
    if types and len(types) != layers:
        raise ModelError(f"config.json: {len(types)} layer_types for {layers} layers")
    window = tuple(t == "sliding_attention" for t in types)
    return {"sliding_window": k.integer("sliding_window"), "windowed_layers": window}


def _experts_from_hf(k: Keys) -> dict[str, Any]:
    name = next((n for n in ("num_experts", "num_local_experts") if k.has(n)), None)
    if name is None:
        return {}
    if k.get("mlp_only_layers") or k.integer("decoder_sparse_step", 1) != 1:
        raise ModelError("config.json: layers without experts among layers with experts")
    return {
        "num_experts": k.integer(name),
        "num_experts_per_tok": k.integer("num_experts_per_tok"),
        "moe_intermediate_size": k.integer("moe_intermediate_size"),
        "norm_topk_prob": bool(k.get("norm_topk_prob", False)),
    }


def scaling_of(k: Keys) -> Keys:
    """The scaling of a config's rope: `rope_parameters`, or the older `rope_scaling`."""
    values = k.get("rope_parameters") or k.get("rope_scaling") or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: rope scaling {values!r} is no mapping")
    return Keys(values, "config.json rope")


def rope_from_hf(k: Keys, head_dim: int) -> Rope:
    """`rope_parameters`, or `rope_theta` with `rope_scaling`."""
    s = scaling_of(k)
    base = s.real("rope_theta", k.real("rope_theta", 10000.0))
    kind = s.get("rope_type") or s.get("type") or "default"
    share = k.real("partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise ModelError(f"config.json: partial_rotary_factor = {share}; expected 0 to 1")
    rope = Rope("neox", int(head_dim * share), base)
    trained = s.integer(
        "original_max_position_embeddings", k.integer("max_position_embeddings", 2048)
    )
    if kind == "default":
        return rope
    if kind == "linear":
        if s.real("factor") < 1:
            raise ModelError(f"config.json rope: linear factor {s.real('factor')}")
        return _with(rope, freq_scale=1 / s.real("factor"))
    if kind == "llama3":
        return _with(rope, freq_factors=llama3_factors(rope, s, trained))
    if kind in ("yarn", "deepseek_yarn"):
        return _yarn(rope, s, trained)
    raise ModelError(f"config.json: rope type {kind!r}; known: default, linear, llama3, yarn")


def _yarn(rope: Rope, s: Keys, trained: int) -> Rope:
    """YaRN. ggml's rope multiplies by 1 + ln(factor) / 10 itself, so that is divided out here."""
    factor = s.real("factor")
    if factor < 1 or s.get("truncate", True) is False:
        raise ModelError(f"config.json rope: yarn factor {factor}, truncate {s.get('truncate')}")
    wanted = implied = yarn_magnitude(factor, 1.0)
    once, all_dims = s.real("mscale", 0.0), s.real("mscale_all_dim", 0.0)
    if once and all_dims:
        wanted = yarn_magnitude(factor, once) / yarn_magnitude(factor, all_dims)
    if s.has("attention_factor"):
        wanted = s.real("attention_factor")
    return _with(
        rope,
        freq_scale=1 / factor,
        ext_factor=1.0,
        attn_factor=wanted / implied,
        beta_fast=s.real("beta_fast", 32.0),
        beta_slow=s.real("beta_slow", 1.0),
        n_ctx_orig=trained,
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention's magnitude for positions stretched by `factor` >= 1.

    Source: Peng et al. 2023 (arXiv 2309.00071), equation 22; transformers' `get_mscale`.
    """
    return 1.0 + 0.1 * mscale * math.log(factor)


def _with(rope: Rope, **changes: Any) -> Rope:
    return Rope(**{**rope.__dict__, **changes})


def llama3_factors(rope: Rope, s: Keys, trained: int) -> tuple[float, ...]:
    """Divisors of the frequencies: long waves by `factor`, short ones by 1, smooth in between.

    Source: the Llama 3.1 release, `apply_scaling`; transformers' `_compute_llama3_parameters`.
    """
    factor, low, high = s.real("factor"), s.real("low_freq_factor"), s.real("high_freq_factor")
    if high <= low or factor < 1:
        raise ModelError(f"config.json rope: llama3 factors {factor}, {low}, {high}")
    exponent = np.arange(0, rope.n_rot, 2, dtype=np.float64) / rope.n_rot
    wavelength = 2 * np.pi * rope.freq_base**exponent
    smooth = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
    return tuple(float(f) for f in 1.0 / ((1.0 - smooth) / factor + smooth))


def from_gguf(metadata: Mapping[str, Any], architecture: str, rope_mode: str) -> DecoderConfig:
    """The `{architecture}.*` keys of a GGUF file."""
    k = Keys(metadata, "GGUF metadata", architecture + ".")
    heads, hidden = k.integer("attention.head_count"), k.integer("embedding_length")
    head_dim = k.integer("attention.key_length", hidden // max(heads, 1))
    if k.has("attention.value_length") and k.integer("attention.value_length") != head_dim:
        raise ModelError("GGUF metadata: attention.value_length differs from key_length")
    tokens = metadata.get("tokenizer.ggml.tokens")
    context = k.integer("context_length", 2048)
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=k.integer("feed_forward_length", 0 if k.has("expert_count") else None),
        num_hidden_layers=k.integer("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=k.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=k.real("attention.layer_norm_rms_epsilon", 1e-5),
        vocab_size=k.integer("vocab_size", len(tokens) if tokens is not None else None),
        max_position_embeddings=context,
        rope=rope_from_gguf(k, rope_mode, head_dim, context),
        sliding_window=(
            k.integer("attention.sliding_window") if k.has("attention.sliding_window") else None
        ),
        num_experts=k.integer("expert_count", 0),
        num_experts_per_tok=k.integer("expert_used_count", 0),
        moe_intermediate_size=k.integer("expert_feed_forward_length", 0),
    )


def rope_from_gguf(k: Keys, mode: str, head_dim: int, context: int) -> Rope:
    """The `rope.*` keys of a GGUF file. ModelError for a scaling that we do not know."""
    rope = Rope(
        mode, k.integer("rope.dimension_count", head_dim), k.real("rope.freq_base", 10000.0)
    )
    kind = k.get("rope.scaling.type", "none")
    if kind == "none" or not k.has("rope.scaling.factor"):
        return rope
    factor = k.real("rope.scaling.factor")
    if factor <= 0:
        raise ModelError(f"GGUF metadata: rope.scaling.factor = {factor}")
    scale = 1 / factor
    if kind == "linear":
        return _with(rope, freq_scale=scale)
    if kind == "yarn":
        trained = k.integer("rope.scaling.original_context_length", context)
        return _with(
            rope,
            freq_scale=scale,
            ext_factor=1.0,
            attn_factor=k.real("rope.scaling.attn_factor", 1.0),
            beta_fast=k.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=k.real("rope.scaling.yarn_beta_slow", 1.0),
            n_ctx_orig=trained,
        )
    raise ModelError(f"GGUF metadata: rope.scaling.type {kind!r}; known: none, linear, yarn")
