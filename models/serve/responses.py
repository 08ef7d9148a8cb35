"""POST /v1/responses: the same answers in the newer form, without stored state."""

import secrets
import time
from typing import Any

from .engine import Wanted
from .errors import Refused
from .generation import Asked, Generation
from .replies import PING, Dialect, Events, Whole, event, usage
from .schema import JsonSchema, ResponseFormat, ResponsesRequest
from .voice import Said


def prepared(generation: Generation, asked: ResponsesRequest) -> Any:
    """As `Generation.chat`."""
    service, text = generation.service, asked.text.format
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        for item in asked.input:
            said = item.content
            words = said if isinstance(said, str) else "".join(p.text for p in said)
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": words})
    ids = service.chat_ids(messages)
    schema = (
        JsonSchema(name=text.name, schema_=text.schema_) if text.type == "json_schema" else None
    )
    form = service.form(ResponseFormat(type=text.type, json_schema=schema))
    limit = -1 if asked.max_output_tokens is None else asked.max_output_tokens
    one = asked.model_copy(update={"n": 1})
    name, wanted = service.m.model.name, Wanted(limit, None, form)
    dialect = Dialect(True, f"resp_{secrets.token_hex(12)}", name, service.m.tokenizer)
    return lambda: Asked(service.answer([ids], one, wanted), dialect, one)


async def whole(generation: Generation, asked: Asked) -> dict[str, Any]:
    """The reply, once all of it is there."""
    a = Whole()
    async for _, what in generation.heard(asked.answers):
        if what is not None:
            a.add(what)
    if a.error is not None:
        raise Refused(a.error)
    return _response(asked, a, _item(asked, a))


async def events(generation: Generation, asked: Asked) -> Events:
    """The reply as it comes; every event has a number."""
    a, number = Whole(), 0

    def told(kind: str, **facts: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **facts}, kind)

    at = {"item_id": _item_id(asked), "output_index": 0, "content_index": 0}
    yield told("response.created", response=_response(asked, a, None))
    opened = {**_item(asked, a), "status": "in_progress", "content": []}
    yield told("response.output_item.added", output_index=0, item=opened)
    yield told("response.content_part.added", **at, part=_part(""))
    async for _, what in generation.heard(asked.answers):
        if what is None:
            yield PING
            continue
        a.add(what)
        if isinstance(what, Said) and what.text:
            yield told("response.output_text.delta", **at, delta=what.text, logprobs=[])
    if a.error is not None:
        yield told("error", message=a.error, code=None, param=None)
        return
    yield told("response.output_text.done", **at, text=a.text, logprobs=[])
    yield told("response.content_part.done", **at, part=_part(a.text))
    yield told("response.output_item.done", output_index=0, item=_item(asked, a))
    kind = "response.completed" if a.finish == "stop" else "response.incomplete"
    yield told(kind, response=_response(asked, a, _item(asked, a)))


def _item_id(asked: Asked) -> str:
    return asked.dialect.id.replace("resp_", "msg_")


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _item(asked: Asked, a: Whole) -> dict[str, Any]:
    status = "incomplete" if a.finish == "length" else "completed"
    base = {"id": _item_id(asked), "type": "message", "role": "assistant", "status": status}
    return {**base, "content": [_part(a.text)]}


def _response(asked: Asked, a: Whole, item: dict[str, Any] | None) -> dict[str, Any]:
    """The response around its one message, or around none yet."""
    status = {None: "in_progress", "length": "incomplete"}.get(a.finish, "completed")
    counted = usage(asked.answers.prompt_tokens, [a])
    return {
        "id": asked.dialect.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": asked.dialect.model,
        "output": [] if item is None else [item],
        "incomplete_details": {"reason": "max_output_tokens"} if a.finish == "length" else None,
        "error": None,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "usage": None
        if item is None
        else {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        },
    }
