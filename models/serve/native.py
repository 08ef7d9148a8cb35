"""Answers in llama-server's own form: POST /completion, and what `/infill` shares with it."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ggraph.text.stream import TextStream

from .engine import Wanted
from .generation import Asked, Generation
from .inbox import Ended
from .native_fields import NativeCompletion, NativeRequest
from .replies import Events, Whole, event, failed
from .schema import each
from .voice import Said
from .wire import Wire
from .worker import Ticket

SHORTEST = 1e-6  # seconds that a rate is taken over


class GapStream(TextStream):
    """Text that ends before a line with less than `indent` spaces or tabs in front of its first
    letter, and where it has a line's end, `seconds` after its first token (0: whenever it ends)."""

    def __init__(self, *given: Any, indent: int, seconds: float) -> None:
        super().__init__(*given)
        self._seconds, self._begun, self._lines = seconds, 0.0, False
        spaces = rf"\n[ \t]{{0,{indent - 1}}}" if indent else None
        self._less = spaces and re.compile(rf"{spaces}[^ \t\r\n]")
        self._open = spaces and re.compile(rf"{spaces}\Z")  # nobody knows yet
        self._held, self._over = "", False

    @property
    def stopped(self) -> str | None:
        """As `TextStream`; empty where no stop string, but a line or the time has ended it."""
        return "" if self._over else super().stopped

    def is_plain(self, token: int) -> bool:
        """Never: each may be the last."""
        return False

    def push(self, token: int) -> str:
        """As `TextStream`."""
        now = time.monotonic()
        self._begun = self._begun or now
        text = self._shown(super().push(token))
        late = self._seconds and now - self._begun > self._seconds
        if late and self._lines and self.stopped is None:
            self._over = True
        return text

    def finish(self) -> str:
        """As `TextStream`."""
        return self._shown(super().finish()) + self._held

    def _shown(self, text: str) -> str:
        """What may be shown of what was held back, and more."""
        text, self._held = self._held + text, ""
        if self._less and (found := self._less.search(text)):
            self._over, text = True, text[: found.start()]
        elif self._open and (found := self._open.search(text)):
            text, self._held = text[: found.start()], found[0]
        self._lines |= "\n" in text + self._held
        return text


@dataclass(eq=False)
class NativeAsked(Asked):
    """A request that is being answered. `read`: tokens of the prompt of each answer. `cut`: not all
    of what was given fitted."""

    body: NativeRequest
    read: Sequence[int] = ()
    cut: bool = False


@dataclass(eq=False)
class Native:
    """Answers in this form."""

    generation: Generation

    def completion(self, body: NativeCompletion) -> Callable[[], NativeAsked]:
        """As `Generation.chat`."""
        service, prompts = self.generation.service, each(body.prompt)
        service.check_room(len(prompts), body)
        ids = [service.text_ids(p, special=body.parse_special) for p in prompts]
        return self.begin(ids, body, self.wanted(body))

    def wanted(self, body: NativeRequest) -> Wanted:
        """How the answer is to be."""
        # What was begun elsewhere must come to be said again, however long that takes
        begun = body.going_on is not None and body.going_on.lanes
        seconds = 0.0 if begun else max(0, body.t_max_predict_ms) / 1000
        wanted = Wanted(
            body.n_predict, body.n_probs or None, self.generation.service.form(body.form)
        )
        if body.n_indent or seconds:
            wanted.stream = partial(GapStream, indent=body.n_indent, seconds=seconds)
        return wanted

    def begin(
        self, prompts: Sequence[list[int]], body: NativeRequest, wanted: Wanted, cut: bool = False
    ) -> Callable[[], NativeAsked]:
        """What begins the answers to prompts."""
        service, dialect = self.generation.service, self.generation.dialect(body, chat=False)
        read = [len(ids) for ids in prompts for _ in range(body.n or 1)]

        def begun() -> NativeAsked:
            answers = service.answer(prompts, body, wanted)
            answers.apart = body.tells_tokens
            return NativeAsked(answers, dialect, body, read=read, cut=cut)

        return begun

    async def whole(self, asked: NativeAsked) -> Any:
        """The reply, once all of it is there: a list where several answers were asked for."""
        found = await self.generation.ended(asked)
        told = [
            _chosen(asked, {**_end(asked, i, a), "content": a.text, **_tokens(asked, a.said)})
            for i, a in enumerate(found)
        ]
        return told[0] if len(told) == 1 else told

    async def events(self, asked: NativeAsked, wire: Wire | None = None) -> Events:
        """The reply as it comes."""
        found = [Whole() for _ in asked.answers.tickets]

        def tell(index: int, what: Said | Ended) -> bytes:
            a = found[index]
            if a.error is not None:
                return failed(a.error)
            text = a.untold(len(a.text))
            more = _tokens(asked, [what] if isinstance(what, Said) else ())
            told = {"index": index, "content": text, "stop": False, **more}
            said = event(told) if text or any(more.values()) else b""
            if isinstance(what, Ended):
                said += event(_chosen(asked, _end(asked, index, a)))
            return said

        async for told in self.generation.told(asked, found, tell, wire):
            yield told


def _tokens(asked: NativeAsked, said: Sequence[Said]) -> dict[str, Any]:
    """What was said in ids, and with chances, where these are wanted."""
    found, entry = dict[str, Any](), asked.dialect.entry
    if asked.body.tells_tokens:
        found["tokens"] = [s.token for s in said if s.token is not None]
    if asked.body.n_probs:
        found["completion_probabilities"] = [
            {
                "id": s.chance.token, **entry(s.chance),
                "top_logprobs": [{"id": b.token, **entry(b)} for b in s.best],
            }
            for s in said if s.chance is not None
        ]  # fmt: skip
    return found


def _end(asked: NativeAsked, index: int, a: Whole) -> dict[str, Any]:
    """What is told of an answer that has ended, in llama-server's names."""
    prompt = asked.read[index]
    why = "eos" if a.stopped is None else "word" if a.stopped else "limit"
    return {
        "index": index, "content": "", "stop": True, "model": asked.dialect.model,
        "stop_type": why if a.finish == "stop" else "limit", "stopping_word": a.stopped or "",
        "tokens_predicted": a.tokens, "tokens_evaluated": prompt, "tokens_cached": a.reused,
        "has_new_line": "\n" in a.text, "truncated": asked.cut,
        "timings": _timings(asked.answers.tickets[index], prompt - a.reused, a),
    }  # fmt: skip


def _timings(ticket: Ticket, read: int, a: Whole) -> dict[str, Any]:
    """How long it took until the first token, with the time in which others went first, and behind
    it."""
    first = time.perf_counter() if ticket.first is None else ticket.first
    found: dict[str, Any] = {"cache_n": a.reused}
    spans = ("prompt", read, first - ticket.begun), ("predicted", a.tokens, ticket.last - first)
    for name, count, span in spans:
        seconds = max(span, SHORTEST)
        found |= {
            f"{name}_n": count, f"{name}_ms": 1e3 * seconds,
            f"{name}_per_token_ms": 1e3 * seconds / max(1, count),
            f"{name}_per_second": count / seconds,
        }  # fmt: skip
    return found


def _chosen(asked: NativeAsked, told: dict[str, Any]) -> dict[str, Any]:
    """The fields that are wanted, under the names by which they were."""
    found, nothing = dict[str, Any](), object()
    for path in asked.body.response_fields:
        value: Any = told
        for name in path.split("/"):
            value = value.get(name, nothing) if isinstance(value, dict) else nothing
        if value is not nothing:
            found[path] = value
    return found if asked.body.response_fields else told
