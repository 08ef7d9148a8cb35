"""POST /v1/chat/completions and /v1/completions."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ggraph.text.stream import TextStream, is_harmony

from .calls import Calls, Reading
from .engine import Service, Wanted
from .errors import Refused
from .grammar import schema_of
from .inbox import Ended
from .listener import Listener
from .messages import Tool
from .notations import HARMONY, HERMES, Notation, notation_of
from .reader import Answers
from .replies import DONE, PING, Dialect, Events, Whole, event, failed, finish_of, usage
from .schema import ChatRequest, CompletionRequest, Sampling, each
from .tools import answer_grammar, chosen, demanded, for_template
from .voice import Form, Said
from .wire import Wire

Tell = Callable[[int, Said | Ended], bytes]  # the events of what an answer says, or of its end


@dataclass(eq=False)
class Asked:
    """A request that is being answered."""

    answers: Answers
    dialect: Dialect
    body: Sampling
    reading: Reading | None = None  # where it may call functions

    def answer(self, index: int = 0) -> Whole:
        """One of the answers, of which nothing has come."""
        if self.reading is None:
            return Whole()
        return Whole(calls=Calls(self.reading, f"{self.dialect.id} {index}"))


@dataclass(eq=False)
class Generation(Listener):
    """Answers with text, by one model."""

    service: Service

    def chat(self, asked: ChatRequest) -> Callable[[], Asked]:
        """Everything that takes time is done; the call that comes back begins the answers."""
        self.service.check_room(1, asked)
        images = self.service.images_in(asked.messages)
        messages, more = self.conversation(asked)
        ids = self.service.chat_ids(messages, images, **more)
        _, tools = chosen(asked.tools or (), asked.tool_choice)
        limit = _limit(asked.max_completion_tokens, asked.max_tokens)
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        stem = self.service.stem_of(ids, messages, images, **more)
        form, reading, shown = self.service.form(asked.response_format), None, frozenset[int]()
        thinking = None
        formed = form is not None and not demanded(asked.tool_choice)
        if asked.reasoning_format != "none" and not formed:
            thinking = self.service.thinking(ids)
        if tools:
            notation = notation_of(self.service.m.tokenizer.chat_template or "") or HERMES
            form, reading, shown = self._calling(asked, tools, notation, thinking)
        wanted = Wanted(limit, top, form, stem, shown, thinking, demanded(asked.tool_choice))
        if reading is not None:
            until, first = reading.beginnings, reading.first_letters
            wanted.stream = partial(TextStream, until=until, first=first)
        dialect = self.dialect(asked)
        return lambda: Asked(self.service.answer([ids], asked, wanted), dialect, asked, reading)

    def count(self, asked: ChatRequest) -> int:
        """Tokens of a conversation, whose images nobody reads. Refused where they are too many, or
        the template objects."""
        messages, more = self.conversation(asked)
        images = self.service.images_in(asked.messages)
        return len(self.service.chat_ids(messages, images, read=False, **more))

    def templated(self, asked: ChatRequest) -> str:
        """A conversation as the text that a template makes of it. Refused where an image is in it,
        which is no text."""
        if any(m.images for m in asked.messages):
            raise Refused(
                "messages: an image is no text: ask /v1/chat/completions", param="messages"
            )
        messages, more = self.conversation(asked)
        return self.service.chat_text(messages, **more)

    def conversation(self, asked: ChatRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What a template makes a prompt of: messages and variables."""
        told, _ = chosen(asked.tools or (), asked.tool_choice)
        template = self.service.m.tokenizer.chat_template or ""
        if told and is_harmony(self.service.m.tokenizer):
            _check_channels(notation_of(template), asked)
        messages, more = for_template(asked.messages, told, template)
        more |= asked.variables
        return messages, more

    def completion(self, asked: CompletionRequest) -> Callable[[], Asked]:
        """The same for plain text."""
        prompts = each(asked.prompt)
        self.service.check_room(len(prompts), asked)
        special = asked.parse_special
        if asked.suffix:
            ids = [self.service.gap_ids(p, asked.suffix, special=special) for p in prompts]
        else:
            ids = [self.service.text_ids(p, special=special) for p in prompts]
        limit = _limit(asked.max_tokens)
        wanted = Wanted(limit, asked.logprobs, self.service.form(asked.response_format))
        dialect = self.dialect(asked, chat=False)
        return lambda: Asked(self.service.answer(ids, asked, wanted), dialect, asked)

    async def ended(self, asked: Asked) -> list[Whole]:
        """All answers, once they are there. Refused where one has failed."""
        found = [asked.answer(i) for i in range(len(asked.answers.tickets))]
        async for heard in self.heard(asked.answers):
            for index, what in heard:
                if what is not None:
                    found[index].add(what)
        for a in found:
            if a.error is not None:
                raise self.service.worker.refusal(a.error)
            a.news()
        return found

    async def whole(self, asked: Asked) -> dict[str, Any]:
        """The reply, once all of it is there."""
        found = await self.ended(asked)
        choices = [
            asked.dialect.choice(i, a, _message(a) if asked.dialect.chat else None)
            for i, a in enumerate(found)
        ]
        envelope = asked.dialect.envelope(choices, chunk=False)
        return {**envelope, "usage": usage(asked.answers.prompt_tokens, found)}

    async def events(self, asked: Asked, wire: Wire | None = None) -> Events:
        """The answers as they come, as server-sent events; what another thread may send goes by the
        wire."""
        d, found = asked.dialect, [asked.answer(i) for i in range(len(asked.answers.tickets))]
        if d.chat:  # where there may be calls alone, some clients take "" for a text of its own
            opening = {"role": "assistant"} | ({} if asked.reading else {"content": ""})
            for i in range(len(found)):
                yield _chunk(d, {"index": i, "delta": opening, "finish_reason": None})

        def tell(index: int, what: Said | Ended) -> bytes:
            return _told(asked, found[index], index, what)

        async for told in self.told(asked, found, tell, wire):
            yield told
        end = DONE
        if d.counted:
            counted = usage(asked.answers.prompt_tokens, found)
            end = event({**d.envelope([], chunk=True), "usage": counted}) + end
        yield end

    async def told(
        self, asked: Asked, found: Sequence[Whole], tell: Tell, wire: Wire | None
    ) -> Events:
        """The events that `tell` makes of what the answers say, which has been added to `found` by
        then; but for those that went by the wire: none do where a journal counts them."""

        def added(index: int, what: Said | Ended | None) -> bytes:
            if what is None:
                return PING
            found[index].add(what)
            return tell(index, what)

        answers = asked.answers
        if wire is not None and answers.journal is None:
            answers.said.listen(added, wire)
        async for heard in self.heard(answers):
            if told := b"".join([added(index, what) for index, what in heard]):
                yield told

    def _calling(
        self, asked: ChatRequest, tools: Sequence[Tool], notation: Notation, thinking: bool | None
    ) -> tuple[Callable[[], Form], Reading, frozenset[int]]:
        """The form of calls and of text beside them, how they are read, and the special tokens that
        belong to their text. Refused where the form cannot be followed."""
        grammars, special = self.service.grammars, notation.special(self.service.m.tokenizer)
        schema = schema_of(asked.response_format)
        lenient = asked.response_format is not None and asked.response_format.lenient
        grammar = answer_grammar(
            tools, notation, special,
            demanded=demanded(asked.tool_choice),
            several=asked.parallel_tool_calls is not False,
            schema=schema,
            lenient=lenient,
            thinking=thinking,
        )  # fmt: skip
        form = grammars.lark(grammar, "tools")
        functions = {t.function.name: t.function.parameters for t in tools}
        reading = Reading(functions, notation, schema is not None)
        return form.fresh, reading, notation.shown(special)

    def dialect(self, asked: Sampling, *, chat: bool = True) -> Dialect:
        """The form of a reply."""
        service, begun = self.service, asked.going_on
        name = secrets.token_hex(12) if begun is None else begun.id
        created = int(time.time()) if begun is None else begun.created
        counted = asked.stream_options is not None and asked.stream_options.include_usage
        return Dialect(chat, name, service.name, service.m.tokenizer, created, counted)


def _limit(*given: int | None) -> int:
    """The first that was given; -1 where none was."""
    return next((limit for limit in given if limit is not None), -1)


def _check_channels(notation: Notation | None, asked: ChatRequest) -> None:
    """Refused where no call can be in an answer in channels."""
    lacking = ""
    if notation is not HARMONY:
        lacking = "and its chat template says nothing of calls within those"
    elif asked.continue_final_message:
        lacking = "and the one that goes on with a message holds no calls"
    if lacking:
        message = f"tools: this model answers in channels (harmony), {lacking}: leave them out"
        raise Refused(message, param="tools")


def _chunk(d: Dialect, choice: dict[str, Any]) -> bytes:
    return event(d.envelope([choice], chunk=True))


def _told(asked: Asked, a: Whole, index: int, what: Said | Ended) -> bytes:
    """The events of what an answer says, or of its end."""
    if a.error is not None:
        return failed(a.error)
    d, told = asked.dialect, list[bytes]()
    said = what if isinstance(what, Said) else None
    if said is not None and said.thought and d.chat:
        told.append(_chunk(d, d.thought(index, said.thought)))
    text, called = a.news()
    if said is not None and said.chance is not None:
        told.append(_chunk(d, d.piece(index, text, said)))
    elif text:
        told.append(d.told(index, text))
    told += [_chunk(d, d.called(index, p)) for p in called if p.begins or p.more]
    if said is None:
        told.append(_chunk(d, d.last(index, finish_of(a))))
    return b"".join(told)


def _message(a: Whole) -> dict[str, Any]:
    thought = {"reasoning_content": a.thought} if a.thought else {}
    if a.called:
        calls = [c.shown for c in a.called]
        return {"role": "assistant", "content": a.shown or None, **thought, "tool_calls": calls}
    return {"role": "assistant", "content": a.shown, **thought, "refusal": None}
