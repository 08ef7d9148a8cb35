"""Many texts decoded together: one step serves every lane.

Legend: B lanes, L cache slots of a lane, T token rows of a step, E width.

Lane b owns the slots b*L .. (b+1)*L - 1 of one cache; the mask shows a row its own lane only, and
attention skips what is hidden. A row's bits do not depend on its neighbours, so that every text is
the one that decoding alone would give, whatever the number of lanes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.decode.acceptance import Pick
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Result, Runner
from ggraph.errors import InputError
from ggraph.tensor import Array

SLOT_STEP = 128  # lanes begin at multiples of it, where attention can skip whole chunks


@dataclass(frozen=True)
class Request:
    """A prompt to be answered. `pick` chooses a token from logits and keeps its own state.

    `turns` is how many end tokens after the prompt end the text: a pick that also writes the
    user's part asks for two.
    """

    index: int
    prompt: Sequence[int]
    pick: Pick
    turns: int = 1


@dataclass(eq=False)
class Answered:
    """A text that has ended: `tokens` with the prompt first, and taps [len(tokens) - 1, A*E].

    The last token was chosen but never fed, so it has no features.
    """

    index: int
    prompt_length: int
    tokens: list[int]
    features: list[Array] = field(repr=False)
    pick: Pick


@dataclass(eq=False)
class _Lane:
    start: int  # first slot
    request: Request
    text: Answered
    ends: int = 0  # end tokens chosen so far


class Lanes:
    """Decodes many requests in lanes of `length` tokens each, on a runner made for them."""

    def __init__(self, runner: Runner, lanes: int, length: int, ends: Iterable[int]) -> None:
        if lanes < 1 or length % SLOT_STEP or lanes * length > runner.context:
            raise InputError(
                f"{lanes} lanes of {length} slots: expected multiples of {SLOT_STEP} that fit "
                f"{runner.context} slots"
            )
        self.runner, self.length, self.ends = runner, length, frozenset(ends)
        self._free = [b * length for b in reversed(range(lanes))]
        self._total = lanes * length
        runner.past = self._total  # one context bucket for all steps

    def run(self, requests: Iterable[Request], limit: int) -> Iterator[Answered]:
        """Yield each text once it ends: by an end token, `limit` new tokens, or a full lane.

        Prompts that leave no room for an answer are passed over.
        """
        waiting = iter(requests)
        busy: list[_Lane] = []
        while True:
            while self._free and (request := next(waiting, None)) is not None:
                if 0 < len(request.prompt) < self.length:
                    busy.append(self._begin(request))
            if not busy:
                return
            for lane in [b for b in busy if self._ended(b, limit)]:
                busy.remove(lane)
                self._free.append(lane.start)
                yield lane.text
            if busy:
                self._advance(busy)

    def _ended(self, lane: _Lane, limit: int) -> bool:
        total, prompt = len(lane.text.tokens), lane.text.prompt_length
        return lane.ends >= lane.request.turns or total - prompt >= limit or total >= self.length

    def _choose(self, lane: _Lane, logits: Array) -> None:
        token = lane.request.pick(logits)
        lane.text.tokens.append(token)
        lane.ends += token in self.ends

    def _begin(self, request: Request) -> _Lane:
        """Run the prompt and choose its first token."""
        start, count = self._free.pop(), len(request.prompt)
        text = Answered(request.index, count, list(request.prompt), [], request.pick)
        lane = _Lane(start, request, text)
        step = self.runner.batch
        for first in range(0, count, step):
            part = request.prompt[first : first + step]
            positions = range(first, first + len(part))
            rows = self._rows(part, positions, [start] * len(part))
            result = self.runner.step(rows, [len(part) - 1])
            text.features.append(self._taps(result))
        self._choose(lane, result.logits[-1])
        return lane

    def _advance(self, busy: Sequence[_Lane]) -> None:
        """One token for every busy lane."""
        tokens = [b.text.tokens[-1] for b in busy]
        positions = [len(b.text.tokens) - 1 for b in busy]
        rows = self._rows(tokens, positions, [b.start for b in busy])
        result = self.runner.step(rows, range(len(busy)))
        taps = self._taps(result)
        for i, lane in enumerate(busy):
            lane.text.features.append(taps[i : i + 1])
            self._choose(lane, result.logits[i])

    def _rows(self, tokens: Sequence[int], positions: Sequence[int], starts: Sequence[int]) -> Rows:
        slots = [s + p for s, p in zip(starts, positions, strict=True)]
        at = np.arange(self._total)[None, :]
        visible = (at >= np.asarray(starts)[:, None]) & (at <= np.asarray(slots)[:, None])
        return Rows(tokens, positions, slots, 0, visible)

    def _taps(self, result: Result) -> Array:
        """f32 [T, A*E], in the order of the runner's taps."""
        kept = [result.taps[i] for i in self.runner.taps]
        rows = len(result.logits) if not kept else len(kept[0])
        return np.concatenate(kept, axis=1) if kept else np.empty((rows, 0), np.float32)
