"""The draft head as a PyTorch module, and its training-time test. Floor 10.

Only training imports this file: it needs the extra [train]. Decoding runs `models.eagle3`.

Legend: B texts, N positions, E width of head and target, A taps, H heads, K key-value heads,
D head_dim, W draft vocabulary, S steps of the training-time test.

Position p holds the target's features at p and the embedding of token p + 1; it predicts token
p + 2. Step i of the training-time test starts from the previous step's output at every position,
with the text moved on by i: it is what the head sees as it drafts its (i+1)-th token, given that
the drafts so far were right. At step i a query at p reads the keys of step 0 up to p, and of the
steps 1 to i only the one at p itself: the chain that it would have drafted.
Source: Li et al. 2025 (arXiv 2503.01840), section 3.2.
"""

from collections.abc import Sequence
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
        self.fc = nn.Linear(c.taps * e, e, bias=False)
        self.hidden_norm = Norm(e, c.eps)
        self.input_layernorm = Norm(e, c.eps)
        self.q_proj = nn.Linear(2 * e, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * e, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * e, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, e, bias=False)
        self.post_attention_layernorm = Norm(e, c.eps)
        self.gate_proj = nn.Linear(e, c.intermediate, bias=False)
        self.up_proj = nn.Linear(e, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, e, bias=False)
        self.norm = Norm(e, c.eps)
        self.lm_head = nn.Linear(e, c.vocabulary, bias=False)

    def forward(self, features: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Outputs before the final norm, [B, N, E] for each step.

        `features` [B, N, A*E]; `embedded` [B, N + steps - 1, E] holds the embedding of token p + 1
        at p.
        """
        n = features.shape[1]
        hidden, past, outs = self.fc(features), _Keys(self.config), []
        for i in range(steps):
            hidden = self._layer(hidden, embedded[:, i : i + n], past, i)
            outs.append(hidden)
            if self.config.feedback_norm:
                hidden = self.norm(hidden)
        return outs

    def logits(self, out: Tensor) -> Tensor:
        """[.., E] -> [.., W]."""
        return self.lm_head(self.norm(out))

    def _layer(self, g: Tensor, embedded: Tensor, past: "_Keys", i: int) -> Tensor:
        c, (b, n, _) = self.config, g.shape
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)  # [B, N, 2E]
        q = self.q_proj(x).view(b, n, c.heads, c.head_dim).transpose(1, 2)  # [B, H, N, D]
        k = self.k_proj(x).view(b, n, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, n, c.kv_heads, c.head_dim).transpose(1, 2)
        mixed = past.attend(q, k, v, i)  # [B, H, N, D]
        h = g + self.o_proj(mixed.transpose(1, 2).reshape(b, n, -1))
        y = self.post_attention_layernorm(h)
        return h + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class _Keys:
    """Keys and values of the steps so far, and attention over them."""

    def __init__(self, c: NetConfig) -> None:
        self.config = c
        self.held: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
        """q [B, H, N, D], k and v [B, K, N, D] of step i: the mixed values [B, H, N, D]."""
        group = self.config.heads // self.config.kv_heads
        q, k = (rotated(t, self.config.rope_base, i) for t in (q, k))
        self.held.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        k0, v0 = self.held[0]
        if i == 0:
            return F.scaled_dot_product_attention(q, k0, v0, is_causal=True)
        n, scale = q.shape[2], q.shape[3] ** -0.5
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k0.transpose(-1, -2)).masked_fill(hidden, float("-inf"))  # [B, H, N, N]
        own = [(q * kj).sum(-1, keepdim=True) for kj, _ in self.held[1:]]  # each [B, H, N, 1]
        shares = torch.softmax(torch.cat([scores, *own], -1) * scale, -1)
        mixed = shares[..., :n] @ v0
        for j, (_, vj) in enumerate(self.held[1:]):
            mixed = mixed + shares[..., n + j : n + j + 1] * vj
        return mixed


def rotated(x: Tensor, base: float, offset: int) -> Tensor:
    """Rotary embedding of [B, H, N, D] at positions offset .. offset + N - 1, halves paired."""
    n, d = x.shape[2], x.shape[3]
    inverse = base ** (-torch.arange(0, d, 2, dtype=torch.float32, device=x.device) / d)
    angle = torch.outer(torch.arange(offset, offset + n, device=x.device).float(), inverse)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at the end.

    `features` [B, N, (A+1)*E] with the final norm's output last, `tokens` i64 [B, N + S] where
    position p holds token p + 1, `wanted` bool [B, N]: positions from which drafts are learnt,
    `lengths` [B] rows each.
    """

    features: Tensor
    tokens: Tensor
    wanted: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class StepResult:
    """One step's loss sum over `count` positions, and where its guess was right.

    `known` bool [B, N]: a next token is known there; `right` is False elsewhere.
    """

    loss: Tensor
    count: int
    right: Tensor
    known: Tensor


@dataclass(frozen=True)
class Words:
    """The vocabularies: `embedding` and `output` of the target, f32 [V, E], and for the draft's
    W tokens `ids` [W], with `place` [V] the way back, -1 for tokens that the draft has not."""

    embedding: Tensor
    output: Tensor
    ids: Tensor
    place: Tensor

    @classmethod
    def of(cls, embedding: Tensor, output: Tensor, ids: Tensor) -> "Words":
        """With the way back computed."""
        place = torch.full((len(embedding),), -1, dtype=torch.long, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return cls(embedding, output[ids], ids, place)


def run_steps(
    net: DraftNet, batch: Batch, words: Words, steps: int, *, loss: str = "ce"
) -> list[StepResult]:
    """Losses and hits of each step.

    `loss` is "ce" (against the target's distribution over the draft vocabulary), "kl" (the same
    minus the target's entropy: equal gradients), or "hard" (against the text's next token).
    Positions whose next token the draft vocabulary lacks are not learnt from.
    """
    e = net.config.width
    truth = batch.features[..., -e:]  # [B, N, E]
    n = truth.shape[1]
    embedded = words.embedding[batch.tokens[:, : n + steps - 1]]
    outs = net(batch.features[..., :-e], embedded, steps)
    at = torch.arange(n, device=truth.device)
    laws = _Laws(truth, at[None, :] < batch.lengths[:, None], words.output, loss)
    found = []
    for i, out in enumerate(outs):
        # Step i at p guesses token p + 2 + i, whose chances the target gives at p + 1 + i.
        ahead = 1 + i
        known = batch.wanted & (at[None, :] + ahead < batch.lengths[:, None])
        rows, columns = known.nonzero(as_tuple=True)
        label = words.place[batch.tokens[rows, columns + ahead]]  # [M]
        guess = net.logits(out[rows, columns])  # [M, W]
        covered = label >= 0
        total = laws.loss(guess[covered], (rows[covered], columns[covered] + ahead), label[covered])
        right = torch.zeros_like(known)
        right[rows, columns] = guess.argmax(-1) == label
        found.append(StepResult(total, int(covered.sum()), right, known))
    return found


class _Laws:
    """The target's distributions over the draft vocabulary, computed once for all steps.

    `truth` [B, N, E] holds final hidden rows, of which `real` bool [B, N] are no padding; `output`
    [W, E].
    """

    def __init__(self, truth: Tensor, real: Tensor, output: Tensor, kind: str) -> None:
        self.kind = kind
        if kind == "hard":
            return
        self.row = torch.full(real.shape, -1, dtype=torch.long, device=truth.device)
        self.row[real] = torch.arange(int(real.sum()), device=truth.device)
        with torch.no_grad():
            self.law = torch.softmax(truth[real] @ output.T, -1)  # [rows, W]

    def loss(self, guess: Tensor, where: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
        """Summed loss of M rows of draft logits [M, W], whose laws stand at `where`."""
        if self.kind == "hard":
            return F.cross_entropy(guess, label, reduction="sum")
        with torch.no_grad():
            law = self.law[self.row[where]]  # [M, W]
            least = (law * torch.log(law.clamp_min(1e-30))).sum() if self.kind == "kl" else 0.0
        return least - (law * torch.log_softmax(guess, -1)).sum()


def accepted_lengths(results: Sequence[StepResult], chain: int) -> tuple[float, list[float]]:
    """Mean tokens per round, the bonus counted, of greedy chains; and the hit rate of each step.

    Rounds follow one another through each text as in decoding: the next begins after what the
    last one won.
    """
    hits = [float(r.right.sum()) / max(1, int(r.known.sum())) for r in results]
    rounds = tokens = 0
    right = torch.stack([r.right for r in results[:chain]]).cpu().numpy()  # [S, B, N]
    known = results[0].known.cpu().numpy()
    for b in range(known.shape[0]):
        positions = known[b].nonzero()[0]
        p, stop = (int(positions[0]), int(positions[-1])) if len(positions) else (1, 0)
        while p <= stop:
            won = 1
            for i in range(len(right)):
                if not right[i, b, p]:
                    break
                won += 1
            rounds, tokens, p = rounds + 1, tokens + won, p + won
    return tokens / max(1, rounds), hits
