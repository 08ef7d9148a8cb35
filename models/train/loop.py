"""Training of an EAGLE-3 head from stored answers. Needs PyTorch (extra [train]).

Legend: B texts, N positions, E width, W draft vocabulary, S steps of the training-time test.

The target stays as it is: its embedding and its output matrix are read from the checkpoint, its
features from the shards of `models.train.data`. On the CPU the same seed gives the same head.
"""

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ggraph import Array, InputError

from ..run.outputs import write_whole
from .data import Text, apart, describe, read_shard, shards
from .net import DraftNet
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
    tell,
    tells,
    words_of,
)  # fmt: skip
from .round import Rounding
from .start import grown, started
from .steps import Batch, StepResult, run_steps

CHECKPOINT = "checkpoint.pt"
HELD = 64  # texts for testing
MIXED_SHARDS = 8  # shards whose texts are shuffled together


@dataclass(eq=False)
class _State:
    """Everything that a checkpoint keeps."""

    net: DraftNet
    optimizer: Any
    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0


def train(
    target: Target,
    data: Path,
    out: Path,
    options: TrainOptions,
    report: Report | None = None,
    start: Path | None = None,
) -> tuple[DraftNet, Array]:
    """Train, or go on from the checkpoint in `out`. Returns the head and its target ids [W].

    With `start` the training begins with that head (folder or GGUF) and its kind of feedback. Its
    draft vocabulary stays, and grows where `options.draft_vocab` is more.

    `report` is told of the loss and, on held-out texts, of the accepted length of chains of
    `options.steps` drafts. InputError where data, checkpoint and options do not fit.
    """
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = shards(data)
    held, total = surveyed(files, HELD)
    net, ids = _begun(target, data, files, options, start)
    net.to(device)
    if options.bf16:
        net.use_bf16()
    state = _State(net, optimizer_of(net, options.rate))
    _resume(out, state, options, ids)
    run = _Run(target, options, device, ids, state, out, report)
    run.all(files, held, int(total * options.epochs))
    return net, ids


def _begun(
    target: Target, data: Path, files: Sequence[Path], options: TrainOptions, start: Path | None
) -> tuple[DraftNet, Array]:
    """The head before its first step, and its target ids [W]."""
    taps, vocabulary = describe(data)["taps"], target.model.vocab_size
    if start is not None:
        net, ids = started(start, target.model, taps)
        more = min(options.draft_vocab or vocabulary, vocabulary) - len(ids)
        if more <= 0:
            return net, ids
        return grown(net, ids, draft_ids(files, vocabulary, more, beside=ids), target.output)
    ids = draft_ids(files, vocabulary, options.draft_vocab)
    return fresh(target, len(taps), ids, options), ids


def draft_ids(
    files: Sequence[Path], vocabulary: int, wanted: int, beside: Array | None = None
) -> Array:
    """The `wanted` tokens that answers use most, ascending i64 [W]; ties go to the lower id. None
    of `beside`."""
    if wanted == 0 or wanted >= vocabulary:
        return np.arange(vocabulary)
    return frequent_ids(
        (t for p in files for t in read_shard(p, features=False)), vocabulary, wanted, beside
    )


def surveyed(files: Sequence[Path], most: int | None = None) -> tuple[list[Text], int]:
    """Texts for testing, at most `most`, and the number of tokens of those to learn from.

    InputError where either are missing.
    """
    held: list[Text] = []
    total = 0
    for path in files:
        texts = read_shard(path, features=False)
        total += sum(len(t.tokens) for t in texts if not is_held(t))
        if (most is None or len(held) < most) and any(map(is_held, texts)):
            held += (apart(t) for t in read_shard(path) if is_held(t) and tells(t))
    if not held or not total:
        raise InputError(f"{len(files)} shards of data are too few: no text is left for testing")
    return held[:most], total


def _resume(out: Path, state: _State, options: TrainOptions, ids: Array) -> None:
    path = out / CHECKPOINT
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    held = torch.load(path, weights_only=True)
    fixed = ("draft_vocab", "feedback_norm", "seed")
    if any(held["options"][k] != asdict(options)[k] for k in fixed) or held["ids"] != ids.tolist():
        raise InputError(f"{path} was made with other options or data: remove it to start anew")
    state.net.load_state_dict(held["net"])
    state.optimizer.load_state_dict(held["optimizer"])
    state.batches, state.tokens, state.seconds = held["batches"], held["tokens"], held["seconds"]


@dataclass(eq=False)
class _Run:
    """One process's part of a training."""

    target: Target
    options: TrainOptions
    device: Any
    ids: Array
    state: _State
    out: Path
    report: Report | None

    def __post_init__(self) -> None:
        self.words = words_of(self.target, self.ids, self.device)
        kind = self.options.rounding
        self.rounding = Rounding(self.state.net, kind) if kind is not None else None

    def all(self, files: Sequence[Path], held: Sequence[Text], total: int) -> None:
        """Every epoch, from where the checkpoint stands, until `total` tokens are seen."""
        options, state = self.options, self.state
        begun = time.perf_counter() - state.seconds
        saved, seen, at, epoch = time.perf_counter(), 0, 0, 0
        if state.tokens >= total:
            return
        while seen < total:
            for texts in self._epoch(files, epoch):
                seen += sum(len(t.tokens) for t in texts)
                at += 1
                if at <= state.batches:
                    continue
                loss = self._batch(texts, state.tokens / total)
                state.batches, state.tokens = at, seen
                state.seconds = time.perf_counter() - begun
                if time.perf_counter() - saved > options.save_seconds or seen >= total:
                    saved = time.perf_counter()
                    self._save()
                    self._tell(loss, held, total)
                if seen >= total:
                    return
            epoch += 1

    def _epoch(self, files: Sequence[Path], epoch: int) -> Iterator[list[Text]]:
        """Batches of about `batch_tokens`, texts of like length together, in an order by seed."""
        r = np.random.default_rng((self.options.seed, epoch))
        order = r.permutation(len(files))
        for first in range(0, len(order), MIXED_SHARDS):
            mixed = order[first : first + MIXED_SHARDS]
            texts = [t for i in mixed for t in read_shard(files[i]) if not is_held(t)]
            texts = sorted((texts[i] for i in r.permutation(len(texts))), key=length_of)
            batches = list(packed(texts, self.options.batch_tokens))
            for i in r.permutation(len(batches)):
                yield batches[i]

    def _batch(self, texts: Sequence[Text], done: float) -> float:
        """One optimiser step after a share `done`; the mean loss of the first draft position."""
        o, net = self.options, self.state.net
        number = self.state.batches
        batch = batch_of(texts, o.steps, self.device, prompts=o.prompts, seed=(o.seed, number))
        optimizer, rounding = self.state.optimizer, self.rounding
        return mean_loss(descend(net, optimizer, batch, self.words, o, done, number, rounding))

    def tested(self, held: Sequence[Text]) -> tuple[float, list[float]]:
        """Accepted length and hit rates on held-out answers."""
        results: list[list[StepResult]] = []
        if self.rounding is not None:
            self.rounding.apply()
        with torch.no_grad():
            for texts in packed(sorted(held, key=length_of), self.options.batch_tokens):
                net, steps = self.state.net, self.options.steps
                batch = batch_of(texts, steps, self.device)
                results.append(run_steps(net, batch, self.words, steps))
        if self.rounding is not None:
            self.rounding.restore()
        return figures(results)

    def _tell(self, loss: float, held: Sequence[Text], total: int) -> None:
        length, hits = self.tested(held)
        state = self.state
        rate = state.tokens / max(state.seconds, 1e-9)
        entry = {
            "tokens": state.tokens,
            "of": total,
            "seconds": round(state.seconds, 1),
            "seconds_left": round((total - state.tokens) / max(rate, 1e-9), 1),
            "loss": round(loss, 4),
            "accepted_length": round(length, 4),
            "hits": [round(h, 4) for h in hits],
        }
        tell(self.out, entry, self.report)

    def _save(self) -> None:
        state, path = self.state, self.out / CHECKPOINT
        held = {
            "net": state.net.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "batches": state.batches,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "options": asdict(self.options),
            "ids": self.ids.tolist(),
        }
        packed = io.BytesIO()
        torch.save(held, packed)
        write_whole(path, packed.getvalue())


def batch_of(
    texts: Sequence[Text],
    steps: int,
    device: Any,
    *,
    prompts: float = 0.0,
    seed: Sequence[int] = (),
) -> Batch:
    """Texts as one padded batch on the device, with the tokens that `steps` steps look at, and a
    share `prompts` of the prompts' positions beside those of the answers."""
    lengths = [len(t.features) for t in texts]
    n, wide = max(lengths), texts[0].features.shape[1]
    features = np.zeros((len(texts), n, wide), np.float32)
    tokens = np.zeros((len(texts), n + steps), np.int64)
    wanted = np.zeros((len(texts), n), bool)
    for b, t in enumerate(texts):
        features[b, : lengths[b]] = t.features
        following = t.tokens[1 : n + steps + 1]
        tokens[b, : len(following)] = following
        wanted[b, : lengths[b]] = positions_of(t, prompts, seed)
    arrays = (features, tokens, wanted, np.array(lengths))
    return Batch(*(torch.from_numpy(a).to(device) for a in arrays))


def use_threads(count: int | None) -> None:
    """CPU threads of the training; None leaves PyTorch's choice."""
    if count is not None:
        torch.set_num_threads(count)
