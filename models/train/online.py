"""Training of a head on a GPU within a time limit: answers, then features and learning.

What `models.train.loop` reads from shards is made here on the device: texts first, for a share of
the time, then batch by batch the target's features, so that nothing but tokens is kept.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ggraph import Array, InputError

from .data import Text
from .net import DraftNet, Tensor
from .parts import (
    Report,
    Target,
    TrainOptions,
    descend,
    figures,
    frequent_ids,
    fresh,
    is_held,
    length_of,
    mean_loss,
    optimizer_of,
    packed,
    positions_of,
    stepped,
    tell,
    tells,
    words_of,
)  # fmt: skip
from .steps import Batch, Words
from .target import TorchTarget, Writing, write_texts

SORTED = 64  # batches whose texts are sorted by length together
NONE = np.empty((0, 0), np.float16)  # features that nobody kept


@dataclass(frozen=True)
class OnlineOptions:
    """`seconds` in all, of which a share goes to making texts, `wave` of them at a time.

    `own_share` of the texts have prompts that the target makes up. `held` texts are tested on.
    """

    seconds: float
    texts_share: float = 0.35
    wave: int = 2048
    own_share: float = 0.75
    held: int = 256
    tell_seconds: float = 15.0

    def __post_init__(self) -> None:
        if not 0 < self.texts_share < 1 or not 0 <= self.own_share <= 1:
            raise InputError(f"shares {self.texts_share}, {self.own_share}: expected 0 to 1")
        if self.seconds <= 0 or self.wave < 1 or self.held < 1:
            raise InputError(
                f"{self.seconds} seconds, waves of {self.wave}, {self.held} held: "
                "expected positive numbers"
            )


@dataclass(eq=False)
class OnlineTraining:
    """One training. `texts` may be given instead of made."""

    target: Target
    taps: Sequence[int]
    how: Writing
    options: TrainOptions
    online: OnlineOptions
    out: Path
    report: Report | None = None
    texts: list[Text] = field(default_factory=list)

    def __post_init__(self) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        dtype = torch.bfloat16 if cuda else torch.float32
        self.torch_target = TorchTarget(self.target.model, self.device, dtype)
        self.out.mkdir(parents=True, exist_ok=True)

    def write(self, prompts: Sequence[Sequence[int]]) -> int:
        """Make texts until their share of the time is over; returns their tokens.

        `prompts` are token ids that are answered once each, in order.
        """
        o, begun = self.online, time.perf_counter()
        random = torch.Generator(self.device).manual_seed(self.options.seed)
        left = list(prompts)
        while time.perf_counter() - begun < o.seconds * o.texts_share:
            count = min(len(left), round(o.wave * (1 - o.own_share)))
            given, left = left[:count], left[count:]
            made = write_texts(self.torch_target, self.how, given, o.wave - count, random)
            rows = [x.cpu().numpy() for x in (made.tokens, made.prompts, made.lengths)]
            for tokens, prompt, length in zip(*rows, strict=True):
                if prompt + 4 < length:  # there is an answer to learn from
                    kept = tokens[:length].astype(np.int32)
                    self.texts.append(Text(len(self.texts), int(prompt), kept, NONE))
            self._tell({"texts": len(self.texts), "tokens": sum(map(length_of, self.texts))})
        return sum(map(length_of, self.texts))

    def learn(self, state: Any = None) -> tuple[DraftNet, Array]:
        """Train for the rest of the time, from `state` (a head's tensors) where there is one."""
        o, model = self.options, self.target.model
        held = [t for t in self.texts if is_held(t) and tells(t)][: self.online.held]
        learnt = [t for t in self.texts if not is_held(t)]
        if not held or not learnt:
            raise InputError(f"{len(self.texts)} texts are too few: none is left for testing")
        torch.manual_seed(o.seed)
        ids = frequent_ids(learnt, model.vocab_size, o.draft_vocab or model.vocab_size)
        net = fresh(self.target, len(self.taps), ids, o)
        if state is not None:
            net.load_state_dict(state)
        net.to(self.device)
        self._run(net, words_of(self.target, ids, self.device), learnt, held)
        return net, ids

    def _run(
        self, net: DraftNet, words: Words, learnt: Sequence[Text], held: Sequence[Text]
    ) -> None:
        o, optimizer = self.options, optimizer_of(net, self.options.rate)
        budget = self.online.seconds * (1 - self.online.texts_share)
        begun = told = time.perf_counter()
        seen = 0
        for number, texts in enumerate(self._batches(learnt)):
            done = (time.perf_counter() - begun) / budget
            if done >= 1:
                break
            batch = self._batch(texts, o.prompts, (o.seed, number))
            first = descend(net, optimizer, batch, words, o, done, number)
            seen += sum(map(length_of, texts))
            if time.perf_counter() - told > self.online.tell_seconds:
                told = time.perf_counter()
                told_of = {"tokens": seen, "loss": round(mean_loss(first), 4)}
                self._tell({**told_of, **self.tested(net, words, held)})
        self._tell({"tokens": seen, **self.tested(net, words, held)})

    def _batches(self, texts: Sequence[Text]) -> Iterator[list[Text]]:
        """Endless batches of about `batch_tokens`, texts of like length together."""
        r = np.random.default_rng(self.options.seed)
        wide = max(1, self.options.batch_tokens // self.how.length) * SORTED
        while True:
            order = r.permutation(len(texts))
            for first in range(0, len(order), wide):
                some = sorted((texts[i] for i in order[first : first + wide]), key=length_of)
                batches = list(packed(some, self.options.batch_tokens))
                for i in r.permutation(len(batches)):
                    yield batches[i]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _batch(
        self, texts: Sequence[Text], prompts: float = 0.0, seed: Sequence[int] = ()
    ) -> Batch:
        """Texts as one padded batch, with the features that the target gives now."""
        lengths = np.array([len(t.tokens) for t in texts])
        n, steps = int(lengths.max()), self.options.steps
        tokens = np.zeros((len(texts), n + steps), np.int64)
        wanted = np.zeros((len(texts), n - 1), bool)
        for row, seen, t in zip(tokens, wanted, texts, strict=True):
            row[: len(t.tokens)] = t.tokens
            seen[: len(t.tokens) - 1] = positions_of(t, prompts, seed)
        ids = torch.from_numpy(tokens).to(self.device)
        features: Tensor = self.torch_target.features(ids[:, : n - 1], self.taps).float()
        masks = (torch.from_numpy(a).to(self.device) for a in (wanted, lengths - 1))
        return Batch(features, ids[:, 1:], *masks)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def tested(self, net: DraftNet, words: Words, held: Sequence[Text]) -> dict[str, Any]:
        """Accepted length (bonus counted) and hit rates on the answers of held-out texts."""
        results = [
            stepped(net, self._batch(texts), words, self.options.steps)
            for texts in packed(sorted(held, key=length_of), self.options.batch_tokens)
        ]
        length, hits = figures(results)
        return {"accepted_length": round(length, 4), "hits": [round(h, 4) for h in hits]}

    def _tell(self, entry: dict[str, Any]) -> None:
        tell(self.out, entry, self.report)
