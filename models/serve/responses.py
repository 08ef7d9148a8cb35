"""POST /v1/responses: the same answers in the newer form, which can go on from one another."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .calls import Call, Piece
from .conversations import Conversations, Kept, messages_of, output_part
from .errors import Refused
from .generation import Asked, Generation
from .inbox import Ended
from .items import CallItem, FlatAllowed, FlatChoice, Item, MessageItem
from .messages import (
    AllowedChoice,
    AllowedTools,
    Function,
    Message,
    Tool,
    ToolChoice,
)
from .replies import Events, Whole, event
from .schema import ChatRequest, ResponseFormat, ResponsesRequest
from .voice import Said
from .wire import Wire


@dataclass(eq=False)
class Turn(Asked):
    """A response that is being made. `said` are the messages before it, without instructions."""

    body: ResponsesRequest
    said: tuple[Message, ...] = ()

    @property
    def id(self) -> str:
        """Its name."""
        return f"resp_{self.dialect.name}"

    @property
    def message_id(self) -> str:
        """The name of its message."""
        return f"msg_{self.dialect.name}"


@dataclass(eq=False)
class Responses:
    """Answers in the form of `/v1/responses`, and those that are kept."""

    generation: Generation
    conversations: Conversations

    def prepared(self, body: ResponsesRequest) -> Callable[[], Turn]:
        """As `Generation.chat`."""
        said = self._said(body)
        with _by_its_name():
            begin = self.generation.chat(as_chat(body, said))

        def turn() -> Turn:
            asked = begin()
            return Turn(asked.answers, asked.dialect, body, asked.reading, said)

        return turn

    def count(self, body: ResponsesRequest) -> int:
        """Tokens of what a model would read."""
        said = self._said(body)
        with _by_its_name():
            return self.generation.count(as_chat(body, said))

    async def whole(self, turn: Turn) -> dict[str, Any]:
        """The reply, once all of it is there."""
        [a] = await self.generation.ended(turn)
        return self._finished(turn, a, output_of(turn, a))

    async def events(self, turn: Turn, wire: Wire | None = None) -> Events:
        """The reply as it comes; every event has a number."""
        a = turn.answer()
        told = _Teller(turn, a)
        for kind in ("response.created", "response.in_progress"):
            yield told(kind, response=_response(turn, a, []))

        def tell(index: int, what: Said | Ended) -> bytes:
            return told.news() if isinstance(what, Said) else b""

        async for said in self.generation.told(turn, [a], tell, wire):
            yield said
        if a.error is not None:
            yield told("error", message=a.error, code=None, param=None)
            return
        yield told.news() + told.end()
        response = self._finished(turn, a, output_of(turn, a))
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield told(f"response.{kind}", response=response)

    def _said(self, body: ResponsesRequest) -> tuple[Message, ...]:
        """All messages, instructions aside. Refused where there are none."""
        given = body.input
        items = given if isinstance(given, str) else self.conversations.resolved(given)
        said = self._before(body) + tuple(messages_of(items))
        if not said:
            raise Refused("input: expected a message", param="input")
        return said

    def _before(self, body: ResponsesRequest) -> tuple[Message, ...]:
        """What was said before. Refused where it is not kept."""
        if body.previous_response_id is None:
            return ()
        try:
            return self.conversations.find(body.previous_response_id).messages
        except Refused as error:  # by these names agents know to send all of it again
            error.param, error.code = "previous_response_id", "previous_response_not_found"
            raise

    def _finished(self, turn: Turn, a: Whole, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole response, kept unless the request says otherwise."""
        response = _response(turn, a, output)
        if turn.body.store is not False:
            kept = Kept.of(response, (*turn.said, _as_message(output)))
            self.conversations.keep(turn.id, kept)
        return response


@contextmanager
def _by_its_name() -> Iterator[None]:
    """A conversation that is refused is called by its name in a response's request."""
    try:
        yield
    except Refused as error:
        if error.param == "messages":
            error.param = "input"
        raise


class _Teller:
    """Numbers the events of a response, and knows which of its items is open."""

    def __init__(self, turn: Turn, a: Whole) -> None:
        self.turn, self.a = turn, a
        self._place = {"item_id": turn.message_id, "output_index": 0, "content_index": 0}
        self.number, self.items = 0, 0  # of events, and of items that have begun
        self._message = False  # whether it is open
        self._call: Call | None = None  # the one that is open
        self._known = 0  # tokens whose chances were told

    def __call__(self, kind: str, **facts: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **facts}, kind)

    def news(self) -> bytes:
        """What the answer says beyond what was told of it."""
        text, called = self.a.news()
        told = [self._more(text)] if text else []
        return b"".join(told + [self._of_call(piece) for piece in called])

    def end(self) -> bytes:
        """What is open ends, where it was cut, too; a message where there is nothing else."""
        told = b"" if self.items else self._opened()
        if self._message and (rest := self._chances()):
            told += self("response.output_text.delta", **self._place, delta="", logprobs=rest)
        return told + self._closed()

    def _opened(self) -> bytes:
        """The message begins."""
        self.items, self._message = 1, True
        item = {**_message(self.turn, Whole()), "status": "in_progress", "content": []}
        added = self("response.output_item.added", output_index=0, item=item)
        return added + self("response.content_part.added", **self._place, part=output_part(""))

    def _more(self, text: str) -> bytes:
        """More of the message, and its beginning before that."""
        head = b"" if self._message else self._opened()
        facts = {**self._place, "delta": text, "logprobs": self._chances()}
        return head + self("response.output_text.delta", **facts)

    def _chances(self) -> list[dict[str, Any]]:
        """Those of tokens of the message that no event has told of."""
        known, self._known = self._known, _spoken(self.a)
        return _chances(self.turn, self.a.said[known : self._known])

    def _of_call(self, piece: Piece) -> bytes:
        """More of a call, which ends what is before it where it begins."""
        told, call, kind = b"", piece.call, "response.function_call_arguments"
        if piece.begins:
            told = self._closed()
            self.items, self._call = self.items + 1, call
            begun = {**_called(self.turn, call), "status": "in_progress", "arguments": ""}
            told += self("response.output_item.added", output_index=self.items - 1, item=begun)
        if piece.more:
            at = {"item_id": _id_of(self.turn, call), "output_index": self.items - 1}
            told += self(f"{kind}.delta", **at, delta=piece.more)
        return told + (self._closed() if call.whole else b"")

    def _closed(self) -> bytes:
        """The message ends, or the last call."""
        told, place = b"", {"output_index": self.items - 1}
        if self._message:
            item = _message(self.turn, self.a)
            at, part = self._place, item["content"][0]
            known = {"text": part["text"], "logprobs": part.get("logprobs", [])}
            told = self("response.output_text.done", **at, **known)
            told += self("response.content_part.done", **at, part=part)
            told += self("response.output_item.done", **place, item=item)
        elif self._call is not None:
            item = _called(self.turn, self._call)
            facts = {"item_id": item["id"], **place}
            facts |= {"name": item["name"], "arguments": item["arguments"]}
            told = self("response.function_call_arguments.done", **facts)
            told += self("response.output_item.done", **place, item=item)
        self._message, self._call = False, None
        return told


def as_chat(body: ResponsesRequest, said: tuple[Message, ...]) -> ChatRequest:
    """The same question as `/v1/chat/completions` is asked it."""
    told = [Message(role="system", content=body.instructions)] if body.instructions else []
    tools = [
        Tool(type="function", function=Function.model_validate(t.model_dump(exclude={"type"})))
        for t in body.tools or ()
    ]
    named, form = body.tool_choice, body.text.format
    choice = named if named is None or isinstance(named, str) else _chosen(named)
    more = {
        "messages": [*told, *said], "tools": tools or None, "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "logprobs": body.chances, "top_logprobs": body.top_logprobs,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "response_format": ResponseFormat(
            type=form.type, schema_=form.schema_, strict=form.strict
        ),
    }  # fmt: skip
    return ChatRequest.model_construct(**{**body.shared, **more})


def _chosen(flat: FlatChoice | FlatAllowed) -> ToolChoice | AllowedChoice:
    if isinstance(flat, FlatChoice):
        return ToolChoice.of(flat.name)
    allowed = AllowedTools(mode=flat.mode, tools=[ToolChoice.of(t.name) for t in flat.tools])
    return AllowedChoice(type="allowed_tools", allowed_tools=allowed)


def output_of(turn: Turn, a: Whole) -> list[dict[str, Any]]:
    """The items of a response: a message, calls of functions, or one and then the others."""
    calls = [_called(turn, call) for call in a.called]
    return [_message(turn, a), *calls] if a.shown or not calls else calls


def _as_message(output: list[dict[str, Any]]) -> Message:
    """A response as a later one sees it, without a call that was cut: no result is of it."""
    items: list[Item] = []
    for i in output:
        if i["type"] == "message":
            items.append(MessageItem(role="assistant", content=i["content"][0]["text"]))
        elif i["status"] == "completed":
            items.append(CallItem.model_validate(i))
    return messages_of(items or [MessageItem(role="assistant", content="")])[0]


def _message(turn: Turn, a: Whole) -> dict[str, Any]:
    """The item of an answer's text; where calls follow, it has not been cut."""
    status = "incomplete" if a.finish == "length" and not a.called else "completed"
    base = {"id": turn.message_id, "type": "message", "role": "assistant", "status": status}
    chances = {"logprobs": _chances(turn, a.said[: _spoken(a)])} if turn.body.chances else {}
    return {**base, "content": [{**output_part(a.shown), **chances}]}


def _called(turn: Turn, call: Call) -> dict[str, Any]:
    """The item of a call."""
    return {
        "type": "function_call", "id": _id_of(turn, call), "call_id": call.id,
        "status": "completed" if call.whole else "incomplete",
        "name": call.name, "arguments": call.arguments,
    }  # fmt: skip


def _id_of(turn: Turn, call: Call) -> str:
    return f"fc_{turn.dialect.name}_{call.index}"


def _spoken(a: Whole) -> int:
    """How many of an answer's tokens are its message's, as far as is known: at its end all that are
    no call's."""
    if a.finish is not None and not a.called:
        return len(a.said)
    return bisect_left(a.said, a.told, key=lambda s: s.at)


def _chances(turn: Turn, said: Sequence[Said]) -> list[dict[str, Any]]:
    """Those of tokens, as a chat has them."""
    found = turn.dialect.logprobs(said)
    return [] if found is None else list(found["content"])


def _response(turn: Turn, a: Whole, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The response around its items, or around none yet."""
    body, dialect = turn.body, turn.dialect
    status = {None: "in_progress", "length": "incomplete"}.get(a.finish, "completed")
    choice, form = body.tool_choice or "auto", body.text.format
    return {
        "id": turn.id,
        "object": "response",
        "created_at": dialect.created,
        "status": status,
        "model": dialect.model,
        "output": output,
        "incomplete_details": {"reason": "max_output_tokens"} if a.finish == "length" else None,
        "error": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort} if body.reasoning else None,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {
            "format": {"type": form.type, **form.model_dump(by_alias=True, exclude_unset=True)}
        },
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [t.model_dump(exclude_none=True) for t in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None if a.finish is None else _usage(turn, a),
    }


def _usage(turn: Turn, a: Whole) -> dict[str, Any]:
    read, prompt = a.reused, turn.answers.prompt_tokens
    written = prompt - read  # what is computed stays in the cache
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
        "output_tokens": a.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + a.tokens,
    }
