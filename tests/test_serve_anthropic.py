"""`/v1/messages` as the `anthropic` client sees it, held to the types of Anthropic's reference."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import jsonschema
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from notation_kit import TEACHES_HERMES
from pydantic import TypeAdapter
from serve_kit import FLAG, WEB, Server, events, served
from small_model import small_model
from test_serve_thoughts import CLOSES, ENDS, LIKES, OPENS, vocabulary

from models.serve.anthropic import as_chat, read_input
from models.serve.anthropic_blocks import MessagesRequest
from models.serve.errors import MESSAGES
from models.serve.replies import failed

TALK = [{"role": "user", "content": "Set it."}]
TOOL: dict[str, Any] = {"name": "set", "description": "d", "input_schema": FLAG}
USE = {"type": "tool_use", "id": "c", "name": "set", "input": {"on": True}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "done"}
CALLED = [*TALK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
FORM = {"format": {"type": "json_schema", "schema": FLAG}}
ASKED: list[dict[str, Any]] = [  # each is a request that the reference allows
    {}, {"system": "Be kind."}, {"system": [{"type": "text", "text": "Be kind."}]},
    {"stop_sequences": ["a"]}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    {"metadata": {"user_id": "u"}}, {"tools": [TOOL]}, {"tools": [TOOL], "messages": CALLED},
    {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 99},
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "set"}, "max_tokens": 99},
    {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"tools": [TOOL], "tool_choice": {"type": "none"}},
    {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, {"output_config": FORM},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "disabled"}},
    {"messages": [*TALK, {"role": "assistant", "content": "I"}]}, {"service_tier": "auto"},
]  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def said(server: Server, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 12, "messages": TALK, "seed": 5, **more}
    reply = WEB.post(f"{server.url}/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def bare(content: list[Any]) -> list[dict[str, Any]]:
    """Blocks without the names of calls, which are each reply's own."""
    found = [b if isinstance(b, dict) else b.model_dump() for b in content]
    keys = ("type", "text", "thinking", "signature", "name", "input")
    return [{k: b[k] for k in keys if k in b} for b in found]


def streamed(server: Server, **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The blocks that the client puts together, and the end."""
    c = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    body = {"seed": 5, **{k: v for k, v in more.items() if k not in ("messages", "max_tokens")}}
    own: dict[str, Any] = {"messages": more.get("messages", TALK), "model": "m"}
    own["max_tokens"] = more.get("max_tokens", 12)
    with c.messages.stream(**own, extra_body=body) as stream:
        found = stream.get_final_message()
    return bare(found.content), {"reason": found.stop_reason, "at": found.stop_sequence}


@pytest.mark.parametrize("body", ASKED, ids=[str(i) for i in range(len(ASKED))])
def test_replies_are_as_the_reference_says(server: Server, body: dict[str, Any]) -> None:
    """Whole and in events, which say the same."""
    whole = said(server, **body)
    TypeAdapter(Message).validate_json(json.dumps(whole), strict=True)
    asked = {"model": "m", "max_tokens": 12, "messages": TALK, "seed": 5, "stream": True, **body}
    stream = WEB.post(f"{server.url}/v1/messages", json=asked)
    assert stream.headers["content-type"].startswith("text/event-stream")
    told = list(events(stream.text))
    for name, data in told:
        TypeAdapter(RawMessageStreamEvent).validate_json(json.dumps(data), strict=True)
        assert name == data["type"]
    assert [told[0][0], told[-2][0], told[-1][0]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    open_ = None
    for name, data in told[1:-2]:  # blocks one after another, each begun and ended
        assert (name == "content_block_start") == (open_ is None)
        assert open_ in (None, data["index"])
        open_ = None if name == "content_block_stop" else data["index"]
    assert open_ is None
    content, end = streamed(server, **body)
    assert content == bare(whole["content"])
    assert end == {"reason": whole["stop_reason"], "at": whole["stop_sequence"]}
    usage = (whole["usage"], told[-2][1]["usage"])
    read = [u["input_tokens"] + u["cache_read_input_tokens"] for u in usage]
    assert read[0] == read[1] == told[0][1]["message"]["usage"]["input_tokens"]


def test_answers_are_those_of_a_chat(server: Server) -> None:
    """The same words, tokens and reasons as the same question has in OpenAI's form."""
    call = {"id": "c", "type": "function", "function": {"name": "set", "arguments": '{"on": true}'}}
    chat = {"messages": [{"role": "system", "content": "Be kind."}, *TALK,
                         {"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "c", "content": "done"},
                         {"role": "user", "content": "And\nnow?"}],
            "tools": [{"type": "function", "function": {"name": "set", "description": "d",
                                                        "parameters": FLAG}}],
            "max_tokens": 30, "seed": 7, "temperature": 1.5}  # fmt: skip
    last = {"role": "user", "content": [
        RESULT, {"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]}  # fmt: skip
    found = said(server, system="Be kind.", messages=[*CALLED[:2], last], tools=[TOOL],
                 max_tokens=30, seed=7, temperature=1.5)  # fmt: skip
    other = WEB.post(f"{server.url}/v1/chat/completions", json=chat).json()
    assert found["content"][0]["text"] == other["choices"][0]["message"]["content"] != ""
    usage = found["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"]
        == (other["usage"]["prompt_tokens"])
    )
    assert usage["output_tokens"] == other["usage"]["completion_tokens"]
    finish = other["choices"][0]["finish_reason"]
    assert found["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[finish]


def test_a_demanded_call_is_a_block(server: Server) -> None:
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 99}
    found = said(server, **more)
    assert (found["stop_reason"], [b["type"] for b in found["content"]]) == (
        "tool_use",
        ["tool_use"],
    )
    jsonschema.validate(found["content"][0]["input"], FLAG)
    cut = said(server, **{**more, "max_tokens": 20})
    assert (cut["stop_reason"], cut["content"]) == ("max_tokens", [])


def test_models_are_listed_as_the_reference_says(
    client: anthropic.Anthropic, server: Server
) -> None:
    """With what its own fields are called, beside OpenAI's."""
    (listed,) = client.models.list()
    found = client.models.retrieve(listed.id)
    assert (found.type, found.display_name, found.id) == ("model", "small", "small")
    assert found.created_at.timestamp() == server.client.models.list().data[0].created
    page = WEB.get(f"{server.url}/v1/models").json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("small", "small", False)


def test_forms_are_held(server: Server) -> None:
    found = said(server, output_config=FORM, max_tokens=60)
    jsonschema.validate(json.loads(found["content"][0]["text"]), FLAG)


def test_the_stop_sequence_is_named(server: Server) -> None:
    whole = said(server, max_tokens=30, temperature=0)["content"][0]["text"]
    stop = whole[4:6]
    found = said(server, max_tokens=30, temperature=0, stop_sequences=["never", stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"] == [{"type": "text", "text": whole[: whole.index(stop)]}]


def test_an_answer_goes_on_in_a_last_turn_of_the_assistant(server: Server) -> None:
    """As where a chat is told to; without one it is a new answer."""
    begun = {"role": "assistant", "content": "It is"}
    chat = {"messages": [*TALK, begun], "add_generation_prompt": False, "max_tokens": 12,
            "continue_final_message": True, "seed": 5}  # fmt: skip
    other = WEB.post(f"{server.url}/v1/chat/completions", json=chat).json()
    found = said(server, messages=[*TALK, begun])
    assert found["content"][0]["text"] == other["choices"][0]["message"]["content"]
    assert found["content"] != said(server)["content"]


def test_turns_of_one_role_are_one() -> None:
    """And what functions gave back comes before what is said beside it."""
    text = {"type": "text", "text": "b"}
    body = {"system": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}], "messages": [
        {"role": "user", "content": "a"}, {"role": "user", "content": [text]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"}, text, USE]},
        {"role": "user", "content": [text, {**RESULT, "content": [text, text]}]},
        {"role": "user", "content": [{"type": "web_search_tool_result", "content": []}]},
    ]}  # fmt: skip
    found = as_chat(MessagesRequest.model_validate(body)).messages
    assert [(m.role, m.text) for m in found] == [
        ("system", "x\ny"), ("user", "a\nb"), ("assistant", "b"), ("tool", "b\nb"), ("user", "b"),
    ]  # fmt: skip
    (call,) = found[2].tool_calls or ()
    assert (call.id, json.loads(call.function.arguments)) == ("c", USE["input"])
    assert (found[2].reasoning_content, found[3].tool_call_id) == ("hm", "c")


def test_tokens_are_counted_as_they_are_read(server: Server, client: anthropic.Anthropic) -> None:
    own: dict[str, Any] = {"messages": TALK, "system": "Be kind.", "tools": [TOOL]}
    raw = WEB.post(f"{server.url}/v1/messages/count_tokens", json={"model": "m", **own})
    TypeAdapter(MessageTokensCount).validate_json(raw.content, strict=True)
    usage = said(server, **own)["usage"]
    assert client.messages.count_tokens(model="m", **own).input_tokens == (
        usage["input_tokens"] + usage["cache_read_input_tokens"]
    )


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "), ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "reads text only: it has no tower"),
    ({"messages": [{"role": "user", "content": [{**RESULT, "content": [PICTURE]}]}]}, "reads text"),
    ({"messages": [{"role": "user", "content": "a" * 99999}]}, "prompt is too long: "),
    ({"tools": [TOOL, TOOL]}, "tools: 'set' is there twice"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "names no tool"),
    ({"tool_choice": {"type": "any"}}, "names no tool"), ({"n": 2}, "n: this server cannot"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers: this server cannot"),
    ({"stop": "a"}, "stop: this server cannot do that: leave it out, and say stop_sequences"),
    ({"tools": [{**TOOL, "type": 5}]}, "tools.0.type: Input should be 'custom'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "none"}}}}, "schema"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_cannot_be_served_is_refused_in_the_same_form(
    server: Server, body: dict[str, Any], says: str
) -> None:
    asked = {"model": "m", "max_tokens": 5, "messages": TALK, **body}
    for stream in (False, True):
        reply = WEB.post(f"{server.url}/v1/messages", json={**asked, "stream": stream})
        told = TypeAdapter(ErrorResponse).validate_json(reply.content, strict=True)
        assert (reply.status_code, told.error.type) == (400, "invalid_request_error")
        assert says in told.error.message


def test_each_status_has_its_kind_of_error(server: Server) -> None:
    url = f"{server.url}/v1/messages"
    replies = [
        WEB.get(url), WEB.post(f"{url}/nowhere"), WEB.post(url, content=b"{"),
        WEB.post(url, content=b" " * ((1 << 23) + 1)),
        WEB.post(url, json={}, headers={"origin": "http://elsewhere.example"}),
    ]  # fmt: skip
    found = [(r.status_code, r.json()["type"], r.json()["error"]["type"]) for r in replies]
    assert found == [
        (405, "error", "invalid_request_error"), (404, "error", "not_found_error"),
        (400, "error", "invalid_request_error"), (413, "error", "request_too_large"),
        (403, "error", "permission_error"),
    ]  # fmt: skip


def test_numbers_that_no_reply_can_hold_are_texts() -> None:
    long = "9" * 5000
    given = f'{{"a": 1e999, "b": {long}, "c": 1.5, "d": 12, "e": -1e999}}'
    found = {"a": "1e999", "b": long, "c": 1.5, "d": 12, "e": "-1e999"}
    assert read_input(given) == found


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: Any) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("thinks") / "small.gguf"
    changes = vocabulary(4, TEACHES_HERMES + ENDS["given"])
    with served(small_model(path, changes), "--parallel", "2") as running:
        yield running


def test_thoughts_are_blocks_before_the_text(thinking: Server) -> None:
    """The same parts that a chat has, and none where the template is told to leave them out."""
    seen = set[tuple[str, ...]]()
    for seed in range(24):
        for kind in ("enabled", "disabled"):
            more: dict[str, Any] = {"thinking": {"type": kind}, "seed": seed, "temperature": 2,
                                    "logit_bias": LIKES, "max_tokens": 40}  # fmt: skip
            found = said(thinking, **more)
            assert streamed(thinking, **more)[0] == bare(found["content"])
            chat = {**more, "messages": TALK, "thinking": None,
                    "chat_template_kwargs": {"enable_thinking": kind == "enabled"}}  # fmt: skip
            reply = WEB.post(f"{thinking.url}/v1/chat/completions", json=chat).json()
            message = reply["choices"][0]["message"]
            parts = (("thinking", message.get("reasoning_content")), ("text", message["content"]))
            assert [(b["type"], b[b["type"]]) for b in found["content"]] == [
                p for p in parts if p[1]
            ]
            seen.add((kind, *(b["type"] for b in found["content"])))
    assert ("enabled", "thinking", "text") in seen and ("disabled", "text") in seen


def test_a_call_comes_behind_a_thought(thinking: Server) -> None:
    likes = {str(ord("b")): 42, "257": 100, str(CLOSES): 43, str(OPENS): -100}
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 150,
                            "logit_bias": likes, "temperature": 2}  # fmt: skip
    for seed in range(12):
        found = said(thinking, seed=seed, **more)
        assert streamed(thinking, seed=seed, **more)[0] == bare(found["content"])
        kinds = [b["type"] for b in found["content"]]
        assert kinds[-1] == "tool_use" and kinds[:-1] in ([], ["thinking"])
        if kinds[:-1]:
            return
    pytest.fail("no seed had a thought")


def test_a_failure_amid_a_stream_is_an_error_event() -> None:
    """As the client reads it, which raises then."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        kind = {"content-type": "text/event-stream"}
        return httpx2.Response(200, content=failed("it broke", MESSAGES), headers=kind)

    web = httpx2.Client(transport=httpx2.MockTransport(answer))
    c = anthropic.Anthropic(base_url="http://x", api_key="none", http_client=web, max_retries=0)
    own: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": TALK}
    with pytest.raises(anthropic.APIStatusError, match="it broke"), c.messages.stream(**own) as s:
        s.get_final_message()
