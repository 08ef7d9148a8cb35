"""What `/v1/responses` keeps: conversations that a later response may go on with."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from .errors import Refused
from .items import CallItem, Item, MessageItem, ReferenceItem, ResultItem
from .messages import CalledFunction, Message, ToolCall
from .replies import one_line
from .routing import kept_with
from .schema import InputItemsQuery

_MESSAGES = TypeAdapter(tuple[Message, ...])
_ITEM: TypeAdapter[Item] = TypeAdapter(Item)


@dataclass(frozen=True)
class Kept:
    """A response, and all that was said up to its end, as JSON: so what both take is known, with
    tools, instructions and whatever else they hold."""

    response: bytes
    said: bytes

    @staticmethod
    def of(response: dict[str, Any], messages: Sequence[Message]) -> "Kept":
        """Of these messages, the response's own the last."""
        said = _MESSAGES.dump_json(tuple(messages), exclude_none=True)
        return Kept(one_line(response), said)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said."""
        return _MESSAGES.validate_json(self.said)

    @property
    def size(self) -> int:
        """In bytes; what a conversation has in common with others is counted in each."""
        return len(self.response) + len(self.said)


class Conversations:
    """The latest responses: at most `most`, of at most `size` bytes together. Whoever knows the id
    of one may have it; ids cannot be guessed."""

    def __init__(self, most: int, size: int) -> None:
        self.most, self.size = most, size
        self._held: OrderedDict[str, Kept] = OrderedDict()  # what was used longest ago first
        self._count = 0  # bytes of all of them

    def keep(self, id: str, kept: Kept) -> None:
        """Add a response; what was used longest ago goes for it, or the response itself where it
        is too long. One of the same id, which was begun here and gone on with elsewhere, goes."""
        if id in self._held:
            self.drop(id)
        self._held[id] = kept
        self._count += kept.size
        while len(self._held) > self.most or self._count > self.size:
            self._count -= self._held.popitem(last=False)[1].size

    def find(self, id: str) -> Kept:
        """A response that is still there. Refused where none is."""
        kept = self._held.get(id)
        if kept is None:
            raise Refused(f"no response {id[:80]!r} is kept here (any more)", 404)
        with suppress(KeyError):  # asked for in a thread of its own: it may have gone by now
            self._held.move_to_end(id)
        return kept

    def resolved(self, given: Sequence[Item]) -> list[Item]:
        """An input with the items themselves where it names some that are kept. Refused where one
        is not, and where it is named twice: a short request is to be no long prompt."""
        there, found, seen = dict[str, dict[str, Any]](), list[Item](), set[str]()
        for item in given:
            if not isinstance(item, ReferenceItem):
                found.append(item)
                continue
            response, shown = kept_with(item.id), f"{item.id[:80]!r}"
            if item.id in seen:
                raise Refused(f"input: item {shown} is there twice", param="input")
            seen.add(item.id)
            if response in self._held and response not in there:
                there[response] = _items_with(response, self.find(response))
            if (named := there.get(response, {}).get(item.id)) is None:
                message = f"input: no item {shown} is kept here (any more): send all of it instead"
                raise Refused(message, 404, "input")
            found.append(_ITEM.validate_python(named))
        return found

    def drop(self, id: str) -> None:
        """Forget a response. Refused where none is."""
        self._count -= self.find(id).size
        del self._held[id]


def output_part(text: str) -> dict[str, Any]:
    """Text of the assistant, as an item has it."""
    return {"type": "output_text", "text": text, "annotations": []}


def input_part(text: str) -> dict[str, Any]:
    """Text of anybody else."""
    return {"type": "input_text", "text": text}


def items_of(id: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages before a response as the items of its input. Their ids follow from its own: they
    are the same whenever they are asked for."""
    found: list[dict[str, Any]] = []
    for m in messages:
        if m.role == "tool":
            output = _parts(m) if m.images else m.text
            more = {"call_id": m.tool_call_id, "output": output}
            found.append({"type": "function_call_output", **more})
        elif m.text or not m.tool_calls:
            found.append({"type": "message", "role": m.role, "content": _parts(m)})
        for call in m.tool_calls or ():
            more = {"call_id": call.id, **call.function.model_dump()}
            found.append({"type": "function_call", **more})
    name = id.removeprefix("resp_")
    return [{"id": f"item_{name}_{i}", "status": "completed", **f} for i, f in enumerate(found)]


def _parts(m: Message) -> list[dict[str, Any]]:
    """A message's images, and its text."""
    seen = [{"type": "input_image", "image_url": p.image_url.url} for p in m.images]
    return [*seen, output_part(m.text) if m.role == "assistant" else input_part(m.text)]


def _items_with(id: str, kept: Kept) -> dict[str, dict[str, Any]]:
    """By their ids, the items that a response has read and made."""
    read, made = items_of(id, kept.messages[:-1]), json.loads(kept.response)["output"]
    return {item["id"]: item for item in (*read, *made)}


def page_of(items: Sequence[dict[str, Any]], asked: InputItemsQuery) -> dict[str, Any]:
    """A list as OpenAI's clients leaf through it. Refused behind an item that is not in it."""
    ordered = list(items) if asked.order == "asc" else list(items)[::-1]
    if asked.after is not None:
        ids = [item["id"] for item in ordered]
        if asked.after not in ids:
            raise Refused(f"after: no item {asked.after[:80]!r} here", param="after")
        ordered = ordered[ids.index(asked.after) + 1 :]
    shown = ordered[: asked.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(ordered),
    }


def messages_of(given: str | Sequence[Item]) -> list[Message]:
    """The input of a response as messages; calls side by side are one message, with the
    assistant's text before them."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    found: list[Message] = []
    for item in given:
        if isinstance(item, MessageItem):
            found.append(Message(role=item.role, content=item.content))
        elif isinstance(item, CallItem):
            called = CalledFunction(name=item.name, arguments=item.arguments)
            _call(found, ToolCall(id=item.call_id, function=called))
        elif isinstance(item, ResultItem):
            found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
    return found


def _call(found: list[Message], call: ToolCall) -> None:
    """Add a call to the message before, where that is the assistant's."""
    if not found or found[-1].role != "assistant":
        found.append(Message(role="assistant"))
    found[-1].tool_calls = [*(found[-1].tool_calls or ()), call]
