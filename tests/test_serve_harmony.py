"""Calls within gpt-oss's channels: what the grammar lets through, what of it is text, thought and
call, whole and in pieces, and a server with such a model."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import test_text_parts
from notation_kit import ODD, ON, TEACHES_HARMONY, WRONG, talk
from serve_kit import FLAG, WEB, WORD, Server, served
from small_model import TINY, byte_alphabet, small_model
from tool_kit import FUNCTIONS, TOOLS, both_ways, heard, joined, tool

from ggraph.formats import open_checkpoint
from ggraph.text.tokenizer import Tokenizer
from models.serve.calls import Reading
from models.serve.generation import Asked
from models.serve.grammar import Grammars
from models.serve.messages import Message
from models.serve.notations import HARMONY, notation_of
from models.serve.replies import Dialect
from models.serve.schema import ChatRequest
from models.serve.tools import answer_grammar, for_template
from models.serve.voice import Said

MARKERS = test_text_parts.HARMONY
IDS = {marker: 256 + i for i, marker in enumerate(MARKERS)}
VOCABULARY = {
    "tokenizer.ggml.tokens": [*byte_alphabet(), *MARKERS, *(f"<|x{i}|>" for i in range(56)), "ab"],
    "tokenizer.ggml.token_type": [1] * 256 + [3] * 63 + [1],
    "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": IDS["<|return|>"],
    "tokenizer.chat_template": TEACHES_HARMONY,
}  # fmt: skip
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I call to=functions.f, or {{}}{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>Let me look.{NEXT}"
FINAL = "<|channel|>final<|message|>"
HEADERS = [
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{} json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary<|message|>",
]


def call(called: tuple[str, str], header: str = HEADERS[0]) -> str:
    return header.format(called[0]) + called[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("harmony")
    return small_model(folder / "small.gguf", VOCABULARY, TINY.parent / "tiny2" / "gpt_oss")


@pytest.fixture(scope="module")
def tokenizer(model: Any) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(model).metadata)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


FREE: dict[str, Any] = {}
FORMED: dict[str, Any] = {"schema": WORD}
DEMANDED: dict[str, Any] = {"demanded": True}
WORDS = '{"word": "a"}'
PASSES = [
    (FREE, FINAL), (FREE, FINAL + "text"), (FREE, THOUGHT + FINAL + "a to=functions.f b"),
    (FREE, THOUGHT + THOUGHT + PREAMBLE + FINAL + "text"), (FREE, PREAMBLE + call(ODD)),
    *((FREE, THOUGHT + call(ON, header)) for header in HEADERS),
    *((kind, call(ON, header)) for kind in (FREE, FORMED, DEMANDED) for header in HEADERS),
    (FORMED, FINAL + WORDS), (FORMED, THOUGHT + FINAL + WORDS), (FORMED, THOUGHT + call(ODD)),
    (DEMANDED, THOUGHT + call(ON)), (DEMANDED, THOUGHT + PREAMBLE + call(ODD)),
]  # fmt: skip
FAILS = [
    (FREE, "text"), (FREE, THOUGHT), (FREE, ""), (FREE, FINAL + "a" + NEXT), (FREE, call(WRONG)),
    (FREE, call(("h", "{}"))), (FREE, call(ON) + call(ON)), (FREE, FINAL + "text" + call(ON)),
    (FREE, call(ON, "<|channel|>analysis to=functions.{}<|message|>")), (FREE, call(ON)[:-1]),
    (DEMANDED, FINAL + "text"), (DEMANDED, THOUGHT), (DEMANDED, THOUGHT + call(WRONG)),
    (DEMANDED, call(WRONG)), (DEMANDED, THOUGHT + FINAL + call(ON)),
    (FORMED, FINAL + "text"), (FORMED, WORDS), (FORMED, THOUGHT + call(WRONG)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "passes"),
    [*((k, t, True) for k, t in PASSES), *((k, t, False) for k, t in FAILS)],
)
def test_parts_are_thoughts_then_text_or_a_call(
    grammars: Grammars, tokenizer: Tokenizer, kind: dict[str, Any], text: str, passes: bool
) -> None:
    special = HARMONY.special(tokenizer)
    matcher = grammars.lark(answer_grammar(TOOLS, HARMONY, special, **kind), "tools").matcher
    ids = tokenizer.encode(text, bos=False, special=True)
    fits = matcher.validate_tokens(ids) == len(ids)
    assert (fits and matcher.consume_tokens(ids) and matcher.is_accepting()) == passes
    if passes and matcher.is_stopped():  # nothing may follow but an end, `<|call|>` among them
        assert text.endswith("}")


def test_how_calls_are_shown_is_never_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """So a model that spells it in letters is kept from it."""
    matcher = grammars.lark(
        answer_grammar(TOOLS, HARMONY, HARMONY.special(tokenizer)), "tools"
    ).matcher
    spelt = tokenizer.encode(call(ON, HEADERS[3]), bos=False)
    ids = [*tokenizer.encode(FINAL, bos=False, special=True), *spelt]
    assert not set(spelt) & tokenizer.special_ids
    assert matcher.validate_tokens(ids) < len(ids)


def said(t: Tokenizer, text: str, calls: bool = True) -> list[Said]:
    """What an answer says, to who has functions or has none."""
    return test_text_parts.said(t, text, HARMONY.shown(HARMONY.special(t)) if calls else ())


HM = "I call to=functions.f, or {}"
ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [  # text, thought, calls
    *((f"{THOUGHT}{call(ON, header)}<|call|>", "", HM, [ON]) for header in HEADERS),
    *((f"{call(ON, header)}<|call|>", "", "", [ON]) for header in HEADERS),
    (f"{THOUGHT}{PREAMBLE}{call(ODD)}<|call|>", "Let me look.", HM, [ODD]),
    (f"{PREAMBLE}{call(ODD)[:-3]}", "Let me look.", "", [(ODD[0], ODD[1][:-3])]),
    (f"{THOUGHT}{FINAL}a to=functions.f<|return|>", "a to=functions.f", HM, []),
    (call(("h", "{}")), "", "", []),  # which no grammar lets through
    ("<|channel|>analysis to=python code<|message|>1<|call|>", "", "1", []),
]


@pytest.mark.parametrize(("written", "text", "thought", "calls"), ANSWERS)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_is_the_whole_answer(
    tokenizer: Tokenizer,
    written: str,
    text: str,
    thought: str,
    calls: list[tuple[str, str]],
    finish: str,
) -> None:
    body = ChatRequest(messages=[Message(role="user", content="a")])
    dialect = Dialect(True, "1", "m", tokenizer, 0)

    def asked() -> Asked:
        answers = heard([said(tokenizer, written)], finish)
        return Asked(answers, dialect, body, Reading(FUNCTIONS, HARMONY))

    (choice,), streamed = both_ways(asked)
    content, called, _, end = joined(streamed, 0)
    message = choice["message"]
    deltas = [d["choices"][0]["delta"] for d in streamed]
    thoughts = "".join(d.get("reasoning_content", "") for d in deltas)
    assert (message["content"] or "") == content == text
    assert message.get("reasoning_content", "") == thoughts == thought
    assert message.get("tool_calls", []) == called
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in called] == calls
    stopped = "tool_calls" if calls and calls[-1][1].endswith("}") else "stop"
    assert choice["finish_reason"] == end == (stopped if finish == "stop" else "length")


def test_who_gave_no_tools_is_told_of_calls_as_thoughts(tokenizer: Tokenizer) -> None:
    found = said(tokenizer, f"{PREAMBLE}{call(ON)}<|call|>", calls=False)
    assert "".join(s.text for s in found) == "Let me look."
    assert "".join(s.thought for s in found) == ON[1]


@pytest.mark.parametrize("header", HEADERS)
def test_a_functions_name_is_no_channels(tokenizer: Tokenizer, header: str) -> None:
    found = said(tokenizer, THOUGHT + call(("finalize.final", "{}"), header), calls=False)
    assert ("".join(s.text for s in found), "".join(s.thought for s in found)) == ("", HM + "{}")


# ----- a server


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Server]:
    with served(model, "--parallel", "2") as running:
        yield running


def answer(server: Server, **more: Any) -> tuple[Any, str]:
    """The message, which a stream says, too, and why it ended."""
    asked: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 150,
        "tools": [tool("f", FLAG)], "seed": 3, **more,
    }  # fmt: skip
    choice = server.client.chat.completions.create(**asked).choices[0]
    pieces = [p.to_dict() for p in server.client.chat.completions.create(**asked, stream=True)]
    text, called, _, end = joined(pieces, 0)
    message: dict[str, Any] = choice.message.to_dict()
    assert ((message["content"] or ""), choice.finish_reason) == (text, end)
    assert [c["function"] for c in message.get("tool_calls", [])] == [c["function"] for c in called]
    return message, end


ENDS = {str(IDS["<|return|>"]): 90, str(IDS["<|call|>"]): 95}
CALLS = {**ENDS, str(ord("c")): 100, str(ord(" ")): 60, str(IDS["<|message|>"]): 55}  # a commentary


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_demanded_call_is_given(server: Server, choice: Any) -> None:
    message, end = answer(server, tool_choice=choice, logit_bias=CALLS)
    (called,) = message["tool_calls"]
    jsonschema.validate(json.loads(called["function"]["arguments"]), FLAG)
    assert (called["function"]["name"], message["content"], end) == ("f", None, "tool_calls")


def test_a_model_calls_or_answers_as_it_likes_to(server: Server) -> None:
    """Its channel is the letter that it likes: c(ommentary) or f(inal)."""
    message, end = answer(server, logit_bias=CALLS)
    assert ([c["function"]["name"] for c in message["tool_calls"]], end) == (["f"], "tool_calls")
    likes = {str(IDS["<|channel|>"]): 100, str(ord("f")): 50}
    message, end = answer(server, logit_bias={**likes, **ENDS})
    assert (message.get("tool_calls"), end) == (None, "stop")


def test_a_form_holds_beside_tools(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": WORD}}
    likes = {str(ord("f")): 80, str(ord("a")): 50, str(ord('"')): 100}
    message, end = answer(server, logit_bias=likes, response_format=form)
    jsonschema.validate(json.loads(message["content"]), WORD)
    assert end == "stop"


def test_a_conversation_goes_on_behind_calls(server: Server) -> None:
    message, _ = answer(server, tool_choice="required", logit_bias=CALLS)
    result = {"role": "tool", "content": "done", "tool_call_id": message["tool_calls"][0]["id"]}
    for messages in ([{"role": "user", "content": "Hi"}, message, result], talk(ON, ODD)):
        answer(server, messages=messages, max_tokens=5)
    flat = {"type": "function", "name": "f", "parameters": FLAG}
    body = {
        "input": "Hi", "tools": [flat], "tool_choice": "required", "max_output_tokens": 150,
        "logit_bias": CALLS,
    }  # fmt: skip
    first = WEB.post(f"{server.url}/v1/responses", json=body).json()
    (item,) = first["output"]
    assert (item["type"], item["name"]) == ("function_call", "f")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_template_is_told_what_was_thought_before_a_call(name: str) -> None:
    """But not beside text, as it takes one of them."""
    given = [m | ({name: "hm"} if m["role"] == "assistant" else {}) for m in talk(ON)]
    hi, called, result = (Message.model_validate(m) for m in given)
    for text, thought in (("", "hm"), ("Well.", None)):
        called.content = text
        _, told, _ = for_template([hi, called, result], TOOLS, TEACHES_HARMONY)[0]
        assert (told["content"], told.get("thinking")) == (text, thought)
        assert told["reasoning_content"] == "hm"


def test_a_text_that_goes_on_holds_no_calls(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}],
        "tools": [tool("f", FLAG)], "max_tokens": 3,
        "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    url = f"{server.url}/v1/chat/completions"
    reply = WEB.post(url, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    assert WEB.post(url, json={**body, "tool_choice": "none"}).status_code == 200


def test_its_template_teaches_it() -> None:
    assert notation_of(TEACHES_HARMONY) is HARMONY
