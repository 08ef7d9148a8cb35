"""Replies have every field, with its type, that OpenAI's own description gives them.

The description is that of the `openai` package: its types are made from OpenAI's public reference.
The client itself is lenient and would take anything; here they are held to strictly. Each line of
`ASKED` is a request that the reference allows, by address.
"""

import json
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serve_kit import FLAG, TALK, WEB, Server, events

PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": FLAG}}
FLAT = {"type": "function", "name": "f", "description": "d", "parameters": FLAG, "strict": True}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
CHANCES = "message.output_text.logprobs"
FLAT_NAMED = {"type": "function", "name": "f"}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": FLAG, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [*TALK, {"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "c", "content": "ok"}]  # fmt: skip
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "ok"},
]

CHAT: list[dict[str, Any]] = [
    {}, {"max_tokens": 3}, {"max_completion_tokens": 3}, {"n": 2}, {"seed": 1, "temperature": 1.5},
    {"top_p": 0.5}, {"stop": "a"}, {"stop": ["a", "b"]}, {"presence_penalty": 1.0},
    {"frequency_penalty": -1.0}, {"logit_bias": {"97": -100}}, {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2}, {"user": "u"}, {"metadata": {"a": "b"}},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}},
    {"response_format": FORM, "max_tokens": 60}, {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 90},
    {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 90, "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": ALLOWED, "max_tokens": 90},
    {"messages": PARTS}, {"messages": CALLED}, {"messages": CALLED, "tools": [TOOL]},
    {"messages": [{"role": "developer", "content": "Be kind."}, *TALK]}, {"store": False},
    {"service_tier": "auto"}, {"reasoning_effort": "low"},
]  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [
    {}, {"max_tokens": 3}, {"prompt": [97, 98]}, {"prompt": ["a", "b"]}, {"prompt": [[97], [98]]},
    {"n": 2}, {"logprobs": 2}, {"stop": ["a"]}, {"seed": 2}, {"echo": False}, {"user": "u"},
]  # fmt: skip
RESPONSES: list[dict[str, Any]] = [
    {}, {"instructions": "Be kind."}, {"input": ITEMS}, {"max_output_tokens": 3}, {"store": False},
    {"text": {"format": {"type": "text"}}}, {"tools": [FLAT]}, {"parallel_tool_calls": True},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": FLAG}},
     "max_output_tokens": 60},
    {"tools": [FLAT], "tool_choice": "required", "max_output_tokens": 90},
    {"tools": [FLAT], "tool_choice": FLAT_NAMED, "max_output_tokens": 90},
    {"tools": [FLAT], "max_output_tokens": 90,
     "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [FLAT_NAMED]}},
    {"temperature": 0.5, "top_p": 0.9}, {"metadata": {"a": "b"}}, {"truncation": "disabled"},
    {"include": [CHANCES]}, {"include": [CHANCES], "top_logprobs": 2},
    {"include": [CHANCES], "top_logprobs": 2, "tools": [FLAT], "tool_choice": "required",
     "max_output_tokens": 90},
]  # fmt: skip
ASKED: list[tuple[str, dict[str, Any], type | None, Any]] = [
    *(("/v1/chat/completions", {"messages": TALK, **c}, ChatCompletion, ChatCompletionChunk)
      for c in CHAT),
    *(("/v1/completions", {"prompt": "ab", **c}, Completion, Completion) for c in COMPLETIONS),
    *(("/v1/responses", {"input": "Hi", **r}, Response, ResponseStreamEvent) for r in RESPONSES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "whole", "piece"), ASKED, ids=[f"{i}{a[0]}" for i, a in enumerate(ASKED)]
)
def test_replies_are_as_the_reference_says(
    server: Server, path: str, body: dict[str, Any], whole: type, piece: Any
) -> None:
    asked = {"model": "m", "max_tokens": 8, **body}
    if path == "/v1/responses":
        asked = {"model": "m", "max_output_tokens": 8, **body}
    reply = WEB.post(server.url + path, json=asked)
    assert reply.status_code == 200, reply.text
    TypeAdapter(whole).validate_json(reply.content, strict=True)
    stream = WEB.post(server.url + path, json={**asked, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    told = list(events(stream.text))
    assert len(told) > 1
    for name, data in told:
        if piece is Completion:  # the type of whole replies: its reason may not be missing
            data["choices"][0]["finish_reason"] = data["choices"][0]["finish_reason"] or "stop"
        TypeAdapter(piece).validate_json(json.dumps(data), strict=True)
        assert name == (data["type"] if path == "/v1/responses" else "")
    assert stream.text.endswith("data: [DONE]\n\n") == (path != "/v1/responses")


@pytest.mark.parametrize("stop", [None, "a", "xyz"])
def test_tokens_of_completions_are_where_they_say(server: Server, stop: str | None) -> None:
    """In a stream as in a whole reply, where text is held back too."""
    for seed in range(4):
        asked = {"prompt": ["ab", "cd"], "max_tokens": 20, "logprobs": 2, "seed": seed,
                 "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "stop": stop,
                 "logit_bias": {str(i): -100 for i in range(256, 319)}}  # fmt: skip
        choices = WEB.post(f"{server.url}/v1/completions", json=asked).json()["choices"]
        stream = WEB.post(f"{server.url}/v1/completions", json={**asked, "stream": True})
        pieces = [c for _, data in events(stream.text) for c in data["choices"]]
        for choice in choices:
            told, text = choice["logprobs"], choice["text"]
            tokens, offsets = told["tokens"], told["text_offset"]
            assert len(tokens) == len(offsets) and offsets == sorted(offsets) and offsets[0] == 0
            for token, at in zip(tokens, offsets, strict=True):
                behind = text[at:].removeprefix("\ufffd")  # a broken letter, known by what follows
                assert not token.isascii() or token.startswith(behind[: len(token)])
            own = [p["logprobs"] for p in pieces if p["index"] == choice["index"]]
            assert [at for p in own if p for at in p["text_offset"]] == offsets


def test_lists_and_vectors_are_too(server: Server) -> None:
    found = WEB.get(f"{server.url}/v1/models").json()
    assert found["object"] == "list"
    TypeAdapter(list[Model]).validate_json(json.dumps(found["data"]), strict=True)
    for given in ("a", ["a", "b"], [97], [[97], [98]]):
        asked = {"model": "m", "input": given, "encoding_format": "float"}
        reply = WEB.post(f"{server.url}/v1/embeddings", json=asked)
        TypeAdapter(CreateEmbeddingResponse).validate_json(reply.content, strict=True)


OF_OPENAI = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


@pytest.mark.parametrize("path", [*OF_OPENAI, "/completion", "/infill", "/apply-template"])
def test_errors_are_objects_with_four_fields(server: Server, path: str) -> None:
    error = WEB.post(server.url + path, json={"model": "m"}).json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and isinstance(error["message"], str)
