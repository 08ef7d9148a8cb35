"""What a client writes null for is as if it had been left out."""

from typing import Any, get_args

import pytest
from serve_kit import TALK, WEB, Server

from models.serve import anthropic_blocks, items, messages, native_fields, schema
from models.serve.fields import Body

NEEDED: dict[str, Any] = {  # of the bodies below, by name
    "role": "user", "content": "a", "text": "a", "output": "a", "input": "a", "prompt": "a",
    "name": "f", "function": {"name": "f"}, "call_id": "c", "id": "0", "created": 0, "lane": 0,
    "thinking": "a", "tool_use_id": "c", "input_schema": {"type": "object"}, "schema_": {},
    "messages": TALK, "tokens": [1], "mode": "auto", "input_prefix": "a", "input_suffix": "b",
    "query": "a", "documents": ["b"], "url": "data:,", "image_url": {"url": "data:,"},
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
}  # fmt: skip
OWN: dict[type[Body], dict[str, Any]] = {
    messages.AllowedTools: {"tools": [{"type": "function", "function": {"name": "f"}}]},
    items.FlatAllowed: {"tools": [{"type": "function", "name": "f"}]},
    anthropic_blocks.UseBlock: {"input": {}},
    anthropic_blocks.Thinking: {"type": "enabled"},
}
BODIES = sorted(
    {
        found
        for module in (schema, items, messages, anthropic_blocks, native_fields)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Body)
    }
    - {Body, schema.Sampling, native_fields.NativeRequest},
    key=lambda body: body.__name__,
)
# There null bounds nothing, and what is left out 16 tokens
OTHERWISE = (schema.CompletionRequest, "max_tokens")


def least(body: type[Body]) -> dict[str, Any]:
    """The shortest body of its kind."""
    found: dict[str, Any] = {}
    for name, field in body.model_fields.items():
        if field.is_required():
            own = OWN.get(body, {})
            if name in own or name != "type":
                found[name] = own[name] if name in own else NEEDED[name]
            else:
                found[name] = get_args(field.annotation)[0]
    return found


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_null_is_what_is_left_out(body: type[Body]) -> None:
    asked = least(body)
    whole = body.model_validate(asked)
    for name, field in body.model_fields.items():
        if not field.is_required() and (body, name) != OTHERWISE:
            assert body.model_validate({**asked, field.alias or name: None}) == whole, name


def call(**arguments: Any) -> list[dict[str, Any]]:
    """A conversation in which a function was called."""
    called = {"id": "c", "type": "function", "function": {"name": "f", **arguments}}
    told = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    return [*TALK, {"role": "assistant", "content": None, "tool_calls": [called]}, told]


def item(**arguments: Any) -> list[dict[str, Any]]:
    """The same as items."""
    called = {"type": "function_call", "call_id": "c", "name": "f", **arguments}
    return [*TALK, called, {"type": "function_call_output", "call_id": "c", "output": "ok"}]


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": None, "strict": None}}
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # as clients send it, and without
    (CHAT, {"stream_options": {"include_usage": None}, "stream": None}, {}),
    (TEXT, {"stream_options": {"include_usage": None}}, {}),
    (CHAT, {"response_format": FORM},
     {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
    (CHAT, {"messages": call(arguments=None)}, {"messages": call(arguments="{}")}),
    (CHAT, {"messages": call()}, {"messages": call(arguments="{}")}),
    (RESPONSES, {"text": None}, {}),
    (RESPONSES, {"text": {"format": None, "verbosity": None}}, {}),
    (RESPONSES, {"input": item(arguments=None)}, {"input": item(arguments="{}")}),
    (RESPONSES, {"input": item()}, {"input": item(arguments="{}")}),
    (RESPONSES, {"input": [{"type": None, "role": "user", "content": "ab"}]}, {}),
    (RESPONSES, {"input": [*item()[:-1], {**item()[-1], "call_id": None}]}, {"input": item()}),
]  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 4, "temperature": 0},
    TEXT: {"prompt": "ab", "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "ab", "max_output_tokens": 4, "temperature": 0},
}


@pytest.mark.parametrize(("path", "given", "plain"), SAME)
def test_answers_are_those_to_what_was_left_out(
    server: Server, path: str, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    told = []
    for more in (given, plain):
        reply = WEB.post(server.url + path, json={**ASKED[path], **more})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        texts = found.get("choices") or [item["content"] for item in found["output"]]
        read = found["usage"].get("prompt_tokens") or found["usage"]["input_tokens"]
        told.append((texts, read))
    assert told[0] == told[1]


def test_a_completion_of_nothing_is_one_of_an_empty_text(server: Server) -> None:
    """Which this model, without a token for a text's beginning, has nothing to read in."""
    told = [WEB.post(server.url + TEXT, json={"prompt": p}).json()["error"] for p in (None, "")]
    assert told[0] == told[1] and told[0]["message"] == "the prompt is empty"
