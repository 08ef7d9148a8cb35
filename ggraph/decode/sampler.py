"""Choosing the next token from logits.

The stages and their order are llama.cpp's: penalties, top-k, top-p, min-p, temperature, draw. A
`Sampler` holds all state explicitly (the last tokens and the random stream), so that speculation
can clone it, and draws exactly one uniform number per sampled token under every configuration, so
that plain and speculative decoding read the same stream. Not here: grammars, logit bias.

Legend: V tokens in the vocabulary, m candidates left, ids i64, laws f64.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggraph.decode.acceptance import only
from ggraph.decode.given import words
from ggraph.door import checked, fit
from ggraph.errors import InputError, shown
from ggraph.ops.draw import first_beyond, greatest, weights

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Law = npt.NDArray[np.float64]

# What stands for a row of logits where only the greatest are known: `top_k` of them, or more.
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32)])


@dataclass(frozen=True)
class SamplerConfig:
    """How to choose. Defaults are llama.cpp's; InputError names the value that is out of range.

    `temp` <= 0 takes the best token. `top_k` <= 0, `top_p` >= 1 and `min_p` = 0 switch their stage
    off, as do `repeat_penalty` 1 and the other penalties at 0. `repeat_last_n` tokens are looked
    at for penalties (0: none, -1: all). `seed` None: another stream each time.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        fit(self)
        for name, value in vars(self).items():
            _check(value is None or math.isfinite(value), name, "a finite number", value)
        _check(self.top_p >= 0, "top_p", ">= 0", self.top_p)
        _check(0 <= self.min_p <= 1, "min_p", "0 to 1", self.min_p)
        _check(self.repeat_penalty > 0, "repeat_penalty", "> 0", self.repeat_penalty)
        last = self.repeat_last_n
        _check(-1 <= last < 1 << 31, "repeat_last_n", "-1 to 2147483647", last)
        _check(self.seed is None or self.seed >= 0, "seed", ">= 0", self.seed)

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temp <= 0

    @property
    def stages(self) -> tuple[int, float, float, float]:
        """What a draw goes by where nothing is penalised: top-k, temperature, top-p, min-p."""
        return self.top_k, self.temp, self.top_p, self.min_p

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the law."""
        active = self.repeat_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return bool(active) and self.repeat_last_n != 0


class Sampler:
    """Samples tokens for one text. `accept` every token that is kept, the prompt's included."""

    @checked
    def __init__(self, config: SamplerConfig, vocab_size: int) -> None:
        if vocab_size < 1:
            raise InputError(f"sampler: vocabulary of {vocab_size} tokens")
        self.config = config
        self.vocab_size = vocab_size
        self._random = np.random.Generator(np.random.PCG64(config.seed))
        self._ahead: deque[float] = deque()  # numbers that were looked at, but not used
        last = None if config.repeat_last_n < 0 else config.repeat_last_n
        self._window: deque[int] = deque(maxlen=last)
        self._counts: Counter[int] = Counter()

    def sample(self, logits: Logits) -> int:
        """The next token for `logits` f32 [V], or for the greatest of them, CANDIDATE [k], or the
        one that a device took of them, i32 [1]. State changes only by one uniform number.

        The token is the first, in order of ids, at which the summed law exceeds that number.
        InputError for logits of another shape, with NaN or +inf, or with nothing above -inf.
        """
        u = self.uniform()
        if isinstance(logits, np.ndarray) and logits.dtype.kind == "i":
            return only(logits)
        ids, law = self.law(logits)
        return int(ids[first_beyond(law, u)])

    def probabilities(self, logits: Logits) -> Law:
        """The law f64 [V] that `sample` draws from: all stages applied, sums to 1."""
        out = np.zeros(self.vocab_size)
        ids, law = self.law(logits)
        out[ids] = law / np.cumsum(law)[-1]
        return out

    def law(self, given: npt.NDArray[Any]) -> tuple[Ids, Law]:
        """The same by candidates: their ids [m], in order, and their law [m], times its sum."""
        if isinstance(given, np.ndarray) and given.dtype == CANDIDATE:
            known, logits = self._candidates(given)
            ids, law = self._law_of(logits)
            return known[ids], law
        return self._law_of(self._penalised(self._checked(given)))

    def accept(self, token: int) -> None:
        """Note that `token` stands in the text now. InputError when it is out of range."""
        whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not whole or not 0 <= token < self.vocab_size:
            raise InputError(f"sampler: token {shown(token)}, expected 0 to {self.vocab_size - 1}")
        if not self.config.penalises:
            return
        if len(self._window) == self._window.maxlen:
            old = self._window[0]
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
        self._window.append(token)
        self._counts[token] += 1

    def accept_all(self, tokens: Iterable[int]) -> None:
        """`accept` each of `tokens` in order, or the token in whose place a row is given."""
        if not isinstance(tokens, Iterable):
            raise InputError(f"sampler: expected several tokens, got {shown(tokens)}")
        for token in words([*tokens]):
            self.accept(token)

    def clone(self) -> "Sampler":
        """An equal sampler with its own state: both go on alike from here."""
        other = Sampler(self.config, self.vocab_size)
        other._random.bit_generator.state = self._random.bit_generator.state
        other._ahead = self._ahead.copy()
        other._window = self._window.copy()
        other._counts = self._counts.copy()
        return other

    def uniform(self) -> float:
        """The next number of the stream, in [0, 1)."""
        return self._ahead.popleft() if self._ahead else float(self._random.random())

    @checked
    def ahead(self, places: Sequence[int]) -> Law:
        """The numbers f64 [n] at these places of the stream from here on; none is used up."""
        for _ in range(len(self._ahead), max(places, default=-1) + 1):
            self._ahead.append(float(self._random.random()))
        return np.array([self._ahead[p] for p in places], np.float64)

    def _checked(self, logits: Logits) -> Logits:
        if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
            raise InputError(f"logits: expected an array of floats, got {shown(logits)}")
        if logits.shape != (self.vocab_size,):
            raise InputError(f"logits: expected shape ({self.vocab_size},), got {logits.shape}")
        return logits

    def _penalised(self, logits: Logits) -> Logits:
        """A copy with penalties, f32 [V]; the same array when there are none."""
        if not self._counts:
            return logits
        c = self.config
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))  # [n]
        seen = np.fromiter(self._counts.values(), np.float32, len(self._counts))  # [n]
        old = logits[ids]
        # Dividing a negative logit would raise it, so the penalty multiplies there.
        new = np.where(old <= 0, old * c.repeat_penalty, old / c.repeat_penalty)
        out = logits.copy()
        out[ids] = new - seen * c.frequency_penalty - c.presence_penalty
        return out

    def _candidates(self, found: npt.NDArray[Any]) -> tuple[Ids, Logits]:
        """The ids [k], ascending, and logits [k] of the greatest."""
        most = self.vocab_size if self.config.top_k <= 0 else self.config.top_k
        least = 1 if self.config.greedy else min(most, self.vocab_size)
        if self.config.penalises or found.ndim != 1 or len(found) < least:
            raise InputError(
                f"logits: the greatest {len(found)} alone do not decide with {self.config}"
            )
        found = np.sort(found, order="id")
        return found["id"].astype(np.int64), found["logit"]

    def _law_of(self, logits: Logits) -> tuple[Ids, Law]:
        """The same of logits f32 [n], by their places."""
        c, best = self.config, _best(logits)
        if c.greedy:
            return np.array([best]), np.ones(1)
        ids = greatest(logits, c.top_k)
        return ids, weights(logits[ids].astype(np.float64), c.temp, c.top_p, c.min_p)


def _best(logits: Logits) -> int:
    """The lowest id with the greatest logit. InputError when that is no number."""
    best = int(np.argmax(logits))  # argmax stops at a NaN, so one look finds any
    if not math.isfinite(logits[best]):
        raise InputError(f"logits: greatest value is {logits[best]} at id {best}")
    return best


def _check(ok: bool, name: str, expected: str, got: Any) -> None:
    if not ok:
        raise InputError(f"{name}: expected {expected}, got {got!r}")
