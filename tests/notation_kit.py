"""Chat templates that teach notations of calls, in the manner of those that models bring, and a
vocabulary with their markers."""

import json
from collections.abc import Callable
from typing import Any

from small_model import byte_alphabet

from models.serve.notations import (
    GEMMA,
    GLM,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    TAGS,
)

MARKERS = (
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<|tool_call|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
CALLS, _, TAG, CALL, _, LISTED, OF_GEMMA, _, _, THINK, THOUGHT, OF_LFM2 = range(258, 270)  # ids
TURNS = """
{%- for m in messages %}
  {%- if m.role == "assistant" and m.tool_calls %}{{ calls(m) }}<|im_end|>
  {%- else %}<|im_start|>{{ m.role }}
{{ m.tool_call_id }}{{ m.content }}<|im_end|>
  {%- endif %}
{%- endfor %}<|im_start|>assistant
"""
TEACHES_LLAMA = """
{%- macro calls(m) %}
  {%- if m.tool_calls | length != 1 %}{{ raise_exception("one call a message") }}{% endif %}
  {%- set c = m.tool_calls[0].function %}
  {{- '{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + "}" }}
{%- endmacro %}
{%- if tools %}Say {"name": function name, "parameters": its arguments}. {{ tools | tojson }}
{%- endif %}""" + TURNS  # fmt: skip
NINE = """
{%- if c.id | length != 9 %}{{ raise_exception("an id has 9 letters") }}{% endif %}"""
TEACHES_LIST = """
{%- macro calls(m) %}[TOOL_CALLS][
  {%- for c in m.tool_calls %}""" + NINE + """
    {{- c.function | tojson }}{{ "" if loop.last else ", " }}
  {%- endfor %}]
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}""" + TURNS  # fmt: skip
TEACHES_MISTRAL = """
{%- macro calls(m) %}
  {%- for c in m.tool_calls %}""" + NINE + """
    {{- "[TOOL_CALLS]" + c.function.name + "[ARGS]" + c.function.arguments | tojson }}
  {%- endfor %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}""" + TURNS  # fmt: skip
TEACHES_HERMES = """
{%- macro calls(m) %}
  {%- for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}""" + TURNS  # fmt: skip
TEACHES_GRANITE = """
{%- if tools %}Say <|tool_call|> and a list. {{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%- endfor %}<|im_start|>assistant
"""  # which writes no calls itself
TEACHES_TAGS = """
{%- macro calls(m) %}
  {%- for c in m.tool_calls %}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}""" + TURNS  # fmt: skip
TEACHES_GLM = """
{%- macro calls(m) %}
  {%- for c in m.tool_calls %}<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}""" + TURNS  # fmt: skip
TEACHES_LFM2 = TEACHES_GRANITE.replace("Say <|tool_call|> and a list.", "List of tools: ")
TEACHES_GEMMA = """
{%- macro calls(m) %}
  {%- for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{
    {%- for k, v in c.function.arguments | dictsort %}{{ k }}:
      {%- if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}
      {{- "" if loop.last else "," }}
    {%- endfor %}}<tool_call|>
  {%- endfor %}
{%- endmacro %}
{%- if tools %}{{ tools | tojson }}{% endif %}""" + TURNS  # fmt: skip
TEACHES_HARMONY = """
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- set last = namespace(name="") %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{ raise_exception("one call a message") }}{% endif %}
    {%- set c = m.tool_calls[0].function %}{% set last.name = c.name %}
    {%- set first = m.content or m.thinking %}
    {%- if m.content and m.thinking %}{{ raise_exception("one of both") }}{% endif %}
    {%- if first %}<|start|>assistant<|channel|>analysis<|message|>{{ first }}<|end|>
    {%- endif %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json
    {{- "<|message|>" + c.arguments | tojson }}<|call|>
  {%- elif m.role == "tool" %}<|start|>functions.{{ last.name }} to=assistant
    {{- "<|channel|>commentary<|message|>" + m.content | tojson }}<|end|>
  {%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>
    {{- m.content }}<|end|>
  {%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
  {%- endif %}
{%- endfor %}<|start|>assistant"""


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in calls)


def typed(*calls: tuple[str, str]) -> str:
    """As Llama writes them too: functions are described to it so."""
    return llama(*calls).replace('{"name"', '{"type": "function", "name"')


def mistral_list(*calls: tuple[str, str]) -> str:
    said = (f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls)
    return f"[TOOL_CALLS][{', '.join(said)}]"


def granite(*calls: tuple[str, str]) -> str:
    return mistral_list(*calls).replace("[TOOL_CALLS][{", "<|tool_call|>[{", 1)


def mistral(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in calls)


def hermes(*calls: tuple[str, str]) -> str:
    said = (f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls)
    return "\n".join(f"<tool_call>\n{s}\n</tool_call>" for s in said)


class Spelt(str):
    """A number, spelt as it was."""


def given(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arguments, parse_float=Spelt, parse_int=Spelt)
    return found


def literal(value: Any, quoted: Callable[[str], str], names: Any, words: Any, joint: str) -> str:
    """A value as some language writes it."""
    if isinstance(value, Spelt):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    said = [literal(v, quoted, names, words, joint) for v in value] if _many(value) else []
    if isinstance(value, dict):
        inner = (literal(v, quoted, names, words, joint) for v in value.values())
        said = [f"{names(k)}{v}" for k, v in zip(value, inner, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{joint.join(said)}{closing}" if _many(value) else words[value]


def _many(value: Any) -> bool:
    return isinstance(value, dict | list)


def python(value: Any) -> str:
    words = {v: repr(v) for v in (None, True, False)}
    return literal(value, repr, lambda k: f"{k!r}: ", words, ", ")


JSONS = {None: "null", True: "true", False: "false"}


def gemma_value(value: Any) -> str:
    return literal(value, '<|"|>{}<|"|>'.format, "{}:".format, JSONS, ",")


def raw(value: Any) -> str:
    """Strings as they are, other values in JSON."""
    if isinstance(value, str) and not isinstance(value, Spelt):
        return value
    return literal(value, json.dumps, lambda k: f"{json.dumps(k)}: ", JSONS, ", ")


def tags(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in given(a).items())
        + "</function>\n</tool_call>"
        for name, a in calls
    )


def glm(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n"
            for k, v in given(a).items()
        )
        + "</tool_call>"
        for name, a in calls
    )


def glm_short(*calls: tuple[str, str]) -> str:
    """As GLM-4.7 writes them."""
    return glm(*calls).replace(">\n<", "><").replace("\n<", "<")


def lfm2(*calls: tuple[str, str]) -> str:
    said = (
        f"{name}({', '.join(f'{k}={python(v)}' for k, v in given(a).items())})" for name, a in calls
    )
    return f"<|tool_call_start|>[{', '.join(said)}]<|tool_call_end|>"


def gemma(*calls: tuple[str, str]) -> str:
    said = (f"call:{name}{gemma_value(given(arguments))}" for name, arguments in calls)
    return "".join(f"<|tool_call>{call}<tool_call|>" for call in said)


TAUGHT = {
    "llama": (LLAMA, TEACHES_LLAMA, llama),
    "llama typed": (LLAMA, TEACHES_LLAMA, typed),
    "mistral list": (MISTRAL_LIST, TEACHES_LIST, mistral_list),
    "mistral": (MISTRAL, TEACHES_MISTRAL, mistral),
    "granite": (GRANITE, TEACHES_GRANITE, granite),
    "hermes": (HERMES, TEACHES_HERMES, hermes),  # with markers that are special tokens
    "tags": (TAGS, TEACHES_TAGS, tags),
    "glm": (GLM, TEACHES_GLM, glm),
    "glm short": (GLM, TEACHES_GLM, glm_short),
    "lfm2": (LFM2, TEACHES_LFM2, lfm2),
    "gemma": (GEMMA, TEACHES_GEMMA, gemma),
}
ON, OFF, WRONG = ("f", '{"on": true}'), ("f", '{"on": false}'), ("f", '{"on": 1}')
AROUND = "; [TOOL_CALLS][ARGS]]}<tool_call>)<tool_call|>"  # as around calls
ODD = ("ff", f'{{"word": "{AROUND}"}}')
UNKNOWN = ("h", "{}")


def vocabulary(kind: int) -> dict[str, Any]:
    """Changes to the small model's: the markers are tokens of this kind."""
    special = ["<|im_start|>", "<|im_end|>", *MARKERS]
    rest = [f"<|unused{i}|>" for i in range(319 - 256 - len(special))]
    types = [1] * 256 + [3] * 2 + [kind] * len(MARKERS) + [3] * len(rest) + [1]
    return {
        "tokenizer.ggml.tokens": [*byte_alphabet(), *special, *rest, "ab"],
        "tokenizer.ggml.token_type": types,
    }


def talk(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """A question, calls and their results, with the ids that OpenAI gives."""
    called = [
        {"id": f"call_{i:024}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    results = [{"role": "tool", "content": "done", "tool_call_id": c["id"]} for c in called]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": called},
        *results,
    ]
