"""Arguments of calls that are no JSON: what of a function's schema the grammar holds, and that what
was written is read as what it was."""

import json
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from notation_kit import TAUGHT, talk, vocabulary
from serve_kit import FLAG
from small_model import small_model
from test_serve_notations import encoded
from tool_kit import calls_of, tool

from ggraph.formats import open_checkpoint
from ggraph.text.tokenizer import Tokenizer
from models.serve.arguments import JSON
from models.serve.calls import Reading
from models.serve.errors import Refused
from models.serve.grammar import Grammars
from models.serve.messages import Message, Tool
from models.serve.notations import GEMMA, GLM, HERMES, LFM2, TAGS, Notation
from models.serve.parameters import Parameters
from models.serve.tools import answer_grammar, for_template

NOTATIONS = {"tags": TAGS, "glm": GLM, "lfm2": LFM2, "gemma": GEMMA}
every = pytest.mark.parametrize("kind", NOTATIONS)
Words = tuple[Grammars, Tokenizer]


@pytest.fixture(scope="module", params=[3, 4], ids=["special", "plain"])
def words(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Words:
    path = tmp_path_factory.mktemp("arguments") / "small.gguf"
    made = small_model(path, vocabulary(request.param))
    tokenizer = Tokenizer.from_gguf(open_checkpoint(made).metadata)
    return Grammars(tokenizer, tokenizer.vocab_size), tokenizer


def of(schema: Any) -> list[Tool]:
    return [Tool.model_validate(tool("f", schema))]


def passes(words: Words, notation: Notation, schema: Any, text: str) -> bool:
    grammars, tokenizer = words
    special = notation.special(tokenizer)
    grammar = answer_grammar(of(schema), notation, special, demanded=True)
    matcher, found = grammars.lark(grammar, "tools").matcher, encoded(tokenizer, text)
    fits = matcher.validate_tokens(found) == len(found)
    return bool(fits and matcher.consume_tokens(found) and matcher.is_accepting())


def read(notation: Notation, schema: Any, text: str) -> list[Any]:
    called = calls_of(Reading({"f": schema}, notation), text)
    return [json.loads(c.arguments) for c in called if c.whole]


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


TEXT, WHOLE, YES = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SOME = fields(("b", "d"), a=WHOLE, b=TEXT, c=YES, d={"type": "number"}, e=TEXT)
NULLABLE = {"anyOf": [TEXT, {"type": "null"}]}
MIXED = {"enum": ["red", "reddish", 3, None, True, 2.5]}
NESTED = fields(("o",), o=fields(("x",), x=TEXT, y={"type": "array", "items": WHOLE}))
NODE = fields(("n",), n=WHOLE, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
LINKED = {**fields(("head",), head={"$ref": "#/$defs/node"}), "$defs": {"node": NODE}}
WRAPPED = {**fields(("head",), head={"allOf": [{"$ref": "#/$defs/n"}]}), "$defs": {"n": WHOLE}}
ANY = fields(("any",), any={})
CASES: list[tuple[Any, list[Any], list[Any]]] = [  # what passes, and what does not
    (SOME, [{"b": "x", "d": 1.5}, {"a": -1, "b": "", "c": True, "d": 2, "e": "y"},
            {"b": "two\nlines", "c": False, "d": 0}],
     [{}, {"b": "x"}, {"d": 1}, {"a": 1.5, "b": "x", "d": 1}, {"b": "x", "c": 1, "d": 1},
      {"b": "x", "d": "one"}, {"b": "x", "d": 1, "f": 1}, {"d": 1, "b": "x"}]),
    (fields(a=WHOLE, b=WHOLE), [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{"b": True}]),
    (fields(("a",), a=NULLABLE), [{"a": "x"}, {"a": None}], [{}]),
    (fields(("a",), a={"type": ["integer", "null"]}), [{"a": 1}, {"a": None}], [{"a": "x"}]),
    (fields(("a",), a=MIXED), [{"a": v} for v in MIXED["enum"]], [{"a": "blue"}, {"a": 4}]),
    (fields(("a",), a={"const": "b c"}), [{"a": "b c"}], [{"a": "b"}]),
    (fields(("a",), a={"type": "integer", "minimum": 3}), [{"a": 3}], [{"a": 2}]),
    (NESTED, [{"o": {"x": "q"}}, {"o": {"x": "", "y": []}}, {"o": {"x": "q", "y": [1, 2]}}],
     [{"o": {}}, {"o": {"x": 1}}, {"o": {"x": "q", "y": ["1"]}}]),
    (LINKED, [{"head": {"n": 1}}, {"head": {"n": 1, "next": {"n": 2, "next": None}}}],
     [{"head": {"n": 1, "next": {"next": None}}}, {"head": 1}]),
    (WRAPPED, [{"head": 1}], [{"head": "x"}]),
    (ANY, [{"any": v} for v in (1, -2.5, True, None, [1, "a b", [None]], {"k": {"l": "m"}}, {})],
     [{}]),
    (None, [{}, {"a": 1}, {"a": "x y", "b": [1], "c": {"d": None}}], []),
    ({"type": "object"}, [{}, {"a": True}], []),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    (fields(("x",)), [{"x": 1}], [{}]),
]  # fmt: skip


@every
@pytest.mark.parametrize(("schema", "right", "wrong"), CASES)
def test_a_schema_is_held_and_what_was_written_is_read(
    words: Words, kind: str, schema: Any, right: list[Any], wrong: list[Any]
) -> None:
    notation = NOTATIONS[kind]
    for value in right:
        jsonschema.validate(value, schema or {})
        text = notation.written([("f", value)])
        assert passes(words, notation, schema, text), text
        assert read(notation, schema, text) == [value], text
    for value in wrong:
        text = notation.written([("f", value)])
        assert not passes(words, notation, schema, text), text


# No half pairs, which no answer has, and no markers: those of others are tested with ODD.
said = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from([
    "it's", 'say "a"', "\\", "\\n\n", "true", "None", "12", "null", "{}", "[1]", "</",
    "'", "), g(", "\n", "\n\n", " x ", "\u2028", '"', "<parameter=b>\nc",
])  # fmt: skip
MARKED = [m for m in vocabulary(3)["tokenizer.ggml.tokens"] if len(m) > 2] + ["</parameter>"]
said = said.filter(lambda text: not any(m in text for m in MARKED))


@every
@given(texts=st.lists(said, min_size=2, max_size=2))
def test_any_string_is_what_it_was(words: Words, kind: str, texts: list[str]) -> None:
    """Also one that looks like another value, or like what is around arguments."""
    notation, schema = NOTATIONS[kind], fields(("a", "b"), a=TEXT, b=TEXT)
    value = dict(zip("ab", texts, strict=True))
    text = notation.written([("f", value)])
    assert read(notation, schema, text) == [value]
    assert passes(words, notation, schema, text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner | said, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner | said, max_size=3)
    ),
)


@every
@given(value=st.dictionaries(st.sampled_from(["a", "b", "c"]), values, max_size=3))
def test_values_of_any_kind_are_what_they_were(words: Words, kind: str, value: Any) -> None:
    """Where no schema says what they are."""
    notation = NOTATIONS[kind]
    text = notation.written([("f", value)])
    assert read(notation, None, text) == [value]
    assert passes(words, notation, None, text)


READ: list[tuple[str, Any, str, Any]] = [  # what models write that no grammar held
    ("tags", SOME, "<parameter=a>\n1\n</parameter>\n<parameter=c>\nTrue\n</parameter>\n",
     {"a": 1, "c": True}),
    ("tags", fields(a={"type": ["boolean", "string"]}), "<parameter=a>\nFalse\n</parameter>\n",
     {"a": False}),
    ("tags", fields(a=NULLABLE), "<parameter=a>\nNone\n</parameter>\n", {"a": None}),
    ("tags", SOME, "<parameter=a>\nmany\n</parameter>\n", {"a": "many"}),
    ("tags", SOME, "<parameter=other>\n[1]\n</parameter>\n", {"other": [1]}),
    ("tags", SOME, f"<parameter=a>\n{'9' * 400}\n</parameter>\n", {"a": int("9" * 400)}),
    ("glm", fields(a={"type": "array"}),
     '<arg_key>a</arg_key><arg_value>["</arg_value>"]</arg_value>',
     {"a": ["</arg_value>"]}),
    ("glm", fields(a={}), "<arg_key>a</arg_key>\n<arg_value>NaN</arg_value>", {"a": "NaN"}),
    ("lfm2", SOME, r"""a = 1,c=true,  e='it\'s \u00e9\x21\d'""",
     {"a": 1, "c": True, "e": "it's é!\\d"}),
    ("lfm2", SOME, 'e="it\'s"', {"e": "it's"}),
    ("lfm2", None, "a=[ 1 , {'b' : null} ]", {"a": [1, {"b": None}]}),
    ("lfm2", None, "a='\\ud800'", {"a": "\ufffd"}),
    ("gemma", SOME, 'a: 1, e: <|"|>x<|"|>', {"a": 1, "e": "x"}),
    ("gemma", None, 'a:{b:None,c:[<|"|>}<|"|>]}', {"a": {"b": None, "c": ["}"]}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "schema", "written", "value"), READ)
def test_what_was_not_held_is_read_all_the_same(
    kind: str, schema: Any, written: str, value: Any
) -> None:
    notation = NOTATIONS[kind]
    text = notation.written([("f", {})])
    at = text.index(notation.between, text.index("f")) + len(notation.between or "f")
    assert read(notation, schema, text[:at] + written + text[at:]) == [value]


@every
def test_what_is_cut_or_broken_is_no_call(kind: str) -> None:
    notation = NOTATIONS[kind]
    value = {"o": {"x": "q, r", "y": [1, -2]}}
    text = notation.written([("f", value)])
    for n in range(len(text)):
        assert read(notation, NESTED, text[:n]) in ([], [value])
    begun = text[: text.index(f"f{notation.between}")] + f"f{notation.between}"
    deep = (f"{sign}{'[' * 9999}" for sign in ("o=", "o:"))
    for broken in ("o=", "o:", "o='", 'o:<|"|>', "<arg_key>o", *deep):
        assert read(notation, NESTED, begun + broken) == []


UNHELD: list[dict[str, Any]] = [
    {**TEXT, "format": "password"}, {**TEXT, "not": {"const": "b"}}, {"oneOf": [TEXT, TEXT]},
    {"type": "array", "items": TEXT, "uniqueItems": True},
    {"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT},
    {"type": "object", "if": {}, "then": {}}, {"type": "object", "dependentRequired": {"b": ["c"]}},
]  # fmt: skip


@pytest.mark.parametrize("kind", [*NOTATIONS, "hermes"])
@pytest.mark.parametrize("part", UNHELD)
def test_what_a_schema_says_that_cannot_be_held_is_not(words: Words, kind: str, part: Any) -> None:
    """As tools have it that nobody wrote for a grammar; the rest holds."""
    notation, schema = TAUGHT[kind][0], fields(("a", "n"), a=part, n={"type": "integer"})
    value: Any = {"array": ["b", "b"], "object": {"b": "c"}}.get(part.get("type", ""), "b")
    for n, passed in ((1, True), (True, False)):
        text = notation.written([("f", {"a": value, "n": n})])
        assert passes(words, notation, schema, text) == passed, text


@every
@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": []}, fields(a={"type": "text"}), fields(a={"type": 5}),
    fields(a={"$ref": "#/$defs/none"}), fields(a={"$ref": "elsewhere.json"}), fields(a=False),
    {"type": "object", "properties": {"a": TEXT}, "required": "a"},
    {"type": "object", "required": [["a"]]}, fields(a={"enum": "abc"}),
    {"type": "object", "properties": {"a\n<:=": TEXT}},
])  # fmt: skip
def test_a_schema_that_cannot_be_read_is_refused(words: Words, kind: str, schema: Any) -> None:
    notation = NOTATIONS[kind]
    with pytest.raises(Refused) as refused:
        passes(words, notation, schema, "")
    assert not any(word in str(refused.value) for word in ("guidance", "at 8(", "%json"))


def deep(count: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(count):
        inner = fields(a=inner)
    return inner


@every
@pytest.mark.parametrize("schema", [
    fields(a={"enum": ["a" * 70_000]}), deep(300), deep(100_000),
    fields(**{f"p{i}": {"type": ["string", "null"]} for i in range(5000)}),
], ids=range(4))  # fmt: skip
def test_a_schema_that_takes_too_much_is_refused(words: Words, kind: str, schema: Any) -> None:
    with pytest.raises(Refused):
        passes(words, NOTATIONS[kind], schema, "")


@pytest.mark.parametrize("kind", ["tags", "glm"])
def test_what_parts_refer_to_is_counted_for_each(words: Words, kind: str) -> None:
    """As each has it."""
    parts = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/a"}} for i in range(200)}
    for count, right in ((3, True), (900, False)):
        listed = {"enum": list(range(count))}
        schema = {**fields(**parts), "$defs": {"a": listed, "unused": {"enum": ["a" * 9000]}}}
        text = NOTATIONS[kind].written([("f", {"p7": [1]})])
        if right:
            assert passes(words, NOTATIONS[kind], schema, text)
        else:
            with pytest.raises(Refused, match="together"):
                passes(words, NOTATIONS[kind], schema, text)


INNER = fields(x={"type": "integer"})
NAMED = fields(("a",), a={"type": "integer"})
OF_OTHERS: list[dict[str, Any]] = [
    {"additionalProperties": True}, {"additionalProperties": {"type": "integer"}},
    {"patternProperties": {"^b": {}}}, {"allOf": [fields(b={})]}, {"anyOf": [{}, fields(b={})]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        (NAMED, {"a": 1}, True),
        (NAMED, {"a": 1, "b": 2}, False),
        (fields(a={}), {}, True),
        (fields(("b",), a={}), {"a": 1, "b": 2}, True),  # required, and not described
        (fields(), {"b": 2}, True),
        ({}, {"b": 2}, True),
        *(({**NAMED, **more}, {"a": 1, "b": 2}, True) for more in OF_OTHERS),
        (fields(a=INNER), {"a": {"x": 1, "y": 2}}, True),
        (fields(a=INNER), {"a": {"x": 1}, "y": 2}, False),
        ({**fields(a={"$ref": "#/$defs/I"}), "$defs": {"I": INNER}}, {"a": {"x": 1}}, True),
    ],
)
def test_a_call_has_no_arguments_that_nobody_named(
    words: Words, schema: Any, value: Any, fits: bool
) -> None:
    """Where some are named, and nothing is said of others: as between tags."""
    text = HERMES.written([("f", value)])
    assert passes(words, HERMES, schema, text) == fits


@every
def test_many_parameters_make_no_deep_grammar(words: Words, kind: str) -> None:
    """llguidance goes down by recursion, and would end the process. Very many are too dear for an
    answer, as they are in JSON."""
    value = {"p0001": 1, "p0199": "x", "p0250": [2]}
    text = NOTATIONS[kind].written([("f", value)])
    for count in (300, 4000):
        schema = fields(("p0199",), **{f"p{i:04}": {} for i in range(count)})
        with suppress(*[Refused] * (count > 300)):
            assert passes(words, NOTATIONS[kind], schema, text) == (count == 300)
        assert read(NOTATIONS[kind], schema, text) == [value]


def test_alternatives_of_alternatives_are_looked_at_once() -> None:
    """And not two to the number of them."""
    for key in ("anyOf", "allOf"):
        parts = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
        given = Parameters({**fields(a={"$ref": "#/$defs/d0"}), "$defs": {**parts, "d60": WHOLE}})
        assert given.types(given.known["a"]) == {"integer"}


@every
def test_a_schema_that_leads_back_to_itself_ends(words: Words, kind: str) -> None:
    loop = {**fields(("a",), a={"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/a"}}}
    text = NOTATIONS[kind].written([("f", {"a": 1})])
    both = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    node = fields(b={"allOf": [{"$ref": "#/$defs/a"}]})
    either = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    loops = [{**fields(("a",), a=part), "$defs": {"a": part}} for part in (both, node, either)]
    for turning in (loop, {"$ref": "#"}, *loops):
        with suppress(Refused):
            passes(words, NOTATIONS[kind], turning, text)
        assert len(read(NOTATIONS[kind], turning, text)) == 1


@pytest.mark.parametrize("kind", TAUGHT)
@pytest.mark.parametrize("text", ["oops", "[1]", "null", '"a"', "[" * 99_999])
def test_earlier_arguments_that_no_template_could_go_through_are_refused(
    kind: str, text: str
) -> None:
    notation, template, _ = TAUGHT[kind]
    messages = [Message.model_validate(m) for m in talk(("f", text))]
    if notation.arguments is JSON:
        assert for_template(messages, of(FLAG), template)
    else:
        with pytest.raises(Refused, match="no JSON object"):
            for_template(messages, of(FLAG), template)
    messages[1].tool_calls[0].function.arguments = ""  # type: ignore[index]
    assert for_template(messages, of(FLAG), template)
