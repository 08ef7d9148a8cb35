"""A loaded model as far as a server has texts read by it: ids, vectors, room."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ggraph import Array
from ggraph.serving.encoder import Encoding, Read
from ggraph.serving.text import Plain, Request, Text

from ..pooling import Pooling, pooling_of
from ..run.load import LoadedEncoder, Opened
from .errors import TOO_LONG, Refused
from .gaps import LETTERS_PER_TOKEN
from .inbox import Inbox
from .settings import Settings
from .told import Journal
from .worker import Ticket, Worker

BEYOND = "exceeds the available context size of"  # as llama-server says, for who looks at words
WAY = "(`ggraph serve -c` sets another)"  # to have a longer context
ROWS: dict[Pooling, int | None] = {"mean": None, "cls": 0, "last": -1}  # of which vectors are made


@dataclass(eq=False)
class Answers:
    """The answers to one request: what they say comes through `said`, with the index of each."""

    tickets: list[Ticket]
    said: Inbox
    prompt_tokens: int
    journal: Journal | None = None


@dataclass(eq=False)
class Reader:
    """A model with its worker."""

    m: Opened
    settings: Settings
    worker: Worker = field(init=False)
    begun: int = field(init=False, default_factory=lambda: int(time.time()))

    def stop(self) -> None:
        """End every answer."""
        self.worker.stop()

    @property
    def name(self) -> str:
        """What clients are told that the model is called."""
        return self.settings.alias or self.m.model.name

    @property
    def context(self) -> int:
        """Tokens of one text."""
        return self.m.context

    @cached_property
    def pooling(self) -> Pooling:
        """How a text's vector is made: as the model's files say, which are read once, or else the
        mean, which libraries of embeddings take then. ModelError for what is not made here."""
        return pooling_of(self.m.model.checkpoint, causal=self.m.model.causal) or "mean"

    def text_ids(
        self,
        prompt: str | Sequence[int],
        param: str = "prompt",
        *,
        special: bool = False,
        complete: bool = False,
    ) -> list[int]:
        """Token ids of a text, with what the vocabulary puts behind one that is `complete`, or ids
        that were given in a field. Refused where they are none, or too many."""
        if isinstance(prompt, str):
            self.check_letters(len(prompt), param)
            ids = self.m.tokenizer.encode(prompt, special=special, bos=None, most=self.context)
            ends = self.m.tokenizer.vocabulary.suffix if complete else ()
            return self._fits([*ids, *ends], param)
        most = self.m.model.vocab_size
        if any(t >= most for t in prompt):
            raise Refused(f"token id {max(prompt)}: expected 0 to {most - 1}", param=param)
        return self._fits(list(prompt), param)

    def check_letters(self, count: int, param: str) -> None:
        """Refused where so many letters of a field cannot fit."""
        most = self.context * LETTERS_PER_TOKEN
        if count > most:
            message = f"the prompt has {count} letters (at most {most} can fit), which {BEYOND}"
            raise Refused(f"{message} {self.context} {WAY}", param=param, code=TOO_LONG)

    def _fits(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise Refused("the prompt is empty", param=param)
        if len(ids) > self.context:
            message = f"the prompt has at least {len(ids)} tokens, which {BEYOND}"
            raise Refused(f"{message} {self.context} {WAY}", param=param, code=TOO_LONG)
        return ids

    def read(self, requests: Sequence[Request]) -> Answers:
        """Have texts read."""
        self.worker.check_room(len(requests), "input")
        said = Inbox(eager=False)
        tickets = [Ticket(i, said) for i in range(len(requests))]
        for ticket, request in zip(tickets, requests, strict=True):
            self.worker.submit(ticket, request)
        return Answers(tickets, said, sum(len(r.prompt) for r in requests))

    def reading(self, ids: list[int], pooling: Pooling) -> Request:
        """A request that has a text read."""
        return Request(ids, Plain(_mute), 0, features=True)

    def vector(self, text: Text, pooling: Pooling) -> Array:
        """What reading a text has made: of its rows' states one vector, f64 [E]."""
        states: Array = np.concatenate(text.features).astype(np.float64)
        found: Array = states.mean(axis=0) if pooling == "mean" else states[-(pooling == "last")]
        return found

    def cancel(self, answers: Answers) -> None:
        """Nobody listens any more."""
        for ticket in answers.tickets:
            self.worker.cancel(ticket)


@dataclass(eq=False)
class EncoderService(Reader):
    """An encoder with its worker."""

    m: LoadedEncoder

    def __post_init__(self) -> None:
        batch = Encoding(self.m.encoder)
        self.worker = Worker(batch, self.settings.parallel + self.settings.queued)

    def reading(self, ids: list[int], pooling: Pooling) -> Request:
        """A request that has a text read."""
        return Read(ids, Plain(_mute), 0, features=True, row=ROWS[pooling])

    def vector(self, text: Text, pooling: Pooling) -> Array:
        """The vector that the encoder has made, f64 [V]."""
        return text.features[0].astype(np.float64)

    def pair_ids(self, first: Sequence[int], text: str, param: str) -> Read:
        """A request that has two texts judged, of which the first is there as a whole. Refused as
        for `text_ids`."""
        self.check_letters(len(text), param)
        t, v = self.m.tokenizer, self.m.tokenizer.vocabulary
        second = t.encode(text, bos=False, most=self.context)
        ids = self._fits([*first, *v.between, *second, *v.suffix], param)
        return Read(ids, Plain(_mute), 0, features=True, row=0, second=len(first))


def _mute(_: object) -> int:
    raise Refused("a text that is only read says nothing")
