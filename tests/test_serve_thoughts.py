"""Thoughts between `<think>` and `</think>`, which a prompt may have opened: what of an answer is
text, what calls may be beside them, and a server with such a model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from notation_kit import ON, TEACHES_HERMES, WRONG, hermes
from serve_kit import FLAG, WEB, Server, served
from small_model import byte_alphabet, small_model
from tool_kit import FORM, TOOLS, joined, tool

from ggraph.formats import open_checkpoint
from ggraph.text.stream import THINK, THOUGHT, TextStream
from ggraph.text.tokenizer import Tokenizer
from models.serve.grammar import Grammars
from models.serve.notations import HERMES, LLAMA, TAGS, Notation
from models.serve.tools import answer_grammar

OPENS, CLOSES = 258, 259  # the ids of the markers
ENDS = {
    "given": "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{%- else %}<think>\n{% endif %}",
    "own": "{#- which the model closes with </think> #}",
}


def vocabulary(kind: int, template: str = "") -> dict[str, Any]:
    markers = ["<|im_start|>", "<|im_end|>", THINK, THOUGHT]
    return {
        "tokenizer.ggml.tokens": [*byte_alphabet(), *markers, *(f"<|x{i}|>" for i in range(60))],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 2 + [kind] * 2 + [3] * 60,
        "tokenizer.ggml.merges": [], "tokenizer.chat_template": template,
    }  # fmt: skip


@pytest.fixture(scope="module", params=[3, 4], ids=["control", "user-defined"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    path = tmp_path_factory.mktemp("thoughts") / "small.gguf"
    made = small_model(path, vocabulary(request.param))
    return Tokenizer.from_gguf(open_checkpoint(made).metadata)


def told(tokenizer: Tokenizer, ids: list[int], opened: bool | None) -> tuple[str, str]:
    """Text and thought of an answer."""
    stream, text, thought = TextStream(tokenizer, thinking=opened), "", ""
    for token in ids:
        text += stream.push(token)
        thought += stream.thought
    return text + stream.finish(), thought + stream.thought


@pytest.mark.parametrize(("opened", "written", "text", "thought"), [
    (True, "hm\n</think>\n\nParis", "Paris", "hm\n"), (True, "h\n m", "", "h\n m"),
    (True, "</think>\n\n", "", ""), (True, "\n</think> a\n b ", "a\n b ", ""), (True, "", "", ""),
    (True, "<think>\nhm</think>Paris", "Paris", "hm"), (False, "\n Paris", "\n Paris", ""),
    (False, "<think>\nhm\n</think>\n\nParis", "Paris", "hm\n"), (False, "<think>\n", "", ""),
    (False, "\n<think>hm</think>a<think>b</think>", "a<think>b</think>", "hm"),
    (False, "write <think>, then </think>", "write <think>, then </think>", ""),
    (False, "</think>Paris", "Paris", ""), (False, "<think>hm", "", "hm"),
])  # fmt: skip
def test_what_comes_before_the_text_is_thought(
    tokenizer: Tokenizer, opened: bool, written: str, text: str, thought: str
) -> None:
    ids = tokenizer.encode(written, bos=False, special=True)
    assert told(tokenizer, ids, opened) == (text, thought)
    if CLOSES not in tokenizer.special_ids:  # else markers are left out, as ever
        assert told(tokenizer, ids, None) == (written, "")


unmarked = st.text(max_size=5).filter(lambda text: "think>" not in text)


@given(unmarked, unmarked, st.booleans())
def test_nothing_is_lost_but_spaces(
    tokenizer: Tokenizer, thought: str, text: str, opened: bool
) -> None:
    before, behind = (tokenizer.encode(part, bos=False) for part in (thought, text))
    ids = [*([] if opened else [OPENS]), *before, CLOSES, *behind]
    assert told(tokenizer, ids, opened) == (text.lstrip(), thought.lstrip())


CALL, BAD = hermes(ON), hermes(WRONG)


@pytest.mark.parametrize(("thinking", "written", "passes"), [
    (True, "hm</think>\n\ntext", True), (True, f"hm</think>\n\n{CALL}", True),
    (True, f"hm {BAD}</think>text {CALL}", True), (True, f"hm</think>{BAD}", False),
    (True, "text", False), (True, CALL, False), (True, "</think>", True),
    (False, "text", True), (False, f"text {CALL}", True), (False, f"text {BAD}", False),
    (False, f"<think>hm {BAD}</think>\n\n{CALL}", True), (False, "<think>hm", False),
    (False, f"<think>hm {CALL}", False), (False, f"\n<think>hm</think>text {BAD}", False),
    (False, f"<think></think>text {CALL}", True), (None, f"<think>{BAD}", False),
])  # fmt: skip
def test_a_call_within_a_thought_is_none(
    tokenizer: Tokenizer, thinking: bool | None, written: str, passes: bool
) -> None:
    assert fits(tokenizer, HERMES, written, thinking=thinking) == passes


@pytest.mark.parametrize("notation", [HERMES, LLAMA, TAGS], ids=["hermes", "llama", "tags"])
@pytest.mark.parametrize(("thinking", "before", "passes"), [
    (True, "hm</think>\n\n", True), (True, f"hm {CALL} {BAD}</think>", True), (True, "hm", False),
    (True, "", False), (True, "</think>text ", False), (True, "</think><think></think>", False),
    (False, "", True), (False, "<think>hm</think>\n", True), (False, "text ", False),
    (False, " ", False), (False, "\n<think>hm</think>", False),
    (False, f"<think>{BAD}</think>", True), (False, "<think>hm", False),
    (False, "<think>hm</think>text ", False), (None, "", True), (None, "<think>hm</think>", False),
])  # fmt: skip
def test_a_demanded_call_comes_behind_a_thought(
    tokenizer: Tokenizer, notation: Notation, thinking: bool | None, before: str, passes: bool
) -> None:
    """And alone: there is no text, and the thought ends at its marker."""
    grammar: dict[str, Any] = {"thinking": thinking, "demanded": True}
    calls = [notation.written([("f", {"on": on})]) for on in (True, 1)]
    assert fits(tokenizer, notation, before + calls[0], **grammar) == passes
    for wrong in (before, before + calls[1], before + calls[0] + "text", before + calls[0] * 2):
        assert not fits(tokenizer, notation, wrong, **grammar)


def fits(tokenizer: Tokenizer, notation: Notation, written: str, **options: Any) -> bool:
    """Whether a grammar lets an answer through, as a whole."""
    special, grammars = notation.special(tokenizer), Grammars(tokenizer, tokenizer.vocab_size)
    grammar = answer_grammar(TOOLS, notation, special, **options)
    matcher, ids = (
        grammars.lark(grammar, "tools").matcher,
        tokenizer.encode(written, bos=False, special=True),
    )
    whole = matcher.validate_tokens(ids) == len(ids)
    return bool(whole and matcher.consume_tokens(ids) and matcher.is_accepting())


# ----- a server


@pytest.fixture(scope="module", params=ENDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("thinks") / "small.gguf"
    changes = vocabulary(4, TEACHES_HERMES + ENDS[request.param])
    with served(small_model(path, changes), "--parallel", "2") as running:
        yield running


def tokenizer_of(server: Server) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(server.path).metadata)


def opened(tokenizer: Tokenizer) -> bool:
    """Whether the template opens a thought."""
    return "<think>\n{% endif" in (tokenizer.chat_template or "")


LIKES = {"257": 40, str(OPENS): 42, str(ord("b")): 42, str(CLOSES): 42, str(ord(" ")): 42}


def answer(server: Server, **more: Any) -> tuple[dict[str, Any], str, list[str]]:
    """The message, which a stream says, too, why it ended, and its tokens."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "logprobs": True,
        "temperature": 2, "seed": 3, "logit_bias": LIKES, **more,
    }  # fmt: skip
    url = f"{server.url}/v1/chat/completions"
    choice = WEB.post(url, json=body).json()["choices"][0]
    lines = WEB.post(url, json={**body, "stream": True}).text.splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    pieces = [json.loads(f) for f in found]
    message, (text, called, _, end) = choice["message"], joined(pieces, 0)
    thoughts = (p["choices"][0]["delta"].get("reasoning_content", "") for p in pieces)
    assert (message["content"] or "", message.get("reasoning_content", "")) == (
        text, "".join(thoughts),
    )  # fmt: skip
    assert [c["function"] for c in message.get("tool_calls", [])] == [c["function"] for c in called]
    assert choice["finish_reason"] == end
    return message, end, [t["token"] for t in (choice["logprobs"] or {}).get("content", ())]


def test_a_thought_reaches_a_client_beside_the_content(server: Server) -> None:
    tokenizer, seen = tokenizer_of(server), set[tuple[bool, bool]]()
    for seed in range(12):
        for off in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
            message, _, tokens = answer(server, seed=seed, **off)
            ids = [i for t in tokens for i in tokenizer.encode(t, bos=False)]
            text, thought = told(tokenizer, ids, opened(tokenizer) and not off)
            assert message["content"] == text
            assert message.get("reasoning_content", "") == thought
            seen.add((bool(text), bool(thought)))
    assert (True, True) in seen


def test_who_wants_all_as_text_has_it(server: Server) -> None:
    """As one has it who asks for a text to be continued, where no template is."""
    for seed in range(3):
        message, _, tokens = answer(server, seed=seed, reasoning_format="none")
        assert message["content"] == "".join(t for t in tokens if t != "<|im_end|>")
        assert "reasoning_content" not in message
    for name in ("auto", "deepseek", None):
        answer(server, reasoning_format=name, max_tokens=3)
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_format": "granite"}
    assert WEB.post(f"{server.url}/v1/chat/completions", json=body).status_code == 400


def test_forms_are_no_thoughts(server: Server) -> None:
    """Though the prompt has opened one: nothing may close it."""
    likes = {str(ord("{")): 60, str(ord('"')): 80, str(ord("w")): 60, "257": 100}
    message, end, _ = answer(server, logit_bias=likes, response_format=FORM, max_tokens=150)
    assert ("word" in json.loads(message["content"]), end) == (True, "stop")


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("more", [{}, {"response_format": FORM}], ids=["", "formed"])
def test_a_model_may_think_before_a_demanded_call(server: Server, choice: Any, more: Any) -> None:
    """Where it begins to, or the prompt has; a thought that is cut is one, and no call."""
    asked = {"tools": [tool("f", FLAG)], "tool_choice": choice, "max_tokens": 150, **more}
    opens, thinks = opened(tokenizer_of(server)), {str(ord("b")): 42, "257": 100}
    for begins in (opens, True):
        likes = {**thinks, str(CLOSES): 43, str(OPENS): 40 if begins else -100}
        message, end, tokens = answer(server, logit_bias=likes, **asked)
        assert (message["tool_calls"][0]["function"]["name"], end) == ("f", "tool_calls")
        assert message["content"] is None
        assert message.get("reasoning_content", "").strip("b") == ""
        assert tokens.count(THOUGHT) == (begins or opens)
    likes = {**thinks, str(OPENS): 40, str(CLOSES): -100}
    message, end, _ = answer(server, logit_bias=likes, **asked)
    assert (end, message["content"]) == ("length", "") and "tool_calls" not in message
    assert message["reasoning_content"].strip("b") == "" != message["reasoning_content"]
    message, end, _ = answer(server, logit_bias={}, reasoning_format="none", **asked)
    assert (len(message["tool_calls"]), end) == (1, "tool_calls")


def test_a_thought_comes_before_text_beside_tools(server: Server) -> None:
    likes = {str(OPENS): 60, str(CLOSES): 80, "257": 100}  # an end is none within a thought
    message, end, tokens = answer(server, logit_bias=likes, tools=[tool("f", FLAG)])
    assert (message["content"], end) == ("", "stop") and "tool_calls" not in message
    assert tokens == [THOUGHT] * opened(tokenizer_of(server))


def test_a_response_has_the_text_alone(server: Server) -> None:
    body = {"input": "Hi", "max_output_tokens": 40, "logit_bias": LIKES, "temperature": 2}
    for seed in range(4):
        reply = WEB.post(f"{server.url}/v1/responses", json={**body, "seed": seed}).json()
        message, *_ = answer(server, seed=seed)
        assert reply["output"][0]["content"][0]["text"] == message["content"]
