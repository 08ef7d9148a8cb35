"""POST /v1/responses: the same answers in the newer form, which can go on from one another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        a, told = Whole(), _Teller(turn)
        for kind in ("response.created", "response.in_progress"):
            yield told(kind, response=_response(turn, a, []))

        def tell(index: int, what: Said | Ended) -> bytes:
            if isinstance(what, Ended):
                return b""
            told.chances += _chances(turn, [what])
            text = a.untold(turn.shown(a))
            return told.more(text) if text else b""

        async for said in self.generation.told(turn, [a], tell, wire):
            yield said
        if a.error is not None:
            yield told("error", message=a.error, code=None, param=None)
            return
        output = output_of(turn, a)
        for index, item in enumerate(output):
            if item["type"] == "function_call":
                yield told.call(index, item)
            else:
                yield told.more(a.untold(turn.shown(a))) + told.closed(item)
        response = self._finished(turn, a, output)
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
    """Numbers the events of a response."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._place = {"item_id": turn.message_id, "output_index": 0, "content_index": 0}
        self.number, self.open = 0, False  # whether the message has begun
        self.chances = list[dict[str, Any]]()  # of tokens that no event has told of

    def __call__(self, kind: str, **facts: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **facts}, kind)

    def opened(self) -> bytes:
        """The message begins."""
        item = {**_message(self.turn, Whole()), "status": "in_progress", "content": []}
        added = self("response.output_item.added", output_index=0, item=item)
        return added + self("response.content_part.added", **self._place, part=output_part(""))

    def more(self, text: str) -> bytes:
        """What the message has beyond what was told of it, and its beginning before that."""
        head, self.open = b"" if self.open else self.opened(), True
        if not text and not self.chances:
            return head
        facts = {**self._place, "delta": text, "logprobs": self.chances}
        self.chances = []
        return head + self("response.output_text.delta", **facts)

    def closed(self, item: dict[str, Any]) -> bytes:
        """The message ends."""
        at, part = self._place, item["content"][0]
        known = {"text": part["text"], "logprobs": part.get("logprobs", [])}
        return b"".join((
            self("response.output_text.done", **at, **known),
            self("response.content_part.done", **at, part=part),
            self("response.output_item.done", output_index=0, item=item),
        ))  # fmt: skip

    def call(self, index: int, item: dict[str, Any]) -> bytes:
        """One call, which is known once it is whole."""
        at = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        arguments, kind = item["arguments"], "response.function_call_arguments"
        return b"".join((
            self("response.output_item.added", output_index=index, item=begun),
            self(f"{kind}.delta", **at, delta=arguments),
            self(f"{kind}.done", **at, name=item["name"], arguments=arguments),
            self("response.output_item.done", output_index=index, item=item),
        ))  # fmt: skip


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
    calls = [
        {
            "type": "function_call", "id": f"fc_{turn.dialect.name}_{i}",
            "call_id": call["id"], "status": "completed", **call["function"],
        }
        for i, call in enumerate(turn.calls(a))
    ]  # fmt: skip
    message = _message(turn, a)
    return [message, *calls] if message["content"][0]["text"] or not calls else calls


def _as_message(output: list[dict[str, Any]]) -> Message:
    """A response as a later one sees it."""
    items: list[Item] = []
    for i in output:
        if i["type"] == "message":
            items.append(MessageItem(role="assistant", content=i["content"][0]["text"]))
        else:
            items.append(CallItem.model_validate(i))
    return messages_of(items)[0]


def _message(turn: Turn, a: Whole) -> dict[str, Any]:
    status = "incomplete" if a.finish == "length" else "completed"
    base = {"id": turn.message_id, "type": "message", "role": "assistant", "status": status}
    chances = {"logprobs": _chances(turn, a.said)} if turn.body.chances else {}
    return {**base, "content": [{**output_part(turn.text(a)), **chances}]}


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
