"""Lessons: the losses of a head's steps on some texts, and what its guesses were worth.

Needs PyTorch (extra [train]). Legend: B texts, N positions, M positions of some texts one after
another, E width, A taps, V target vocabulary, W draft vocabulary, C chosen draft tokens, S steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .net import DraftNet, Past, Tensor, product

LIKELY = 8  # tokens of each law that are always among the chosen ones


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


@dataclass(frozen=True)
class Lesson:
    """What is learnt from a batch.

    `loss` is "ce" (against the target's distribution over the draft vocabulary), "kl" (the same
    minus the target's entropy: equal gradients), or "hard" (against the text's next token).
    With `alive` > 0 later steps are taken only where all guesses before had the text's token among
    their best `alive`: elsewhere a chain has ended. With `candidates` > 0 the losses run over the
    laws' likely tokens, the text's, and so many others drawn by `seed`, in place of all W.
    """

    loss: str = "ce"
    alive: int = 0
    candidates: int = 0
    seed: int = 0


WHOLE = Lesson()


def run_steps(
    net: DraftNet, batch: Batch, words: Words, steps: int, lesson: Lesson = WHOLE
) -> list[StepResult]:
    """Losses and hits of each step.

    Positions whose next token the draft vocabulary lacks are not learnt from.
    """
    e, n = net.config.width, batch.features.shape[1]
    at = torch.arange(n, device=batch.tokens.device)
    real = at < batch.lengths[:, None]  # [B, N]
    labels = words.place[batch.tokens]  # [B, N + S]
    laws = _Laws(
        batch.features[..., -e:], real, labels[:, :n], words.output, lesson, net.lm_head.bf16
    )
    out, past = net.first(batch.features[..., :-e], words.embedding[batch.tokens[:, :n]])
    # Step i at p guesses token p + 2 + i, whose chances the target gives at p + 1 + i.
    known = batch.wanted & (at + 1 < batch.lengths[:, None])
    past.rows, past.columns = known.nonzero(as_tuple=True)
    out, found = out[past.rows, past.columns], []
    for ahead in range(1, steps + 1):
        guess = net.logits(out, laws.chosen)  # [M, C]
        where = past.rows, past.columns + ahead
        label = laws.column(labels[where])  # [M]
        found.append(_result(laws.loss(guess, where, label), guess, label, past, known))
        if ahead == steps:
            break
        goes = past.columns + ahead + 1 < batch.lengths[past.rows]
        if lesson.alive:
            goes &= _among_best(guess.detach(), label, lesson.alive)
        which = goes.nonzero(as_tuple=True)[0]
        past.keep(which)
        token = batch.tokens[past.rows, past.columns + ahead]
        out = net.further(out[which], words.embedding[token], past)
    return found


def _result(loss: Tensor, guess: Tensor, label: Tensor, past: Past, like: Tensor) -> StepResult:
    known, right = torch.zeros_like(like), torch.zeros_like(like)
    known[past.rows, past.columns] = True
    right[past.rows, past.columns] = guess.argmax(-1) == label
    return StepResult(loss, int((label >= 0).sum()), right, known)


def _among_best(guess: Tensor, label: Tensor, count: int) -> Tensor:
    """Whether fewer than `count` logits [M, C] are above the label's; False without a label."""
    own = guess.gather(1, label.clamp_min(0)[:, None])
    return (label >= 0) & ((guess > own).sum(-1) < count)


class _Laws:
    """The target's distributions over the draft tokens that count, once for all steps.

    `truth` [B, N, E] holds final hidden rows, of which `real` bool [B, N] are no padding, `labels`
    [B, N] the draft tokens (or -1) beside them; `output` [W, E]. `chosen` [C] is None for all W.
    """

    chosen: Tensor | None = None

    def __init__(
        self,
        truth: Tensor,
        real: Tensor,
        labels: Tensor,
        output: Tensor,
        lesson: Lesson,
        bf16: bool,
    ) -> None:
        self.kind = lesson.loss
        law = None
        if lesson.loss != "hard":
            self.row = torch.full(real.shape, -1, dtype=torch.long, device=truth.device)
            self.row[real] = torch.arange(int(real.sum()), device=truth.device)
            with torch.no_grad():
                law = torch.softmax(product(truth[real], output, bf16), -1)  # [rows, W]
        if lesson.candidates:
            self._choose(law, labels[real & (labels >= 0)], len(output), lesson)
        if law is not None and self.chosen is not None:
            law = law[:, self.chosen]
            law /= law.sum(-1, keepdim=True)
        self.law = law

    def _choose(self, law: Tensor | None, said: Tensor, total: int, lesson: Lesson) -> None:
        random = torch.Generator().manual_seed(lesson.seed)
        others = torch.randint(total, (lesson.candidates,), generator=random).to(said.device)
        likely = [] if law is None else [law.topk(min(LIKELY, total)).indices.flatten()]
        self.chosen = torch.unique(torch.cat([said, others, *likely]))
        self._column = torch.full((total,), -1, dtype=torch.long, device=said.device)
        self._column[self.chosen] = torch.arange(len(self.chosen), device=said.device)

    def column(self, label: Tensor) -> Tensor:
        """Where draft tokens [M] stand in the logits; -1 stays."""
        if self.chosen is None:
            return label
        return torch.where(label >= 0, self._column[label.clamp_min(0)], label)

    def loss(self, guess: Tensor, where: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
        """Summed loss of M rows of draft logits [M, C], whose laws stand at `where`; rows without a
        label do not count."""
        covered = label >= 0
        guess = guess[covered]
        if self.law is None:
            return F.cross_entropy(guess, label[covered], reduction="sum")
        with torch.no_grad():
            law = self.law[self.row[where][covered]]  # [M', C]
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
