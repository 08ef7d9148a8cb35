"""What every training of a head shares: options, beginning, optimiser step, batches.

Needs PyTorch (extra [train]). Legend: E width, W draft vocabulary, V target vocabulary.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ggraph import Array, InputError

from ..registry import Model
from .data import Text
from .net import DraftNet, NetConfig
from .round import Rounding, check_kind
from .steps import WHOLE, Batch, Lesson, StepResult, Words, accepted_lengths, run_steps

LOG = "training.jsonl"
LOSSES = ("ce", "kl", "hard")
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainOptions:
    """How a head is trained. `draft_vocab` of 0 keeps the whole vocabulary.

    The first `single` share of the tokens is learnt with one step, which is cheaper, the rest with
    `steps`. `prompts` is the share of the prompts' positions that is learnt from beside all of the
    answers'. `alive` and `candidates` leave
    out what teaches little (`steps.Lesson`); 0 keeps everything. With `rounding` steps are
    computed with matrices as a GGUF file of that type would give them back (`round`); with `bf16`
    products are made in bfloat16.
    """

    draft_vocab: int = 8192
    steps: int = 3
    step_weight: float = 0.8
    loss: str = "ce"
    rate: float = 1e-3
    warm_up: float = 0.03
    clip: float = 1.0
    batch_tokens: int = 2048
    epochs: float = 2.0
    single: float = 0.3
    prompts: float = 1.0
    feedback_norm: bool = False
    alive: int = 2
    candidates: int = 512
    warm_start: bool = True
    rounding: str | None = None
    bf16: bool = False
    seed: int = 0
    save_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r}; known: {', '.join(LOSSES)}")
        if self.draft_vocab < 0 or not 1 <= self.steps <= 16 or self.batch_tokens < 8:
            raise InputError(
                f"draft vocabulary {self.draft_vocab}, {self.steps} steps, "
                f"{self.batch_tokens} tokens a batch: out of range"
            )
        if not 0 < self.rate < 1 or not 0 <= self.warm_up < 1 or self.clip <= 0:
            raise InputError(
                f"rate {self.rate}, warm-up {self.warm_up}, clip {self.clip}: out of range"
            )
        if self.alive < 0 or self.candidates < 0:
            raise InputError(
                f"alive {self.alive}, {self.candidates} candidates: expected 0 (all) or more"
            )
        if self.rounding is not None:
            check_kind(self.rounding)
        if not 0 < self.epochs <= 1000 or not 0 <= self.single <= 1 or not 0 <= self.prompts <= 1:
            raise InputError(
                f"{self.epochs} epochs, single {self.single}, prompts {self.prompts}: out of range"
            )


@dataclass(frozen=True, eq=False)
class Target:
    """What training needs of the target: embedding and output matrix f32 [V, E]."""

    model: Model
    embedding: Array
    output: Array

    @classmethod
    def of(cls, model: Model) -> "Target":
        """Read both matrices; they are one where the checkpoint ties them."""
        embedding = model.catalogue["token_embd.weight"].float32()
        output = model.catalogue.get("output.weight")
        return cls(model, embedding, embedding if output is None else output.float32())


def fresh(target: Target, taps: int, ids: Array, options: TrainOptions) -> DraftNet:
    """A head before its first step, over the target ids [W]."""
    net = DraftNet(net_config(target.model, taps, len(ids), options))
    if options.warm_start:
        warm_start(net, target, ids)
    return net


def words_of(target: Target, ids: Array, device: Any) -> Words:
    """The target's tables and the head's ids [W], on the device."""
    arrays = (target.embedding, target.output, np.asarray(ids, np.int64))
    return Words.of(*(torch.from_numpy(a).to(device) for a in arrays))


def net_config(model: Model, taps: int, vocabulary: int, options: TrainOptions) -> NetConfig:
    """A head as wide as its target, with the target's heads, feed-forward and rotary base."""
    c = model.config
    return NetConfig(
        width=c.hidden_size,
        taps=taps,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        intermediate=c.intermediate_size or 4 * c.hidden_size,
        vocabulary=vocabulary,
        rope_base=c.rope.freq_base,
        eps=c.rms_norm_eps,
        feedback_norm=options.feedback_norm,
    )


def frequent_ids(
    texts: Iterable[Text], vocabulary: int, wanted: int, beside: Array | None = None
) -> Array:
    """The `wanted` tokens that these answers use most, ascending i64 [W]; none of `beside`."""
    counts = np.zeros(vocabulary, np.int64)
    for text in texts:
        np.add.at(counts, text.tokens[text.prompt_length :], 1)
    if beside is not None:
        counts[beside] = -1
    return np.sort(np.argsort(-counts, kind="stable")[:wanted])


def warm_start(net: DraftNet, target: Target, ids: Array) -> None:
    """Begin with the target's last layer on the feature half, its rows of the output matrix, and
    the last tap passed through."""
    c, model = net.config, target.model
    blk = f"blk.{model.layer_count - 1}"
    e = c.width

    def stored(name: str) -> Any:
        return torch.from_numpy(model.catalogue[name].float32())

    with torch.no_grad():
        net.fc.weight.normal_(0, 1e-3)
        net.fc.weight[:, -e:] += torch.eye(e)
        net.lm_head.weight.copy_(torch.from_numpy(target.output[ids]))
        net.norm.weight.copy_(stored("output_norm.weight"))
        net.hidden_norm.weight.copy_(stored(f"{blk}.attn_norm.weight"))
        net.input_layernorm.weight.copy_(stored(f"{blk}.attn_norm.weight"))
        net.post_attention_layernorm.weight.copy_(stored(f"{blk}.ffn_norm.weight"))
        for part, heads in (("q", c.heads), ("k", c.kv_heads), ("v", 0)):
            weight = stored(f"{blk}.attn_{part}.weight")  # [H*D, E]
            if heads and model.config.rope.mode == "normal":
                weight = half_split(weight, heads)
            wide = getattr(net, f"{part}_proj").weight
            wide.normal_(0, 5e-3)
            wide[:, e:] += weight
        net.o_proj.weight.copy_(stored(f"{blk}.attn_output.weight"))
        if f"{blk}.ffn_gate.weight" in model.catalogue:
            for part in ("gate", "up", "down"):
                getattr(net, f"{part}_proj").weight.copy_(stored(f"{blk}.ffn_{part}.weight"))


def half_split(rows: Any, heads: int) -> Any:
    """Rows [H*D, E] from interleaved rotary pairs to half-split ones, as heads store them."""
    wide = rows.shape[1]
    return rows.view(heads, -1, 2, wide).transpose(1, 2).reshape(-1, wide)


def optimizer_of(net: DraftNet, rate: float) -> Any:
    """AdamW; norms do not decay."""
    decayed = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def is_held(t: Text) -> bool:
    """Whether a text is only tested on: about one of 32, by a hash of its index (Fibonacci's). A
    remainder of the index would go with `AnswerOptions.sampled_every`, and all or none of the texts
    tested on would be sampled."""
    return (t.index * 0x9E3779B1 & 0xFFFFFFFF) >> 27 == 31


def tells(t: Text) -> bool:
    """Whether a text has an answer that a draft can be held against: two tokens at least."""
    return t.prompt_length + 1 < len(t.tokens)


def stepped(
    net: DraftNet, batch: Batch, words: Words, steps: int, lesson: Lesson = WHOLE
) -> list[StepResult]:
    """What so many steps give; on a GPU their products are in bfloat16."""
    kind = batch.features.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        return run_steps(net, batch, words, steps, lesson)


def descend(
    net: DraftNet,
    optimizer: Any,
    batch: Batch,
    words: Words,
    o: TrainOptions,
    done: float,
    number: int,
    rounding: Rounding | None = None,
) -> StepResult:
    """One optimiser step after a share `done` of the training, on the batch of that number and the
    steps' mean losses, later steps weighing less: the first step's result. What is rounded for them
    is exact again before it moves."""
    for group in optimizer.param_groups:
        group["lr"] = rate_at(done, o)
    if rounding is not None:
        rounding.apply()
    results = stepped(net, batch, words, 1 if done < o.single else o.steps, lesson_of(o, number))
    weighted = [o.step_weight**i * r.loss / max(1, r.count) for i, r in enumerate(results)]
    optimizer.zero_grad(set_to_none=True)
    torch.stack(weighted).sum().backward()
    if rounding is not None:
        rounding.restore()
    torch.nn.utils.clip_grad_norm_(net.parameters(), o.clip)
    optimizer.step()
    return results[0]


def mean_loss(result: StepResult) -> float:
    """Of each position."""
    return float(result.loss.detach()) / max(1, result.count)


def figures(results: Sequence[Sequence[StepResult]]) -> tuple[float, list[float]]:
    """Accepted length and hit rates over batches of held-out texts, one step or more each."""
    parts = [accepted_lengths(r, len(r)) for r in results]
    weights = [float(r[0].known.sum()) for r in results]
    mean = float(np.average([p[0] for p in parts], weights=weights))
    return mean, np.average([p[1] for p in parts], axis=0, weights=weights).tolist()


def tell(out: Path, entry: dict[str, Any], report: Report | None) -> None:
    """Append an entry to the log in the folder `out`, and pass it on."""
    with open(out / LOG, "a", encoding="utf-8") as f:
        f.write(json.dumps(entry) + "\n")
    if report is not None:
        report(entry)


def positions_of(t: Text, share: float, seed: Sequence[int] = ()) -> Array:
    """Positions to learn from, bool [N - 1]: all of the answer, and a share of the prompt's."""
    rows, answer = len(t.tokens) - 1, max(0, t.prompt_length - 1)
    wanted = np.arange(rows) >= answer
    if share > 0:
        wanted |= np.random.default_rng((*seed, t.index)).random(rows) < share
    return wanted


def length_of(t: Text) -> int:
    """Tokens of a text."""
    return len(t.tokens)


def packed(texts: Sequence[Text], most: int) -> Iterator[list[Text]]:
    """Runs of texts, sorted by length, that pad to at most `most` positions."""
    batch: list[Text] = []
    for t in texts:
        if batch and (len(batch) + 1) * len(t.tokens) > most:
            yield batch
            batch = []
        batch.append(t)
    if batch:
        yield batch


def lesson_of(o: TrainOptions, batch: int) -> Lesson:
    """What the batch of this number teaches; its random candidates follow from the number."""
    return Lesson(o.loss, o.alive, o.candidates, o.seed * 1_000_003 + batch)


def rate_at(done: float, o: TrainOptions) -> float:
    """Learning rate after a share `done` of the training: warm-up, then a cosine to a tenth."""
    if done < o.warm_up:
        return o.rate * max(done, 1e-3) / o.warm_up
    progress = (done - o.warm_up) / (1 - o.warm_up)
    return o.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))
