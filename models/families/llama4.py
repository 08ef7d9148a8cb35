"""Llama 4: three layers of four see their own stretch of the text alone and turn; every fourth sees
everything, does not turn, and has queries that grow with the position. An expert is chosen for each
row, takes it as far as a sigmoid opens, and stands beside what every row takes.

Legend: T rows, E width, H heads, K key-value heads, D head_dim, X experts, F width of an expert.
Source: Meta 2025, the Llama 4 release; transformers `modeling_llama4`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ggraph import ModelError, Tensor, ops

from .. import blocks
from ..architecture import SWIGLU, Architecture, Tensors, changed, pairing_neighbours
from ..config import DecoderConfig, Keys, layer_range
from ..gguf_config import STEP, every
from ..hf_config import GROWTH
from ..rotation import rotate
from ..step import Step

PERIOD = 4
STRETCH, GROWN = 8192, 0.1
UNEVEN = 128  # experts of the model whose queries and keys are not normalised


def layer(s: Step, x: Tensor, i: int) -> Tensor:
    """Layer i: [T, E] -> [T, E]."""
    h = s.asked(x, i) + attention(s, blocks.norm(s, x, f"blk.{i}.attn_norm"), i)
    normed = blocks.norm(s, h, f"blk.{i}.ffn_norm")
    return h + (mixture if s.config.has_experts(i) else blocks.swiglu)(s, normed, i)


def attention(s: Step, x: Tensor, i: int) -> Tensor:
    """Self-attention of layer i over the cache, as `blocks.attention`: [T, E] -> [T, E]."""
    c, kv = s.config, s.config.num_key_value_heads
    q = turned(s, blocks.heads(s, s.asked(x, i), i, "q", c.num_attention_heads), i, "q")
    k = turned(s, blocks.heads(s, x, i, "k", kv), i, "k")
    v = blocks.heads(s, x, i, "v", kv)
    seen = blocks.cached(s, k, f"cache.k.{i}"), blocks.cached(s, v, f"cache.v.{i}")
    mixed = blocks.attend(s, q, seen, blocks.mask_of(s, i), i)
    return blocks.linear(s, mixed, f"blk.{i}.attn_output", c.hidden_size)


def turned(s: Step, x: Tensor, i: int, role: str) -> Tensor:
    """Heads [T, H, D] of q or k: rotated and then normalised; where layer i does not turn, those of
    q grown."""
    c, rope = s.config, s.config.rope_of(i)
    if rope is not None:
        at = [s.asked(s.positions, i)] if role == "q" else s.places
        y = rotate(s, x, rope, f"blk.{i}.{role}_rope", at)
        return ops.rms_norm(y, eps=c.rms_norm_eps) if c.even_heads else y
    return x * s.asked(s.growth, i).reshape(-1, 1, 1) if role == "q" and c.query_growth else x


def mixture(s: Step, x: Tensor, i: int) -> Tensor:
    """The best expert of layer i, and what every row takes: [T, E]."""
    c, ffn = s.config, f"blk.{i}.ffn"
    (rows, e), f = x.shape, c.moe_intermediate_size
    logits = blocks.linear(s, x, f"{ffn}_gate_inp", c.num_experts)  # [T, X]
    chosen = ops.top_k(logits, 1, name=f"blk.{i}.moe_ids")  # [T, 1]
    opened = ops.moe_shares(ops.sigmoid(logits), chosen, normalise=False)
    taken = ops.moe_mix(x.reshape(rows, 1, e), opened).reshape(rows, 1, e)
    gate, up = (blocks.expert(s, taken, chosen, f"{ffn}_{p}_exps", f) for p in ("gate", "up"))
    made = blocks.expert(s, ops.swiglu(gate, up), chosen, f"{ffn}_down_exps", e)
    shared = blocks.gated(s, x, i, ops.swiglu, c.shared_intermediate_size, "_shexp")
    return made.reshape(rows, e) + shared


def translate(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Widths of experts and of layers without, which layers have some, turn, and see all."""
    k = Keys(values, "config.json")
    layers, width = k.integer("num_hidden_layers"), k.integer("intermediate_size")
    turns = values.get("no_rope_layers") or [*every(k.integer("no_rope_layer_interval"), layers)]
    mixed = values.get("moe_layers")
    if mixed is None:
        step = k.integer(STEP)
        mixed = [i for i in layer_range(layers) if step > 0 and (i + 1) % step == 0]
    if not isinstance(mixed, list) or not isinstance(turns, list) or len(turns) < layers:
        raise ModelError(f"llama4: moe_layers {mixed!r:.60}, no_rope_layers {turns!r:.60}")
    if any(turn not in (0, 1) for turn in turns):
        raise ModelError(f"llama4: no_rope_layers {turns!r:.60}: expected 1 where a layer turns")
    stretch = k.integer("attention_chunk_size") if k.has("attention_chunk_size") else None
    own = "full" if stretch is None else "chunked"
    kinds = values.get("layer_types") or [f"{own if t else 'full'}_attention" for t in turns]
    if not isinstance(kinds, list):
        raise ModelError(f"llama4: layer_types {kinds!r:.60}")
    renamed = [("sliding_attention" if t == "chunked_attention" else t) for t in kinds]
    return {
        **values, "intermediate_size": k.integer("intermediate_size_mlp"),
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width,
        "mlp_only_layers": [i for i in layer_range(layers) if i not in mixed],
        "rotated_layers": turns[:layers], "layer_types": renamed, "sliding_window": stretch,
        "even_heads": k.flag("use_qk_norm"),
        GROWTH: k.real("attn_scale") if k.flag("attn_temperature_tuning") else 0.0,
    }  # fmt: skip


def complete(c: DecoderConfig) -> DecoderConfig:
    """What no file says, and what GGUF files leave out. ModelError where experts are mixed."""
    if c.num_experts and c.num_experts_per_tok != 1:
        raise ModelError(f"llama4: {c.num_experts_per_tok} experts a row; known: 1")
    own = c.window_rope  # of the layers that turn
    return replace(
        pairing_neighbours(replace(c, rope=replace(c.rope, freq_base=own.freq_base)) if own else c),
        window_rope=None,
        chunked=c.sliding_window is not None,
        windowed_layers=c.windowed_layers or every(PERIOD, c.num_hidden_layers),
        shared_intermediate_size=c.shared_intermediate_size or c.moe_intermediate_size,
        norm_topk_prob=True,
    )


def read(k: Keys, layers: int) -> Mapping[str, Any]:
    """What llama.cpp takes for granted. ModelError for a file of full layers alone."""
    if not k.integer("attention.sliding_window"):
        raise ModelError("llama4: attention.sliding_window = 0: expected the length of a stretch")
    even = k.integer("expert_count", 0) != UNEVEN
    return {"rotated_layers": every(PERIOD, layers), "even_heads": even}


def keys(c: DecoderConfig) -> Mapping[str, Any]:
    """The other way. ModelError for what llama.cpp would take otherwise."""
    usual = every(PERIOD, c.num_hidden_layers)
    if not c.sliding_window or not c.windowed_layers == c.rotated_layers == usual:
        raise ModelError("llama4: GGUF cannot say that others than each fourth layer see all")
    if c.even_heads != (c.num_experts != UNEVEN):
        either = "" if c.even_heads else " not"
        raise ModelError(f"llama4: GGUF cannot say that queries and keys are{either} normalised")
    mixed = [c.has_experts(i) for i in range(c.num_hidden_layers)]
    step = mixed.index(True) + 1 if any(mixed) else 0
    if not step or mixed != [(i + 1) % step == 0 for i in range(len(mixed))]:
        raise ModelError(f"llama4: GGUF cannot say which layers have experts: {mixed!r:.60}")
    return {
        STEP: step, "attention.temperature_scale": c.query_growth,
        "attention.temperature_length": c.growth_length,
    }  # fmt: skip


def sanitize(tensors: Tensors, c: DecoderConfig) -> Tensors:
    """Experts with a row for each feature that they make, where those of a layer stand in two
    tensors, in which features are columns."""
    both, down = "ffn_gate_up_exps.weight", "ffn_down_exps.weight"
    leads = {n.removesuffix(both) for n in tensors if n.endswith(both)}
    columns = {lead + part for lead in leads for part in (both, down)}
    return {n: changed(t, t.data.swapaxes(1, 2)) if n in columns else t for n, t in tensors.items()}


SHARED = "feed_forward.shared_expert"
PARTS = {f"{part}_proj": part for part in ("gate", "up", "down")}
LLAMA4 = Architecture(
    "llama4", blocks.Stack(layer), ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    "normal",
    layer_names={
        **{f"feed_forward.{name}": f"ffn_{part}" for name, part in PARTS.items()},
        **{f"{SHARED}.{name}": f"ffn_{part}_shexp" for name, part in PARTS.items()},
        "feed_forward.router": "ffn_gate_inp",
        "feed_forward.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    },
    translate=translate, complete=complete, sanitize=sanitize, keys=keys, read=read,
    fixed={**SWIGLU, "attention_bias": (False,), "num_experts_per_tok": (1,)},
    gguf_defaults={
        "attention.sliding_window": STRETCH, "attention.temperature_scale": GROWN,
        "attention.temperature_length": STRETCH,
    },
    hf_defaults={
        "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "num_experts_per_tok": 1, "num_local_experts": 16,
        STEP: 1, "use_qk_norm": True, "no_rope_layer_interval": PERIOD,
        "attention_chunk_size": STRETCH, "attn_temperature_tuning": True, "floor_scale": STRETCH,
        "attn_scale": GROWN,
    },
)  # fmt: skip
