"""Hyperparameters from a Hugging Face config.json.

Both config forms of transformers are read: the older `rope_theta` + `rope_scaling` and the newer
`rope_parameters`, with one set for all layers or one for each kind of layer.
Sources: transformers `modeling_rope_utils` and the models' own configs.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ggraph import ModelError
from ggraph.errors import shown

from .config import (
    SCALARS,
    SHORT_FACTORS,
    DecoderConfig,
    Keys,
    Rope,
    layer_range,
    scalar,
    yarn_magnitude,
)

RECURRENT = ("linear_attention", "mamba", "conv")  # layer types that have a state
FEEDING = ("mlp", "moe")  # those that are nothing but a feed-forward
PLAIN = ("default", "mrope")  # the latter by three positions: see `rotation`
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
LONGROPE = ("longrope", "su")  # what newer and older configs call it
GROWTH = "llama_4_scaling_beta"  # of queries, by how many contexts of the training are behind them


def from_hf(values: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """A config.json whose keys have their usual names."""
    k = Keys(values, "config.json")
    heads = k.integer("num_attention_heads")
    hidden = k.integer("hidden_size")
    head_dim = k.integer("head_dim", hidden // max(heads, 1))
    layers = k.integer("num_hidden_layers")
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=k.integer("intermediate_size", 0 if _experts(k) else None),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=k.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=k.real(next((n for n in EPSILONS if k.has(n)), EPSILONS[0]), 1e-6),
        vocab_size=k.integer("vocab_size"),
        max_position_embeddings=k.integer("max_position_embeddings", 2048),
        rope=rope_from_hf(k, head_dim),
        **_layers_from_hf(k, layers, head_dim),
        unused_positions=k.integer("unused_positions", 0),
        type_vocab_size=k.integer("type_vocab_size", 0),
        multipliers=k.reals("multipliers") if k.has("multipliers") else (),
        exact_gelu=k.flag("exact_gelu"),
        even_heads=k.flag("even_heads"),
        latent_norm_eps=k.real("latent_norm_eps", 0.0),
        use_double_wide_mlp=k.flag("use_double_wide_mlp"),
        attention_k_eq_v=k.flag("attention_k_eq_v"),
        **_scalars_from_hf(k),
    )


def check_fixed(
    values: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], architecture: str
) -> None:
    """ModelError for a config that says of a key, perhaps in its rope, what is not known here, or
    tells of two ropes."""
    k = Keys(values, "config.json")
    rope = scaling_of(k)
    older, newer = k.mapping("rope_scaling"), k.get("rope_parameters")
    if newer and any(rope.get(key) != value for key, value in older.items()):
        raise ModelError(f"config.json: rope_scaling {older!r:.80} beside other rope_parameters; "
                         "change the latter")  # fmt: skip
    for key, known in fixed.items():
        told = rope.get(key) if rope.has(key) else k.get(key)
        if told is not None and told not in known:
            either = " or ".join(map(repr, known)) or "none"
            raise ModelError(f"{architecture}: config.json: {key} {told!r:.60}; known: {either}")


def without_window(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """No layer slides, whatever is left in a config of the model that this one was made from."""
    return {**values, "sliding_window": None}


def _scalars_from_hf(k: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for s in SCALARS:
        name = next((n for n in s.hf if k.has(n)), None)
        if name is not None:
            found[s.name] = scalar(k, s, name)
    if _experts(k):
        found["norm_topk_prob"] = k.flag("norm_topk_prob")
        found["num_experts_per_tok"] = k.integer("num_experts_per_tok")
        found["dense_layers"] = _dense(k, k.integer("num_hidden_layers"))
    return found


def _experts(k: Keys) -> bool:
    return any(k.has(n) for n in ("num_experts", "num_local_experts", "n_routed_experts"))


def _dense(k: Keys, layers: int) -> tuple[bool, ...]:
    """Which layers have no experts, where others have: the first ones, those that are listed, all
    but each so-manieth."""
    first = k.integer("first_k_dense_replace", k.integer("num_dense_layers", 0))
    listed, step = k.get("mlp_only_layers") or [], k.integer("decoder_sparse_step", 1)
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise ModelError(f"config.json: mlp_only_layers {listed!r:.60} is no list of integers")
    if step < 1 or first < 0:
        raise ModelError(
            f"config.json: decoder_sparse_step = {step}, {first} dense layers at the start"
        )
    numbers = layer_range(layers)
    found = tuple(i < first or i in listed or (i + 1) % step > 0 for i in numbers)
    return found if any(found) else ()


def _layers_from_hf(k: Keys, layers: int, head_dim: int) -> dict[str, Any]:
    """What differs from layer to layer."""
    types = k.get("layer_types") or ()
    if not isinstance(types, (list, tuple)) or (types and len(types) != layers):
        raise ModelError(f"config.json: layer_types {types!r:.60} for {layers} layers")
    found: dict[str, Any] = {}
    if any(t in RECURRENT for t in types):
        found["recurrent_layers"] = tuple(t in RECURRENT for t in types)
    if any(t in FEEDING for t in types):
        found["feeding_layers"] = tuple(t in FEEDING for t in types)
    found["mrope_section"] = scaling_of(k).integers("mrope_section")
    if k.has("rotated_layers"):
        found["rotated_layers"] = _flags(k, "rotated_layers", layers)
    slides = tuple(t == "sliding_attention" for t in types)
    told = k.has("sliding_window") and k.get("use_sliding_window", True) is not False
    if told and (not slides or any(slides)):
        found["sliding_window"] = k.integer("sliding_window")
        found["windowed_layers"] = slides
        own = k.integer("window_head_dim", head_dim)
        if own != head_dim:
            found["window_head_dim"] = own
        if k.has("window_kv_heads"):
            found["window_kv_heads"] = k.integer("window_kv_heads")
        local = _local_rope(k, own)
        if local is not None:
            found["window_rope"] = local
    return found


def _flags(k: Keys, key: str, layers: int) -> tuple[bool, ...]:
    """One yes or no, perhaps as 1 or 0, for each layer."""
    value = k.get(key)
    if not isinstance(value, list) or len(value) != layers or any(v not in (0, 1) for v in value):
        raise ModelError(f"config.json: {key} {value!r:.60} for {layers} layers")
    return tuple(bool(v) for v in value)


def _local_rope(k: Keys, head_dim: int) -> Rope | None:
    """The rope of sliding layers, where it is another one. ModelError for scalings whose divisors
    are a tensor, of which a model has one."""
    values, key = k.get("rope_parameters"), "rope_local_base_freq"
    base = k.real(key, k.real("rope_theta", 10000.0))
    if isinstance(values, Mapping) and isinstance(values.get("sliding_attention"), Mapping):
        scaling = {"rope_theta": base, **values["sliding_attention"]}
        rope = rope_from_hf(Keys({"rope_parameters": scaling}, "config.json"), head_dim)
        kind = rope_kind(Keys(scaling, "config.json rope"))
        if kind not in ("default", "linear") or rope.n_rot != head_dim:
            raise ModelError(f"config.json: sliding layers with rope {scaling!r:.80}; known: whole "
                             "heads, by type default or linear")  # fmt: skip
        return replace(rope, factors="")
    return Rope("neox", head_dim, base, factors="") if k.has(key) else None


def scaling_of(k: Keys) -> Keys:
    """The scaling of a config's rope: `rope_parameters`, or the older `rope_scaling`. Of several,
    that of layers which see everything."""
    values = k.get("rope_parameters") or k.get("rope_scaling") or {}
    if isinstance(values, Mapping) and isinstance(values.get("full_attention"), Mapping):
        values = values["full_attention"]
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: rope scaling {shown(values)} is no mapping")
    return Keys(values, "config.json rope")


def rope_kind(scaling: Keys) -> str:
    """What a scaling is called, by newer and older configs."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: rope type {shown(kind)} is no name")
    return kind


def rope_from_hf(k: Keys, head_dim: int) -> Rope:
    """`rope_parameters`, or `rope_theta` with `rope_scaling`."""
    s = scaling_of(k)
    base = s.real("rope_theta", k.real("rope_theta", 10000.0))
    kind = rope_kind(s)
    share = s.real("partial_rotary_factor", k.real("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise ModelError(f"config.json: partial_rotary_factor = {share}; expected 0 to 1")
    if kind == "proportional":
        return _proportional(Rope("neox", head_dim, base), share, s.real("factor", 1.0))
    most, told = k.integer("max_position_embeddings", 2048), "original_max_position_embeddings"
    trained = s.integer(told, k.integer(told, most))
    counted = trained if s.has(GROWTH) else 0
    rope = Rope("neox", int(head_dim * share + 1e-9), base, n_ctx_orig=counted)
    if kind in PLAIN:
        return rope
    if kind in ("linear", "dynamic"):
        if s.real("factor") < 1:
            raise ModelError(f"config.json rope: {kind} factor {s.real('factor')}")
        if kind == "dynamic":
            return replace(rope, dynamic=True)
        return replace(rope, freq_scale=1 / s.real("factor"))
    if kind == "llama3":
        return replace(rope, freq_factors=llama3_factors(rope, s, trained))
    if kind in ("yarn", "deepseek_yarn"):
        return _yarn(rope, s, trained)
    if kind in LONGROPE:
        return _longrope(rope, s, trained, most / max(trained, 1))
    raise ModelError(
        f"config.json: rope type {shown(kind)}; known: default, dynamic, linear, llama3, "
        "longrope, proportional, yarn"
    )


UNTURNED = 1e30  # divides a frequency so that its pair never turns, as llama.cpp's files have it


def _proportional(rope: Rope, share: float, factor: float) -> Rope:
    """The first share of the pairs turns, as if all did, a `factor` slower; the others stay as they
    are."""
    if factor < 1:
        raise ModelError(f"config.json rope: proportional factor {factor}")
    pairs = rope.n_rot // 2
    turned = int(rope.n_rot * share / 2)
    factors = (1.0,) * turned + (UNTURNED,) * (pairs - turned)
    return replace(rope, freq_factors=factors, freq_scale=1 / factor)


def _yarn(rope: Rope, s: Keys, trained: int) -> Rope:
    """YaRN. ggml's rope multiplies by 1 + ln(factor) / 10 itself, so that is divided out here."""
    factor = s.real("factor")
    if factor < 1:
        raise ModelError(f"config.json rope: yarn factor {factor}")
    wanted = implied = yarn_magnitude(factor, 1.0)
    once, all_dims = s.real("mscale", 0.0), s.real("mscale_all_dim", 0.0)
    if once and all_dims:
        wanted = yarn_magnitude(factor, once) / yarn_magnitude(factor, all_dims)
    if s.has("attention_factor"):
        wanted = s.real("attention_factor")
    return replace(
        rope,
        freq_scale=1 / factor,
        ext_factor=1.0,
        attn_factor=wanted / implied,
        beta_fast=s.real("beta_fast", 32.0),
        beta_slow=s.real("beta_slow", 1.0),
        n_ctx_orig=trained,
        truncate=s.flag("truncate", True),
    )


def _longrope(rope: Rope, s: Keys, trained: int, stretched: float) -> Rope:
    """LongRoPE: divisors that were searched for, for texts as long as those of the training and for
    longer ones. The magnitude of either grows with what the context is `stretched` by.

    Source: Ding et al. 2024 (arXiv 2402.13753); transformers' `_compute_longrope_parameters`.
    """
    factor = s.real("factor", stretched)
    if trained < 2:
        raise ModelError(f"config.json rope: LongRoPE from a context of {trained}")
    grown = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return replace(
        rope,
        attn_factor=s.real("attention_factor", grown),
        n_ctx_orig=trained,
        freq_factors=s.reals("short_factor", rope.n_rot // 2),
        long_factors=s.reals("long_factor", rope.n_rot // 2),
        factors=SHORT_FACTORS,
    )


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
