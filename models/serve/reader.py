"""A loaded model as far as a server has texts read by it: ids, vectors, room."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ggraph import Array, ModelError
from ggraph.serving.encoder import Encoding, Read
from ggraph.serving.text import Plain, Request, Text

from ..pooling import Pooling, longest_of, pooling_of
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
    """The answers to one request: what they say comes through `said`, with the index of each, and
    where it is to be told in tokens, too, each of these `apart`."""

    tickets: list[Ticket]
    said: Inbox
    prompt_tokens: int
    journal: Journal | None = None
    apart: bool = False


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

    @cached_property
    def longest(self) -> int | None:
        """Tokens of a text or pair that are read of a longer one, as the model's files say; None
        where they do not, or where the context ends before. Refused for no such number."""
        try:
            found = longest_of(self.m.model.checkpoint)
        except ModelError as error:
            raise Refused(str(error)) from None
        return found if found is not None and found <= self.context else None

    def text_ids(
        self,
        prompt: str | Sequence[int],
        param: str = "prompt",
        *,
        special: bool = False,
        complete: bool = False,
    ) -> list[int]:
        """Token ids of a text, or ids that were given in a field. One that is `complete` has what
        the vocabulary puts behind it, and is cut where `longest` says. Refused where they are none,
        or too many."""
        if isinstance(prompt, str):
            prompt = self.readable(prompt, param, self.longest if complete else None)
            bos = False if special and self._begun(prompt) else None
            ids = self.m.tokenizer.encode(prompt, special=special, bos=bos, most=self.context)
            if not complete:
                return self._fits(ids, param)
            ends = self.m.tokenizer.vocabulary.suffix
            room = len(ids) if self.longest is None else max(self.longest - len(ends), 0)
            return self._fits([*ids[:room], *ends], param)
        most = self.m.model.vocab_size
        if any(t >= most for t in prompt):
            raise Refused(f"token id {max(prompt)}: expected 0 to {most - 1}", param=param)
        return self._fits(list(prompt), param)

    def _begun(self, text: str) -> bool:
        """Whether a text begins with the markers that every prompt begins with, as templates write
        them: no model was taught to read them twice."""
        t = self.m.tokenizer
        return bool(head := t.decode(t.vocabulary.prefix)) and text.startswith(head)

    def readable(self, text: str, param: str, longest: int | None) -> str:
        """The text, or of one that is cut the letters that can be read. Refused where another has
        more letters than fit."""
        if longest is not None:
            return text[: longest * LETTERS_PER_TOKEN]
        self.check_letters(len(text), param)
        return text

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

    def pairs(self, query: str, texts: Sequence[str]) -> list[Read]:
        """Requests that have the query judged with each text. Of a pair the longer one is cut first
        where `longest` says. Refused as for `text_ids`."""
        t, v = self.m.tokenizer, self.m.tokenizer.vocabulary
        lead, first = t.encode(""), self._inner(query, "query")
        if self.longest is None:
            self._fits([*lead, *first, *v.suffix], "query")
        around, found = len(lead) + 2 * len(v.suffix) + len(v.between), []
        for second in (self._inner(text, "documents") for text in texts):
            a, b = len(first), len(second)
            if self.longest is not None:
                a, b = shares(a, b, max(self.longest - around, 0))
            begun = [*lead, *first[:a], *v.suffix]
            ids = self._fits([*begun, *v.between, *second[:b], *v.suffix], "documents")
            found.append(Read(ids, Plain(_mute), 0, features=True, row=0, second=len(begun)))
        return found

    def _inner(self, text: str, param: str) -> list[int]:
        """Token ids of one text of a pair."""
        text = self.readable(text, param, self.longest)
        return self.m.tokenizer.encode(text, bos=False, most=self.context)


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay where both have `room`: the longer one is cut first, and
    where both are cut it has the odd token, as the second of two that are as long.

    Source: the `tokenizers` library, truncation "longest_first".
    """
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def _mute(_: object) -> int:
    raise Refused("a text that is only read says nothing")
