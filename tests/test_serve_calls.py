"""Calls in pieces: however an answer's tokens fall, clients put together what a whole reply says,
of calls that are cut or damaged, too. The official clients read the bytes that a server sends."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import httpx
import httpx2  # the `anthropic` client's
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from notation_kit import ODD, OFF, ON, TAUGHT, UNKNOWN, WRONG, llama
from small_model import small_model
from tool_kit import (
    FUNCTIONS,
    JSON,
    SERVICE,
    SILENT,
    calls_of,
    heard,
    heard_in_pieces,
    whole_calls,
)

from ggraph.formats import open_checkpoint
from ggraph.text.tokenizer import Tokenizer
from models.serve.anthropic import Messages, input_of
from models.serve.calls import Call, Reading
from models.serve.conversations import Conversations
from models.serve.generation import Asked, Generation
from models.serve.messages import Message
from models.serve.notations import HARMONY, Notation
from models.serve.replies import Dialect
from models.serve.responses import Responses, Turn
from models.serve.schema import ChatRequest, ResponsesRequest
from models.serve.voice import Said

LONG = (
    "ff",
    json.dumps({"word": 'a "quoted" \\ {[}] \u2028 \U0001f30a \n' * 3}, ensure_ascii=False),
)
WIDE = ("g", '{"a": [1.50, 1e999, {"b": [[], {}, "]}"]}], "b": "\\ud83c\\udf0a", "c": null}')
LONE = ("g", "12"), ("g", '"a"'), ("g", "[1, 2]"), ("g", "true")  # what is no object


def harmony(call: tuple[str, str]) -> str:
    return f"<|channel|>commentary to=functions.{call[0]}<|message|>{call[1]}"


NOTATIONS: dict[str, tuple[Notation, Callable[..., str]]] = {
    **{kind: (notation, calls) for kind, (notation, _, calls) in TAUGHT.items()},
    "harmony": (HARMONY, lambda *calls: "".join(map(harmony, calls))),  # as streams show it
}
READINGS = {kind: Reading(FUNCTIONS, notation) for kind, (notation, _) in NOTATIONS.items()}
JSONS = [k for k, (n, _) in NOTATIONS.items() if n.arguments.growing("{", 0) is not None]
every = pytest.mark.parametrize("kind", NOTATIONS)


def answers(kind: str) -> list[str]:
    """Parts of answers in a notation."""
    calls = NOTATIONS[kind][1]
    said = [calls(c) for c in (ON, ODD, LONG, UNKNOWN)] + [calls(ON, OFF, LONG), calls(LONG, ON)]
    if kind in JSONS:
        said += [calls(WRONG), calls(WIDE), calls(WIDE, ON), *(calls(c, ON) for c in LONE)]
        said += [calls(("f", '{"on": tru}'), ON), calls(("g", "[" * 2000 + "]" * 2000))]
    return said


@st.composite
def answered(draw: st.DrawFn) -> tuple[str, str, bool, str, list[int]]:
    """A notation, an answer in it that may be cut or damaged, whether it has a form, why it ends,
    and where its tokens do."""
    kind = draw(st.sampled_from([*NOTATIONS]))
    part = st.sampled_from([*answers(kind), "a", " ", "\n", "{", '"', "\\", "}", ", ", JSON])
    text = "".join(draw(st.lists(part, max_size=4)))
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=30).map(sorted))
    finish = draw(st.sampled_from(["stop", "length"]))
    return kind, text, draw(st.booleans()), finish, [*cuts, len(text)]


@given(answered())
@settings(max_examples=400)
def test_pieces_make_the_whole(answer: tuple[str, str, bool, str, list[int]]) -> None:
    """To the letter: and what is whole is what it is when all is read at once."""
    kind, text, formed, finish, cuts = answer
    reading = Reading(FUNCTIONS, NOTATIONS[kind][0], formed)
    shown, called, pieces = heard_in_pieces(reading, text, finish, cuts)
    assert shown == text[: reading.shown(text, finish)]
    for call in called:
        own = [p for p in pieces if p.call is call]
        assert [p.begins for p in own] == [True] + [False] * (len(own) - 1)
        assert "".join(p.more for p in own) == call.arguments
    assert [p.call.index for p in pieces] == sorted(p.call.index for p in pieces)
    at_once = calls_of(reading, text, finish)
    assert [vars(c) for c in called] == [vars(c) for c in at_once]
    assert [(c.name, c.arguments) for c in called if c.whole] == whole_calls(reading, text)
    assert all(c.whole for c in called[:-1])
    assert all(c.whole or kind in JSONS for c in called)  # others are there whole, or not at all


@pytest.mark.parametrize("kind", JSONS)
def test_arguments_come_as_they_are_written(kind: str) -> None:
    """Letter by letter, all but the last bracket as soon as it is there."""
    notation, calls = NOTATIONS[kind]
    text, late = calls(LONG), list[int]()
    for length in range(len(text) + 1):
        _, called, _ = heard_in_pieces(Reading(FUNCTIONS, notation), text, "", range(length + 1))
        told = called[0].arguments if called else ""
        assert LONG[1].startswith(told)
        begun = text.index(LONG[1])
        late.append(min(max(0, length - begun), len(LONG[1])) - len(told))
    assert set(late) == {0}


def test_what_is_whole_of_a_call_that_is_cut_is_an_object() -> None:
    """As Anthropic's replies have it, wherever it is cut."""
    name, text = WIDE
    for length in range(1, len(text)):
        found = input_of(Call(0, "a", name, text[:length]))
        assert isinstance(found, dict) and list(found) == list("abc")[: len(found)]
        kept = found.get("a", [])
        assert kept == [1.5, "1e999", {"b": [[], {}, "]}"]}][: len(kept)] or length < 40
    assert input_of(Call(0, "a", name, text[:-1])) == {
        "a": [1.5, "1e999", {"b": [[], {}, "]}"]}], "b": "\U0001f30a",
    }  # fmt: skip
    assert input_of(Call(0, "a", name, '{"a": tru, ')) == {}
    assert input_of(Call(0, "a", name, '{"a": ' + "[" * 100_000)) == {}


# ----- what the official clients put together


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = small_model(tmp_path_factory.mktemp("calls") / "small.gguf")
    return Tokenizer.from_gguf(open_checkpoint(path).metadata)


GENERATION = Generation(SERVICE, SILENT)
RESPONSES = Responses(GENERATION, Conversations(9, 99_999))
MESSAGES = Messages(GENERATION)
CHAT = ChatRequest(messages=[Message(role="user", content="a")])
TALK: Any = [{"role": "user", "content": "a"}]


Replies = Callable[[str, bytes], tuple[str, bytes]]  # of an address: what kind they are, and bytes


def sent(tokenizer: Tokenizer, kind: str, text: str, finish: str, step: int) -> Replies:
    """A server that gives this answer, some letters at a time."""
    dialect = Dialect(True, "1", "m", tokenizer, 0)
    reading = READINGS[kind]

    def answer() -> Any:
        cut = [Said(97, text[at : at + step]) for at in range(0, len(text), step)]
        return heard([cut], finish)

    def reply(path: str, body: bytes) -> tuple[str, bytes]:
        form: Any = MESSAGES if path == "/v1/messages" else GENERATION
        asked: Any = Asked(answer(), dialect, CHAT, reading)
        if path == "/v1/responses":
            form, asked = RESPONSES, Turn(answer(), dialect, ResponsesRequest(input="a"), reading)

        async def all_of_it() -> bytes:
            return b"".join([e async for e in form.events(asked)])

        if json.loads(body).get("stream"):
            return "text/event-stream", asyncio.run(all_of_it())
        return "application/json", json.dumps(asyncio.run(form.whole(asked))).encode()

    return reply


def client_of(replies: Replies, http: Any) -> Any:
    """A client, by one of the libraries that clients are made with."""

    def reply(request: Any) -> Any:
        kind, content = replies(request.url.path, request.content)
        return http.Response(200, headers={"content-type": kind}, content=content)

    return http.Client(transport=http.MockTransport(reply))


def of_openai(replies: Replies) -> openai.OpenAI:
    c = client_of(replies, httpx)
    return openai.OpenAI(api_key="none", base_url="http://a/v1", http_client=c, max_retries=0)


def chat(replies: Replies, stream: bool) -> list[tuple[Any, ...]]:
    ask = of_openai(replies).chat.completions
    if not stream:
        choice = ask.create(model="m", messages=TALK).choices[0]
    else:
        with ask.stream(model="m", messages=TALK) as pieces:
            list(pieces)
        choice = pieces.current_completion_snapshot.choices[0]
    calls = choice.message.tool_calls or ()
    said = [(c.type, c.id, c.function.name, c.function.arguments) for c in calls]
    return [(choice.message.content or "", choice.finish_reason), *said]


def response(replies: Replies, stream: bool) -> list[tuple[Any, ...]]:
    client = of_openai(replies)
    if not stream:
        found = client.responses.create(model="m", input="a")
    else:
        with client.responses.stream(model="m", input="a") as pieces:
            told = list(pieces)
        found = told[-1].response
        done = [e.item for e in told if e.type == "response.output_item.done"]
        assert list(map(response_item, done)) == list(map(response_item, found.output))
        for item in found.output:  # what deltas say is what ends say
            own = [e for e in told if getattr(e, "item_id", None) == item.id]
            deltas = "".join(e.delta for e in own if e.type.endswith(".delta"))
            said = item.arguments if item.type == "function_call" else item.content[0].text
            assert deltas == said
        order = [e.output_index for e in told if hasattr(e, "output_index")]
        assert order == sorted(order)
    return [(found.status,), *map(response_item, found.output)]


def response_item(i: Any) -> tuple[Any, ...]:
    if i.type == "message":
        return i.status, i.id, i.content[0].text
    return i.status, i.id, i.call_id, i.name, i.arguments


def message(replies: Replies, stream: bool) -> list[tuple[Any, ...]]:
    c = client_of(replies, httpx2)
    client = anthropic.Anthropic(api_key="none", base_url="http://a", http_client=c, max_retries=0)
    asked: dict[str, Any] = {"model": "m", "messages": TALK, "max_tokens": 9}
    if not stream:
        found = client.messages.create(**asked)
    else:
        with client.messages.stream(**asked) as pieces:
            found = pieces.get_final_message()
    blocks = [(b.text,) if b.type == "text" else (b.id, b.name, b.input) for b in found.content]
    return [(found.stop_reason,), *blocks]


@every
@pytest.mark.parametrize("ask", [chat, response, message], ids=["chat", "responses", "messages"])
def test_clients_put_together_what_a_whole_reply_says(
    tokenizer: Tokenizer, kind: str, ask: Any
) -> None:
    calls = NOTATIONS[kind][1]
    several = (ON, LONG) if kind != "harmony" else (LONG,)
    texts = [calls(*several), calls(ON), "plain", *(
        ["Let me look.\n" + calls(*several)] if NOTATIONS[kind][0].marker else [llama(UNKNOWN)]
    )]  # fmt: skip
    for step in (1, 4, 999):
        for text in texts:
            asked = partial(sent, tokenizer, kind, text, "stop", step)
            assert ask(asked(), True) == ask(asked(), False)
            found = str(ask(asked(), True))
            assert all(c[0] in found for c in (*several, ON) if calls(c) in text)


@every
@pytest.mark.parametrize("ask", [chat, response, message], ids=["chat", "responses", "messages"])
def test_clients_hear_the_same_of_what_is_cut(tokenizer: Tokenizer, kind: str, ask: Any) -> None:
    """Its end says that it was cut; a call is there as far as it was written."""
    text = NOTATIONS[kind][1](LONG)
    for length in range(0, len(text), 5):
        asked = partial(sent, tokenizer, kind, text[:length], "length", 3)
        whole, streamed = ask(asked(), False), ask(asked(), True)
        if ask is message:  # whose client shows values that are cut, too
            whole, streamed = ([t[:2] for t in found] for found in (whole, streamed))
        assert whole == streamed
        assert whole[0][-1] in ("length", "incomplete", "max_tokens")
        begun = (
            length > text.index(LONG[1])
            if kind in JSONS
            else bool(whole_calls(READINGS[kind], text[:length]))
        )
        assert ("ff" in str(whole[1:])) == begun
