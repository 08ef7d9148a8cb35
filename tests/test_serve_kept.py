"""What a client can learn of a response that is kept, and of one that it has not asked for yet."""

import json
from typing import Any
from unittest.mock import ANY

import openai
import pytest
from openai.types.responses import Response, ResponseItem
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter
from serve_kit import WEB, Server

from models.serve.routing import kept_with

ASKED: dict[str, Any] = {"model": "m", "max_output_tokens": 4, "temperature": 0}
TOOL: dict[str, Any] = {
    "type": "function", "name": "set", "strict": True,
    "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}},
                   "required": ["on"], "additionalProperties": False},
}  # fmt: skip
SAID: list[Any] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                 {"type": "input_text", "text": "b"}]},
    {"role": "assistant", "content": "I see."},
    {"type": "function_call", "call_id": "c", "name": "set", "arguments": '{"on": true}'},
    {"type": "function_call_output", "call_id": "c", "output": "done"},
]  # fmt: skip


def test_what_a_client_notes_on_a_response_is_given_back(server: Server) -> None:
    noted, client = {"a": "b", "k" * 64: "v" * 512}, server.client
    whole = client.responses.create(**ASKED, input="Hi", metadata=noted)
    events = list(client.responses.create(**ASKED, input="Hi", metadata=noted, stream=True))
    assert whole.metadata == noted == client.responses.retrieve(whole.id).metadata
    assert all(e.response.metadata == noted for e in (events[0], events[-1]))
    assert client.responses.create(**ASKED, input="Hi").metadata == {}
    most = {str(i): "" for i in range(16)}
    assert client.responses.create(**ASKED, input="Hi", metadata=most).metadata == most


@pytest.mark.parametrize(
    ("noted", "says"),
    [
        ({str(i): "" for i in range(17)}, "at most 16 items"),
        ({"k" * 65: ""}, "at most 64 characters"),
        ({"a": "v" * 513}, "at most 512 characters"),
        ({"a": 1}, "metadata.a: Input should be a valid string"),
        ([], "metadata: Input should be an object"),
    ],
)
def test_notes_are_bounded_as_openai_has_it(server: Server, noted: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.responses.create(**ASKED, input="Hi", metadata=noted)
    assert says in refused.value.message and refused.value.param == "metadata"


def shown(items: list[Any]) -> list[tuple[Any, ...]]:
    """What matters of items."""
    found: list[tuple[Any, ...]] = []
    for i in items:
        if i.type == "message":
            found.append((i.role, "".join(p.text for p in i.content)))
        elif i.type == "function_call":
            found.append((i.name, i.call_id, json.loads(i.arguments)))
        else:
            found.append((i.call_id, i.output))
    return found


def test_the_items_that_a_response_has_read_are_told(server: Server) -> None:
    """Those of the responses before it, too; in OpenAI's own types, which are held to strictly."""
    client = server.client
    first = client.responses.create(**ASKED, input=SAID, instructions="No item.")
    then = client.responses.create(**ASKED, input="And?", previous_response_id=first.id)
    told = [
        ("developer", "Be kind."), ("user", "ab"), ("assistant", "I see."),
        ("set", "c", {"on": True}), ("c", "done"),
    ]  # fmt: skip
    page = client.responses.input_items.list(first.id, order="asc")
    assert shown(page.data) == told
    more = [*told, ("assistant", first.output_text), ("user", "And?")]
    assert shown(client.responses.input_items.list(then.id).data) == more[::-1]
    raw = WEB.get(f"{server.url}/v1/responses/{then.id}/input_items").json()
    TypeAdapter(ResponseItemList).validate_python({**raw, "data": []}, strict=True)
    for item in raw["data"]:
        TypeAdapter(ResponseItem).validate_json(json.dumps(item), strict=True)
    assert len({item["id"] for item in raw["data"]}) == len(more)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_items_are_leafed_through(server: Server, order: Any) -> None:
    many: list[Any] = [{"role": "user", "content": str(i)} for i in range(25)]
    made = server.client.responses.create(**ASKED, input=many)
    listing = server.client.responses.input_items.list
    texts = [str(i) for i in range(25)][:: 1 if order == "asc" else -1]
    for limit in (1, 7, 25, 100):
        found = list(listing(made.id, order=order, limit=limit))
        assert [i.content[0].text for i in found] == texts  # type: ignore[union-attr]
    page = listing(made.id, order=order)
    assert len(page.data) == 20 and page.has_more
    end = listing(made.id, order=order, after=found[-1].id)
    assert end.data == [] and not end.has_more
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nobody"}):
        with pytest.raises(openai.BadRequestError) as refused:
            listing(made.id, extra_query=wrong)
        assert refused.value.param == next(iter(wrong))


def test_what_is_not_kept_has_no_items_and_what_is_over_cannot_be_cancelled(server: Server) -> None:
    client = server.client
    made = client.responses.create(**ASKED, input="Hi")
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        client.responses.cancel(made.id)
    assert client.responses.retrieve(made.id).status == "incomplete"
    client.responses.delete(made.id)
    for ask in (client.responses.cancel, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask(made.id)


def test_events_are_not_told_again(server: Server) -> None:
    """The client took the whole response for a stream without events."""
    made = server.client.responses.create(**ASKED, input="Hi")
    with pytest.raises(openai.BadRequestError, match="no events") as refused:
        list(server.client.responses.retrieve(made.id, stream=True))
    assert refused.value.param == "stream"
    assert server.client.responses.retrieve(made.id).output == made.output


FORM: dict[str, Any] = {
    "type": "json_schema", "name": "flag", "schema": TOOL["parameters"], "strict": True,
    "description": "A switch.",
}  # fmt: skip


@pytest.mark.parametrize("form", [None, {"type": "text"}, {"type": "json_object"}, FORM])
def test_a_response_says_how_it_was_asked_for(server: Server, form: Any) -> None:
    text = {} if form is None else {"text": {"format": form}}
    asked = {**ASKED, **text, "temperature": 0.5, "top_p": 0.25, "reasoning": {"effort": "low"}}
    made = server.client.responses.create(**asked, input="Hi")
    again = server.client.responses.retrieve(made.id)
    for found in (made, again):
        TypeAdapter(Response).validate_json(found.to_json(), strict=True)
        assert (found.temperature, found.top_p, found.truncation) == (0.5, 0.25, "disabled")
        assert found.reasoning is not None and found.reasoning.effort == "low"
        assert found.text is not None and found.text.to_dict() == {
            "format": form or {"type": "text"}
        }
    plain = server.client.responses.create(model="m", input="Hi", max_output_tokens=1)
    assert (plain.temperature, plain.top_p, plain.reasoning) == (None, None, None)


def test_tokens_are_counted_as_they_are_used(server: Server) -> None:
    client = server.client
    first = client.responses.create(**ASKED, input="Hi")
    asked: list[dict[str, Any]] = [
        {"input": "Hi"}, {"input": SAID}, {"input": "Hi", "instructions": "Be kind."},
        {"input": "Hi", "tools": [TOOL]}, {"input": "And?", "previous_response_id": first.id},
        {"input": "Hi", "tools": [TOOL], "tool_choice": "none"},
    ]  # fmt: skip
    counts = []
    for body in asked:
        counted = client.responses.input_tokens.count(model="m", **body)
        TypeAdapter(InputTokenCountResponse).validate_python(counted.to_dict(), strict=True)
        usage = client.responses.create(**ASKED, **body).usage
        assert usage is not None and counted.input_tokens == usage.input_tokens
        counts.append(counted.input_tokens)
    assert len(set(counts[:5])) == 5
    before = client.responses.input_tokens.count(previous_response_id=first.id).input_tokens
    assert counts[0] < before < counts[4]
    for nothing in ({}, {"input": None}, {"input": []}):
        with pytest.raises(openai.BadRequestError, match="expected a message") as refused:
            client.responses.input_tokens.count(**nothing)  # type: ignore[arg-type]
        assert refused.value.param == "input"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(input="a b " * 100_000)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")


def test_items_that_are_kept_are_read_by_their_ids(server: Server) -> None:
    """Of outputs and inputs, as if the client had sent all of them."""
    client = server.client
    calling = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100, "model": "m"}
    first = client.responses.create(**ASKED, input=SAID)
    more = {**ASKED, "max_output_tokens": 12}
    words = client.responses.create(**more, input="Hi", instructions="Be kind.")
    assert words.output_text
    call = client.responses.create(**calling, input="Set it.").output[0]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    read = client.responses.input_items.list(first.id, order="asc").data
    ids = [i.id for i in (*read, *words.output, call)]
    given: list[Any] = [{"type": "item_reference", "id": id} for id in ids]
    told: Any = [*SAID, {"role": "assistant", "content": words.output_text}, call.to_dict()]
    made = client.responses.create(**ASKED, input=[*given, result])
    whole = client.responses.create(**ASKED, input=[*told, result])
    assert made.usage is not None and whole.usage is not None
    assert made.output_text == whole.output_text
    assert made.usage.input_tokens == whole.usage.input_tokens > 50
    for response in (made, client.responses.create(**ASKED, input="On?")):
        items = list(client.responses.input_items.list(response.id))
        assert all(kept_with(i.id) == response.id for i in (*items, *response.output) if i.id)
    assert shown(list(client.responses.input_items.list(made.id, order="asc"))) == [
        *shown(read), ("assistant", words.output_text), ("set", call.call_id, {"on": ANY}),
        (call.call_id, "done"),
    ]  # fmt: skip


def test_items_that_are_not_kept_are_refused(server: Server) -> None:
    client = server.client
    free = client.responses.create(**ASKED, input="Hi", store=False)
    gone = client.responses.create(**ASKED, input="Hi")
    client.responses.delete(gone.id)
    there = client.responses.create(**ASKED, input="Hi").output[0].id or ""
    lost = [free.output[0].id, gone.output[0].id, f"{there}_7", "rs_1", "", "x" * 200]
    for id in lost:
        with pytest.raises(openai.NotFoundError, match=r"no item .* is kept here") as unknown:
            client.responses.create(**ASKED, input=[{"type": "item_reference", "id": str(id)}])
        assert unknown.value.param == "input"
    for wrong in ([{"type": "item_reference", "id": there}] * 2, [{"type": "item_reference"}]):
        with pytest.raises(openai.BadRequestError, match=r"is there twice|Field required") as bad:
            client.responses.create(**ASKED, input=wrong)  # type: ignore[arg-type]
        assert bad.value.param == "input"
