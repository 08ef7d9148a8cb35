"""Calls of functions beside text: what the grammar lets through, how it is read, whole and in
pieces, and what of it reaches a client."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_kit import FLAG, WEB, Server
from small_model import small_model
from tool_kit import (
    CLOSE,
    FORM,
    FUNCTIONS,
    JSON,
    OPEN,
    SERVICE,
    SILENT,
    TOOLS,
    both_ways,
    call,
    calls_of,
    data_of,
    heard,
    joined,
    told,
    tool,
    whole_calls,
)

from ggraph.formats import open_checkpoint
from ggraph.text.tokenizer import Tokenizer
from models.serve.anthropic import Messages
from models.serve.calls import Reading
from models.serve.conversations import Conversations
from models.serve.errors import Refused
from models.serve.generation import Asked, Generation
from models.serve.grammar import Grammars
from models.serve.inbox import NOTHING_YET, Ended, Inbox
from models.serve.messages import Message
from models.serve.notations import HERMES
from models.serve.reader import Answers
from models.serve.replies import DONE, PING, Dialect, Events
from models.serve.responses import Responses, Turn
from models.serve.schema import ChatRequest, ResponsesRequest
from models.serve.tools import answer_grammar, for_template
from models.serve.voice import Chance, Said
from models.serve.worker import Ticket

WORD: dict[str, Any] = {
    "type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"],
    "additionalProperties": False,
}  # fmt: skip


F, FF = call("f", '{"on": true}'), call("ff", f'{{"word": "a{OPEN}b{CLOSE}c"}}')
G, REFERS = call("g", '{"any": [1.50, 1e999]}'), call("refers", '{"on": null}')
THOUGHT = "<think>a < b, no <tool> yet</think>\n\n<b>So</b>"


# ----- what the grammar lets through


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grammars, Tokenizer]:
    path = small_model(tmp_path_factory.mktemp("grammars") / "small.gguf")
    tokenizer = Tokenizer.from_gguf(open_checkpoint(path).metadata)
    return Grammars(tokenizer, tokenizer.vocab_size), tokenizer


FREE: dict[str, Any] = {}
FORMED: dict[str, Any] = {"schema": FLAG}
DEMANDED: dict[str, Any] = {"demanded": True}
ONE: dict[str, Any] = {"several": False}
PASSES = [
    (FREE, ""), (FREE, "text"), (FREE, THOUGHT), (FREE, "<"), (FREE, OPEN[:-1]), (FREE, JSON),
    (FREE, F), (FREE, FF + F), (FREE, f"{F}\n{G}\n"), (FREE, REFERS), (FREE, "Let me look.\n" + F),
    (FREE, THOUGHT + FF + F), (FREE, "<" + F), (FREE, OPEN[:5] + F),
    (FORMED, JSON), (FORMED, F), (FORMED, FF + F),
    (DEMANDED, F), (DEMANDED, FF), (DEMANDED, REFERS),
    (ONE, "text"), (ONE, THOUGHT + F), (ONE, F + "\n"), (ONE | FORMED, JSON), (ONE | FORMED, F),
]  # fmt: skip
FAILS = [
    (FREE, OPEN), (FREE, f"a{OPEN}b"), (FREE, "a" + call("h", "{}")), (FREE, F + "text"),
    (FREE, call("f", '{"on": 1}')), (FREE, call("refers", '{"on": 1}')), (FREE, F[:-1]),
    (FREE, "a" + F + call("f", "{}")), (FREE, THOUGHT + call("ff", "{}")),
    (FORMED, ""), (FORMED, "text"), (FORMED, "text" + F), (FORMED, JSON + F), (FORMED, F + JSON),
    (FORMED, '{"on": 1}'), (FORMED, call("f", '{"on": 1}')),
    (ONE, F + F), (ONE, "a" + F + "\n" + G), (ONE | FORMED, FF + F),
    (DEMANDED, ""), (DEMANDED, "text"), (DEMANDED, JSON), (DEMANDED, "a" + F), (DEMANDED, F + F),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "passes"),
    [*((k, t, True) for k, t in PASSES), *((k, t, False) for k, t in FAILS)],
)
def test_answers_are_text_then_calls(
    grammars: tuple[Grammars, Tokenizer], kind: dict[str, Any], text: str, passes: bool
) -> None:
    made, tokenizer = grammars
    matcher = made.lark(answer_grammar(TOOLS, HERMES, {}, **kind), "tools").matcher
    ids = tokenizer.encode(text, bos=False)
    fits = matcher.validate_tokens(ids) == len(ids)
    assert (fits and matcher.consume_tokens(ids) and matcher.is_accepting()) == passes


def test_a_form_goes_its_own_way_from_where_it_was(
    grammars: tuple[Grammars, Tokenizer],
) -> None:
    made, tokenizer = grammars
    both, ids = made.json_schema(WORD), tokenizer.encode('{"word": "a', bos=False)
    left, right = both.fresh(), both.fresh()
    for token in ids:
        assert not left.accept(token)
    again = left.fresh()
    for form, ends in ((left, '"}'), (right, '{"word": ""}'), (again, 'b"}')):
        *inner, last = tokenizer.encode(ends, bos=False)
        assert not any(form.accept(t) for t in inner) and form.accept(last)


@pytest.mark.parametrize("count", [50, 600, 1000])
def test_a_form_that_becomes_too_dear_is_refused_and_no_end(
    grammars: tuple[Grammars, Tokenizer], count: int
) -> None:
    """Wherever that shows: an answer that was cut there must not pass for one that is whole."""
    made, tokenizer = grammars
    names = {f"p{i:04}": {"type": "integer"} for i in range(count)}
    form = made.json_schema({"type": "object", "properties": names, "additionalProperties": False})
    *inner, last = tokenizer.encode('{"p0001": 12}', bos=False)
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    refused = ""
    try:
        for token in inner:
            assert np.isfinite(form.allow(logits)[token])
            assert not form.accept(token)
        assert form.accept(last)
    except Refused as error:
        refused = str(error)
    assert refused.startswith("schema: ") == (count > 50)


UNIQUE = {"type": "array", "items": {"type": "null"}, "uniqueItems": True}
LISTED = {"x": {**UNIQUE, "uniqueItems": False}}
OBJECT = {"type": "object", "additionalProperties": False}
ALIKE: list[tuple[Any, bool, str, bool]] = [  # a schema, whether it is lenient, JSON, if it passes
    (LISTED["x"], False, "[null, null]", True), ({"anyOf": [LISTED["x"]]}, False, "[null]", True),
    ({**OBJECT, "properties": LISTED}, False, '{"x": [null, null]}', True),
    ({**OBJECT, "properties": LISTED}, False, '{"x": [1]}', False),
    ({**OBJECT, "properties": {"uniqueItems": False}}, False, '{"uniqueItems": 1}', False),
    ({"const": {"uniqueItems": False}}, False, '{"uniqueItems": false}', True),
    ({"const": {"uniqueItems": False}}, False, "{}", False),
    (UNIQUE, True, "[null, null]", True), (UNIQUE, True, "[1]", False),
    ({"not": {"type": "null"}}, True, "null", True),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "lenient", "text", "passes"), ALIKE)
def test_what_a_schema_says_that_nothing_holds(
    grammars: tuple[Grammars, Tokenizer], schema: Any, lenient: bool, text: str, passes: bool
) -> None:
    """It is refused, unless it asks for nothing or need not be held; all else is held."""
    made, tokenizer = grammars
    matcher = made.json_schema(schema, lenient=lenient).matcher
    ids = tokenizer.encode(text, bos=False)
    fits = matcher.validate_tokens(ids) == len(ids)
    assert (fits and matcher.consume_tokens(ids) and matcher.is_accepting()) == passes
    if lenient:
        with pytest.raises(Refused, match="no grammar here holds that"):
            made.json_schema(schema)


# ----- how it is read

READING = Reading(FUNCTIONS, HERMES)


def read(text: str, finish: str = "stop") -> tuple[str, list[tuple[str, ...]]]:
    called = calls_of(READING, text, finish)
    json.dumps([c.shown for c in called], ensure_ascii=False).encode()
    assert all(c.whole for c in called[:-1])
    found = [(c.name, c.arguments) for c in called if c.whole]
    assert found == whole_calls(READING, text)
    cut = [(c.name, c.arguments, "cut") for c in called if not c.whole]
    return text[: READING.shown(text, finish)], [*found, *cut]


ON, MARKED = ("f", '{"on": true}'), ("ff", f'{{"word": "a{OPEN}b{CLOSE}c"}}')
READ = [
    ("text ", "stop", "text ", []),
    (THOUGHT, "stop", THOUGHT, []),
    ("a <tool_", "stop", "a <tool_", []),
    ("a <tool_", "length", "a", []),
    ("a <b", "length", "a <b", []),
    ("Let me look.\n" + F, "stop", "Let me look.", [ON]),
    (THOUGHT + "\n" + FF + F, "stop", THOUGHT, [MARKED, ON]),
    ("a" + FF + F[:-30], "length", "a", [MARKED]),
    ("a" + FF + F[: -len(CLOSE)], "stop", "a", [MARKED, ON]),  # which may be a stop string
    (F[:-30], "length", "", []),
    (F[:-20], "length", "", [("f", '{"on":', "cut")]),
    (F + FF[:53], "stop", "", [ON, ("ff", '{"word": "a<t', "cut")]),
    (F[: -len(CLOSE) - 2], "length", "", [("f", '{"on": true}', "cut")]),  # no bracket behind it
    (call("g", '{"a": tru}'), "stop", "", [("g", '{"a": tru', "cut")]),  # which no grammar lets by
    (G, "stop", "", [("g", '{"any": [1.50, 1e999]}')]),  # as it was written
    (call("g", '"\\ud800"'), "stop", "", [("g", '"\\ud800"')]),
    (call("g", "[" * 9), "length", "", [("g", "[" * 9 + f"}}\n{CLOSE}", "cut")]),
    (
        call("g", "[" * 200_000 + "]" * 200_000),
        "length",
        "",
        [("g", "[" * 200_000 + "]" * 199_999, "cut")],
    ),  # too deep for anybody to read
    (call("g", "9" * 5000), "stop", "", [("g", "9" * 5000)]),
    (OPEN + '{"name": ["f"], "arguments": {}}' + CLOSE, "stop", "", []),
    (OPEN + '{"name": "f", "arguments": 12', "length", "", []),
    (OPEN + '{"name": "h", "arguments": {}}' + CLOSE, "stop", "", []),
]


@pytest.mark.parametrize(("text", "finish", "shown", "calls"), READ)
def test_text_and_whole_calls_are_read(
    text: str, finish: str, shown: str, calls: list[tuple[str, ...]]
) -> None:
    assert read(text, finish) == (shown, calls)


def test_wherever_an_answer_is_cut_its_markup_is_no_text() -> None:
    text = "Let me look.\n" + FF + "\n" + F
    seen = [read(text[:n], "length") for n in range(len(text) + 1)]
    assert all("Let me look.\n".startswith(shown) for shown, _ in seen)
    assert [len(calls) for _, calls in seen] == sorted(len(calls) for _, calls in seen)
    assert {len(calls) for _, calls in seen} == {0, 1, 2}


PARTS = st.sampled_from(["a", " ", "\n", "<", OPEN[:5], "<b>", "{", "}", F, FF, F[:20], JSON])


@given(st.lists(PARTS).map("".join), st.booleans(), st.sampled_from(["stop", "length"]), st.data())
def test_pieces_make_the_whole(text: str, formed: bool, finish: str, data: st.DataObject) -> None:
    """What is shown of a beginning stays."""
    reading, told, at = Reading(FUNCTIONS, HERMES, formed), 0, 0
    while at < len(text):
        at = data.draw(st.integers(at + 1, len(text)))
        shown = reading.shown(text[:at], None, told)
        assert shown >= told
        assert shown == reading.shown(text[:at], None)
        told = shown
    assert told <= reading.shown(text, finish, told) == reading.shown(text, finish)


def test_a_marker_in_text_that_has_a_form_is_text() -> None:
    reading, text = Reading(FUNCTIONS, HERMES, formed=True), f'{{"word": "{F}"}}'
    assert reading.shown(text, "stop") == len(text) and not calls_of(reading, text)
    assert reading.shown(F, "stop") == 0 and len(calls_of(reading, F)) == 1


def test_calls_have_names_of_their_own() -> None:
    """Within an answer, and among those of one request that say the same."""
    ids, again = (
        [c.id for choice in "012" for c in calls_of(READING, F + F, answer=f"reply {choice}")]
        for _ in range(2)
    )
    assert len(set(ids)) == 6 and ids == again
    assert not set(ids).intersection(c.id for c in calls_of(READING, F + F, answer="other 0"))


def test_templates_are_told_which_call_a_result_is_of() -> None:
    called = {"id": "c1", "function": {"name": "f", "arguments": '{"on": true}'}}
    messages = [
        Message.model_validate({"role": "assistant", "content": "a", "tool_calls": [called]}),
        Message(role="tool", content="done", tool_call_id="c1"),
    ]
    found, _ = for_template(messages, TOOLS, "{{ tools }}<tool_call>{{ m.tool_calls }}")
    function = {"name": "f", "arguments": {"on": True}}
    assert found == [
        {"role": "assistant", "content": "a",
         "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]  # fmt: skip


# ----- what reaches a client


SAID = [
    (["Let me look.\n" + F, F + FF], "stop", "tool_calls"),
    ([THOUGHT + "\n" + FF, THOUGHT + FF + F], "stop", "tool_calls"),
    ([THOUGHT, "plain ", "<"], "stop", "stop"),
    (["a" + F + FF[:40], F + F[:30]], "length", "length"),
    ([F[:39], F[:5], F[: len(OPEN)], "a <tool"], "length", "length"),
    (["a" + F + FF[:50], F[:40], F[:-15], "a <tool"], "length", "length"),
    ([G, REFERS], "stop", "tool_calls"),
]


@pytest.mark.parametrize("chances", [False, True], ids=["", "chances"])
@pytest.mark.parametrize(("texts", "finish", "reason"), SAID)
def test_a_stream_is_the_whole_answer(
    grammars: tuple[Grammars, Tokenizer],
    texts: list[str],
    finish: str,
    reason: str,
    chances: bool,
) -> None:
    dialect = Dialect(True, "1", "m", grammars[1], 0)
    body = ChatRequest(messages=[Message(role="user", content="a")])

    def asked() -> Asked:
        return Asked(told(texts, finish, dialect, chances), dialect, body, READING)

    choices, events = both_ways(asked)
    streamed = [joined(events, i) for i in range(len(texts))]
    for choice, (content, calls, logprobs, end), text in zip(choices, streamed, texts, strict=True):
        message = choice["message"]
        assert (message["content"] or "", message.get("tool_calls", [])) == (content, calls)
        assert choice["finish_reason"] == end == reason
        assert ((choice["logprobs"] or {}).get("content") or []) == logprobs
        assert text.startswith(content) and OPEN not in content
        assert len(calls) == text.count('"arguments": {')
        whole = text.count("\n" + CLOSE)
        assert all(json.loads(c["function"]["arguments"]) for c in calls[:whole])
    ids = [c["id"] for _, calls, *_ in streamed for c in calls]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("text", "finish", "kinds"),
    [
        ("Let me look.\n" + F, "stop", ["message", "function_call"]),
        (THOUGHT + FF + F, "stop", ["message", "function_call", "function_call"]),
        (F + FF, "stop", ["function_call", "function_call"]),
        (F + FF[:40], "length", ["function_call"]),
        (F[:39], "length", ["message"]),
        ("a" + F[:45], "length", ["message", "function_call"]),
        (THOUGHT, "stop", ["message"]),
    ],
)
def test_a_response_has_its_text_before_its_calls(
    grammars: tuple[Grammars, Tokenizer], text: str, finish: str, kinds: list[str]
) -> None:
    """Whole, in events, and as a later response sees it."""
    dialect = Dialect(True, "1", "m", grammars[1], 0)
    kept = Conversations(9, 9999)
    responses = Responses(Generation(SERVICE, SILENT), kept)
    body = ResponsesRequest(input="a")

    def turn() -> Turn:
        return Turn(told([text], finish, dialect, False), dialect, body, READING)

    async def whole() -> dict[str, Any]:
        return await responses.whole(turn())

    async def streamed() -> Events:
        async for e in responses.events(turn()):
            yield e

    output, events = asyncio.run(whole())["output"], data_of(streamed())
    assert [item["type"] for item in output] == kinds
    assert output == events[-1]["response"]["output"]
    assert output == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    places = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    assert places == list(range(len(output)))
    content = "".join(i["content"][0]["text"] for i in output if i["type"] == "message")
    assert content == text[: READING.shown(text, finish)]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == content
    later = kept.find("resp_1").messages[-1]
    whole_ones = [i["call_id"] for i in output if i["type"] != "message" and whole_item(i)]
    assert (later.text, [c.id for c in later.tool_calls or ()]) == (content, whole_ones)


def whole_item(item: dict[str, Any]) -> bool:
    """Whether an item of an output is, of which its status tells."""
    if item["type"] == "function_call":
        assert (item["status"] == "completed") == item["arguments"].endswith("}")
    return item["status"] == "completed"


@pytest.mark.parametrize("text", ["Let me look.\n" + F, F + FF, THOUGHT + FF[:50], "a <tool", ""])
def test_a_response_tells_the_chances_of_its_text(
    grammars: tuple[Grammars, Tokenizer], text: str
) -> None:
    """And of nothing else; what deltas, ends and the response say of it is the same."""
    dialect = Dialect(True, "1", "m", grammars[1], 0)
    responses = Responses(Generation(SERVICE, SILENT), Conversations(9, 9999))
    body = ResponsesRequest(input="a", include=["message.output_text.logprobs"])
    chance = Chance(97, -1.0)
    tokens = [Said(97, text[at : at + 3], chance, at=at) for at in range(0, len(text), 3)]

    async def streamed() -> Events:
        turn = Turn(heard([tokens], "length"), dialect, body, READING)
        async for e in responses.events(turn):
            yield e

    events = data_of(streamed())
    known = [e for e in events if e["type"] == "response.output_text.delta"]
    told = [c for e in known for c in e["logprobs"]]
    shown = READING.shown(text, "length")
    output = events[-1]["response"]["output"]
    lone = all(i["type"] == "message" for i in output)
    assert len(told) == sum(t.at < shown or lone for t in tokens)
    for message in (i for i in output if i["type"] == "message"):
        (done,) = (e for e in events if e["type"] == "response.output_text.done")
        assert done["logprobs"] == message["content"][0]["logprobs"] == told


BROKE: Any = SimpleNamespace(
    settings=SimpleNamespace(ping_seconds=9), worker=SimpleNamespace(refusal=Refused), cancel=print
)
GENERATION = Generation(BROKE, SILENT)
ASKS = ChatRequest(messages=[Message(role="user", content="a")])
FAILS: list[tuple[Any, Any, dict[str, Any]]] = [  # a form, what it is asked, and its last event
    (GENERATION, Asked, {"error": {"message": "it broke", "type": "server_error", "param": None,
                                   "code": None}}),
    (Responses(GENERATION, Conversations(9, 9999)), Turn,
     {"type": "error", "message": "it broke", "code": None, "param": None}),
    (Messages(GENERATION), Asked,
     {"type": "error", "error": {"type": "api_error", "message": "it broke"}}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "kind", "last"), FAILS, ids=["chat", "responses", "messages"])
def test_what_fails_amid_an_answer_is_told_in_every_form(
    grammars: tuple[Grammars, Tokenizer], form: Any, kind: Any, last: dict[str, Any]
) -> None:
    """What was said is there, then signs of life while nothing is; a whole reply is refused."""
    body = ResponsesRequest(input="a") if kind is Turn else ASKS

    def asked() -> Any:
        inbox = Inbox(eager=True)
        for heard_ in (0, Said(97, "some")), NOTHING_YET, (0, Ended(None, "it broke")):
            inbox.put(heard_)
        answers = Answers([Ticket(0, inbox)], inbox, 3)
        return kind(answers, Dialect(True, "1", "m", grammars[1], 0), body)

    async def whole() -> None:
        await form.whole(asked())

    async def streamed() -> list[bytes]:
        return [e async for e in form.events(asked())]

    with pytest.raises(Refused, match="it broke"):
        asyncio.run(whole())
    told = b"".join(asyncio.run(streamed())).decode()
    assert told.index("some") < told.index(PING.decode()) < told.index("it broke")
    end = told.removesuffix(DONE.decode()).rpartition("data: ")[2]
    assert {k: v for k, v in json.loads(end).items() if k != "sequence_number"} == last


# ----- a server that is asked for both a form and calls


FLAT_FORM = {"format": {"type": "json_schema", "name": "a", "schema": WORD}}
LIKES = {  # the model's first letter, and that it then ends as soon as it may
    "text": {str(ord("{")): 50, str(ord('"')): 80, "257": 100},
    "call": {str(ord("<")): 50, "257": 100},
}


@pytest.mark.parametrize("stream", [False, True], ids=["", "stream"])
@pytest.mark.parametrize("likes", LIKES)
def test_a_form_and_tools_hold_together(server: Server, likes: str, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 120,
        "tools": [tool("f", FLAG)], "response_format": FORM, "logit_bias": LIKES[likes],
    }  # fmt: skip
    if stream:
        pieces = list(server.client.chat.completions.create(**asked, stream=True))
        text, calls, _, end = joined([p.to_dict() for p in pieces], 0)
        found = [c["function"]["arguments"] for c in calls]
    else:
        choice = server.client.chat.completions.create(**asked).choices[0]
        text, end = choice.message.content or "", choice.finish_reason
        found = [c.function.arguments for c in choice.message.tool_calls or ()]
    checked(likes, text, found)
    assert end == {"text": "stop", "call": "tool_calls"}[likes]


@pytest.mark.parametrize("likes", LIKES)
def test_a_form_and_tools_hold_together_in_a_response(server: Server, likes: str) -> None:
    flat = {"type": "function", "name": "f", "parameters": FLAG, "strict": True}
    asked: dict[str, Any] = {
        "model": "m", "input": "Hi", "max_output_tokens": 120, "tools": [flat], "text": FLAT_FORM,
        "extra_body": {"logit_bias": LIKES[likes]},
    }  # fmt: skip
    whole = server.client.responses.create(**asked)
    events = list(server.client.responses.create(**asked, stream=True))
    for reply in (whole, events[-1].response):
        calls = [i.arguments for i in reply.output if i.type == "function_call"]
        checked(likes, reply.output_text, calls)
        assert reply.status == "completed"


def checked(likes: str, text: str, calls: list[str]) -> None:
    """An answer of the one kind or the other."""
    assert len(calls) == (likes == "call") and (text == "") == (likes == "call")
    for arguments in calls:
        jsonschema.validate(json.loads(arguments), FLAG)
    if text:
        jsonschema.validate(json.loads(text), WORD)


def test_a_demanded_call_that_is_cut_is_no_text(server: Server) -> None:
    for limit in range(1, 50, 7):
        asked: dict[str, Any] = {
            "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": limit,
            "tools": [tool("f", FLAG)], "tool_choice": "required",
        }  # fmt: skip
        choice = server.client.chat.completions.create(**asked).choices[0]
        pieces = list(server.client.chat.completions.create(**asked, stream=True))
        text, calls, _, end = joined([p.to_dict() for p in pieces], 0)
        said = choice.message.content or "", choice.finish_reason
        assert said == (text, end) == ("", "length")
        assert len(calls) == len(choice.message.tool_calls or ()) == (limit > 40)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_no_stop_string_cuts_a_demanded_call(server: Server, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200,
        "tools": [tool("f", FLAG)], "tool_choice": choice, "parallel_tool_calls": False,
    }  # fmt: skip
    plain, stopped = (
        server.client.chat.completions.create(**asked, **more).choices[0]
        for more in ({}, {"stop": ["name", "{", "<"]})
    )
    assert plain.message.tool_calls and plain.finish_reason == "tool_calls"
    found = [[c.function for c in a.message.tool_calls or ()] for a in (plain, stopped)]
    assert found[0] == found[1] and stopped.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_form_that_cannot_be_followed_is_refused_beside_tools(
    server: Server, choice: str
) -> None:
    no_schema: dict[str, Any] = {"type": "none"}
    for form in (
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": no_schema}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a" * 70_000]}}},
    ):
        asked: dict[str, Any] = {
            "model": "m", "messages": [{"role": "user", "content": "Hi"}],
            "tools": [tool("f", FLAG)], "tool_choice": choice, "response_format": form,
        }  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="schema"):
            server.client.chat.completions.create(**asked)
    body = {
        "input": "Hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": choice,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": no_schema}},
    }  # fmt: skip
    assert WEB.post(f"{server.url}/v1/responses", json=body).status_code == 400


def allowed(mode: str, *names: str) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": n}} for n in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def test_of_all_functions_that_a_model_is_told_of_it_calls_those_that_are_allowed(
    server: Server,
) -> None:
    """It likes the letter f, and so the function of that name, wherever it may choose."""
    asked: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60,
        "tools": [tool(n, {"type": "object", "additionalProperties": False}) for n in "fg"],
        "logit_bias": {str(ord("f")): 90},
    }  # fmt: skip
    create = server.client.chat.completions.create
    free = create(**asked, tool_choice="required")
    assert called(free) == {"f"}
    for names in ("g", "fg"):
        reply = create(**asked, tool_choice=allowed("required", *names))
        assert called(reply) == {names[0]}
        assert reply.usage.prompt_tokens == free.usage.prompt_tokens  # it is told of all of them
    lone = create(**asked, tool_choice={"type": "function", "function": {"name": "g"}})
    assert lone.usage.prompt_tokens < free.usage.prompt_tokens
    text = create(**asked, tool_choice=allowed("auto", "g")).choices[0].message
    assert text.content and not text.tool_calls


def called(reply: Any) -> set[str]:
    return {c.function.name for c in reply.choices[0].message.tool_calls or ()}


@pytest.mark.parametrize("names", ["x", "fx"])
def test_a_function_that_is_allowed_must_be_there(server: Server, names: str) -> None:
    asked: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool("f", FLAG)],
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="tool_choice names no tool"):
        server.client.chat.completions.create(**asked, tool_choice=allowed("auto", *names))
    body = {
        "input": "Hi", "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto",
                        "tools": [{"type": "function", "name": n} for n in names]},
    }  # fmt: skip
    assert WEB.post(f"{server.url}/v1/responses", json=body).status_code == 400
