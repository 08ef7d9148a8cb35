"""POST /v1/messages: the same answers in Anthropic's form."""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .anthropic_blocks import Chosen, ClientTool, MessagesRequest, conversation
from .calls import Call, Piece
from .errors import MESSAGES, Refused
from .generation import Asked, Generation
from .inbox import Ended
from .messages import Function, Tool, ToolChoice
from .replies import Events, Whole, event, failed, finish_of
from .schema import ChatRequest, ResponseFormat
from .voice import Said
from .wire import Wire

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\],]', re.DOTALL)  # of JSON, strings whole
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(eq=False)
class Messages:
    """Answers in the form of `/v1/messages`."""

    generation: Generation

    def prepared(self, body: MessagesRequest) -> Callable[[], Asked]:
        """As `Generation.chat`."""
        return self.generation.chat(as_chat(body))

    def count(self, body: MessagesRequest) -> int:
        """Tokens of what a model would read."""
        return self.generation.count(as_chat(body))

    async def whole(self, asked: Asked) -> dict[str, Any]:
        """The reply, once all of it is there."""
        [a], content = await self.generation.ended(asked), _Content()
        content.more("thinking", a.thought)
        content.more("text", a.shown)
        for call in a.called:
            content.call(Piece(call, True, call.arguments))
            content.blocks[-1]["input"] = input_of(call)
        return {**_message(asked, a), "content": content.blocks, **_end(a)}

    async def events(self, asked: Asked, wire: Wire | None = None) -> Events:
        """The reply as it comes."""
        a, content = asked.answer(), _Content()
        yield _event("message_start", message={**_message(asked, a), "content": []})

        def tell(index: int, what: Said | Ended) -> bytes:
            if isinstance(what, Ended):
                return b""
            return content.more("thinking", what.thought) + content.news(a)

        async for said in self.generation.told(asked, [a], tell, wire):
            yield said
        if a.error is not None:
            yield failed(a.error, MESSAGES)
            return
        told = content.news(a) + content.closed()
        yield told + _event("message_delta", delta=_end(a), usage=_usage(asked, a))
        yield _event("message_stop")


@dataclass
class _Content:
    """The blocks of an answer as they come, and the events that tell of them."""

    blocks: list[dict[str, Any]] = field(default_factory=list)
    open: str = ""  # the kind of the last one, where it may go on

    def more(self, kind: str, text: str) -> bytes:
        """More text of a kind, which is the name of its field, too."""
        if not text:
            return b""
        head = b""
        if self.open != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            head, self.open = self.closed() + self._begun({"type": kind, kind: "", **signed}), kind
        self.blocks[-1][kind] += text
        return head + self._more({"type": f"{kind}_delta", kind: text})

    def news(self, a: Whole) -> bytes:
        """What an answer says beyond what was told of it: text and calls."""
        text, called = a.news()
        return b"".join([self.more("text", text), *map(self.call, called)])

    def call(self, piece: Piece) -> bytes:
        """More of a call."""
        call, told = piece.call, b""
        if piece.begins:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            told, self.open = self.closed() + self._begun(block), "tool_use"
        if piece.more:
            told += self._more({"type": "input_json_delta", "partial_json": piece.more})
        return told + (self.closed() if call.whole else b"")

    def closed(self) -> bytes:
        """The last block ends, where one is open."""
        was, self.open = self.open, ""
        return _event("content_block_stop", index=len(self.blocks) - 1) if was else b""

    def _begun(self, block: dict[str, Any]) -> bytes:
        self.blocks.append(block)
        return _event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _more(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The same question as `/v1/chat/completions` is asked it. Refused where it makes no sense."""
    said, options = conversation(body), body.output_config
    choice, goes_on = body.tool_choice, said[-1].role == "assistant" and said[-1].is_text
    think = {"enabled": True, "disabled": False}.get(body.thinking.type if body.thinking else "")
    form = options.format and ResponseFormat(type="json_schema", schema_=options.format.schema_)
    more = {
        "stop": body.stop_sequences, "messages": said, "max_tokens": body.max_tokens,
        "tools": [_tool(t) for t in body.tools or ()] or None,
        "tool_choice": choice and _chosen(choice),
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "reasoning_effort": options.effort, "response_format": form,
        "chat_template_kwargs": None if think is None else {"enable_thinking": think},
        "add_generation_prompt": not goes_on, "continue_final_message": goes_on,
    }  # fmt: skip
    return ChatRequest.model_construct(**{**body.shared, **more})


def _tool(t: ClientTool) -> Tool:
    told = Function(name=t.name, description=t.description, parameters=t.input_schema)
    return Tool(type="function", function=told)


def _chosen(choice: Chosen) -> str | ToolChoice:
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise Refused("tool_choice.name: Field required", param="tool_choice")
    return ToolChoice.of(choice.name)


def input_of(call: Call) -> Any:
    """The arguments of a call, or as many of one that was cut as are whole."""
    if call.whole:
        return read_input(call.arguments)
    with suppress(ValueError, RecursionError):
        return read_input(_with_an_end(call.arguments))
    return {}


def read_input(text: str) -> Any:
    """Arguments. Numbers that no reply can hold are the texts that they were."""
    return json.loads(text, parse_int=_whole, parse_float=_finite)


def _with_an_end(text: str) -> str:
    """JSON that is cut, up to the last value that is there as a whole, and brackets that close
    what is open."""
    end, opened = 0, list[str]()
    for part in _PARTS.finditer(text):
        if part[0] in "{[":
            opened.append("}" if part[0] == "{" else "]")
        elif part[0] in "}]":
            opened.pop()
        if part[0] in "{[]},":
            end = part.start() if part[0] == "," else part.end()
    return text[:end] + "".join(reversed(opened))


def _whole(text: str) -> int | str:
    with suppress(ValueError):  # Python reads and writes no more than some thousand digits
        return int(text)
    return text


def _finite(text: str) -> float | str:
    return found if math.isfinite(found := float(text)) else text


def _message(asked: Asked, a: Whole) -> dict[str, Any]:
    """What is around the content of an answer that has not ended."""
    d = asked.dialect
    return {
        "id": f"msg_{d.name}", "type": "message", "role": "assistant",
        "model": d.model, "stop_reason": None, "stop_sequence": None, "usage": _usage(asked, a),
    }  # fmt: skip


def _end(a: Whole) -> dict[str, Any]:
    """Why an answer has ended."""
    finish = str(finish_of(a))
    reason = REASONS.get(finish, "end_turn" if a.stopped is None else "stop_sequence")
    stopped = a.stopped if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(asked: Asked, a: Whole) -> dict[str, int]:
    """Tokens; those that were in the cache are none of the input's."""
    return {
        "input_tokens": asked.answers.prompt_tokens - a.reused, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": a.reused, "output_tokens": a.tokens,
    }  # fmt: skip


def _event(kind: str, **facts: Any) -> bytes:
    return event({"type": kind, **facts}, kind)
