"""Functions that a model may call: how it is told of them, and how its calls are read.

An answer is text, then calls, in the notation that the model's chat template teaches. Nothing but
what begins the first call tells them apart, and arguments are held to the functions' own schemas.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from .grammar import dumped
from .messages import Message, Tool, ToolChoice
from .notations import HERMES, Notation, notation_of

TOLD = (
    "You may call functions. Each line describes one:\n{functions}\n"
    "To call one, answer with {call} only."
)
_LEXEMES = re.compile(r'"[^"]*"|[{:,] ?')  # of JSON, as llguidance cuts it
_VALUES = json.JSONDecoder(parse_int=str, parse_float=str)  # of any length and size


def answer_grammar(
    tools: Sequence[Tool],
    notation: Notation,
    special: Mapping[str, int],
    *,
    demanded: bool = False,
    several: bool = True,
    schema: dict[str, Any] | None = None,
) -> str:
    """Text and then calls of these functions, or one where there are not to be `several`, in Lark's
    notation. Where one is `demanded`, it is all; where text has a `schema`, there is either text or
    calls. `special` are the ids of what in the `notation` is a special token."""
    lark, marker = partial(_lark, special=special), notation.marker
    opening, closing = lark(notation.opening), lark(notation.closing)
    if notation.unseen in special:
        opening = f"{lark(notation.unseen)}?"
    start = f"TEXT | {opening} calls"
    if demanded:
        start = f"{opening} call {closing}"
    elif schema is not None:
        start = f"%json {dumped(schema)} | {opening} calls"
    elif marker:
        start = f"TEXT | before {lark(notation.opening.removeprefix(marker))} calls"
    more = f"({lark(notation.joint)} call)* " if several else ""
    rules = [
        f"start: {start}",
        f"calls: call {more}{closing} WS?",
        f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}",
        "TEXT: /(.|\\n)*/",
        "WS: /[ \\n]{1,4}/",
    ]
    if marker:  # lazy: the first marker ends the text, also one that is spelt
        token = f" | TEXT {lark(marker)}" if marker in special else ""
        rules += [f"before: spelt{token}", f"spelt[lazy]: TEXT {json.dumps(marker)}"]
    for i, function in enumerate(t.function for t in tools):
        # Each schema stands alone, so that what it refers to is found.
        arguments = dumped(function.parameters or {"type": "object"})
        rules.append(f"call{i}: begun{i} %json {arguments} {lark(notation.after)}")
        rules.append(f"begun{i}{_begun(function.name, notation, special, schema is not None)}")
    return "".join(f"{rule}\n" for rule in rules)


def _begun(name: str, notation: Notation, special: Mapping[str, int], formed: bool) -> str:
    """The rule of a call up to its arguments. Without a marker it ends text itself, lazily; beside
    text that is `formed` it has JSON's lexemes, since what begins alike is told apart by whole ones
    alone."""
    ways, between = notation.begun(name), notation.between
    if formed and not notation.marker:
        parts = [_LEXEMES.findall(way) for way in ways]
    elif between in special:
        parts = [[way.removesuffix(between), between] for way in ways]
    else:
        parts = [[way] for way in ways]
    rule = " | ".join(" ".join(_literal(p, special) for p in way) for way in parts)
    return f"{'' if formed or notation.marker else '[lazy]'}: {rule}"


def _lark(spaced: str, special: Mapping[str, int]) -> str:
    """What is around calls, in Lark's notation."""
    parts = (p for p in re.split("( )", spaced) if p)
    return " ".join("WS?" if p == " " else _literal(p, special) for p in parts)


def _literal(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else json.dumps(text)


def chosen(tools: Sequence[Tool], choice: str | ToolChoice | None) -> list[Tool]:
    """The functions that a choice leaves."""
    if isinstance(choice, ToolChoice):
        return [t for t in tools if t.function.name == choice.function.name]
    return [] if choice == "none" else list(tools)


def demanded(choice: str | ToolChoice | None) -> bool:
    """Whether there must be a call."""
    return choice == "required" or isinstance(choice, ToolChoice)


def for_template(
    messages: Sequence[Message], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for a chat template. The model is told in words where the template
    teaches no notation that can be read."""
    notation = notation_of(template)
    if notation is not None:
        spelt = "tool_calls" not in template  # calls are text to it, as Granite's are
        found = [d for m in messages for d in _with_calls(m, notation, spelt)]
        more = {"tools": [t.model_dump(exclude_none=True) for t in tools]} if tools else {}
        return found, more
    found = [_in_words(m) for m in messages]
    if not tools:
        return found, {}
    functions = (json.dumps(t.function.model_dump(exclude_none=True)) for t in tools)
    call = HERMES.written([("NAME", "OBJECT")])
    told = TOLD.format(functions="\n".join(functions), call=call)
    if found[0]["role"] == "system":
        found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{told}"}
    else:
        found.insert(0, {"role": "system", "content": told})
    return found, {}


def _with_calls(m: Message, notation: Notation, spelt: bool) -> list[dict[str, Any]]:
    """A message for a template that knows tools; several where each may have one call."""
    if spelt and m.tool_calls:
        return [{"role": _role(m), "content": m.text + _written(m, notation)}]
    ids = {"tool_call_id": notation.id_of(m.tool_call_id)} if m.tool_call_id else {}
    base = {"role": _role(m), "content": m.text, **({"name": m.name} if m.name else {}), **ids}
    calls = [
        {
            **({"id": notation.id_of(c.id)} if c.id else {}),
            "type": "function",
            "function": {"name": c.function.name, "arguments": _object(c.function.arguments)},
        }
        for c in m.tool_calls or ()
    ]
    if len(calls) < 2 or not notation.single:
        return [{**base, "tool_calls": calls} if calls else base]
    first, *others = calls
    return [
        {**base, "tool_calls": [first]},
        *({**base, "content": "", "tool_calls": [c]} for c in others),
    ]


def _in_words(m: Message) -> dict[str, Any]:
    """A message for a template that knows no tools, or teaches what cannot be read."""
    if m.role in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>{m.text}</tool_response>"}
    return {"role": _role(m), "content": m.text + _written(m, HERMES)}


def _written(m: Message, notation: Notation) -> str:
    """The calls of a message, if there are any."""
    calls = [
        (json.dumps(c.function.name)[1:-1], json.dumps(_object(c.function.arguments)))
        for c in m.tool_calls or ()
    ]
    return notation.written(calls) if calls else ""


def _role(m: Message) -> str:
    return "system" if m.role == "developer" else m.role


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True)
class Reading:
    """How an answer that may call functions is read. Where text is `formed`, JSON, or the notation
    has no marker, the first letters decide: what begins a call means nothing behind them."""

    names: frozenset[str]  # of the functions
    notation: Notation
    formed: bool = False

    def shown(self, text: str, finish: str | None, told: int = 0) -> int:
        """How many letters of an answer are text for the client, who has `told` of them. Before
        the `finish`, and where it was cut, what may be a call's beginning is none."""
        at = self._marker(text, told)
        if at < 0:
            at = len(text) if finish == "stop" else self._undecided(text)
            if at == len(text) and (finish is not None or self._first_letters):
                return at
        return len(text[:at].rstrip())

    def calls(self, text: str, reply: str, choice: int) -> list[dict[str, Any]]:
        """The whole calls of an answer, in OpenAI's form, with arguments as the model wrote them.
        Their names follow from the reply's, whoever makes it, and the choice's index."""
        at, found = self._marker(text), list[dict[str, Any]]()
        beginning, after = self.notation.first, self.notation.after
        while at >= 0 and (begun := beginning.match(text, at)) and begun[1] in self.names:
            end = _behind_value(text, begun.end())
            if end < 0 or not text.startswith(after, end):
                break
            function = {"name": begun[1], "arguments": text[begun.end() : end]}
            id = hashlib.sha256(f"{reply} {choice} {len(found)}".encode()).hexdigest()[:16]
            found.append({"id": f"call_{id}", "type": "function", "function": function})
            at, beginning = end + len(after), self.notation.later
        return found

    @property
    def _first_letters(self) -> bool:
        return self.formed or not self.notation.marker

    @cached_property
    def _beginnings(self) -> tuple[str, ...]:
        """What ends text where it is met."""
        marker = self.notation.marker
        return (marker,) if marker else tuple(b for n in self.names for b in self.notation.begun(n))

    def _marker(self, text: str, since: int = 0) -> int:
        """Where the calls begin; -1 where there are none yet."""
        if self._first_letters:
            return 0 if text.startswith(self._beginnings) else -1
        return text.find(self.notation.marker, since)

    def _undecided(self, text: str) -> int:
        """Where the text's end may be the beginning of calls."""
        at = 0 if self._first_letters else text.rfind(self.notation.marker[0])
        if at >= 0 and any(b.startswith(text[at:]) for b in self._beginnings):
            return at
        return len(text)


def _behind_value(text: str, at: int) -> int:
    """The place behind a JSON value; -1 where the value is cut."""
    try:
        return _VALUES.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return -1
