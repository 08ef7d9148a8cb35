"""The parts that models are built of, as functions on a `Step`.

Legend: T token rows, C visible cache rows, R cache rows, E hidden_size, H heads, K key-value
heads, D head_dim, F intermediate_size, X experts, U experts per token, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ggraph import Graph, Tensor, ops, state
from ggraph.decode.given import placed
from ggraph.formats.checkpoint import scale_name

from .config import SIGMOID
from .groups import limited
from .rotation import rotate
from .step import Step

DOWN, UP = ".lora_a", ".lora_b"  # behind a weight's name: what an adapter adds (`lora`)


def embed(s: Step) -> Tensor:
    """Rows of the embedding table for the step's tokens, by its factor, or given ones: [T, E]."""
    x = scaled(looked_up(s, "token_embd.weight"), s.config.embedding_multiplier)
    return placed(x, s.given_part(0)) if s.shape.given else x


def looked_up(s: Step, table: str) -> Tensor:
    """Rows of the weight `table` [V, E] for the step's tokens: [T, E]."""
    held = s.w(table, s.config.vocab_size, s.config.hidden_size)
    return by_scale(s, ops.get_rows(held, s.tokens, name="embd"), table)


def placed_by_table(s: Step) -> Tensor:
    """The embedding plus the learned one of each row's position: [T, E]."""
    table = s.w("position_embd.weight", s.config.max_position_embeddings, s.config.hidden_size)
    return embed(s) + ops.get_rows(table, s.positions, name="position")


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a factor that is known beforehand."""
    return x if factor == 1.0 else x * factor


def norm(s: Step, x: Tensor, name: str, eps: float = 0.0) -> Tensor:
    """RMS norm over the last axis, times the weight `{name}.weight`; `eps` 0: the config's."""
    even = ops.rms_norm(x, eps=eps or s.config.rms_norm_eps, name=f"{name}.rms")
    return ops.mul(even, s.w(f"{name}.weight", x.shape[-1]), name=name)


def layer_norm(s: Step, x: Tensor, name: str, *heads: int) -> Tensor:
    """Mean 0 and variance 1 over the last axis, times `{name}.weight`, plus `{name}.bias` where
    present; of x [T, heads, n] each head may have weights of its own."""
    n = x.shape[-1]
    even = ops.norm(x, eps=s.config.rms_norm_eps, name=f"{name}.norm")
    y = ops.mul(even, s.w(f"{name}.weight", *heads, n), name=f"{name}.scaled")
    return ops.add(y, s.w(f"{name}.bias", n), name=name) if s.has(f"{name}.bias") else y


def product(s: Step, x: Tensor, matrix: str, width: int, name: str = "") -> Tensor:
    """x [T, n] times the weight `matrix` [width, n], with its scale, and what an adapter adds:
    [T, width]."""
    n, down = x.shape[-1], f"{matrix}{DOWN}"
    y = by_scale(s, ops.mul_mat(s.w(matrix, width, n), x, name=name), matrix)
    if not s.has(down):
        return y
    few = ops.mul_mat(s.w(down, s.catalogue[down].shape[0], n), x)  # [T, R]
    return y + ops.mul_mat(s.w(f"{matrix}{UP}", width, few.shape[1]), few)


def by_scale(s: Step, y: Tensor, matrix: str) -> Tensor:
    """y times the one scale of the weight `matrix`, where the checkpoint has one."""
    title = scale_name(matrix)
    one = s.has(title) and tuple(s.catalogue[title].shape) == (1,)
    return ops.mul(y, s.w(title, 1)) if one else y


def linear(s: Step, x: Tensor, name: str, width: int) -> Tensor:
    """x [T, n] times `{name}.weight` [width, n], times `{name}.factor` and plus `{name}.bias` where
    present: [T, width]."""
    y = product(s, x, f"{name}.weight", width, name)
    if s.has(f"{name}.factor"):
        y = ops.mul(y, s.w(f"{name}.factor", width), name=f"{name}.multiplied")
    if s.has(f"{name}.bias"):
        y = ops.add(y, s.w(f"{name}.bias", width), name=f"{name}.biased")
    return y


def cached(s: Step, rows: Tensor, name: str) -> Tensor:
    """Write rows [T, K, D] to their slots of the cache `name`; the first C rows: [C, K, D]."""
    if not s.config.causal:
        return rows  # which see those of their step
    shape = s.shape
    cache = state(s.prefix + name, (shape.cache_rows, *rows.shape[1:]), shape.cache_dtype)
    written = ops.set_rows(cache, rows, s.slots, name=f"{name}.new")
    return ops.rows(written, 0, shape.context, name=f"{name}.seen")


def heads(s: Step, x: Tensor, i: int, role: str, count: int, normed: str = "") -> Tensor:
    """`count` heads of the role "q", "k" or "v" in layer i for x [T, n]: [T, count, D].

    `normed` puts an RMS norm before the rotation: over each "head" or over the whole "row"; or a
    layer norm over each head, by weights of its own: "each".
    """
    c, blk = s.config, f"blk.{i}"
    rows, d = x.shape[0], c.head_dim_of(i)
    y = linear(s, x, f"{blk}.attn_{role}", count * d)
    if normed == "row":
        y = norm(s, y, f"{blk}.attn_{role}_norm")
    y = y.reshape(rows, count, d)
    if normed == "each":
        return layer_norm(s, y, f"{blk}.attn_{role}_norm", count)
    return norm(s, y, f"{blk}.attn_{role}_norm") if normed == "head" else y


def turned(s: Step, x: Tensor, i: int, role: str) -> Tensor:
    """Heads x [T, heads, D] of layer i, rotated where it rotates; of the role "q" those of the rows
    that the layer is asked for, grown where queries grow."""
    rope, asks = s.config.rope_of(i), role == "q"
    if rope is not None:
        at = [s.asked(p, i) for p in s.places] if asks else s.places
        x = rotate(s, x, rope, f"blk.{i}.{role}_rope", at)
    return x * s.asked(s.growth, i).reshape(-1, 1, 1) if asks and s.config.query_growth else x


def remembered(s: Step, x: Tensor, i: int, *, qk_norm: str = "") -> tuple[Tensor, Tensor]:
    """Keys and values of layer i for x [T, n], written to the cache: what is seen, [C, K, D]."""
    kv = s.config.kv_heads_of(i)
    k = turned(s, heads(s, x, i, "k", kv, qk_norm), i, "k")  # [T, K, D]
    v = heads(s, x, i, "v", kv)  # [T, K, D]
    return cached(s, k, f"cache.k.{i}"), cached(s, v, f"cache.v.{i}")


def attention(s: Step, x: Tensor, i: int, *, qk_norm: str = "") -> Tensor:
    """Self-attention of layer i over the cache: x [T, n] -> [T, E], of the last layer [M, E] as
    `Step.asked` says. `qk_norm` as `normed` in `heads`."""
    q = heads(s, s.asked(x, i), i, "q", s.config.num_attention_heads, qk_norm)
    q = turned(s, q, i, "q")
    mixed = attend(s, q, remembered(s, x, i, qk_norm=qk_norm), mask_of(s, i), i)
    return linear(s, mixed, f"blk.{i}.attn_output", s.config.hidden_size)


def mask_of(s: Step, i: int) -> Tensor | None:
    """What rows that layer i is asked for see: f32 [T, C], lists i32 [T, S]; None: one another."""
    seen = s.window_mask if s.config.slides(i) else s.mask
    return s.asked(seen, i) if s.config.causal or s.shape.listed else None


def attend(s: Step, q: Tensor, seen: tuple[Tensor, Tensor], mask: Tensor | None, i: int) -> Tensor:
    """Queries [T, H, D] over the keys and values that layer i sees: [T, H*D]."""
    c, name = s.config, f"blk.{i}.attn"
    mixed = ops.flash_attn(
        q,
        *seen,
        mask,
        s.length if c.causal else None,
        s.w(f"{name}_sinks.weight", c.num_attention_heads) if s.has_sinks(i) else None,
        scale=c.attention_multiplier or c.head_dim_of(i) ** -0.5,
        softcap=c.attn_logit_softcapping,
        name=name,
    )  # [T, H, D]
    return mixed.reshape(q.shape[0], mixed.shape[1] * mixed.shape[2])


def swiglu(s: Step, x: Tensor, i: int) -> Tensor:
    """Gated feed-forward of layer i: down(silu(gate x) * up x), [T, E] -> [T, E]."""
    return gated(s, x, i, ops.swiglu, s.config.intermediate_size)


def geglu(s: Step, x: Tensor, i: int) -> Tensor:
    """Gated feed-forward of layer i: down(gelu(gate x) * up x), gelu in its tanh form."""
    return gated(s, x, i, ops.geglu, s.config.width_of(i))


def gated(
    s: Step, x: Tensor, i: int, unit: Callable[..., Tensor], width: int, end: str = ""
) -> Tensor:
    """down(unit(gate x, up x)) of layer i, whose tensors' names end in `end`."""
    ffn = f"blk.{i}.ffn"
    gate = linear(s, x, f"{ffn}_gate{end}", width)
    up = linear(s, x, f"{ffn}_up{end}", width)
    hidden = unit(gate, up, name=f"{ffn}_act{end}")
    return linear(s, hidden, f"{ffn}_down{end}", s.config.hidden_size)


def attended(s: Step, x: Tensor, i: int, *, qk_norm: str = "") -> Tensor:
    """The first half of layer i, added to what came in: [T, E] -> [T, E]; of the last layer as
    `Step.asked` says, as everything behind it."""
    mixed = attention(s, norm(s, x, f"blk.{i}.attn_norm"), i, qk_norm=qk_norm)
    return s.asked(x, i) + scaled(mixed, s.config.residual_multiplier)


def feed_forward(s: Step, x: Tensor, i: int, *, opens: bool = False) -> Tensor:
    """SwiGLU of layer i, or its experts, and what every row takes beside them: [T, E] -> [T, E].

    The latter as a whole, or, where it `opens`, as far as a gate for each row says.
    """
    c = s.config
    if not c.has_experts(i):
        return swiglu(s, x, i)
    made = experts(s, x, i)
    if not c.shared_intermediate_size:
        return made
    shared = gated(s, x, i, ops.swiglu, c.shared_intermediate_size, "_shexp")
    if opens:
        gate = ops.sigmoid(linear(s, x, f"blk.{i}.ffn_gate_inp_shexp", 1))  # [T, 1]
        shared = ops.moe_mix(shared.reshape(-1, 1, x.shape[1]), gate)
    return made + shared


def fed_forward(s: Step, h: Tensor, i: int) -> Tensor:
    """The second half of layer i, added to what the first made: [T, E] -> [T, E]."""
    made = feed_forward(s, norm(s, h, f"blk.{i}.ffn_norm"), i)
    return h + scaled(made, s.config.residual_multiplier)


def experts(
    s: Step, x: Tensor, i: int, *, unit: Callable[..., Tensor] = ops.swiglu, gated: bool = True
) -> Tensor:
    """Mixture of experts of layer i: the U best of X feed-forwards, weighted: [T, E] -> [T, E].

    Experts are as good as their soft_max chance or their sigmoid, and as `exp_probs_b` says beside
    it, where the checkpoint has it: that chooses but does not weigh. Groups are as good as their
    best one, or, of sigmoids, their two best. Where a latent size is told, experts take and make
    rows of that size, between two products.
    """
    c, blk = s.config, f"blk.{i}"
    n, f, u = c.num_experts, c.moe_intermediate_size, c.num_experts_per_tok
    latent = c.moe_latent_size
    e = latent or c.hidden_size
    logits = linear(s, x, f"{blk}.ffn_gate_inp", n)  # [T, X]
    chance = ops.sigmoid if c.expert_gating_func == SIGMOID else ops.soft_max
    worth = chances = chance(logits, name=f"{blk}.moe_probs")
    if s.has(f"{blk}.exp_probs_b.bias"):
        worth = ops.add(chances, s.w(f"{blk}.exp_probs_b.bias", n))
    worth = limited(worth, c.n_group, c.topk_group, c.best_of_group)
    chosen = ops.top_k(worth, u, name=f"{blk}.moe_ids")  # [T, U]
    factor, even = c.routed_scaling_factor, c.norm_topk_prob
    share = ops.moe_shares(chances, chosen, normalise=even, scale=factor, name=f"{blk}.moe_shares")
    seen = linear(s, x, f"{blk}.ffn_latent_down", e) if latent else x
    wide = seen.reshape(x.shape[0], 1, e)
    parts = ("gate", "up") if gated else ("up",)
    taken = [expert(s, wide, chosen, f"{blk}.ffn_{part}_exps", f) for part in parts]  # [T, U, F]
    out = expert(s, unit(*taken), chosen, f"{blk}.ffn_down_exps", e)  # [T, U, E]
    mixed = ops.moe_mix(out, share, name=f"{blk}.moe_out")
    return linear(s, mixed, f"{blk}.ffn_latent_up", c.hidden_size) if latent else mixed


def expert(s: Step, x: Tensor, chosen: Tensor, name: str, width: int) -> Tensor:
    """x [T, U or 1, n] through the experts chosen [T, U], with their scales: [T, U, width]."""
    count = s.config.num_experts
    y = ops.mul_mat_id(s.w(f"{name}.weight", count, width, x.shape[-1]), x, chosen, name=name)
    if s.has(f"{name}.scale"):
        each = ops.get_rows(s.w(f"{name}.scale", count).reshape(count, 1), chosen.reshape(-1))
        y = ops.mul(y, each.reshape(*chosen.shape, 1), name=f"{name}.scaled")
    if s.has(f"{name}.bias"):
        y = ops.add_id(y, s.w(f"{name}.bias", count, width), chosen, name=f"{name}.biased")
    return y


def tap(s: Step, x: Tensor, i: int) -> None:
    """Keep the residual stream at the input of layer i, where the step asks for it."""
    if i in s.shape.taps:
        s.taps[f"layer_input.{i}"] = x


def wanted_rows(s: Step, x: Tensor) -> Tensor:
    """[M, E]: the rows that get logits, if the last layer has not left the others out."""
    rows, wanted = s.shape.rows, s.shape.wanted
    few = x.shape[0] == wanted and (wanted < rows or rows == 1)
    return x if few else ops.get_rows(x, s.wanted, name="wanted_rows")


Norm = Callable[[Step, Tensor, str], Tensor]


def head(s: Step, x: Tensor, normed: Norm = norm) -> Graph:
    """Logits of the wanted rows, and the finished graph.

    A tap one past the last layer is the final norm of every row, which EAGLE-1 heads and a
    model's own draft layers read.
    """
    c = s.config
    if c.num_hidden_layers in s.shape.taps:
        every = normed(s, x, "output_norm")  # [T, E]
        s.taps[f"layer_input.{c.num_hidden_layers}"] = every
        final = wanted_rows(s, every)
    else:
        final = normed(s, wanted_rows(s, x), "output_norm")
    table = "output.weight" if s.has("output.weight") else "token_embd.weight"
    logits = product(s, final, table, c.vocab_size)  # [M, V]
    if s.has("output.bias"):
        logits = logits + s.w("output.bias", c.vocab_size)
    logits = capped(s, logits)
    return Graph.of({"logits": logits, **s.taps}, also=s.kept, name=f"{c.architecture} step")


Layer = Callable[[Step, Tensor, int], Tensor]


@dataclass(frozen=True)
class Stack:
    """What builds the step graph of a family whose layers follow one another: [T, E] -> [T, E]
    each, a decoder's last one perhaps [T, E] -> [M, E]."""

    layer: Layer
    normed: Norm = norm
    """The norm behind the last layer, with which `end` begins."""
    begin: Callable[[Step], Tensor] = embed
    end: Callable[[Step, Tensor, Norm], Graph] = head

    def __call__(self, s: Step) -> Graph:
        """The graph."""
        x = self.begin(s)  # [T, E]
        for i in range(s.config.num_hidden_layers):
            tap(s, x, i)
            x = self.layer(s, x, i)
        return self.end(s, x, self.normed)


def capped(s: Step, logits: Tensor) -> Tensor:
    """Logits [M, V] divided and bent as the config says."""
    logits, cap = scaled(logits, 1.0 / s.config.logits_scaling), s.config.final_logit_softcapping
    return ops.tanh(logits * (1.0 / cap)) * cap if cap else logits
