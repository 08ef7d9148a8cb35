"""Calls of functions in an answer's text, as far as it has come: a client is told of each while it
is written, where its notation allows that, and of what was cut as much as there is."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .arguments import Growing
from .notations import Notation


@dataclass(frozen=True)
class Reading:
    """How an answer that may call functions is read. Where text is `formed`, JSON, or the notation
    has no marker, the first letters decide: what begins a call means nothing behind them."""

    functions: Mapping[str, dict[str, Any] | None]  # by their names, the schemas of arguments
    notation: Notation
    formed: bool = False

    def shown(self, text: str, finish: str | None, told: int = 0) -> int:
        """How many letters of an answer are text for the client, who has `told` of them. Before
        the `finish`, and where it was cut, what may be a call's beginning is none."""
        at = self.marker(text, told)
        if at < 0:
            at = len(text) if finish == "stop" else self._undecided(text)
            if at == len(text) and (finish is not None or self.first_letters):
                return at
        return len(text[:at].rstrip())

    def marker(self, text: str, since: int = 0) -> int:
        """Where the calls begin; -1 where there are none yet."""
        if self.first_letters:
            return 0 if text.startswith(self.beginnings) else -1
        return text.find(self.notation.marker, since)

    @property
    def first_letters(self) -> bool:
        """Whether these decide."""
        return self.formed or not self.notation.marker

    @cached_property
    def beginnings(self) -> tuple[str, ...]:
        """What ends text where it is met."""
        if marker := self.notation.marker:
            return (marker,)
        return tuple(b for name in self.functions for b in self.notation.begun(name))

    def _undecided(self, text: str) -> int:
        """Where the text's end may be the beginning of calls."""
        at = 0 if self.first_letters else text.rfind(self.notation.marker[0])
        if at >= 0 and any(b.startswith(text[at:]) for b in self.beginnings):
            return at
        return len(text)


@dataclass(eq=False)
class Call:
    """A call of an answer, its arguments as the model wrote them, or as JSON says it."""

    index: int
    id: str
    name: str
    arguments: str = ""  # as far as they are there
    whole: bool = False

    @property
    def shown(self) -> dict[str, Any]:
        """In OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Piece(NamedTuple):
    """What is new of a call: whether it begins, and more of its arguments."""

    call: Call
    begins: bool
    more: str


@dataclass(eq=False)
class Calls:
    """The calls of an answer. Their ids follow from the answer's name, whoever makes it."""

    reading: Reading
    answer: str
    found: list[Call] = field(default_factory=list)
    _at: int = -1  # behind the last whole call, or where the first begins
    _open: Growing | None = None  # the arguments of the last one, which go on

    def read(self, text: str, finish: str | None, since: int = 0) -> list[Piece]:
        """Go on with an answer's text, as far as it is there; what is new. No call begins before
        `since`."""
        if self._at < 0:
            self._at = self.reading.marker(text, since)
        news = list[Piece]()
        while self._at >= 0 and (piece := self._next(text, finish)) is not None:
            news.append(piece)
            if not piece.call.whole:
                break
        return news

    def _next(self, text: str, finish: str | None) -> Piece | None:
        """More of the last call, or of another one."""
        growing = self._open
        if growing is None:
            notation = self.reading.notation
            begun = (notation.later if self.found else notation.first).match(text, self._at)
            if begun is None or begun[1] not in self.reading.functions:
                return None
            growing = notation.arguments.growing(text, begun.end())
            if growing is None:
                return self._whole(begun[1], text, begun.end()) if finish is not None else None
            self._add(begun[1])
        begins, self._open = self._open is None, growing
        call, more = self.found[-1], growing.more(text)
        call.arguments += more
        if growing.ended:
            self._end(call, text, growing.at)
        return Piece(call, begins, more) if begins or more or call.whole else None

    def _whole(self, name: str, text: str, at: int) -> Piece | None:
        """A call whose arguments are known once an answer has ended; None where it is cut."""
        notation, schema = self.reading.notation, self.reading.functions[name]
        given = notation.arguments.read(text, at, schema)
        if given is None or not notation.ended.match(text, given[1]):
            return None
        call = self._add(name)
        call.arguments = given[0]
        self._end(call, text, given[1])
        return Piece(call, True, call.arguments)

    def _add(self, name: str) -> Call:
        index = len(self.found)
        id = hashlib.sha256(f"{self.answer} {index}".encode()).hexdigest()[:16]
        self.found.append(Call(index, f"call_{id}", name))
        return self.found[-1]

    def _end(self, call: Call, text: str, at: int) -> None:
        """The call is whole, if what must stand behind its arguments does."""
        if ended := self.reading.notation.ended.match(text, at):
            call.whole, self._at, self._open = True, ended.end(), None
