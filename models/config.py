"""Hyperparameters of a model, whatever file they come from.

Field names are the Hugging Face keys. `hf_config` and `gguf_config` read them; the plain numbers
among them stand in `SCALARS`, one table for reading both forms and for writing GGUF.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggraph import ModelError
from ggraph.errors import shown

MOST_TURNS = 1 << 30  # and positions: more than any model was trained for
MOST_LAYERS = 4096
WIDEST = 1 << 20  # of what a layer has many of: heads, numbers in one
LARGEST = float(np.finfo(np.float32).max)
SOFT_MAX, SIGMOID = 1, 2  # how chances of experts are made, as GGUF says it
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # LongRoPE's


@dataclass(frozen=True)
class Rope:
    """Rotary embedding, in the terms of ggml's `rope_ext`.

    `mode` "normal" rotates neighbours (GGUF of llama), "neox" rotates halves (Hugging Face).
    `freq_factors`, where present, divide each of the n_rot / 2 frequencies (llama3 scaling);
    `factors` is the tensor that holds them, where the checkpoint has it. LongRoPE has a second set,
    `long_factors`, for texts longer than `n_ctx_orig`.
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
    dynamic: bool = False  # NTK: as it was trained, and another base for each longer text
    truncate: bool | None = None  # whether YaRN counts in whole pairs; None: not told, as with True
    freq_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    factors: str = "rope_freqs.weight"

    def __post_init__(self) -> None:
        if not 0 <= self.n_rot <= WIDEST:
            raise ModelError(f"rope: {self.n_rot} numbers of a head turn: expected 0 to {WIDEST}")
        # YaRN divides by the base's logarithm
        if not 0 < self.freq_base < math.inf or (self.ext_factor and self.freq_base == 1):
            raise ModelError(f"rope: base of {self.freq_base}")
        told = (self.beta_fast, self.beta_slow, self.n_ctx_orig)
        if self.ext_factor and not all(0 < v <= MOST_TURNS for v in told):
            raise ModelError(f"yarn: beta_fast, beta_slow and original context of {told}")
        if not 1 / MOST_TURNS <= self.freq_scale <= MOST_TURNS:
            raise ModelError(f"rope: frequencies times {self.freq_scale}")
        if not 0 < self.attn_factor < LARGEST:
            raise ModelError(f"rope: magnitude of {self.attn_factor}")
        if not all(0 < f < LARGEST for f in (self.freq_factors or ()) + (self.long_factors or ())):
            raise ModelError("rope: factors of frequencies that float32 cannot hold")


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention's magnitude for positions stretched by `factor` >= 1.

    Source: Peng et al. 2023 (arXiv 2309.00071), equation 22; transformers' `get_mscale`.
    """
    return 1.0 + 0.1 * mscale * math.log(factor)


@dataclass(frozen=True)
class DecoderConfig:
    """One transformer. Sizes are element counts."""

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
    causal: bool = True  # no row sees later ones; else windows reach to both sides
    unused_positions: int = field(default=0, compare=False)  # at the start of a folder's table
    type_vocab_size: int = 0  # kinds of parts of a text; 0: they are not told apart
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()  # which layers slide; empty: all, if there is a window
    chunked: bool = False  # windows begin anew at each multiple of their size
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    moe_latent_size: int = 0  # of the rows that experts take and make; 0: hidden_size
    norm_topk_prob: bool = True
    # experts beyond Qwen3's
    expert_gating_func: int = 0  # SOFT_MAX if not told
    routed_scaling_factor: float = 1.0
    n_group: int = 0  # of neighbours among the experts, of which those of topk_group can be chosen
    topk_group: int = 0
    dense_layers: tuple[bool, ...] = ()  # layers without experts; empty: none
    shared_intermediate_size: int = 0  # of the feed-forward that every row takes
    # factors and bounds of what flows through the layers; 0: none
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    query_growth: float = 0.0  # with the position: see `Step.growth`
    growth_length: int = 0  # of so many positions, the next one counted; 0: of the training's
    even_heads: bool = False  # queries and keys that turned have norms without weights
    logits_scaling: float = 1.0  # what logits are divided by
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    # layers that are not all alike
    window_rope: Rope | None = field(default=None, repr=False)  # of sliding layers
    window_head_dim: int = 0  # of sliding layers, where it differs
    window_kv_heads: int = 0  # of sliding layers, where they have others
    attention_k_eq_v: bool = False  # keys of the other layers may serve as values, too
    rotated_layers: tuple[bool, ...] = ()  # empty: all
    recurrent_layers: tuple[bool, ...] = ()  # layers with a state in place of attention
    feeding_layers: tuple[bool, ...] = ()  # layers with a feed-forward in its place
    multipliers: tuple[float, ...] = ()  # of what products give, where a family has such
    exact_gelu: bool = False  # in place of its tanh form
    num_nextn_predict_layers: int = 0  # behind the others: they only draft
    num_kv_shared_layers: int = 0  # so many layers at the end read the caches of earlier ones
    use_double_wide_mlp: bool = False  # those have feed-forwards of twice the width
    hidden_size_per_layer_input: int = 0
    # recurrent layers: short convolutions, gated delta nets, state spaces
    conv_l_cache: int = 0
    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_inner_size: int = 0  # of all values
    # images: pairs that turn by time, line, column, in turn or not; layers that add to their rows
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    n_deepstack_layers: int = 0
    # latent attention
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    v_head_dim: int = 0
    latent_norm_eps: float = 0.0  # of the norms of small vectors; 0: rms_norm_eps

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= WIDEST:
                raise ModelError(f"{self.architecture}: {name} = {getattr(self, name)}")
        layer_range(self.num_hidden_layers)
        if self.n_deepstack_layers > self.num_hidden_layers:
            raise ModelError(f"{self.architecture}: {self.n_deepstack_layers} layers add to images")
        for count in (self.num_key_value_heads, self.window_kv_heads or self.num_key_value_heads):
            if count < 0 or self.num_attention_heads % count:
                raise ModelError(
                    f"{self.architecture}: {self.num_attention_heads} heads cannot share "
                    f"{count} key-value heads"
                )
        if self.expert_gating_func > SIGMOID:
            raise ModelError(f"{self.architecture}: expert_gating_func = {self.expert_gating_func}")
        self._check_groups()
        if not self.logits_scaling > 0:
            raise ModelError(f"{self.architecture}: logits_scaling = {self.logits_scaling}")
        if not 0 <= self.latent_norm_eps < 1:
            raise ModelError(f"{self.architecture}: latent_norm_eps = {self.latent_norm_eps}")
        if not math.isfinite(self.rms_norm_eps) or not 0 < self.rms_norm_eps < 1:
            raise ModelError(f"{self.architecture}: rms_norm_eps = {self.rms_norm_eps}")

    def _check_groups(self) -> None:
        kept, groups, experts = self.topk_group, self.n_group, self.num_experts
        if groups < 2 or not experts:
            return
        each = experts // groups
        enough = 1 <= kept <= groups and self.num_experts_per_tok <= kept * each
        if experts % groups or each < self.best_of_group or not enough:
            raise ModelError(
                f"{self.architecture}: of {experts} experts {self.num_experts_per_tok}, from "
                f"topk_group = {kept} of n_group = {groups} groups"
            )

    @property
    def best_of_group(self) -> int:
        """How many of its best experts a group is as good as."""
        return 2 if self.expert_gating_func == SIGMOID else 1

    def slides(self, layer: int) -> bool:
        """Whether this layer sees only the last `sliding_window` positions, or so many around."""
        if self.sliding_window is None:
            return False
        return self.windowed_layers[layer] if self.windowed_layers else True

    def remembers(self, layer: int) -> bool:
        """Whether this layer has a recurrent state in place of attention."""
        return layer < len(self.recurrent_layers) and self.recurrent_layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture."""
        dense = layer < len(self.dense_layers) and self.dense_layers[layer]
        return self.num_experts > 0 and not dense

    @property
    def leading_dense(self) -> int:
        """How many layers at the start have no experts, as GGUF files tell of them. ModelError
        where one behind the others has none, too."""
        count = sum(self.dense_layers)
        if not all(self.dense_layers[:count]):
            dense = [i for i, flag in enumerate(self.dense_layers) if flag]
            raise ModelError(
                f"{self.architecture}: GGUF cannot say that layers {shown(dense)} have no experts"
            )
        return count

    def only_feeds(self, layer: int) -> bool:
        """Whether this layer is nothing but a feed-forward."""
        return layer < len(self.feeding_layers) and self.feeding_layers[layer]

    @property
    def kv_heads(self) -> list[int]:
        """Of each layer, none where it does not attend."""
        without = [self.remembers(i) or self.only_feeds(i) for i in range(self.num_hidden_layers)]
        return [0 if other else self.kv_heads_of(i) for i, other in enumerate(without)]

    def kv_heads_of(self, layer: int) -> int:
        """Key-value heads of this layer, if it attends."""
        own = self.window_kv_heads if self.slides(layer) else 0
        return own or self.num_key_value_heads

    @property
    def linear_value_head_dim(self) -> int:
        """Numbers per value of a recurrent layer."""
        return self.linear_inner_size // max(self.linear_num_value_heads, 1)

    def rope_of(self, layer: int) -> Rope | None:
        """How this layer rotates queries and keys, None where it does not."""
        if self.rotated_layers and not self.rotated_layers[layer]:
            return None
        return self.window_rope if self.window_rope and self.slides(layer) else self.rope

    def width_of(self, layer: int) -> int:
        """Width of this layer's feed-forward."""
        shares = layer >= self.num_hidden_layers - self.num_kv_shared_layers
        return self.intermediate_size * (2 if shares and self.use_double_wide_mlp else 1)

    def head_dim_of(self, layer: int) -> int:
        """Numbers per head in this layer."""
        own = self.window_head_dim if self.slides(layer) else 0
        return own or self.head_dim


def layer_range(layers: int) -> range:
    """The layers by their numbers. ModelError for as many as no model has."""
    if not 1 <= layers <= MOST_LAYERS:
        raise ModelError(f"{layers} layers: expected 1 to {MOST_LAYERS}")
    return range(layers)


@dataclass(frozen=True)
class Scalar:
    """One plain number of `DecoderConfig`: its names in config.json, most usual first, and in GGUF;
    whole where the field's default is."""

    name: str
    hf: tuple[str, ...]
    gguf: str


SCALARS = (
    Scalar("num_experts", ("num_experts", "num_local_experts", "n_routed_experts"), "expert_count"),
    Scalar("num_experts_per_tok", ("num_experts_per_tok",), "expert_used_count"),
    Scalar("moe_intermediate_size", ("moe_intermediate_size",), "expert_feed_forward_length"),
    Scalar("n_deepstack_layers", ("n_deepstack_layers",), "n_deepstack_layers"),
    Scalar("moe_latent_size", ("moe_latent_size",), "moe_latent_size"),
    Scalar("expert_gating_func", ("expert_gating_func",), "expert_gating_func"),
    Scalar("routed_scaling_factor", ("routed_scaling_factor",), "expert_weights_scale"),
    Scalar("n_group", ("n_group",), "expert_group_count"),
    Scalar("topk_group", ("topk_group",), "expert_group_used_count"),
    Scalar(
        "num_nextn_predict_layers",
        ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        "nextn_predict_layers",
    ),
    Scalar(
        "shared_intermediate_size",
        ("shared_expert_intermediate_size",),
        "expert_shared_feed_forward_length",
    ),
    Scalar("embedding_multiplier", ("embedding_multiplier",), "embedding_scale"),
    Scalar("residual_multiplier", ("residual_multiplier",), "residual_scale"),
    Scalar("attention_multiplier", ("attention_multiplier",), "attention.scale"),
    Scalar("query_growth", ("llama_4_scaling_beta",), "attention.temperature_scale"),
    Scalar("growth_length", ("floor_scale",), "attention.temperature_length"),
    Scalar("logits_scaling", ("logits_scaling",), "logit_scale"),
    Scalar("attn_logit_softcapping", ("attn_logit_softcapping",), "attn_logit_softcapping"),
    Scalar("final_logit_softcapping", ("final_logit_softcapping",), "final_logit_softcapping"),
    Scalar("num_kv_shared_layers", ("num_kv_shared_layers",), "attention.shared_kv_layers"),
    Scalar(
        "hidden_size_per_layer_input",
        ("hidden_size_per_layer_input",),
        "embedding_length_per_layer_input",
    ),
    Scalar("conv_l_cache", ("conv_L_cache",), "shortconv.l_cache"),
    Scalar("linear_conv_kernel_dim", ("linear_conv_kernel_dim",), "ssm.conv_kernel"),
    Scalar("linear_key_head_dim", ("linear_key_head_dim",), "ssm.state_size"),
    Scalar("linear_num_key_heads", ("linear_num_key_heads",), "ssm.group_count"),
    Scalar("linear_num_value_heads", ("linear_num_value_heads",), "ssm.time_step_rank"),
    Scalar("linear_inner_size", ("linear_inner_size",), "ssm.inner_size"),
    Scalar("q_lora_rank", ("q_lora_rank",), "attention.q_lora_rank"),
    Scalar("kv_lora_rank", ("kv_lora_rank",), "attention.kv_lora_rank"),
    Scalar("v_head_dim", ("v_head_dim",), "attention.value_length_mla"),
)


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
            raise ModelError(f"{self._where}: {key} = {shown(value)} is not an integer")
        if not -(1 << 63) <= value < 1 << 63:
            raise ModelError(f"{self._where}: {key} = {shown(value)} does not fit in 64 bits")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise ModelError(f"{self._where}: {key} = {shown(value)} is not a number")
        try:
            found = float(value)
        except OverflowError:  # of a whole number
            found = math.inf
        if not math.isfinite(found):
            raise ModelError(f"{self._where}: {key} = {shown(value)} is not finite")
        return found

    def reals(self, key: str, count: int | None = None) -> tuple[float, ...]:
        """A list of finite numbers, so many where that is known."""
        value = self.get(key)
        if not isinstance(value, list) or count not in (None, len(value)):
            wanted = "a list of" if count is None else count
            raise ModelError(f"{self._where}: {key} = {shown(value)}: expected {wanted} numbers")
        each = Keys({str(i): v for i, v in enumerate(value)}, f"{self._where}: {key}")
        return tuple(each.real(str(i)) for i in range(len(value)))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, empty where it is missing."""
        value = self.get(key)
        listed = value.tolist() if isinstance(value, np.ndarray) else value or []
        if not isinstance(listed, (list, tuple)) or any(type(n) is not int for n in listed):
            raise ModelError(f"{self._where}: {key} = {shown(value)} is no list of integers")
        return tuple(listed)

    def flag(self, key: str, default: bool = False) -> bool:
        """Yes or no."""
        value = self._get(key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise ModelError(f"{self._where}: {key} = {shown(value)} is neither true nor false")
        return bool(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A config inside the config, empty where it is missing."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self._where}: {key} = {shown(value)} is no mapping")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        return self._values.get(self._prefix + key, default)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._where}: {self._prefix}{key} is missing")
        return value


def scalar(k: Keys, s: Scalar, key: str) -> int | float:
    """The value of `key`, whole where the field is. ModelError for one that no model has."""
    default = DecoderConfig.__dataclass_fields__[s.name].default
    value = k.integer(key) if isinstance(default, int) else k.real(key)
    if not 0 <= value <= 1 << 20:
        raise ModelError(f"{key} = {value}: expected 0 to {1 << 20}")
    return value
