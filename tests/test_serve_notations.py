"""Calls in the notations of other chat templates than Hermes': what the grammar lets through, how
answers are read and streamed, and what templates are told of earlier calls."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from notation_kit import (
    AROUND,
    CALLS,
    ODD,
    OFF,
    ON,
    TAG,
    TAUGHT,
    TEACHES_GRANITE,
    TEACHES_HARMONY,
    TEACHES_LIST,
    TEACHES_LLAMA,
    TEACHES_MISTRAL,
    UNKNOWN,
    WRONG,
    llama,
    talk,
    vocabulary,
)  # fmt: skip
from serve_kit import WORD
from small_model import small_model
from tool_kit import FUNCTIONS, JSON, TOOLS, both_ways, calls_of, joined, told, whole_calls

from ggraph.formats import open_checkpoint
from ggraph.text.stream import TextStream
from ggraph.text.tokenizer import Tokenizer
from models.serve.calls import Reading
from models.serve.generation import Asked
from models.serve.grammar import Grammars
from models.serve.messages import Message
from models.serve.notations import GEMMA, GRANITE, HERMES, LLAMA, notation_of
from models.serve.replies import Dialect
from models.serve.schema import ChatRequest
from models.serve.tools import answer_grammar, for_template

every = pytest.mark.parametrize("kind", TAUGHT)


UNREAD = (  # by templates that know tools
    "{{ tools }}",
    '{{ tools }}{"name": a, "parameters": b}',
    '{{ tools }}<tool_call><function=f>{"a": 1}</function>',
    '{{ tools }}<tool_call><invoke name="f">',
    '{{ tools }}<tool_call> as <tool_calls>[{"name": a}]</tool_calls>',
    "{{ tools }}<seed:tool_call><function=f><parameter=a>",
)


def test_a_template_says_how_calls_are_written() -> None:
    assert [notation_of(template) for _, template, _ in TAUGHT.values()] == [
        notation for notation, *_ in TAUGHT.values()
    ]
    for other in ("", "<tool_call>[ARGS]", *UNREAD):
        assert notation_of(other) is None
    assert notation_of("{{ tools }}<tool_call>[ARGS]") == HERMES


# ----- what the grammar lets through


@pytest.fixture(scope="module", params=[3, 4], ids=["special", "plain"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    folder = tmp_path_factory.mktemp("notations")
    path = small_model(folder / "small.gguf", vocabulary(request.param))
    return Tokenizer.from_gguf(open_checkpoint(path).metadata)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


def loaded(call: tuple[str, str]) -> tuple[str, Any]:
    return call[0], json.loads(call[1])


FREE: dict[str, Any] = {}
FORMED: dict[str, Any] = {"schema": WORD}
DEMANDED: dict[str, Any] = {"demanded": True}
ONE: dict[str, Any] = {"several": False}
WORDS = '{"word": "a"}'


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an answer: markers within strings are spelt."""
    parts = enumerate(re.split(f"({re.escape(AROUND)})", text))
    return [t for i, p in parts for t in tokenizer.encode(p, bos=False, special=i % 2 == 0)]


def verdicts(kind: str) -> Iterator[tuple[dict[str, Any], str, bool]]:
    """Answers, and whether they pass."""
    calls = TAUGHT[kind][2]
    for text in ("", "text", "a [TOOL_ b", "[ARGS", "{", JSON, llama(UNKNOWN), llama(ON)[:-20]):
        yield FREE, text, True
        yield DEMANDED, text, False
    for right in ([ON], [ODD], [ON, ODD, OFF], [("g", "{}"), ("refers", '{"on": null}')]):
        yield FREE, calls(*right), True
        yield FORMED, calls(*right), True
        yield FREE, calls(*right) + "\n", True
        yield ONE, calls(*right), len(right) == 1
        yield DEMANDED, calls(*right), len(right) == 1
    for wrong in (calls(WRONG), calls(ON, WRONG), calls(ON) + "text", calls(ON, UNKNOWN)):
        yield FREE, wrong, False
        yield FORMED, wrong, False
        yield DEMANDED, wrong, False
    yield FORMED, WORDS, True
    yield FORMED, '{"word": 1}', False
    yield FORMED, calls(ON) + WORDS, False
    yield FREE, "text " + calls(ON), True
    yield FREE, calls(ON).replace("[{", " [{"), True  # as SentencePiece has it
    if (narrow := calls(ON).replace('": ', '":')) != calls(ON):
        yield FREE, narrow, kind.startswith("llama")
    yield FREE, "text " + calls(WRONG), kind.startswith("llama")  # where calls are the whole answer
    yield FORMED, "text " + calls(ON), False


@every
def test_answers_are_text_then_calls(grammars: Grammars, tokenizer: Tokenizer, kind: str) -> None:
    notation, special = TAUGHT[kind][0], TAUGHT[kind][0].special(tokenizer)
    assert bool(special) == (CALLS in tokenizer.special_ids or kind == "gemma")
    for options, text, passes in verdicts(kind):
        matcher = grammars.lark(answer_grammar(TOOLS, notation, special, **options), "t").matcher
        found = encoded(tokenizer, text)
        fits = matcher.validate_tokens(found) == len(found)
        ok = fits and matcher.consume_tokens(found) and matcher.is_accepting()
        assert ok == passes, (options, text)


@every
def test_a_marker_that_is_spelt_is_a_marker(
    grammars: Grammars, tokenizer: Tokenizer, kind: str
) -> None:
    """As it is for who reads the text."""
    notation, _, calls = TAUGHT[kind]
    grammar = answer_grammar(TOOLS, notation, notation.special(tokenizer))
    marker = notation.marker
    for text in ("a" + calls(WRONG), marker, f"a{marker}b"):
        matcher = grammars.lark(grammar, "t").matcher
        found = [t for letter in text for t in tokenizer.encode(letter, bos=False)]
        fits = matcher.validate_tokens(found) == len(found)
        ok = fits and matcher.consume_tokens(found) and matcher.is_accepting()
        assert ok == (not marker), text


def test_gemmas_thoughts_may_be_before_all(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """They are neither text nor calls, whatever they say of these."""
    special, calls = GEMMA.special(tokenizer), TAUGHT["gemma"][2]
    thought = f"<|channel>thought\n{AROUND} call:f{{on:1}}<channel|>"
    answers: list[tuple[dict[str, Any], str, list[tuple[str, str]]]] = [
        (FREE, "text", []), (FREE, "", [ON]), (FREE, "text", [ON, ODD]), (FORMED, "", [ODD]),
        (FORMED, WORDS, []), (DEMANDED, "", [ON]),
    ]  # fmt: skip
    for options, text, called in answers:
        written = text + calls(*called)
        matcher = grammars.lark(answer_grammar(TOOLS, GEMMA, special, **options), "t").matcher
        found = encoded(tokenizer, thought + written)
        assert matcher.validate_tokens(found) == len(found), written
        assert matcher.consume_tokens(found) and matcher.is_accepting()
        stream, thoughts, shown = TextStream(tokenizer, (), GEMMA.shown(special)), "", ""
        for token in found:
            shown += stream.push(token)
            thoughts += stream.thought
        reading = Reading(FUNCTIONS, GEMMA, bool(options))
        names = [c.name for c in calls_of(reading, shown)]
        assert (shown[: reading.shown(shown, "stop")], names) == (text, [n for n, _ in called])
        assert thoughts == f"{AROUND} call:f{{on:1}}"


def test_llamas_tag_may_begin_calls(grammars: Grammars, tokenizer: Tokenizer) -> None:
    special = LLAMA.special(tokenizer)
    for options in (FREE, FORMED, DEMANDED, ONE):
        matcher = grammars.lark(answer_grammar(TOOLS, LLAMA, special, **options), "t").matcher
        found = [TAG, *tokenizer.encode(llama(ON), bos=False)]
        text = TAG not in tokenizer.special_ids and options in (FREE, ONE)
        whole = matcher.validate_tokens(found) == len(found)
        assert whole == (text or TAG in tokenizer.special_ids)
        assert (matcher.validate_tokens([TAG, *b"{a"]) == 3) == text


@pytest.mark.parametrize("schema", [
    {"type": "object"}, WORD, {"type": "string"}, {"enum": [{"name": "f"}, {"name": "q"}, "a"]},
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
])  # fmt: skip
def test_json_may_begin_as_llamas_calls_do(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    texts = [
        "{}", WORDS, '{"name": "q"}', '{"name": "f"}', '{"name": "fa"}', '"a"', '{"name": ""}',
        '{"name": "f", "x": 1}', '{"names": 1}', '{"name": "f", "parameter": 1}', llama(UNKNOWN),
    ]  # fmt: skip
    grammar = answer_grammar(TOOLS, LLAMA, LLAMA.special(tokenizer), schema=schema)

    def passes(text: str) -> bool:
        matcher = grammars.lark(grammar, "t").matcher
        found = tokenizer.encode(text, bos=False)
        fits = matcher.validate_tokens(found) == len(found)
        return bool(fits and matcher.consume_tokens(found) and matcher.is_accepting())

    for text in texts:
        try:
            jsonschema.validate(json.loads(text), schema)
        except jsonschema.ValidationError:
            assert not passes(text), text
        else:
            assert passes(text), text
            assert Reading(FUNCTIONS, LLAMA, formed=True).shown(text, "stop") == len(text)
    assert passes(llama(ON, ODD))


# ----- how it is read


def read(kind: str, text: str, finish: str | None = "stop") -> tuple[str, list[tuple[str, str]]]:
    reading = Reading(FUNCTIONS, TAUGHT[kind][0])
    found = [(c.name, c.arguments) for c in calls_of(reading, text) if c.whole]
    assert found == whole_calls(reading, text)
    return text[: reading.shown(text, finish)], found


@every
def test_text_and_whole_calls_are_read(kind: str) -> None:
    calls = TAUGHT[kind][2]
    assert read(kind, calls(ON)) == ("", [ON])
    assert read(kind, calls(ON, ODD, OFF)) == ("", [ON, ODD, OFF])
    assert read(kind, calls(("g", '{"a": [1.50, 1e999]}'))) == ("", [("g", '{"a": [1.50, 1e999]}')])
    for text in ("text ", JSON, "a < b [x] {", llama(UNKNOWN), llama(ON)[:20], "{", "[", ""):
        assert read(kind, text) == (text, [])
    for name in ("a.b-c", "f"):
        reading = Reading({name: None}, TAUGHT[kind][0])
        assert [c.name for c in calls_of(reading, calls((name, "{}")))] == [name]


@pytest.mark.parametrize("kind", ["mistral", "mistral list"])
def test_text_may_be_before_mistrals_calls(kind: str) -> None:
    calls = TAUGHT[kind][2]
    assert read(kind, "Let me look.\n" + calls(ON, ODD)) == ("Let me look.", [ON, ODD])
    assert read(kind, "a [TOOL_", "length") == ("a", [])
    assert read(kind, "a [TOOL_") == ("a [TOOL_", [])
    assert read(kind, "a [x", None) == ("a [x", [])
    spaced = calls(ON, ODD).replace("[{", " [ {").replace("][TOOL", "] [TOOL")
    assert read(kind, spaced) == ("", [ON, ODD])


def test_llamas_calls_are_the_whole_answer() -> None:
    assert read("llama", "a " + llama(ON)) == ("a " + llama(ON), [])
    assert read("llama", llama(ON)[:20], "length") == ("", [])
    assert read("llama", llama(ON).replace("; ", ";")) == ("", [ON])


@every
def test_wherever_an_answer_is_cut_a_call_is_no_text(kind: str) -> None:
    text = TAUGHT[kind][2](ON, ODD)
    seen = [read(kind, text[:n], "length") for n in range(len(text) + 1)]
    assert all(shown == "" for shown, _ in seen)
    counts = [len(calls) for _, calls in seen]
    assert counts == sorted(counts) and set(counts) == {0, 1, 2}
    assert all(called in ([], [ON], [ON, ODD]) for _, called in seen)


def test_text_is_held_no_longer_than_it_may_become_a_call() -> None:
    """Told letter by letter: what a client has of each beginning."""

    def held(kind: str, text: str) -> set[str]:
        reading = Reading({"f": None, "fly": None}, TAUGHT[kind][0])
        beginnings = (text[:n] for n in range(1, len(text) + 1))
        return {t for t in beginnings if t[: reading.shown(t, None)].rstrip() != t.rstrip()}

    assert held("llama", '{"word": 1}') == {"{", '{"'}
    assert held("llama", '{"name": "flow"}') == {'{"name": "fl'[:n] for n in range(1, 13)}
    assert held("llama", "see {") == set()
    for kind in ("mistral", "mistral list"):
        assert held(kind, "a[b] [TOO") == {"a[", "a[b] [", "a[b] [T", "a[b] [TO", "a[b] [TOO"}
        assert held(kind, JSON) == set()


PARTS = st.sampled_from(["a", " ", "[", "{", "}", "; ", JSON, "[TOOL_CALLS]", "[ARGS]", *(
    said for _, _, calls in TAUGHT.values() for said in (calls(ON), calls(ON, ODD), calls(ON)[:20])
)])  # fmt: skip


@given(
    st.sampled_from([*TAUGHT]), st.lists(PARTS).map("".join), st.booleans(),
    st.sampled_from(["stop", "length"]), st.data(),
)  # fmt: skip
def test_pieces_make_the_whole(
    kind: str, text: str, formed: bool, finish: str, data: st.DataObject
) -> None:
    """What is shown of a beginning stays."""
    reading, told, at = Reading(FUNCTIONS, TAUGHT[kind][0], formed), 0, 0
    while at < len(text):
        at = data.draw(st.integers(at + 1, len(text)))
        shown = reading.shown(text[:at], None, told)
        assert told <= shown == reading.shown(text[:at], None)
        told = shown
    assert told <= reading.shown(text, finish, told) == reading.shown(text, finish)


@every
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_stream_is_the_whole_answer(tokenizer: Tokenizer, kind: str, finish: str) -> None:
    notation, _, calls = TAUGHT[kind]
    cut = calls(ON, ODD)[:-30] if finish == "length" else calls(ON, ODD)
    texts = [calls(ON), JSON, "plain", llama(UNKNOWN), cut]
    dialect = Dialect(True, "1", "m", tokenizer, 0)
    body = ChatRequest(messages=[Message(role="user", content="a")])

    def asked() -> Asked:
        answers = told(texts, finish, dialect, False)
        return Asked(answers, dialect, body, Reading(FUNCTIONS, notation))

    choices, streamed = both_ways(asked)
    wanted = ["", JSON, "plain", llama(UNKNOWN), ""]
    streams = notation.arguments.growing("{", 0) is not None  # else a call is there whole or not
    counts = [1, 0, 0, 0, 1 if finish == "length" and not streams else 2]
    for i, choice in enumerate(choices):
        content, called, _, end = joined(streamed, i)
        message = choice["message"]
        assert (message["content"] or "", message.get("tool_calls", [])) == (content, called)
        assert (content, len(called)) == (wanted[i], counts[i])
        stopped = "tool_calls" if called else "stop"
        assert choice["finish_reason"] == end == (stopped if finish == "stop" else "length")


# ----- what templates are told of earlier calls


def test_mistrals_templates_are_given_ids_of_nine_letters() -> None:
    messages = [Message.model_validate(m) for m in talk(ON, ODD)]
    for template in (TEACHES_LIST, TEACHES_MISTRAL):
        _, called, *results = for_template(messages, TOOLS, template)[0]
        given = [c["id"] for c in called["tool_calls"]]
        assert given == [r["tool_call_id"] for r in results] and len(set(given)) == 2
        assert all(len(i) == 9 and i.isalnum() for i in given)
    own = {"id": "abcdefghi", "function": {"name": "f"}}
    again = Message.model_validate({"role": "assistant", "tool_calls": [own]})
    assert for_template([again], TOOLS, TEACHES_LIST)[0][0]["tool_calls"][0]["id"] == own["id"]


@pytest.mark.parametrize("template", UNREAD)
def test_a_model_is_told_of_calls_that_its_template_does_not_teach(template: str) -> None:
    """In words, and what it learns of earlier calls is written so, too."""
    messages = [Message.model_validate(m) for m in talk(ON)]
    (system, _, called, result), more = for_template(messages, TOOLS, template)
    assert (system["role"], more) == ("system", {})
    assert '<tool_call>{"name": "NAME", "arguments": OBJECT}</tool_call>' in system["content"]
    assert all(t.function.name in system["content"] for t in TOOLS)
    assert called == {"role": "assistant", "content": HERMES.written([loaded(ON)])}
    assert "done" in result["content"]


def test_results_and_what_is_said_then_are_one_turn_of_the_user() -> None:
    """Where a model is told in words: templates as Gemma's refuse two turns of a role in a row."""
    messages = [Message.model_validate(m) for m in talk(ON, ODD)]
    more = [Message(role="user", content="And?"), Message(role="user", content="Well?")]
    found, _ = for_template([*messages, *more], [], "")
    assert [m["role"] for m in found] == ["user", "assistant", "user", "user"]
    result = "<tool_response>done</tool_response>"
    assert [m["content"] for m in found][2:] == [f"{result}\n{result}\nAnd?", "Well?"]
    answered = Message(role="assistant", content="So.")
    found, _ = for_template([*messages, answered, *more], [], "")
    assert [m["content"] for m in found][2:] == [f"{result}\n{result}", "So.", "And?", "Well?"]


def test_a_template_that_writes_no_calls_is_given_them_as_text() -> None:
    messages = [Message.model_validate(m) for m in talk(ON, ODD)]
    (_, called, *_), more = for_template(messages, TOOLS, TEACHES_GRANITE)
    assert called == {"role": "assistant", "content": GRANITE.written([loaded(ON), loaded(ODD)])}
    assert [t["function"]["name"] for t in more["tools"]] == [t.function.name for t in TOOLS]


@pytest.mark.parametrize("template", [TEACHES_LLAMA, TEACHES_HARMONY])
def test_who_takes_one_call_a_message_is_given_it_with_its_result(template: str) -> None:
    """Whatever the order of the results; those of no call stay."""
    messages = [Message.model_validate(m) for m in talk(ON, ODD)]
    messages[1].content = "Well."
    hi, called, *results = messages
    stray = Message(role="tool", content="stray")
    for order in (results, results[::-1]):
        found, _ = for_template([hi, called, *order, stray], TOOLS, template)
        ids = [c["id"] for m in found for c in m.get("tool_calls", ())]
        assert [len(m.get("tool_calls", ())) for m in found] == [0, 1, 0, 1, 0, 0]
        assert [m["content"] for m in found] == ["Hi", "Well.", "done", "", "done", "stray"]
        assert ids == [found[2]["tool_call_id"], found[4]["tool_call_id"]]
