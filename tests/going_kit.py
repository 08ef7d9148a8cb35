"""Requests of every kind whose answers have to go on elsewhere, and what their replies say."""

import json
from typing import Any

from models.serve.going_on import ANSWERS

TALK = [{"role": "user", "content": "Say something."}]
WIDE = {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 11}
ENDLESS = {"256": -100, "257": -100}  # the end tokens of the tiny model
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "on": {"type": "null"},
    },
    "required": ["age", "on"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CHAT, TEXT, RESPONSES, MESSAGES, NATIVE, GAP = ANSWERS
OFF = {"speculative": {"off": True}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"prompt": "abc", "max_tokens": 24, "temperature": 0, "logit_bias": ENDLESS}),
    "greedy, no drafts": (TEXT, {"prompt": "abab", "max_tokens": 20, "temperature": 0, **OFF}),
    "seeded": (TEXT, {"prompt": "abc", "max_tokens": 24, **WIDE, "logit_bias": ENDLESS}),
    "long drafts": (
        TEXT,
        {
            "prompt": "abababab",
            "max_tokens": 30,
            "seed": 1,
            "speculative": {"most": 16},
            "logit_bias": {"97": 10, "98": 10, "99": 10},
        },  # a text that comes to repeat itself
    ),
    "penalties": (
        TEXT,
        {"prompt": "aaaa", "max_tokens": 20, **WIDE, "frequency_penalty": 1.5, "seed": 4},
    ),
    "chances": (TEXT, {"prompt": "ab", "max_tokens": 12, "seed": 2, "logprobs": 3}),
    "chat with chances": (
        CHAT,
        {"messages": TALK, "max_tokens": 12, **WIDE, "logprobs": True, "top_logprobs": 2},
    ),
    "choices": (TEXT, {"prompt": ["abc", "b"], "max_tokens": 10, "n": 2, **WIDE}),
    "usage": (
        CHAT,
        {"messages": TALK, "max_tokens": 12, "seed": 5, "stream_options": {"include_usage": True}},
    ),
    "a form": (CHAT, {"messages": TALK, "max_tokens": 60, "seed": 3, "response_format": FORM}),
    "a demanded call": (
        CHAT,
        {"messages": TALK, "max_tokens": 99, "seed": 3, "tools": [TOOL], "tool_choice": "required"},
    ),
    "calls or text": (
        CHAT,
        {"messages": TALK, "max_tokens": 40, **WIDE, "tools": [TOOL], "logit_bias": {"27": 100}},
    ),
    "native": (NATIVE, {"prompt": ["ab", "c"], "n_predict": 14, "n": 2, "n_probs": 2, **WIDE}),
    "responses": (RESPONSES, {"input": "Hi", "max_output_tokens": 14, **WIDE}),
    "messages": (f"{MESSAGES}?beta=true", {"messages": TALK, "max_tokens": 14, **WIDE}),
    "a call in messages": (
        MESSAGES,
        {
            "messages": TALK,
            "max_tokens": 99,
            "seed": 3,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": SCHEMA}],
        },
    ),
}

GAPS: dict[str, tuple[str, dict[str, Any]]] = {  # for models with tokens for filling in
    "a gap": (GAP, {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 20, "n": 2, **WIDE}),
    "a gap of lines": (
        GAP,
        {
            "input_prefix": "ab", "input_suffix": "cd", "n_predict": 40, "n_indent": 1, **WIDE,
            "logit_bias": {"10": 9, "32": 12}, "stop": ["xyz"],
        },
    ),
}  # fmt: skip


def words(raw: bytes) -> Any:
    """What a reply says: its JSON, or that of its events."""
    text = raw.decode()
    if text.lstrip()[:1] == "{":
        return json.loads(text)
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(e) if e[:1] == "{" else e for e in events]


def bare(said: Any) -> Any:
    """The same without names, dates, and how an answer was computed. Events are in order by choice,
    since several choices come as they are said."""
    if isinstance(said, list):
        found = [bare(s) for s in said]
        if found and isinstance(found[0], dict) and "choices" in found[0]:
            found.sort(key=lambda e: _index(e))
        return found
    if isinstance(said, dict):
        if "cache_read_input_tokens" in said:  # which are counted beside those of the input
            read = said["input_tokens"] + said["cache_read_input_tokens"]
            said = {"read": read, "output_tokens": said["output_tokens"]}
        gone = ("id", "item_id", "call_id", "created", "created_at", "previous_response_id")
        return {k: bare(v) for k, v in said.items() if k not in gone and not k.endswith("_details")}
    return said


def _index(e: Any) -> int:
    choices = e.get("choices") if isinstance(e, dict) else None
    return int(choices[0]["index"]) if choices else 1 << 20
