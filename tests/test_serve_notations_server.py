"""Servers whose model's chat template teaches another notation of calls than Hermes'. One template
may be that of several kinds, which differ in how they are read: they have one server."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from notation_kit import (
    CALL,
    CALLS,
    LISTED,
    OF_GEMMA,
    OF_LFM2,
    OFF,
    ON,
    TAG,
    TAUGHT,
    talk,
    vocabulary,
)
from serve_kit import FLAG, WEB, WORD, Server, served
from small_model import TINY, small_model
from tool_kit import FORM, joined, tool

TINY2 = TINY.parent / "tiny2"


MARKERS = {
    "hermes": CALL, "granite": LISTED, "tags": CALL, "glm": CALL, "glm short": CALL,
    "lfm2": OF_LFM2, "gemma": OF_GEMMA,
}  # fmt: skip

MODELS = {  # that have such templates
    "tags": TINY2 / "qwen3_5", "glm": TINY2 / "glm4_moe_lite", "lfm2": TINY2 / "lfm2",
    "gemma": TINY2 / "gemma4_text",
}  # fmt: skip


KINDS: dict[str, list[str]] = {}  # by what their templates are
for kind, (_, template, _) in TAUGHT.items():
    if kind != "glm short":  # which is glm but for white space, and that is not compared here
        KINDS.setdefault(template, []).append(kind)


@dataclass
class Taught:
    """A server whose model's template teaches notations of these kinds."""

    kinds: list[str]
    server: Server

    @property
    def kind(self) -> str:
        return self.kinds[0]

    def likes(self, kind: str) -> dict[str, float]:
        """The letters of its calls."""
        first = "t" if kind == "llama typed" else "n"
        marker = MARKERS.get(kind, CALLS)
        return {str(ord("{")): 50, str(ord(first)): 60, str(marker): 100, str(TAG): -100, "257": 80}

    def answer(self, **more: Any) -> tuple[str, str, list[dict[str, Any]], str]:
        """All that the model wrote, special tokens included; text, calls and end, which a stream
        has, too."""
        asked: dict[str, Any] = {
            "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150,
            "tools": [tool("f", FLAG)], "logprobs": True, "seed": 3, **more,
        }  # fmt: skip
        choice = self.server.client.chat.completions.create(**asked).choices[0]
        text, called, _, end = joined(
            [p.to_dict() for p in self.server.client.chat.completions.create(**asked, stream=True)],
            0,
        )
        whole = [c.to_dict() for c in choice.message.tool_calls or ()]
        assert (choice.message.content or "", choice.finish_reason) == (text, end)
        assert [c["function"] for c in whole] == [c["function"] for c in called]
        written = b"".join(bytes(t.bytes or ()) for t in choice.logprobs.content)
        return written.decode("utf-8", "replace").removesuffix("<|im_end|>"), text, whole, end


@pytest.fixture(scope="module", params=KINDS.values(), ids=lambda kinds: kinds[0])
def taught(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Taught]:
    folder, kinds = tmp_path_factory.mktemp("taught"), request.param
    changes = {"tokenizer.chat_template": TAUGHT[kinds[0]][1]}
    source = MODELS.get(kinds[0], TINY / "llama_tied")
    path = small_model(folder / "small.gguf", vocabulary(3) | changes, source)
    with served(path, "--parallel", "2") as running:
        yield Taught(kinds, running)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_demanded_call_has_the_models_notation(taught: Taught, choice: Any) -> None:
    for kind in taught.kinds:
        likes = taught.likes(kind)
        written, text, called, end = taught.answer(tool_choice=choice, logit_bias=likes)
        (function,) = [c["function"] for c in called]
        jsonschema.validate(json.loads(function["arguments"]), FLAG)
        wanted = TAUGHT[kind][2](("f", function["arguments"]))
        assert "".join(written.split()) == "".join(wanted.split())
        assert (text, function["name"], end) == ("", "f", "tool_calls")


def test_a_demanded_call_that_is_cut_is_no_text(taught: Taught) -> None:
    """A call is there as far as its arguments are, where they are JSON."""
    for limit in (1, 3, 9):
        written, text, called, end = taught.answer(tool_choice="required", max_tokens=limit)
        assert (text, end) == ("", "length")
        assert all(written.endswith(c["function"]["arguments"]) for c in called)
        assert len(called) == (limit == 9 and taught.kind == "mistral")


def test_a_model_calls_where_it_likes_to(taught: Taught) -> None:
    """Once, by its special token, or beside a form where it has none."""
    form: dict[str, Any] = {"parallel_tool_calls": False}
    if taught.kind.startswith("llama"):
        form["response_format"] = FORM
    for kind in taught.kinds:
        likes = taught.likes(kind)
        written, text, called, end = taught.answer(logit_bias=likes, **form)
        assert (text, end, [c["function"]["name"] for c in called]) == ("", "tool_calls", ["f"])
        assert written.startswith(TAUGHT[kind][2](("f", "{}"))[:10])
        stops = ["true", "false", "True", "False"]  # which stand in its arguments
        assert taught.answer(logit_bias=likes, stop=stops, **form)[0] == written
        asked = {**form, "tool_choice": "none", "logit_bias": likes}
        written, text, called, end = taught.answer(**asked)
        assert not called and end != "tool_calls"


def test_llamas_tag_is_no_text(taught: Taught) -> None:
    if taught.kind.startswith("llama"):
        written, text, called, end = taught.answer(logit_bias={str(TAG): 100, "257": 90})
        assert written.startswith("<|python_tag|>{") and (text, end) == ("", "tool_calls")
        assert len(called) == 1


def test_a_form_and_tools_hold_together(taught: Taught) -> None:
    likes = {str(ord("{")): 60, str(ord('"')): 80, str(ord("w")): 60, "257": 100}
    _, text, called, end = taught.answer(logit_bias=likes, response_format=FORM)
    jsonschema.validate(json.loads(text), WORD)
    assert not called and end == "stop"


def test_a_conversation_goes_on_behind_calls(taught: Taught) -> None:
    """With this server's ids and others', and with several calls in a message."""
    _, _, called, _ = taught.answer(tool_choice="required")
    result = {"role": "tool", "content": "done", "tool_call_id": called[0]["id"]}
    own = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": called}, result]
    for messages in (own, talk(ON), talk(ON, OFF)):
        taught.answer(messages=messages, max_tokens=5)
    flat = {"type": "function", "name": "f", "parameters": FLAG}
    body = {"input": "Hi", "tools": [flat], "tool_choice": "required", "max_output_tokens": 150}
    first = WEB.post(f"{taught.server.url}/v1/responses", json=body).json()
    (item,) = first["output"]
    assert (item["type"], item["name"]) == ("function_call", "f")
    more = {
        "previous_response_id": first["id"], "max_output_tokens": 5, "tools": [flat],
        "input": [{"type": "function_call_output", "call_id": item["call_id"], "output": "done"}],
    }  # fmt: skip
    assert WEB.post(f"{taught.server.url}/v1/responses", json=more).status_code == 200


def test_a_template_that_refuses_is_told_as_a_fault_of_the_request(taught: Taught) -> None:
    if not taught.kind.startswith("mistral"):
        return  # which refuse nothing of this
    nameless = talk(ON)
    del nameless[1]["tool_calls"][0]["id"]
    body = {"messages": nameless, "tools": [tool("f", FLAG)]}
    for stream in (False, True):
        url = f"{taught.server.url}/v1/chat/completions"
        reply = WEB.post(url, json={**body, "stream": stream})
        assert reply.status_code == 400, reply.text
        said = "the chat template refuses the messages: an id has 9 letters"
        assert reply.json()["error"]["message"] == said


def test_calls_within_channels_are_refused(tmp_path: Path) -> None:
    """Where the template says nothing of them; the model answers without tools."""
    changes = vocabulary(3)
    changes["tokenizer.ggml.tokens"][CALLS] = "<|channel|>"
    path = small_model(tmp_path / "small.gguf", changes)
    with served(path, "--parallel", "2") as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        url = f"{server.url}/v1/chat/completions"
        reply = WEB.post(url, json={**body, "tools": [tool("f", FLAG)]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
        assert "leave them out" in reply.json()["error"]["message"]
        for more in ({}, {"tools": [tool("f", FLAG)], "tool_choice": "none"}):
            assert WEB.post(url, json={**body, **more}).status_code == 200
