"""Chat templates that teach notations of calls, in the manner of those that models bring, and a
vocabulary with their markers."""

from typing import Any

from small_model import byte_alphabet

from models.serve.notations import GRANITE, HERMES, LLAMA, MISTRAL, MISTRAL_LIST

MARKERS = (
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<|tool_call|>",
)  # fmt: skip
CALLS, _, TAG, CALL, _, LISTED = range(258, 264)  # their ids
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


TAUGHT = {
    "llama": (LLAMA, TEACHES_LLAMA, llama),
    "llama typed": (LLAMA, TEACHES_LLAMA, typed),
    "mistral list": (MISTRAL_LIST, TEACHES_LIST, mistral_list),
    "mistral": (MISTRAL, TEACHES_MISTRAL, mistral),
    "granite": (GRANITE, TEACHES_GRANITE, granite),
    "hermes": (HERMES, TEACHES_HERMES, hermes),  # with markers that are special tokens
}
ON, OFF, WRONG = ("f", '{"on": true}'), ("f", '{"on": false}'), ("f", '{"on": 1}')
ODD = (
    "ff",
    '{"word": "; [TOOL_CALLS][ARGS]]}<tool_call>"}',
)  # as around calls
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
