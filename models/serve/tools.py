"""Functions that a model may call: how it is told of them, and how its calls are read.

A call is `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, as Hermes and Qwen write it. An
answer that begins with "<" is one or more of them, held to the functions' own schemas; any other
answer is text. Where a call is demanded, the answer is its JSON alone.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .grammar import dumped
from .schema import Message, Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOLD = (
    "You may call functions. Each line describes one:\n{functions}\n"
    'To call one, answer with <tool_call>{{"name": NAME, "arguments": OBJECT}}</tool_call> only.'
)


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON of one call of any of these functions."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": t.function.name},
                    "arguments": t.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for t in tools
        ]
    }


def answer_grammar(tools: Sequence[Tool]) -> str:
    """Text, or calls of these functions, in Lark's notation."""
    return (
        "start: TEXT | call+\n"
        f'call: "{OPEN}" WS? %json {dumped(call_schema(tools))} WS? "{CLOSE}" WS?\n'
        "TEXT: /[^<](.|\\n)*/\n"
        "WS: /[ \\n]{1,4}/\n"
    )


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
        as_calls = [{"type": "function", "function": c} for c in calls]
        more = {"tool_calls": as_calls} if calls else {}
        return {"role": role, "content": m.text, **({"name": m.name} if m.name else {}), **more}
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


def calls_of(text: str, tools: Sequence[Tool], reply: str) -> list[dict[str, Any]]:
    """The calls that an answer consists of, in OpenAI's form; none where it is text, or was cut.
    Their names follow from that of the `reply`, whoever makes it."""
    text = text.strip()
    parts = [p.split(CLOSE)[0] for p in text.split(OPEN)[1:]] if text[:1] == "<" else [text]
    known, found = {t.function.name for t in tools}, list[dict[str, Any]]()
    for part in parts:
        call = _object(part)
        if not isinstance(call, dict) or call.get("name") not in known or "arguments" not in call:
            return []
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        function = {"name": call["name"], "arguments": arguments}
        name = hashlib.sha256(f"{reply} {len(found)} {text}".encode()).hexdigest()[:16]
        found.append({"id": f"call_{name}", "type": "function", "function": function})
    return found
