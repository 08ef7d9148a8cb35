"""What fields of requests do, or why they are refused; what clients look for in refusals."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import ValidationError
from serve_kit import FLAG, TALK, WEB, Server, served
from starlette.testclient import TestClient

from ggraph.serving.prefix import PrefixTree
from ggraph.serving.text import Plain, Request, begun
from models.run.load import load
from models.serve import anthropic, common, fields, native_fields, responses, schema
from models.serve.anthropic_blocks import MessagesRequest
from models.serve.app import Api, make_app
from models.serve.bodies import Bodies
from models.serve.embeddings import embeddings
from models.serve.engine import Service
from models.serve.errors import of_validation
from models.serve.inbox import Ended, Inbox
from models.serve.listener import Listener
from models.serve.reader import Answers, Reader
from models.serve.settings import Settings
from models.serve.worker import Ticket

CHAT, TEXT, GAP = "/v1/chat/completions", "/v1/completions", "/infill"


@pytest.fixture(scope="module")
def server(learnable: Path) -> Iterator[Server]:
    """One that has room for four answers."""
    with served(learnable, "--parallel", "2", "--queue", "2") as running:
        yield running


def refused(server: Server, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error of a request that is refused."""
    reply = WEB.post(server.url + path, json=body)
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert "\n" not in error["message"]
    return error


def test_vectors_have_as_many_numbers_as_asked_for(server: Server) -> None:
    """The first ones of the whole vector, of length 1 again."""

    def vector(**more: Any) -> np.ndarray:
        reply = WEB.post(f"{server.url}/v1/embeddings", json={"input": "abc", **more})
        return np.array(reply.json()["data"][0]["embedding"])

    whole = vector()
    for count in (1, 5, len(whole)):
        short = vector(dimensions=count)
        first = whole[:count] / np.linalg.norm(whole[:count])
        assert short.shape == (count,) and np.allclose(short, first, atol=1e-6)
    assert np.array_equal(vector(dimensions=len(whole)), whole)
    for count in (0, -1, len(whole) + 1):
        error = refused(server, "/v1/embeddings", {"input": "abc", "dimensions": count})
        assert error["param"] == "dimensions" and "dimensions" in error["message"]


def test_states_go_when_their_text_is_read() -> None:
    """They are a hundred times a vector: nobody holds those of all texts until the last is read."""
    said, root = Inbox(eager=False), PrefixTree().root
    tickets, texts = [Ticket(i, said) for i in range(3)], [
        begun(Request([1], Plain(lambda _: 0), 0, features=True), i, 0, root) for i in range(3)
    ]  # fmt: skip
    for ticket, text in zip(tickets, texts, strict=True):
        ticket.text = text  # as the worker has it
        text.features += [np.full((4, 8), ticket.index + 1, np.float32)] * 2
    answers = Answers(tickets, said, 3)

    class Held(Reader):
        """A model whose texts are being read."""

        def read(self, requests: Sequence[Request]) -> Answers:
            return answers

    service = Held(None, Settings(ping_seconds=9, alias="m"))  # type: ignore[arg-type]  # is not asked
    asked = schema.EmbeddingsRequest(input=["a"] * 3)

    async def run() -> list[Any]:
        listener = Listener(service, None)  # type: ignore[arg-type]  # nothing is measured
        reply = asyncio.ensure_future(embeddings(listener, [[1]] * 3, "mean", asked))
        for index in (1, 2, 0):
            said.put((index, Ended(texts[index])))
            while texts[index].features:
                assert not reply.done()
                await asyncio.sleep(0)
        return [d["embedding"] for d in (await reply)["data"]]

    vectors = asyncio.run(asyncio.wait_for(run(), 9))
    assert np.allclose(vectors, np.full((3, 8), 8**-0.5))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SEVERAL: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}
OLD = {"name": "f", "arguments": "{}"}
UNABLE: list[tuple[str, dict[str, Any], str]] = [  # the last is the field that is named
    *((path, {field: value}, field) for path in (CHAT, TEXT, "/v1/responses") for field, value in (
        ("grammar", 'root ::= "a"'), ("json_schema", {"type": "object"}), ("json_schema", {}),
    )),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": [*TALK, {"role": "assistant", "function_call": OLD}]},
     "messages.1.function_call"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    *((path, {"min_tokens": 3}, "min_tokens") for path in (CHAT, TEXT, "/v1/responses")),
    ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
    ("/v1/responses", {"conversation": {"id": "conv_1"}}, "conversation"),
    ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("/v1/responses", {"n": 4}, "n"),
    *(("/v1/responses", {"response_format": form}, "response_format") for form in (
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}, "json",
    )),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"n": 2, "best_of": 3}, "best_of"),
    ("/v1/responses", {"background": True}, "background"),
    ("/v1/responses", {"truncation": "auto"}, "truncation"),
    *((GAP, body, *body) for body in (
        {"grammar": 'root ::= "a"'}, {"mirostat": 1}, {"lora": [{"id": 0, "scale": 0.5}]},
        {"min_tokens": 3},
    )),
]  # fmt: skip
REFUSAL = {"type": "refusal", "refusal": "No."}
ABLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"grammar": None, "json_schema": None, "functions": [], "modalities": ["text"]}),
    (CHAT, {"chat_template_kwargs": {}, "parallel_tool_calls": True, "tools": [TOOL]}),
    (CHAT, {"parallel_tool_calls": False}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False, "budget": 3}, "min_tokens": 0}),
    (CHAT, {"reasoning_effort": "low", "add_generation_prompt": False, "top_k": -1}),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": -1, "stop": ["a", "e", "i", "o", " "]}),
    (TEXT, {"max_tokens": -1, "top_k": -1, "stop": ["a", "e", "i", "o", " "]}),
    ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}, "n": 1}),
    ("/v1/responses", {"conversation": None, "prompt": None, "top_logprobs": 0}),
    ("/v1/responses", {"max_output_tokens": -1, "top_k": -1, "temperature": 0}),
    (CHAT, {"messages": [*TALK, {"role": "assistant", "content": [REFUSAL]}, *TALK]}),
    (CHAT, {"messages": [*TALK, {"role": "assistant", "content": "a", "function_call": None}]}),
    ("/v1/responses", {"input": [{"role": "assistant", "content": [REFUSAL]}, *TALK]}),
    (CHAT, SEVERAL),
    (CHAT, {**SEVERAL, "tool_choice": "none"}),
    (CHAT, {**SEVERAL, "tool_choice": "required"}),
    ("/v1/responses", {"include": ["reasoning.encrypted_content"]}),
    ("/v1/responses", {"response_format": {"type": "text"}, "include": None}),
    (TEXT, {"echo": False, "suffix": ""}),
    (TEXT, {"best_of": 1}),
    (TEXT, {"best_of": 1, "n": 2}),
    (TEXT, {"best_of": 2, "n": 2}),
    (TEXT, {"user": "u", "service_tier": "flex", "whatever": [1]}),
    ("/v1/responses", {"background": False, "truncation": "disabled"}),
    ("/v1/responses", {"background": None, "truncation": None, "include": []}),
]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 2},
    TEXT: {"prompt": "ab", "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    GAP: {"input_prefix": "ab", "input_suffix": "c", "n_predict": 2},
}


@pytest.mark.parametrize(("path", "body", "field"), UNABLE)
def test_what_would_change_the_answer_and_cannot_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    error = refused(server, path, {**ASKED[path], **body})
    assert error["param"] == field.partition(".")[0]
    assert error["message"].startswith(f"{field}: this server cannot do that: leave it out")


SHARED: dict[str, Any] = {  # a value for each field that all forms share, none the default
    "model": "m", "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "repeat_penalty": 2.0,
    "repeat_last_n": 5, "frequency_penalty": 1.0, "presence_penalty": 1.0, "seed": 4,
    "logit_bias": {"3": 1.0}, "stop": ["a"], "n": 2, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True}, "priority": 3, "speculative": {"off": True},
    "response_format": {"type": "json_object"}, "going_on": {"id": "ab", "created": 1},
    "grammar": "a", "json_schema": {}, "min_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize("field", schema.Sampling.model_fields)
def test_a_shared_field_is_followed_or_refused_by_name_in_every_form(field: str) -> None:
    """None is read and then dropped on the way to the chat that other forms are made to."""
    given = {field: SHARED[field]}
    for kind, own, chat in (
        (MessagesRequest, {"messages": TALK}, anthropic.as_chat),
        (schema.ResponsesRequest, {"input": "a"}, lambda body: responses.as_chat(body, ())),
    ):
        try:
            body = kind.model_validate({**own, **given})
        except ValidationError as error:
            assert str(of_validation(error)).startswith(f"{field}: this server cannot do that")
        else:
            told = getattr(chat(body), field)
            assert told == getattr(schema.Sampling.model_validate(given), field)
            assert told != schema.Sampling.model_fields[field].get_default()


@pytest.mark.parametrize(("path", "body"), ABLE)
def test_what_asks_for_no_more_than_is_done_is_answered(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    reply = WEB.post(server.url + path, json={**ASKED[path], **body})
    assert reply.status_code == 200, reply.text


def test_a_model_is_found_by_its_name(server: Server) -> None:
    """As the `openai` client asks for it; another name is told in OpenAI's form."""
    (listed,) = server.client.models.list().data
    assert server.client.models.retrieve(listed.id) == listed
    assert abs(time.time() - listed.created) < 600
    for other in ("gpt-4", "meta-llama/Llama-3", listed.id + "x"):
        with pytest.raises(openai.NotFoundError) as told:
            server.client.models.retrieve(other)
        assert (told.value.code, told.value.param) == ("model_not_found", "model")
        assert told.value.type == "invalid_request_error" and other in told.value.message


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def given(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


LIMITS = {
    CHAT: ("max_tokens", "max_completion_tokens"), TEXT: ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}  # fmt: skip
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
SEEN = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, PICTURE]}
SHOWN = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
HEARD = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
TEXT_ONLY = "reads text only: it has no tower for images (--mmproj names a file)"
UNHEARD = "this model reads text and images, expected 'text'"
SELF = "schema: no text can follow it, since a $ref leads back to itself"
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
UNIQUE: dict[str, Any] = {
    "type": "object", "required": ["on"], "additionalProperties": False,
    "properties": {"on": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3,
                          "uniqueItems": True}},
}  # fmt: skip
ADVICE = 'no grammar here holds that: leave it out, or say "strict": false to have the rest held'
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [SEEN]}, f"small {TEXT_ONLY}"),
    ("/v1/responses", {"input": [SHOWN]}, f"small {TEXT_ONLY}"),
    (CHAT, {"messages": [HEARD]}, f"messages.0.content.0.type: {UNHEARD}"),
    ("/v1/responses", {"input": [HEARD]}, f"input.0.content.0.type: {UNHEARD}"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]},
     "messages.0.content: Input should be a valid string or a valid array"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages.0.content.0.text: Input should be a valid string"),
    (CHAT, {"stop": ["a"] * 17},
     "stop: List should have at most 16 items after validation, not 17"),
    (CHAT, {"tool_choice": "f"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
    ("/v1/responses", {"tool_choice": {"type": "function"}}, "tool_choice.name: Field required"),
    *((path, {"tool_choice": {"type": "custom", "name": "f"}},
       "tool_choice.type: Input should be 'function'") for path in (CHAT, "/v1/responses")),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice.allowed_tools: Field required"),
    ("/v1/responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice.tools: List should have at least 1 item after validation, not 0"),
    ("/v1/responses", {"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
     "tool_choice.mode: Input should be 'auto' or 'required'"),
    (CHAT, {"stop": 5, "messages": TALK * 5000},
     "stop: Input should be a valid string or a valid array"),
    (TEXT, {"prompt": [5, -1]}, "prompt.1: Input should be greater than or equal to 0"),
    (TEXT, {"prompt": [[5], [-1]]}, "prompt.1.0: Input should be greater than or equal to 0"),
    *((path, {"logit_bias": {"-1": 1}}, "logit_bias: token '-1', expected 0 to 319")
      for path in (CHAT, TEXT, "/v1/responses")),
    (TEXT, {"prompt": 5}, "prompt: Input should be a valid string or a valid array"),
    (GAP, {"input_prefix": [97]}, "input_prefix: Input should be a valid string"),
    (GAP, {"input_extra": [{"text": 5}]}, "input_extra.0.text: Input should be a valid string"),
    (GAP, {"n_cmpl": 99}, "n_cmpl: Input should be less than or equal to 64"),
    (GAP, {"input_prefix": "ab"}, "input_prefix: this model has no tokens for filling in"),
    (TEXT, {"prompt": ["a"] * 65},
     "prompt: List should have at most 64 items after validation, not 65"),
    ("/v1/embeddings", {"input": ["a"] * 3000},
     "input: List should have at most 256 items after validation, not 3000"),
    ("/v1/responses", {"input": [{"type": "elsewhere", "id": "a"}]},
     "input.0: the type of an item: expected message, function_call, function_call_output,"
     " item_reference or reasoning"),
    *((path, {name: -2}, f"{name}: Input should be greater than or equal to -1")
      for path, names in LIMITS.items() for name in names),
    (CHAT, {"chat_template_kwargs": {"messages": "a"}},
     "chat_template_kwargs: messages is not a variable of a template's own"),
    *((CHAT, {"top_logprobs": 2, **told}, "top_logprobs: say logprobs true beside it: else none"
       " are told") for told in ({}, {"logprobs": False}, {"logprobs": None})),
    (CHAT, {"continue_final_message": True}, "continue_final_message: say add_generation_prompt"
     " false beside it: there is no new message"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": False},
     "continue_final_message: expected a last message of the assistant, with text and no calls"),
    *((CHAT, {**body, "tool_choice": choice}, "schema: Invalid type: text")
      for choice in ("auto", "required") for body in
      ({**form({"type": "text"}), **given(FLAG)}, given({"type": "text"}))),
    (CHAT, given({"$ref": "#/a"}), "schema: Pointer '/a' does not exist"),
    (CHAT, {"response_format": {"type": "json_schema"}},
     "response_format.json_schema: Field required"),
    (CHAT, form({"$ref": "#"}), SELF),
    (CHAT, form({"allOf": [{"$ref": "#"}]}), SELF),
    (TEXT, form(LOOP), SELF),
    *((path, form(UNIQUE), f'schema: Unimplemented keys: ["uniqueItems"]: {ADVICE}')
      for path in (CHAT, TEXT)),
]  # fmt: skip


FLAT = {"type": "json_schema", "name": "a", "schema": FLAG}
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((path, body) for path in (CHAT, TEXT) for body in (
        form(FLAG), {"response_format": FLAT}, {"response_format": {**FLAT, "type": "json_object"}},
    )),
    ("/v1/responses", {"text": {"format": FLAT}}),
    ("/v1/responses", {"text": {"format": {**FLAT, "type": "json_object"}}}),
]  # fmt: skip


LOOSE = {"type": "json_schema", "name": "a", "schema": UNIQUE, "strict": False}
FORMS += [
    *((path, body) for path in (CHAT, TEXT) for body in (
        {"response_format": {"type": "json_schema", "json_schema": LOOSE}},
        {"response_format": LOOSE}, {"response_format": {**LOOSE, "type": "json_object"}},
    )),
    ("/v1/responses", {"text": {"format": LOOSE}}),
    (CHAT, {"response_format": LOOSE, "tools": [TOOL], "logit_bias": {"123": 100}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_a_schema_is_followed_wherever_it_stands(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    """As OpenAI has it, and as llama-server and others do; one that is not strict in all that a
    grammar can hold."""
    limit = "max_output_tokens" if "text" in body else "max_tokens"
    reply = WEB.post(server.url + path, json={**ASKED[path], **body, limit: 30}).json()
    if path == "/v1/responses":
        text = reply["output"][0]["content"][0]["text"]
    else:
        text = reply["choices"][0].get("text") or reply["choices"][0]["message"]["content"]
    assert list(json.loads(text)) == ["on"]


def test_a_limit_may_be_as_large_as_programs_have_numbers(server: Server) -> None:
    for limit in (1 << 24, (1 << 31) - 1, (1 << 63) - 1):
        body = {"prompt": "abc", "max_tokens": limit, "stop": ["a", "e", "i", "o", " "]}
        assert WEB.post(f"{server.url}{TEXT}", json=body).status_code == 200


def test_every_limit_is_read_by_one_rule(server: Server) -> None:
    """-1 and null bound nothing, 0 has the prompt read and no more."""
    context = server.client.models.list().data[0].to_dict()["meta"]["context_length"]
    for path, names in LIMITS.items():
        for name in names:
            for limit, most in ((0, 0), (1, 1), (-1, context), (None, context)):
                asked = {k: v for k, v in ASKED[path].items() if k not in names}
                body = {**asked, name: limit, "logit_bias": {"97": 100}, "ignore_eos": True}
                reply = WEB.post(server.url + path, json=body).json()
                used, said = reply["usage"], ("completion_tokens", "output_tokens")
                (count,) = [used[key] for key in said if key in used]
                if most == context:
                    most -= used.get("prompt_tokens", used.get("input_tokens")) - 1
                assert count == most, (path, body, reply)


@pytest.mark.parametrize(("path", "body", "says"), WRONG, ids=range(len(WRONG)))
def test_refusals_say_what_is_wrong_where(
    server: Server, path: str, body: dict[str, Any], says: str
) -> None:
    error = refused(server, path, {**ASKED.get(path, {}), **body})
    assert error["message"] == says
    assert error["param"] == next(iter(body))


KINDS = [
    schema.ChatRequest, schema.CompletionRequest, schema.ResponsesRequest,
    schema.EmbeddingsRequest, schema.TokenizeRequest, schema.DetokenizeRequest,
    native_fields.NativeCompletion, native_fields.InfillRequest, native_fields.NativeEmbedding,
]  # fmt: skip


def holds_anything(mapping: Any) -> bool:
    """Whether no value of a mapping can be wrong."""
    return bool(mapping.get("values_schema", {}).get("type", "any") == "any")


def collections(core: Any) -> Iterator[tuple[str, bool]]:
    """Every list and mapping of a core schema by its kind, and whether its faults are few."""
    if isinstance(core, list | tuple):
        for part in core:
            yield from collections(part)
    elif isinstance(core, dict):
        if core.get("type") in ("list", "set", "tuple"):
            yield "list", core.get("fail_fast") is True
        if core.get("type") == "function-before":
            inner, few = core["schema"], core["function"]["function"] is fields.few
            if inner.get("type") == "dict":
                yield "dict", few or holds_anything(inner)
                core = inner.get("values_schema", {})
        if core.get("type") == "dict":
            yield "dict", holds_anything(core)
        for name, part in core.items():
            if name not in ("default", "metadata", "ref", "expected"):
                yield from collections(part)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_a_body_of_wrong_items_costs_no_more_than_its_bytes(kind: type[schema.Body]) -> None:
    """Each fault is an object of ours: there is one for a list, however long, at any depth."""
    assert all(few for _, few in collections(kind.__pydantic_core_schema__))
    many = 5_000
    wrong: list[Any] = [
        ["x"] * many, [None] * many, [[]] * many, [["x"]] * many, [{}] * many, [-1] * many,
        {str(i): "x" for i in range(many)}, [["x"] * many] * 2, [{"content": [{}] * many}] * 2,
        {"lanes": [{"lane": 0, "tokens": ["x"] * many}] * 9}, {"drafters": ["x"] * many},
    ]  # fmt: skip
    for field in kind.model_fields:
        for value in wrong:
            try:
                kind.model_validate_json(json.dumps({field: value}))
            except ValidationError as error:
                assert error.error_count() < 20, field
                assert len(str(of_validation(error))) <= 500


def test_an_answer_goes_on_in_the_last_message(server: Server) -> None:
    """As a completion does of the same text, written by hand with the template's markers."""
    more = {"add_generation_prompt": False, "continue_final_message": True, "temperature": 0}
    said = [*TALK, {"role": "assistant", "content": "ab<|im_end|>"}]
    prompt = learnable_prompt(TALK) + "ab"
    chat = WEB.post(server.url + CHAT, json={**ASKED[CHAT], **more, "messages": said}).json()
    spelt = WEB.post(f"{server.url}/tokenize", json={"content": "<|im_end|>"}).json()["tokens"]
    ids = WEB.post(
        f"{server.url}/tokenize", json={"content": prompt, "parse_special": True}
    ).json()["tokens"]
    text = WEB.post(
        server.url + TEXT, json={**ASKED[TEXT], "prompt": [*ids, *spelt], "temperature": 0}
    ).json()
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"] > 0


def learnable_prompt(talk: list[dict[str, str]]) -> str:
    """What the tiny model's template makes of a conversation that goes on."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in talk]
    return "".join(turns) + "<|im_start|>assistant\n"


def test_a_reference_that_can_end_is_followed(server: Server) -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["next"], "additionalProperties": False}  # fmt: skip
    asked = {**ASKED[TEXT], **form(node), "max_tokens": 60, "temperature": 0}
    assert WEB.post(server.url + TEXT, json=asked).status_code == 200


@pytest.mark.parametrize("letters", [5_000, 99_999])
@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), (TEXT, "prompt"), ("/v1/responses", "input"), ("/v1/embeddings", "input")],
)
def test_what_is_too_long_is_told_as_clients_know_it(
    server: Server, path: str, field: str, letters: int
) -> None:
    """Found to be so before it is read, or by its tokens."""
    text = "a" * letters
    body = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    error = refused(server, path, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    if field in ("messages", "prompt"):
        with pytest.raises(openai.BadRequestError) as told:
            server.client.post(path.removeprefix("/v1"), body=body, cast_to=object)
        assert told.value.code == "context_length_exceeded"
    assert refused(server, TEXT, {"prompt": ""})["code"] is None


LONG = "abc " * 20_000
LONG_TOOL = {"name": "f", "description": LONG}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[%s]"}}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
         "messages"),
        (CHAT, {"tools": [{"type": "function", "function": LONG_TOOL}]}, "messages"),
        (CHAT, {"messages": [*TALK, json.loads(json.dumps(CALLED) % json.dumps(LONG)[1:-1])]},
         "messages"),
        (CHAT, {"messages": [*TALK, json.loads(json.dumps(CALLED) % ("1, " * 30_000 + "1"))]},
         "messages"),
        ("/v1/responses", {"instructions": LONG}, "input"),
        ("/v1/responses", {"tools": [{"type": "function", **LONG_TOOL}]}, "input"),
    ],
    ids=range(6),
)  # fmt: skip
def test_what_cannot_fit_is_refused_before_it_is_read(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    """By its letters, wherever they stand: in tools and calls as in messages."""
    error = refused(server, path, {**ASKED[path], **body})
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "letters (at most" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"n": 5}, "n"),
        (TEXT, {"n": 5}, "n"),
        (TEXT, {"prompt": ["a"] * 5}, "n"),
        ("/v1/embeddings", {"input": ["a"] * 5}, "input"),
    ],
)
def test_what_will_never_fit_is_not_told_to_come_again(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    """Two at once and two that wait are four; as many are answered."""
    error = refused(server, path, {**ASKED.get(path, {}), **body})
    assert error["message"] == "5 answers asked for, at most 4 may be open here"
    assert error["param"] == field
    fits = {k: 4 if v == 5 else v[:4] for k, v in body.items()}
    reply = WEB.post(server.url + path, json={**ASKED.get(path, {}), **fits})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [[97], []]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_empty_is_refused(server: Server, prompt: Any, stream: bool) -> None:
    error = refused(server, TEXT, {"prompt": prompt, "stream": stream})
    assert (error["message"], error["param"]) == ("the prompt is empty", "prompt")


def test_special_tokens_in_a_prompt_are_text_unless_asked_for(server: Server) -> None:
    """The tiny model's own, in a text, in a list of texts, and in `/tokenize`."""

    def tokens(text: str, **more: Any) -> list[int]:
        found = WEB.post(f"{server.url}/tokenize", json={"content": text, **more}).json()["tokens"]
        return list(found)

    def read(prompt: Any, **more: Any) -> tuple[int, list[str]]:
        body = {**ASKED[TEXT], "prompt": prompt, "temperature": 0, "max_tokens": 6, **more}
        reply = WEB.post(server.url + TEXT, json=body).json()
        return reply["usage"]["prompt_tokens"], [c["text"] for c in reply["choices"]]

    text = "ab<|im_start|>ab"
    plain, special = tokens(text), tokens(text, parse_special=True)
    assert tokens(text, parse_special=False) == plain and len(special) == 3 < len(plain)
    wanted = {"parse_special": True}
    assert read(text) == read(text, parse_special=False) == read(plain)
    assert read(text, **wanted) == read(special) == read(special, **wanted)
    assert read([text, "ab"], **wanted) == read([special, tokens("ab")])
    assert refused(server, TEXT, {"prompt": [], **wanted})["message"] == "the prompt is empty"
    long = refused(server, TEXT, {"prompt": "a" * 5000, **wanted})
    assert long["code"] == "context_length_exceeded"


def test_long_bodies_are_read_beside_the_event_loop(
    learnable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every address: many small parts take seconds, in which nobody else would be heard."""
    reads: list[bool] = []  # for each body, whether it was in the loop's thread
    loops = set[int]()
    arrives, checks = Bodies.read, common.checked

    async def arrived(self: Bodies, request: Any) -> bytes:
        loops.add(threading.get_ident())
        return await arrives(self, request)

    def checked(read: Any) -> Any:
        reads.append(threading.get_ident() in loops)
        return checks(read)

    monkeypatch.setattr(Bodies, "read", arrived)
    monkeypatch.setattr(common, "checked", checked)
    many = json.dumps({"content": [{}] * common.SHORT_BODY}).encode()
    m = load(learnable, threads=1)
    service = Service(m, Settings())
    paths = [p for p in Api(service).posts if "{" not in p]
    with TestClient(make_app(service)) as client:
        for path in paths:
            for body in (many, b'{"content": [{}]}'):
                assert client.post(path, content=body).status_code == 400
    m.close()
    assert reads == [False, True] * len(paths)
