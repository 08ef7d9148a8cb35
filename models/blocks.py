"""The parts that decoders are built of, as functions on a `Step`.

Legend: T token rows, C visible cache rows, R cache rows, E hidden_size, H heads, K key-value
heads, D head_dim, F intermediate_size, X experts, U experts per token, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ggraph import Graph, ModelError, Tensor, dtypes, input, ops, state, weight
from ggraph.decode.model import StepShape

from .config import DecoderConfig, Rope


class Stored(Protocol):
    """What the builder must know of a checkpoint's tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in NumPy order."""
        ...

    @property
    def dtype(self) -> dtypes.DType:
        """How the elements are stored."""
        ...


@dataclass
class Step:
    """A graph under construction: config, checkpoint catalogue, shape bucket, and its inputs."""

    config: DecoderConfig
    catalogue: Mapping[str, Stored]
    shape: StepShape
    prefix: str = ""  # of weight and state names, so that two models can share a session
    shared: frozenset[str] = frozenset()  # weights of another model, taken without the prefix
    taps: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, context = self.shape.rows, self.shape.context
        self.tokens = input("tokens", (rows,), dtypes.I32)
        self.positions = input("positions", (rows,), dtypes.I32)
        self.slots = input("slots", (rows,), dtypes.I64)
        seen = self.shape.listed or context
        kind = dtypes.I32 if self.shape.listed else dtypes.F32
        self.mask = input("mask", (rows, seen), kind)
        self.window_mask = self.mask
        if self.config.sliding_window is not None:
            self.window_mask = input("window_mask", (rows, seen), kind)
        self.length = input("length", (1,), dtypes.I32)
        self.wanted = input("wanted", (self.shape.wanted,), dtypes.I32)

    def w(self, name: str, *shape: int) -> Tensor:
        """The weight `name` of the checkpoint. ModelError when absent or of another shape."""
        stored = self.catalogue.get(name)
        if stored is None:
            raise ModelError(f"{self.config.architecture}: the checkpoint has no tensor {name!r}")
        if tuple(stored.shape) != shape:
            raise ModelError(f"{name!r}: expected {list(shape)}, got {list(stored.shape)}")
        title = name if name in self.shared else self.prefix + name
        return self.weights.setdefault(title, weight(title, shape, stored.dtype))

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self.catalogue


def embed(s: Step) -> Tensor:
    """Rows of the embedding table for the step's tokens: [T, E]."""
    table = s.w("token_embd.weight", s.config.vocab_size, s.config.hidden_size)
    return ops.get_rows(table, s.tokens, name="embd")


def norm(s: Step, x: Tensor, name: str) -> Tensor:
    """RMS norm over the last axis, times the weight `{name}.weight`."""
    scaled = ops.rms_norm(x, eps=s.config.rms_norm_eps, name=f"{name}.rms")
    return ops.mul(scaled, s.w(f"{name}.weight", x.shape[-1]), name=name)


def linear(s: Step, x: Tensor, name: str, width: int) -> Tensor:
    """x [T, n] times `{name}.weight` [width, n], plus `{name}.bias` where present: [T, width]."""
    y = ops.mul_mat(s.w(f"{name}.weight", width, x.shape[-1]), x, name=name)
    if s.has(f"{name}.bias"):
        y = ops.add(y, s.w(f"{name}.bias", width), name=f"{name}.biased")
    return y


def rotate(s: Step, x: Tensor, rope: Rope, name: str, positions: Tensor | None = None) -> Tensor:
    """Rotary embedding of x [T, heads, D] at `positions`, else at the step's."""
    factors = None
    if s.has("rope_freqs.weight"):
        factors = s.w("rope_freqs.weight", rope.n_rot // 2)
    return ops.rope(
        x,
        s.positions if positions is None else positions,
        factors,
        n_rot=rope.n_rot,
        mode=rope.mode,
        freq_base=rope.freq_base,
        freq_scale=rope.freq_scale,
        ext_factor=rope.ext_factor,
        attn_factor=rope.attn_factor,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        n_ctx_orig=rope.n_ctx_orig,
        name=name,
    )


def cached(s: Step, rows: Tensor, name: str) -> Tensor:
    """Write rows [T, K, D] to their slots of the cache `name`; the first C rows: [C, K, D]."""
    heads, dim = rows.shape[1], rows.shape[2]
    shape, dtype = s.shape, s.shape.cache_dtype
    cache = state(s.prefix + name, (shape.cache_rows, heads, dim), dtype)
    written = ops.set_rows(cache, rows, s.slots, name=f"{name}.new")
    return ops.rows(written, 0, shape.context, name=f"{name}.seen")


def remembered(s: Step, x: Tensor, i: int, *, qk_norm: bool = False) -> tuple[Tensor, Tensor]:
    """Keys and values of layer i for x [T, n], written to the cache: what is seen, [C, K, D]."""
    c, blk = s.config, f"blk.{i}"
    rows, kv, d = x.shape[0], c.num_key_value_heads, c.head_dim
    k = linear(s, x, f"{blk}.attn_k", kv * d).reshape(rows, kv, d)  # [T, K, D]
    v = linear(s, x, f"{blk}.attn_v", kv * d).reshape(rows, kv, d)  # [T, K, D]
    if qk_norm:
        k = norm(s, k, f"{blk}.attn_k_norm")
    k = rotate(s, k, c.rope, f"{blk}.k_rope")
    return cached(s, k, f"cache.k.{i}"), cached(s, v, f"cache.v.{i}")


def attention(
    s: Step, x: Tensor, i: int, *, qk_norm: bool = False, only: Tensor | None = None
) -> Tensor:
    """Self-attention of layer i over the cache: x [T, n] -> [T, E]; [M, E] for the M rows `only`,
    where the others are to be remembered but not computed."""
    c, blk = s.config, f"blk.{i}"
    mask = s.window_mask if c.slides(i) else s.mask
    asking, positions = x, s.positions
    if only is not None:
        asking, mask = ops.get_rows(x, only), ops.get_rows(mask, only)
        positions = ops.get_rows(positions.reshape(-1, 1), only).reshape(-1)
    rows, h, d = asking.shape[0], c.num_attention_heads, c.head_dim
    q = linear(s, asking, f"{blk}.attn_q", h * d).reshape(rows, h, d)  # [T, H, D]
    if qk_norm:
        q = norm(s, q, f"{blk}.attn_q_norm")
    q = rotate(s, q, c.rope, f"{blk}.q_rope", positions)
    seen_k, seen_v = remembered(s, x, i, qk_norm=qk_norm)
    mixed = ops.flash_attn(
        q, seen_k, seen_v, mask, s.length, scale=d**-0.5, name=f"{blk}.attn"
    )  # [T, H, D]
    return linear(s, mixed.reshape(rows, h * d), f"{blk}.attn_output", c.hidden_size)


def swiglu(s: Step, x: Tensor, i: int) -> Tensor:
    """Gated feed-forward of layer i: down(silu(gate x) * up x), [T, E] -> [T, E]."""
    c, blk = s.config, f"blk.{i}"
    gate = linear(s, x, f"{blk}.ffn_gate", c.intermediate_size)
    up = linear(s, x, f"{blk}.ffn_up", c.intermediate_size)
    return linear(s, ops.swiglu(gate, up, name=f"{blk}.ffn_act"), f"{blk}.ffn_down", c.hidden_size)


def fed_forward(s: Step, h: Tensor, i: int) -> Tensor:
    """The second half of layer i, added to what the first made: [T, E] -> [T, E]."""
    return h + swiglu(s, norm(s, h, f"blk.{i}.ffn_norm"), i)


def experts(s: Step, x: Tensor, i: int) -> Tensor:
    """Mixture of experts of layer i: the U best of X feed-forwards, weighted: [T, E] -> [T, E]."""
    c, blk = s.config, f"blk.{i}"
    n, f, e, u = c.num_experts, c.moe_intermediate_size, c.hidden_size, c.num_experts_per_tok
    rows = x.shape[0]
    chances = ops.soft_max(linear(s, x, f"{blk}.ffn_gate_inp", n), name=f"{blk}.moe_probs")
    chosen = ops.top_k(chances, u, name=f"{blk}.moe_ids")  # [T, U]
    share = ops.get_rows(chances.reshape(rows, n, 1), chosen)  # [T, U, 1]
    if c.norm_topk_prob:
        total = ops.sum_rows(share.reshape(rows, u))  # [T, 1]
        share = ops.div(share.reshape(rows, u), total).reshape(rows, u, 1)
    wide = x.reshape(rows, 1, e)
    gate = ops.mul_mat_id(s.w(f"{blk}.ffn_gate_exps.weight", n, f, e), wide, chosen)  # [T, U, F]
    up = ops.mul_mat_id(s.w(f"{blk}.ffn_up_exps.weight", n, f, e), wide, chosen)
    hidden = ops.swiglu(gate, up)
    out = ops.mul_mat_id(s.w(f"{blk}.ffn_down_exps.weight", n, e, f), hidden, chosen)  # [T, U, E]
    weighted = ops.mul(out, share, name=f"{blk}.moe_weighted")
    summed = ops.sum_rows(weighted.permute(0, 2, 1))  # [T, E, 1]
    return summed.reshape(rows, e)


def tap(s: Step, x: Tensor, i: int) -> None:
    """Keep the residual stream at the input of layer i, where the step asks for it."""
    if i in s.shape.taps:
        s.taps[f"layer_input.{i}"] = x


def _wanted_rows(s: Step, x: Tensor) -> Tensor:
    """[M, E]: the rows that get logits; a single row is wanted as it is."""
    if s.shape.rows == s.shape.wanted == 1:
        return x
    return ops.get_rows(x, s.wanted, name="wanted_rows")


def head(s: Step, x: Tensor) -> Graph:
    """Logits of the wanted rows, and the finished graph.

    A tap one past the last layer is the final norm of every row, which EAGLE-1 heads read.
    """
    c = s.config
    if c.num_hidden_layers in s.shape.taps:
        normed = norm(s, x, "output_norm")  # [T, E]
        s.taps[f"layer_input.{c.num_hidden_layers}"] = normed
        final = _wanted_rows(s, normed)
    else:
        final = norm(s, _wanted_rows(s, x), "output_norm")
    tied = "output.weight" not in s.catalogue
    table = s.w("token_embd.weight" if tied else "output.weight", c.vocab_size, c.hidden_size)
    logits = ops.mul_mat(table, final)  # [M, V]
    return Graph.of({"logits": logits, **s.taps}, name=f"{c.architecture} step")
