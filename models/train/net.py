"""The draft head as a PyTorch module, and its training-time test.

Only training imports this file: it needs the extra [train]. Decoding runs `models.eagle3`.

Legend: B texts, N positions, M positions of some texts one after another, E width of head and
target, A taps, H heads, K key-value heads, D head_dim, W draft vocabulary.

Position p holds the target's features at p and the embedding of token p + 1; it predicts token
p + 2. Step i of the training-time test starts from the previous step's output at every position,
with the text moved on by i: it is what the head sees as it drafts its (i+1)-th token, given that
the drafts so far were right. At step i a query at p reads the keys of step 0 up to p, and of the
steps 1 to i only the one at p itself: the chain that it would have drafted.
Source: Li et al. 2025 (arXiv 2503.01840), section 3.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

Tensor: TypeAlias = Any  # torch.Tensor; PyTorch is optional, so that its types are not checked


@dataclass(frozen=True)
class NetConfig:
    """Shape of a head. With `feedback_norm` the next step starts from the normed output
    (EAGLE-3.1)."""

    width: int
    taps: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_base: float
    eps: float
    feedback_norm: bool = False


ROWS = 64  # rows and outputs of products in bfloat16 come in multiples of so many


class Matrix(nn.Linear):  # type: ignore[misc]
    """A matrix without bias. With `bf16` products are made in bfloat16."""

    bf16 = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., K] -> [.., N]."""
        return product(x, self.weight, self.bf16)


def product(x: Tensor, weight: Tensor, bf16: bool = False) -> Tensor:
    """x [.., K] times `weight` [N, K] -> [.., N]; with `bf16` of factors rounded to bfloat16.

    Then rows and outputs are filled up to multiples of `ROWS`: PyTorch's library generates code
    for every shape that it meets, which takes longer than the product.
    """
    if not bf16:
        return F.linear(x, weight)
    flat, n = x.reshape(-1, x.shape[-1]), len(weight)
    padded = (F.pad(t.bfloat16(), (0, 0, 0, -len(t) % ROWS)) for t in (flat, weight))
    return F.linear(*padded)[: len(flat), :n].float().view(*x.shape[:-1], n)


class Norm(nn.Module):  # type: ignore[misc]
    """RMS norm with a weight [n]."""

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [.., n], scaled to a root mean square of one, times the weight."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class DraftNet(nn.Module):  # type: ignore[misc]
    """fc, one layer over [embedding ; feature], norm and output matrix. No bias anywhere."""

    def __init__(self, c: NetConfig) -> None:
        super().__init__()
        e, self.config = c.width, c
        self.fc = Matrix(c.taps * e, e)
        self.hidden_norm = Norm(e, c.eps)
        self.input_layernorm = Norm(e, c.eps)
        self.q_proj = Matrix(2 * e, c.heads * c.head_dim)
        self.k_proj = Matrix(2 * e, c.kv_heads * c.head_dim)
        self.v_proj = Matrix(2 * e, c.kv_heads * c.head_dim)
        self.o_proj = Matrix(c.heads * c.head_dim, e)
        self.post_attention_layernorm = Norm(e, c.eps)
        self.gate_proj = Matrix(e, c.intermediate)
        self.up_proj = Matrix(e, c.intermediate)
        self.down_proj = Matrix(c.intermediate, e)
        self.norm = Norm(e, c.eps)
        self.lm_head = Matrix(e, c.vocabulary)

    def use_bf16(self) -> None:
        """Products in bfloat16 from now on."""
        for part in self.modules():
            if isinstance(part, Matrix):
                part.bf16 = True

    def forward(self, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Outputs before the final norm, [B, N, E] for each step, at every position.

        `features` [B, N, A*E]; `embedded` [B, N + steps - 1, E] holds the embedding of token p + 1
        at p.
        """
        b, n = features.shape[:2]
        out, past = self.first(features, embedded[:, :n])
        every = torch.ones(b, n, dtype=torch.bool, device=features.device)
        past.rows, past.columns = every.nonzero(as_tuple=True)
        outs = [out]
        for i in range(1, steps):
            flat = self.further(outs[-1].flatten(0, 1), embedded[:, i : i + n].flatten(0, 1), past)
            outs.append(flat.view(b, n, -1))
        return outs

    def first(self, features: Tensor, embedded: Tensor) -> tuple[Tensor, "Past"]:
        """Step 0: outputs [B, N, E] from features [B, N, A*E] and embeddings [B, N, E]."""
        past = Past(self.config)
        return self._layer(self.fc(features), embedded, past.begin), past

    def further(self, out: Tensor, embedded: Tensor, past: "Past") -> Tensor:
        """The next step at the M positions that `past` holds: outputs [M, E], from the outputs
        before [M, E] and the embeddings [M, E] of the tokens that followed."""
        hidden = self.norm(out) if self.config.feedback_norm else out
        return self._layer(hidden, embedded, past.go_on)

    def logits(self, out: Tensor, chosen: Tensor | None = None) -> Tensor:
        """[.., E] -> [.., W], or of the draft tokens `chosen` [C] only: [.., C]."""
        weight = self.lm_head.weight if chosen is None else self.lm_head.weight[chosen]
        return product(self.norm(out), weight, self.lm_head.bf16)

    def _layer(self, g: Tensor, embedded: Tensor, mix: Callable[..., Tensor]) -> Tensor:
        c = self.config
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)  # [.., 2E]
        q = self.q_proj(x).unflatten(-1, (c.heads, c.head_dim))  # [.., H, D]
        k = self.k_proj(x).unflatten(-1, (c.kv_heads, c.head_dim))
        v = self.v_proj(x).unflatten(-1, (c.kv_heads, c.head_dim))
        h = g + self.o_proj(mix(q, k, v).flatten(-2))
        y = self.post_attention_layernorm(h)
        return h + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Past:
    """Keys and values of the steps so far, and attention over them.

    Of later steps it holds those at the positions that go on: texts `rows` [M], ascending, and
    `columns` [M].
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, c: NetConfig) -> None:
        self.config = c
        self.own: list[tuple[Tensor, Tensor]] = []  # of steps 1 and on: keys, values [M, K, D]

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Step 0: q [B, N, H, D], k and v [B, N, K, D]; the mixed values [B, N, H, D]."""
        at = torch.arange(q.shape[1], device=q.device)
        q, k = (rotated(t, self.config.rope_base, at) for t in (q, k))
        self.first = k, v
        group = self.config.heads // self.config.kv_heads
        k, v = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))  # [B, H, N, D]
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return mixed.transpose(1, 2)

    def keep(self, which: Tensor) -> None:
        """Go on with these of the M positions only: i64 [M'], ascending."""
        self.rows, self.columns = self.rows[which], self.columns[which]
        self.own = [(k[which], v[which]) for k, v in self.own]

    def go_on(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A later step: q [M, H, D], k and v [M, K, D]; the mixed values [M, H, D]."""
        c, at = self.config, self.columns + len(self.own) + 1
        q, k = (rotated(t, c.rope_base, at) for t in (q, k))
        self.own.append((k, v))
        counts = torch.bincount(self.rows, minlength=len(self.first[0])).tolist()
        mixed, end = [], 0
        for b, count in enumerate(counts):
            begin, end = end, end + count
            if count:
                mixed.append(self._text(b, slice(begin, end), q[begin:end]))
        return torch.cat(mixed) if mixed else q

    def _text(self, b: int, part: slice, q: Tensor) -> Tensor:
        """Attention of one text's queries [m, H, D]: step 0 up to each, then its own chain."""
        c, m = self.config, len(q)
        k0, v0 = (t[b].transpose(0, 1) for t in self.first)  # [K, N, D]
        n = k0.shape[1]
        q = q.view(m, c.kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)  # [K, H/K, m, D]
        scores = (q.flatten(1, 2) @ k0.transpose(1, 2)).view(*q.shape[:3], n)
        hidden = torch.arange(n, device=q.device) > self.columns[part, None]  # [m, N]
        scores = scores.masked_fill(hidden, float("-inf"))
        own = [(k[part].transpose(0, 1)[:, None], v[part].transpose(0, 1)[:, None])
               for k, v in self.own]  # [K, 1, m, D]  # fmt: skip
        near = [(q * k).sum(-1, keepdim=True) for k, _ in own]  # [K, H/K, m, 1]
        shares = torch.softmax(torch.cat([scores, *near], -1) * c.head_dim**-0.5, -1)
        mixed = (shares[..., :n].flatten(1, 2) @ v0).view_as(q)
        for j, (_, v) in enumerate(own):
            mixed = mixed + shares[..., n + j : n + j + 1] * v
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)  # [m, H, D]


def rotated(x: Tensor, base: float, positions: Tensor) -> Tensor:
    """Rotary embedding of [.., N, H, D] at positions [N], halves paired."""
    d = x.shape[-1]
    inverse = base ** (-torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d)
    angle = torch.outer(positions.float(), inverse)[:, None]  # [N, 1, D / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
