"""A dense target in PyTorch: answers and features at the speed of a GPU.

Only training imports this file: it needs the extra [train]. On a GPU, features are computed again
for every batch, which costs less than keeping them; on the CPU `models.train.data` keeps them, from
ggraph's own kernels.

Legend: B texts, N tokens of a text, A taps, E width, H heads, K key-value heads, D head_dim,
L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ggraph import ModelError

from ..registry import Model
from .net import Tensor
from .prompts import OWN_TOKENS, Turn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOP_K = 40  # most tokens that sampling chooses from
LOOK = 16  # steps between looks whether all texts have ended


class TorchTarget:
    """The weights of a dense decoder on one device. ModelError for others, and for what it lacks:
    sliding windows, experts, scaled rotary embedding."""

    def __init__(self, model: Model, device: Tensor, dtype: Tensor) -> None:
        c = self.config = model.config
        r = c.rope
        scaled = r.freq_scale != 1.0 or r.ext_factor or r.attn_factor != 1.0
        if c.architecture not in FAMILIES or c.sliding_window or c.num_experts or scaled:
            raise ModelError(
                f"{model.name}: only plain dense targets ({', '.join(FAMILIES)}) run in PyTorch"
            )
        self.device, self.dtype = device, dtype

        def stored(name: str) -> Tensor:
            return torch.from_numpy(model.catalogue[name].float32()).to(device, dtype)

        self.weights = {n: stored(n) for n in model.catalogue if n != r.factors}
        self.output = self.weights.get("output.weight", self.weights["token_embd.weight"])
        factors = torch.ones(r.n_rot // 2)
        if r.factors in model.catalogue:  # which a config's become, too
            factors = torch.from_numpy(model.catalogue[r.factors].float32())
        powers = torch.arange(0, r.n_rot, 2, dtype=torch.float32) / r.n_rot
        self.inverse = (r.freq_base**-powers / factors).to(device)

    def features(self, tokens: Tensor, taps: Sequence[int]) -> Tensor:
        """[B, N, (A+1)*E] of token ids [B, N]: the taps, then the final norm's output."""
        hidden = F.embedding(tokens, self.weights["token_embd.weight"])
        turns = self._turns(torch.arange(tokens.shape[1], device=self.device))
        kept = []
        for i in range(self.config.num_hidden_layers):
            if i in taps:
                kept.append(hidden)
            hidden = self._layer(i, hidden, turns, None)
        order = sorted(taps)
        kept = [kept[order.index(t)] for t in taps]
        return torch.cat([*kept, self._norm(hidden, "output_norm")], -1)

    def logits(self, final: Tensor) -> Tensor:
        """[.., V] from the final norm's output."""
        return final @ self.output.T

    def next_logits(self, tokens: Tensor, position: int, cache: "Cache") -> Tensor:
        """Logits [B, V] after tokens [B], all at one position, whose keys join the cache."""
        hidden = F.embedding(tokens, self.weights["token_embd.weight"])[:, None]
        turns = self._turns(torch.tensor([position], device=self.device))
        for i in range(self.config.num_hidden_layers):
            hidden = self._layer(i, hidden, turns, (cache, position))
        return self.logits(self._norm(hidden[:, 0], "output_norm"))

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.outer(positions.float(), self.inverse)  # [N, n_rot / 2]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.config.rms_norm_eps).to(x) * weight

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _layer(
        self,
        i: int,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        cached: tuple["Cache", int] | None,
    ) -> Tensor:
        c, blk, (b, n, _) = self.config, f"blk.{i}", x.shape
        y = self._norm(x, f"{blk}.attn_norm")
        heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}
        q, k = (self._heads(y, f"{blk}.attn_{p}", h, turns) for p, h in heads.items())
        v = self._product(y, f"{blk}.attn_v").view(b, n, c.num_key_value_heads, c.head_dim)
        v = v.transpose(1, 2)  # [B, K, N, D]
        if cached is not None:
            k, v = cached[0].joined(i, cached[1], k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cached is None, enable_gqa=True)
        x = x + self._product(mixed.transpose(1, 2).reshape(b, n, -1), f"{blk}.attn_output")
        y = self._norm(x, f"{blk}.ffn_norm")
        gate, up = (self._product(y, f"{blk}.ffn_{p}") for p in ("gate", "up"))
        return x + self._product(F.silu(gate) * up, f"{blk}.ffn_down")

    def _heads(self, y: Tensor, name: str, heads: int, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries or keys [B, heads, N, D]."""
        b, n, _ = y.shape
        x = self._product(y, name).view(b, n, heads, self.config.head_dim)
        if f"{name}_norm.weight" in self.weights:
            x = self._norm(x, f"{name}_norm")
        return self._rotated(x.transpose(1, 2), turns)

    def _rotated(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = turns
        rotated = 2 * cos.shape[-1]
        part, rest = x[..., :rotated], x[..., rotated:]
        if self.config.rope.mode == "normal":
            a, b = part[..., 0::2], part[..., 1::2]
            whole = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            whole = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([whole, rest], -1)


class Cache:
    """Keys and values [L, B, K, N, D] of texts that grow together."""

    def __init__(self, target: TorchTarget, texts: int, length: int) -> None:
        c = target.config
        shape = (c.num_hidden_layers, texts, c.num_key_value_heads, length, c.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, device=target.device, dtype=target.dtype) for _ in range(2)
        )

    def joined(self, i: int, position: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Layer i's keys and values up to `position`, where k and v [B, K, 1, D] now stand."""
        self.keys[i, :, :, position] = k[:, :, 0]
        self.values[i, :, :, position] = v[:, :, 0]
        return self.keys[i, :, :, : position + 1], self.values[i, :, :, : position + 1]


@dataclass(frozen=True)
class Written:
    """Texts of tokens i64 [B, N], each `lengths` long, its answer from `prompts` on (both [B])."""

    tokens: Tensor
    prompts: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Writing:
    """How texts are made: at most `length` tokens, `sampled_every`-th answer at `temperature`, the
    others greedy. `ends` close an answer."""

    turn: Turn
    ends: Sequence[int]
    length: int = 384
    sampled_every: int = 4
    temperature: float = 0.7


@torch.no_grad()  # type: ignore[untyped-decorator]
def write_texts(
    target: TorchTarget, how: Writing, given: Sequence[Sequence[int]], own: int, random: Tensor
) -> Written:
    """Answers to the `given` prompts, and to `own` prompts that the target makes up first.

    All texts grow together, a token per step; `random` is a generator of the target's device.
    """
    device, count = target.device, len(given) + own
    forced = torch.full((count, how.length + len(how.turn.after)), -1, device=device)
    starts = [*given, *[how.turn.before] * own]
    for row, ids in zip(forced, starts, strict=True):
        row[: len(ids)] = torch.tensor(ids, device=device)
    prompts = torch.tensor([len(ids) for ids in starts], device=device)
    writing = torch.arange(count, device=device) >= len(given)
    limit = prompts + OWN_TOKENS
    ends = torch.tensor(list(how.ends), device=device)
    after = torch.tensor(how.turn.after, device=device)
    lengths = torch.full((count,), how.length, device=device)
    tokens = forced[:, : how.length].clone()
    cache = Cache(target, count, how.length)
    heat = _temperatures(count, how, device)
    for t in range(how.length - 1):
        logits = target.next_logits(tokens[:, t], t, cache)
        free = forced[:, t + 1] < 0
        token = _picked(logits.float(), torch.where(writing, 1.0, heat), random)
        ended = torch.isin(token, ends)
        closing = writing & free & (ended | (t + 1 >= limit))  # the own prompt is complete
        rows = closing.nonzero()[:, 0]
        if len(rows):
            forced[rows[:, None], t + 1 + torch.arange(len(after), device=device)] = after
            prompts[rows] = t + 1 + len(after)
            writing[rows] = False
        tokens[:, t + 1] = torch.where(forced[:, t + 1] < 0, token, forced[:, t + 1])
        over = free & ~closing & ~writing & ended
        lengths = torch.where(
            over, torch.minimum(lengths, torch.tensor(t + 2, device=device)), lengths
        )
        if t % LOOK == 0 and bool((lengths < how.length).all()):
            break
    prompts = torch.where(writing, lengths, prompts)  # unfinished ones have no answer
    at = torch.arange(how.length, device=device)
    return Written(torch.where(at < lengths[:, None], tokens, 0), prompts, lengths)


def _temperatures(count: int, how: Writing, device: Tensor) -> Tensor:
    at = torch.arange(count, device=device)
    sampled = at % how.sampled_every == how.sampled_every - 1 if how.sampled_every else at < 0
    return torch.where(sampled, how.temperature, 0.0)


def _picked(logits: Tensor, temperature: Tensor, random: Tensor) -> Tensor:
    """Tokens [B] of logits [B, V]: the best at temperature 0, else drawn among the `TOP_K` best."""
    best, ids = logits.topk(min(TOP_K, logits.shape[-1]), -1)
    law = torch.softmax(best / temperature.clamp_min(1e-6)[:, None], -1)
    drawn = torch.multinomial(law, 1, generator=random)
    chosen = torch.where(temperature[:, None] > 0, drawn, torch.zeros_like(drawn))
    return ids.gather(1, chosen)[:, 0]
