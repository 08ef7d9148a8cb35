"""Functions that a model may call: how it is told of them, and how its calls are read.

A call is `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, as Hermes and Qwen write it. An
answer is text, then calls: nothing but the marker `<tool_call>` tells them apart, and what follows
it is held to the functions' own schemas.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .grammar import dumped
from .schema import Message, Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOLD = (
    "You may call functions. Each line describes one:\n{functions}\n"
    'To call one, answer with <tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call> only.'
)
_BEGINNING = re.compile(rf'{OPEN}\s*{{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"arguments"\s*:\s*')
_END = re.compile(rf"\s*}}\s*({CLOSE}\s*)?")
_VALUES = json.JSONDecoder(parse_int=str, parse_float=str)  # of any length and size


def answer_grammar(
    tools: Sequence[Tool],
    *,
    demanded: bool = False,
    several: bool = True,
    schema: dict[str, Any] | None = None,
) -> str:
    """Text and then calls of these functions, or one where there are not to be `several`, in Lark's
    notation. Where one is `demanded`, it is all; where text has a `schema`, there is either text or
    calls."""
    start = "TEXT | before calls"
    if demanded:
        start = f'"{OPEN}" call'
    elif schema is not None:
        start = f'%json {dumped(schema)} | "{OPEN}" calls'
    more = f'(WS? "{OPEN}" call)* ' if several else ""
    return (
        f"start: {start}\n"
        f'before[lazy]: TEXT "{OPEN}"\n'  # lazy: the first marker ends the text
        f"calls: call {more}WS?\n"
        f'call: WS? function WS? "{CLOSE}"\n'
        f"function: {' | '.join(map(_function, tools))}\n"
        "TEXT: /(.|\\n)*/\n"
        "WS: /[ \\n]{1,4}/\n"
    )


def _function(tool: Tool) -> str:
    """One function's calls. Its schema stands alone, so that what it refers to is found."""
    name, schema = tool.function.name, tool.function.parameters or {"type": "object"}
    before = json.dumps(f'{{"name": "{name}", "arguments": ')
    return f'{before} %json {dumped(schema)} "}}"'


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
    """Messages and variables for a chat template; one that knows no tools is told in words."""
    knows = "tools" in template
    found = [_as_dict(m, knows) for m in messages]
    if not tools:
        return found, {}
    described = [t.model_dump(exclude_none=True) for t in tools]
    if knows:
        return found, {"tools": described}
    told = TOLD.format(functions="\n".join(json.dumps(d["function"]) for d in described))
    if found[0]["role"] == "system":
        found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{told}"}
    else:
        found.insert(0, {"role": "system", "content": told})
    return found, {}


def _as_dict(m: Message, knows: bool) -> dict[str, Any]:
    role = "system" if m.role == "developer" else m.role
    calls = [
        {"name": c.function.name, "arguments": _object(c.function.arguments)}
        for c in m.tool_calls or ()
    ]
    if knows:
        named = {"name": m.name, "tool_call_id": m.tool_call_id}
        more: dict[str, Any] = {k: v for k, v in named.items() if v}
        if calls:
            more["tool_calls"] = [
                {**({"id": given.id} if given.id else {}), "type": "function", "function": c}
                for given, c in zip(m.tool_calls or (), calls, strict=True)
            ]
        return {"role": role, "content": m.text, **more}
    if role in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>{m.text}</tool_response>"}
    return {"role": role, "content": m.text + "".join(map(_written, calls))}


def _written(call: dict[str, Any]) -> str:
    return f"{OPEN}{json.dumps(call)}{CLOSE}"


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True)
class Reading:
    """How an answer that may call functions is read. The marker means nothing within text that is
    `formed`, JSON: there the first letters decide."""

    names: frozenset[str]  # of the functions
    formed: bool = False

    def shown(self, text: str, finish: str | None, told: int = 0) -> int:
        """How many letters of an answer are text for the client, who has `told` of them. Before
        the `finish`, and where it was cut, what may be a marker's beginning is none."""
        at = self._marker(text, told)
        if at < 0:
            at = len(text) if finish == "stop" else self._undecided(text)
            if finish is not None and at == len(text):
                return at
        return len(text[:at].rstrip())

    def calls(self, text: str, reply: str, choice: int) -> list[dict[str, Any]]:
        """The whole calls of an answer, in OpenAI's form, with arguments as the model wrote them.
        Their names follow from the reply's, whoever makes it, and the choice's index."""
        at, found = self._marker(text), list[dict[str, Any]]()
        while at >= 0 and (begun := _BEGINNING.match(text, at)) and begun[1] in self.names:
            end = _END.match(text, _behind_value(text, begun.end()))
            if end is None:
                break
            at = end.end()
            function = {"name": begun[1], "arguments": text[begun.end() : end.start()]}
            id = hashlib.sha256(f"{reply} {choice} {len(found)}".encode()).hexdigest()[:16]
            found.append({"id": f"call_{id}", "type": "function", "function": function})
        return found

    def _marker(self, text: str, since: int = 0) -> int:
        """Where the calls begin; -1 where there are none yet."""
        if self.formed:
            return 0 if text.startswith(OPEN) else -1
        return text.find(OPEN, since)

    def _undecided(self, text: str) -> int:
        """Where the text's end may be a marker's beginning."""
        at = 0 if self.formed else text.rfind("<")
        return at if at >= 0 and OPEN.startswith(text[at:]) else len(text)


def _behind_value(text: str, at: int) -> int:
    """The place behind a JSON value; behind the text where the value is cut."""
    try:
        return _VALUES.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return len(text)
