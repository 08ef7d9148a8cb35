"""Answers in OpenAI's forms: whole, and in pieces."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ggraph.text.tokenizer import Tokenizer

from .calls import Call, Calls, Piece
from .errors import Refused, body
from .inbox import Ended
from .voice import Chance, Said

_JSON = json.JSONEncoder(ensure_ascii=False)
_ENDS = re.compile("[\x85\u2028\u2029]")


def one_line(data: Any) -> bytes:
    """A value as JSON without what ends a line for anybody: many clients read lines as Python's
    `str.splitlines` does, which ends them at more than events or JSON lines know of."""
    text = _JSON.encode(data)
    return (text if text.isascii() else _ENDS.sub(_escaped, text)).encode()


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


@dataclass(eq=False)
class Whole:
    """An answer as it has come so far."""

    text: str = ""
    thought: str = ""
    said: list[Said] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    reused: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str | None = None
    stopped: str | None = None  # the stop string that ended it
    told: int = 0  # letters of its text that the client has
    calls: Calls | None = None  # where it may call functions

    @property
    def shown(self) -> str:
        """The text that the client has."""
        return self.text[: self.told]

    @property
    def called(self) -> list[Call]:
        """The calls that the client knows."""
        return [] if self.calls is None else self.calls.found

    def news(self) -> tuple[str, list[Piece]]:
        """What the client has not been told, which it will be now: text, and then of calls."""
        if self.calls is None:
            return self.untold(len(self.text)), []
        before = self.told
        text = self.untold(self.calls.reading.shown(self.text, self.finish, before))
        return text, self.calls.read(self.text, self.finish, before)

    def untold(self, end: int) -> str:
        """What the client has not been told of the first `end` letters, which it will be now."""
        new, self.told = self.text[self.told : end], end
        return new

    def add(self, what: Said | Ended) -> None:
        """Take in the next thing."""
        if isinstance(what, Said):
            self.text += what.text
            self.thought += what.thought
            self.said.append(what)
            self.stopped = what.stopped
            return
        self.error, t = what.error, what.text
        if t is not None:
            self.finish = "stop" if t.ended == "stop" else "length"
            self.tokens, self.reused = t.new, t.reused
            self.drafted, self.accepted = t.drafted, t.accepted


def finish_of(a: Whole) -> str | None:
    """Why an answer ended, in OpenAI's words: one that was cut is that, whatever it calls."""
    whole = bool(a.called) and a.called[-1].whole
    return "tool_calls" if whole and a.finish == "stop" else a.finish


def usage(prompt_tokens: int, answers: Sequence[Whole]) -> dict[str, Any]:
    """Tokens of a request, in OpenAI's names: what was cached, drafted and kept, or refused."""
    said, drafted = sum(a.tokens for a in answers), sum(a.drafted for a in answers)
    kept = sum(a.accepted for a in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": said,
        "total_tokens": prompt_tokens + said,
        "prompt_tokens_details": {"cached_tokens": max((a.reused for a in answers), default=0)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": kept,
            "rejected_prediction_tokens": drafted - kept,
        },
    }


@dataclass(frozen=True)
class Dialect:
    """One of the two forms that text is asked for in: `chat`, or completions."""

    chat: bool
    name: str  # of the reply, without what says of which form it is
    model: str
    tokenizer: Tokenizer
    created: int  # seconds since 1970
    counted: bool = False  # whether the last event of a stream tells `usage`, and others null

    @property
    def id(self) -> str:
        """The reply's name in these forms."""
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.name}"

    def envelope(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """What is around choices."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            **({"usage": None} if chunk and self.counted else {}),
            "choices": choices,
        }

    def choice(self, index: int, a: Whole, message: dict[str, Any] | None) -> dict[str, Any]:
        """A whole answer; `message` is a chat's."""
        found: dict[str, Any] = {"index": index, "finish_reason": finish_of(a)}
        found["logprobs"] = self.logprobs(a.said)
        return {**found, **({"text": a.text} if message is None else {"message": message})}

    def told(self, index: int, text: str) -> bytes:
        """The event of a piece without chances. There is one for every token, of which only the
        text changes."""
        around = self._around.get(index)
        if around is None:
            chunk = event(self.envelope([self.piece(index, "", None)], chunk=True))
            before, _, behind = chunk.rpartition(b'""')  # the text is the last that a chunk holds
            around = self._around[index] = before, behind
        return b"".join((around[0], one_line(text), around[1]))

    @cached_property
    def _around(self) -> dict[int, tuple[bytes, bytes]]:
        """By the choice's index, what is before and behind the text."""
        return {}

    def piece(self, index: int, text: str, said: Said | None) -> dict[str, Any]:
        """The next words of an answer, with the chances of what was said last."""
        logprobs = None if said is None else self.logprobs([said])
        found = {"index": index, "finish_reason": None, "logprobs": logprobs}
        return {**found, "delta": {"content": text}} if self.chat else {**found, "text": text}

    def thought(self, index: int, thought: str) -> dict[str, Any]:
        """More of what an answer says that is not for the user."""
        delta = {"reasoning_content": thought}
        return {"index": index, "finish_reason": None, "logprobs": None, "delta": delta}

    def called(self, index: int, piece: Piece) -> dict[str, Any]:
        """More of a call, which has its name and id where it begins."""
        begun, more = piece.call.shown if piece.begins else {}, {"arguments": piece.more}
        function = {**begun.get("function", {}), **more}
        delta = {"tool_calls": [{"index": piece.call.index, **begun, "function": function}]}
        return {"index": index, "finish_reason": None, "logprobs": None, "delta": delta}

    def last(self, index: int, finish: str | None) -> dict[str, Any]:
        """The end of an answer."""
        found = {"index": index, "finish_reason": finish, "logprobs": None}
        return {**found, "delta": {}} if self.chat else {**found, "text": ""}

    def logprobs(self, said: Sequence[Said]) -> dict[str, Any] | None:
        """Chances in the form's names; None where none were asked for."""
        known = [(s.chance, s.best) for s in said if s.chance is not None]
        if not known:
            return None
        if self.chat:
            return {
                "content": [
                    {**self.entry(c), "top_logprobs": [self.entry(b) for b in best]}
                    for c, best in known
                ],
                "refusal": None,
            }
        return {
            "tokens": [self._shown(c.token) for c, _ in known],
            "token_logprobs": [c.logprob for c, _ in known],
            "top_logprobs": [{self._shown(b.token): b.logprob for b in best} for _, best in known],
            "text_offset": [s.at for s in said if s.chance is not None],
        }

    def entry(self, c: Chance) -> dict[str, Any]:
        """A token as text and bytes, and the logarithm of its chance."""
        raw = self._bytes(c.token)
        return {"token": self._shown(c.token), "logprob": c.logprob, "bytes": list(raw)}

    def _bytes(self, token: int) -> bytes:
        inside = token < self.tokenizer.vocab_size
        return self.tokenizer.token_bytes(token) if inside else b""

    def _shown(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return b"%sdata: %s\n\n" % (head.encode(), one_line(data))


def failed(message: str, path: str = "") -> bytes:
    """The event of a failure amid the answer of an address."""
    told = body(Refused(message, 500), path)
    return event(told, str(told.get("type", "")))


PING = b": still here\n\n"
DONE = b"data: [DONE]\n\n"
Events = AsyncIterator[bytes]
