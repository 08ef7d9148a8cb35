"""An EAGLE-3 draft decoder, small, for the hazards: one layer over [embedding ; feature].

Legend: T token rows, E width, H heads, K key-value heads, D head width, F feed-forward width,
V target vocabulary, W draft vocabulary, C cache rows.

    x = [norm(embedding of the next token) ; norm(g)]     h1 = g + attention(x)
    h2 = h1 + mlp(norm(h1))                               logits = head(norm(h2))

Source: Li et al. 2025 (arXiv 2503.01840). With `packed` one matrix makes q, k and v, as serving
engines do, and its product is taken per half of x and added, without the concatenation.
"""

from ggraph import ops
from ggraph.dtype import I32
from ggraph.graph import Graph
from ggraph.hazards.parts import linear, norm
from ggraph.tensor import Tensor, input, state, weight

T, E, H, K, D, F, V, W, C = 8, 32, 4, 2, 8, 48, 64, 48, 8


def decoder(packed: bool = False) -> Graph:
    """One draft step: inputs `tokens` [T], `g` [T, E], `slots` [T], `positions` [T], `mask`
    [T, C]; outputs `logits` [T, W] and `feedback` [T, E]."""
    tokens, g = input("tokens", (T,), I32), input("g", (T, E))
    embedded = ops.get_rows(weight("token_embd.weight", (V, E)), tokens, name="embd")
    e, f = norm(embedded, "norm_e"), norm(g, "norm_g")  # the two parallel RMS norms
    h1 = ops.add(g, _attention(e, f, packed), name="residual")
    h2 = ops.add(h1, _mlp(norm(h1, "ffn_norm")), name="hidden")
    logits = linear(norm(h2, "output_norm"), "output", W)
    return Graph.of({"logits": logits, "feedback": h2}, name="eagle3 decoder")


def _attention(e: Tensor, f: Tensor, packed: bool) -> Tensor:
    """Grouped attention over a cache of C rows: [T, E]."""
    positions, slots = input("positions", (T,), I32), input("slots", (T,), I32)
    mask = input("mask", (T, C))
    q, k, v = _qkv_packed(e, f) if packed else _qkv(e, f)
    q = ops.rope(q.reshape(T, H, D), positions, name="q.rope")
    k = ops.rope(k.reshape(T, K, D), positions, name="k.rope")
    keys = ops.set_rows(state("cache.k", (C, K, D)), k, slots, name="keys")
    values = ops.set_rows(state("cache.v", (C, K, D)), v.reshape(T, K, D), slots, name="values")
    mixed = ops.flash_attn(q, keys, values, mask, scale=D**-0.5, name="mixed")  # [T, H, D]
    return linear(mixed.reshape(T, H * D), "attn_output", E)


def _qkv(e: Tensor, f: Tensor) -> tuple[Tensor, ...]:
    """Three products over [e ; f]: [T, H * D], and twice [T, K * D]."""
    x = ops.concat([e, f], axis=-1, name="x")  # [T, 2E]
    return linear(x, "q", H * D), linear(x, "k", K * D), linear(x, "v", K * D)


def _qkv_packed(e: Tensor, f: Tensor) -> tuple[Tensor, ...]:
    """The same from one matrix for all three, taken per half: each norm ends in a product."""
    wide, narrow = H * D, K * D
    both = ops.add(
        linear(e, "qkv.e", wide + 2 * narrow), linear(f, "qkv.g", wide + 2 * narrow), name="qkv"
    )  # [T, (H + 2K) * D]
    parts = (("q", 0, wide), ("k", wide, narrow), ("v", wide + narrow, narrow))
    return tuple(ops.cont(ops.columns(both, at, n), name=name) for name, at, n in parts)


def _mlp(x: Tensor) -> Tensor:
    """Gated feed-forward: [T, E] -> [T, E]."""
    act = ops.swiglu(linear(x, "gate", F), linear(x, "up", F), name="act")
    return linear(act, "down", E)
