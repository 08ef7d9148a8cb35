"""Functions that a model may call: how it is told of them, and how its calls are read.

An answer is text, then calls, in the notation that the model's chat template teaches. Nothing but
what begins the first call tells them apart, and arguments are held to the functions' own schemas.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ggraph.text.stream import THINK, THOUGHT

from .arguments import JSON
from .errors import Refused
from .lark import Lark
from .messages import AllowedChoice, Message, Tool, ToolCall, ToolChoice
from .notations import HERMES, Notation, notation_of

TOLD = (
    "You may call functions. Each line describes one:\n{functions}\n"
    "To call one, answer with {call} only."
)
_LEXEMES = re.compile(r'"[^"]*"|[{:,] ?')  # of JSON, as llguidance cuts it


def answer_grammar(
    tools: Sequence[Tool],
    notation: Notation,
    special: Mapping[str, int],
    *,
    demanded: bool = False,
    several: bool = True,
    schema: dict[str, Any] | None = None,
    lenient: bool = False,
    thinking: bool | None = None,
) -> str:
    """Text and then calls of these functions, or one where there are not to be `several`, in Lark's
    notation. Where one is `demanded`, there is it alone; where text has a `schema`, which may be
    `lenient`, there is either text or calls. `special` are the ids of what is a special token.
    Thoughts come before all, as the notation has them, or in `<think>` where `thinking` is what
    streams are told: one comes, or may; it is neither text nor calls, whatever it says."""
    lark = Lark(special, lenient)
    opening, closing = lark.spaced(notation.opening), lark.spaced(notation.closing)
    if notation.unseen in special:
        opening = f"{lark.literal(notation.unseen)}?"
    elif notation.headers:
        opening = ""
    one = f"{opening} call {closing}"
    start = one if demanded else _start(lark, notation, opening, "TEXT", schema)
    if notation.thoughts:
        ways = (f"{lark.literal(a)} TEXT {lark.literal(z)}" for a, z in notation.thoughts)
        start = f"{lark.add('thought', ' | '.join(ways))}* ({start})"
    elif thinking is not None:
        opens, behind = lark.literal(THINK), f"{lark.until('thought', THOUGHT)} WS? ({start})"
        if not demanded:  # else spaces would lead to nothing but a thought
            unthought = lark.without("UNTHOUGHT", f"[ \\n]*{THINK}(.|\\n)*")
            opens, start = f"WS? {opens}", _start(lark, notation, opening, unthought, schema)
        start = behind if thinking else f"{opens} {behind} | {start}"
    lark.add("start", start)
    more = f"({lark.spaced(notation.joint)} call)* " if several and notation.joint else ""
    lark.add("calls", f"call {more}{closing} WS?")
    lark.add("call", " | ".join(f"call{i}" for i in range(len(tools))))
    for i, function in enumerate(t.function for t in tools):
        # Each schema stands alone, so that what it refers to is found.
        try:
            arguments = notation.arguments.rule(lark, f"arguments{i}", function.parameters)
        except RecursionError:
            raise Refused("schema: it is nested too deep", param="tools") from None
        begun = _begun(lark, f"begun{i}", function.name, notation, schema is not None)
        lark.add(f"call{i}", f"{begun} {arguments} {lark.spaced(notation.after)}")
    return str(lark)


def _start(
    lark: Lark, notation: Notation, opening: str, text: str, schema: dict[str, Any] | None
) -> str:
    """Text, of a terminal or a schema, or calls, or where there is a marker both."""
    marker = notation.marker
    if schema is not None:
        formed = f"%json {lark.counted(schema, lenient=lark.lenient)}"
        return f"{lark.literal(notation.said)} {formed} | {opening} calls"
    if notation.said:  # how calls are shown is no text, so that it is read as what it is
        plain = lark.without("PLAIN", f"(.|\\n)*{re.escape(marker)}(.|\\n)*")
        return f"{lark.literal(notation.said)} {plain} | {opening} calls"
    if not marker:
        return f"{text} | {opening} calls"
    rest = lark.spaced(notation.opening.removeprefix(marker))
    return f"{text} | {lark.until(f'before_{text.lower()}', marker, text)} {rest} calls"


def _begun(lark: Lark, rule: str, name: str, notation: Notation, formed: bool) -> str:
    """The rule of a call up to its arguments. Without a marker it ends text itself, lazily; beside
    text that is `formed` it has JSON's lexemes, since what begins alike is told apart by whole ones
    alone."""
    lone = not notation.marker
    parts = [_LEXEMES.findall(w) if formed and lone else [w] for w in notation.begun(name)]
    ways = (" ".join(map(lark.literal, way)) for way in parts)
    return lark.add(rule, " | ".join(ways), lazy=lone and not formed)


def chosen(
    tools: Sequence[Tool], choice: str | ToolChoice | AllowedChoice | None
) -> tuple[Sequence[Tool], Sequence[Tool]]:
    """The functions that the model is told of, and those that it may call. Refused where a choice
    names one that there is not."""
    if choice == "none":
        tools = []
    named = list[ToolChoice]()
    if isinstance(choice, ToolChoice):
        named = [choice]
    elif isinstance(choice, AllowedChoice):
        named = choice.allowed_tools.tools
    names = {c.function.name for c in named}
    if names - {t.function.name for t in tools} or (demanded(choice) and not tools):
        raise Refused("tool_choice names no tool of this request", param="tool_choice")
    several = [name for name, n in Counter(t.function.name for t in tools).items() if n > 1]
    if several:  # a call could not say which is meant
        raise Refused(f"tools: {several[0]!r} is there twice", param="tools")
    allowed = [t for t in tools if not named or t.function.name in names]
    return allowed if isinstance(choice, ToolChoice) else tools, allowed


def demanded(choice: str | ToolChoice | AllowedChoice | None) -> bool:
    """Whether there must be a call."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, ToolChoice)


def for_template(
    messages: Sequence[Message], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for a chat template. The model is told in words where the template
    teaches no notation that can be read."""
    notation = notation_of(template)
    if notation is not None:
        spelt = "tool_calls" not in template  # calls are text to it, as Granite's are
        each = _one_by_one(messages) if notation.single else messages
        found = [_with_calls(m, notation, spelt) for m in each]
        more = {"tools": [t.model_dump(exclude_none=True) for t in tools]} if tools else {}
        return found, more
    found = _in_words(messages)
    if not tools:
        return found, {}
    functions = (json.dumps(t.function.model_dump(exclude_none=True)) for t in tools)
    call = HERMES.written([("NAME", {})]).replace("{}", "OBJECT")
    told = TOLD.format(functions="\n".join(functions), call=call)
    if found[0]["role"] == "system":
        found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{told}"}
    else:
        found.insert(0, {"role": "system", "content": told})
    return found, {}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Several calls of a message in messages of their own, with its result behind each."""
    found, told = list[Message](), set[int]()  # of results that stand behind their calls
    for i, m in enumerate(messages):
        if len(m.tool_calls or ()) < 2:
            found += [] if id(m) in told else [m]
            continue
        results = defaultdict[str | None, list[Message]](list)
        for r in takewhile(lambda r: r.role == "tool", messages[i + 1 :]):
            results[r.tool_call_id].append(r)
        for n, call in enumerate(m.tool_calls or ()):
            own = {"tool_calls": [call]} | ({"content": "", "reasoning_content": None} if n else {})
            found += [m.model_copy(update=own), *results[call.id]]
            told.update(map(id, results[call.id]))
    return found


def _with_calls(m: Message, notation: Notation, spelt: bool) -> dict[str, Any]:
    """A message for a template that knows tools."""
    if spelt and m.tool_calls:
        return {"role": _role(m), "content": m.text + _written(m, notation), **m.thought}
    ids = {"tool_call_id": notation.id_of(m.tool_call_id)} if m.tool_call_id else {}
    name = {"name": m.name} if m.name else {}
    base = {"role": _role(m), "content": m.shown, **name, **ids, **m.thought}
    calls = [
        {
            **({"id": notation.id_of(c.id)} if c.id else {}),
            "type": "function",
            "function": {"name": c.function.name, "arguments": _given(c, notation)},
        }
        for c in m.tool_calls or ()
    ]
    return {**base, "tool_calls": calls} if calls else base


def _given(call: ToolCall, notation: Notation) -> Any:
    """A call's arguments. Refused where they are no object, and a template could not go through
    their names."""
    given = _object(call.function.arguments)
    if notation.arguments is not JSON and not isinstance(given, dict):
        message = f"the arguments of an earlier call of {call.function.name!r} are no JSON object"
        raise Refused(f"{message}, which this model's chat template needs", param="messages")
    return given


def _in_words(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools, or teaches what cannot be read. What functions
    gave back is the user's to say, in one turn with what is said then: many templates refuse two
    turns of one role in a row."""
    found, result = list[dict[str, Any]](), False  # whether the last one is a result
    for m in messages:
        given = m.role in ("tool", "function")
        told = {"role": "user" if given else _role(m), "content": _worded(m, given), **m.thought}
        if result and told["role"] == "user":
            found[-1]["content"] = _behind(found[-1]["content"], told["content"])
        else:
            found.append(told)
        result = given
    return found


def _worded(m: Message, given: bool) -> Any:
    """What a message says in words, calls and results in it."""
    if given:
        return _behind(_behind("<tool_response>", m.shown, ""), "</tool_response>", "")
    return m.shown if m.images else m.text + _written(m, HERMES)


def _behind(first: Any, second: Any, between: str = "\n") -> Any:
    """What a message says, and what follows it: one text, or a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    return [*_parts(first), *_parts(between), *_parts(second)]


def _parts(content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _written(m: Message, notation: Notation) -> str:
    """The calls of a message, if there are any."""
    calls = [(json.dumps(c.function.name)[1:-1], _given(c, notation)) for c in m.tool_calls or ()]
    return notation.written(calls) if calls else ""


def _role(m: Message) -> str:
    return "system" if m.role == "developer" else m.role


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
