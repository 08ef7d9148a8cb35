"""How well a model foretells a text, and how far it is from another model of the same vocabulary.

Legend: N tokens that are scored, V vocabulary.

The text is cut into chunks of so many tokens, each read from an empty cache, and what lies in a
chunk's second half is scored: it has seen half a chunk and more. So does llama.cpp's
`llama-perplexity`, whose figures these are to be compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph import Array, InputError
from ggraph.decode.runner import Runner
from ggraph.text.tokenizer import Tokenizer

ROWS = 64  # of logits at a time, which bounds what is beside them in float64
Report = Callable[[int, int], None]  # chunks done, of so many


@dataclass(frozen=True, eq=False)
class Losses:
    """Of each scored token, f64 [N], minus the logarithm of its chance."""

    each: Array

    @property
    def perplexity(self) -> float:
        """e to the mean."""
        return float(np.exp(self.each.mean()))

    @property
    def error(self) -> float:
        """The perplexity's standard error."""
        spread = float(self.each.std(ddof=1)) if len(self.each) > 1 else float("inf")
        return self.perplexity * spread / float(np.sqrt(len(self.each)))


@dataclass(frozen=True, eq=False)
class Distance:
    """From a base model to another: Kullback-Leibler divergences f64 [N], in nats, and whether the
    likeliest token is the same, bool [N]."""

    divergences: Array
    same: Array

    def told(self) -> dict[str, float]:
        """The figures that are usual."""
        found = self.divergences
        quantiles = {f"{p:g} %": float(np.quantile(found, p / 100)) for p in (50, 95, 99)}
        return {
            "mean": float(found.mean()), **quantiles, "most": float(found.max()),
            "same likeliest token": float(self.same.mean()),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Judgement:
    """What came of a text; of the base and the distance from it, where there is one."""

    chunks: int
    losses: Losses
    base: Losses | None = None
    distance: Distance | None = None

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        found: dict[str, Any] = {
            "chunks": self.chunks, "tokens": len(self.losses.each),
            "perplexity": self.losses.perplexity, "error": self.losses.error,
        }  # fmt: skip
        if self.base is not None and self.distance is not None:
            found["base"] = {"perplexity": self.base.perplexity, "error": self.base.error}
            found["ratio"] = self.losses.perplexity / self.base.perplexity
            found["divergence"] = self.distance.told()
        return found


def chunked(tokenizer: Tokenizer, text: str, size: int, most: int | None = None) -> list[list[int]]:
    """The text's tokens by chunks of `size`, at most so many, without what is left over; each
    begins with what every prompt begins with, in place of as many tokens. InputError for a text of
    less than a chunk."""
    ids, head = tokenizer.encode(text), tokenizer.encode("")
    starts = range(0, len(ids) - size + 1, size)[:most]
    if not starts:
        raise InputError(f"the text has {len(ids)} tokens, which make no chunk of {size}")
    return [[*head, *ids[i + len(head) : i + size]] for i in starts]


def judged(
    runner: Runner,
    chunks: Sequence[Sequence[int]],
    base: Runner | None = None,
    report: Report = lambda done, total: None,
) -> Judgement:
    """Score the second half of each chunk, beside a base model where one is given. InputError for a
    base of another vocabulary."""
    model = runner.model
    if base is not None and base.model.vocab_size != model.vocab_size:
        raise InputError(
            f"{base.model.name} has {base.model.vocab_size} tokens, {model.name} "
            f"{model.vocab_size}: they cannot be compared"
        )
    losses, others, far = list[Array](), list[Array](), list[tuple[Array, Array]]()
    for i, ids in enumerate(chunks):
        first = len(ids) // 2
        said, meant = _logits(runner, ids, first), ids[first + 1 :]
        own = None if base is None else _logits(base, ids, first)
        for at in range(0, len(meant), ROWS):
            part, wanted = _logarithms(said[at : at + ROWS]), meant[at : at + ROWS]
            losses.append(_losses(part, wanted))
            if own is not None:
                truth = _logarithms(own[at : at + ROWS])
                others.append(_losses(truth, wanted))
                far.append(_apart(truth, part))
        report(i + 1, len(chunks))
    told = Losses(np.concatenate(losses))
    if base is None:
        return Judgement(len(chunks), told)
    divergences, same = (np.concatenate(x) for x in zip(*far, strict=True))
    return Judgement(len(chunks), told, Losses(np.concatenate(others)), Distance(divergences, same))


def _logits(runner: Runner, ids: Sequence[int], first: int) -> Array:
    """f32 [.., V] of the rows that foretell what is behind token `first`."""
    runner.past = 0
    found: Array = runner.text(ids, every=True).logits[first:-1]
    return found


def _logarithms(logits: Array) -> Array:
    """Logarithms of chances, f64 [.., V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def _losses(chances: Array, tokens: Sequence[int]) -> Array:
    found: Array = -chances[np.arange(len(tokens)), list(tokens)]
    return found


def _apart(truth: Array, said: Array) -> tuple[Array, Array]:
    """Divergences of rows, and whether they are alike in what is likeliest."""
    chances = np.exp(truth)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        terms = chances * (truth - said)
    terms[chances == 0] = 0  # whatever the other says of what cannot be
    return terms.sum(axis=1), truth.argmax(axis=1) == said.argmax(axis=1)
