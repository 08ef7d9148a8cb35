"""Requests that nobody should send: sound ones with fields replaced by whatever comes to mind."""

import json
import random
from typing import Any

TALK = [{"role": "user", "content": "Hi"}]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/responses": {"input": "ab", "max_output_tokens": 2},
    "/v1/messages": {"messages": TALK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/v1/embeddings": {"input": "ab"},
    "/embedding": {"content": "ab"},
    "/completion": {"prompt": "ab", "n_predict": 2},
    "/apply-template": {"messages": TALK},
    "/infill": {"input_prefix": "ab", "input_suffix": "c", "n_predict": 2},
    "/tokenize": {"content": "ab"},
    "/detokenize": {"tokens": [97]},
}
FIELDS = [
    "model", "messages", "prompt", "input", "content", "tokens", "max_tokens",
    "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop",
    "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice",
    "response_format", "frequency_penalty", "presence_penalty", "repeat_penalty", "repeat_last_n",
    "speculative", "priority", "user", "echo", "suffix", "instructions", "text", "pooling",
    "encoding_format", "previous_response_id", "store", "unknown",
    "grammar", "json_schema", "functions", "modalities", "parallel_tool_calls", "best_of",
    "chat_template_kwargs", "background", "truncation", "dimensions", "parse_special",
    "system", "stop_sequences", "thinking", "output_config",
    "input_prefix", "input_suffix", "input_extra", "n_predict", "n_cmpl", "n_indent",
    "t_max_predict_ms", "response_fields", "lora",
    "n_probs", "return_tokens", "mirostat", "typical_p", "post_sampling_probs",
]  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "a"}}
SCHEMAS: list[Any] = [
    {}, {"type": "string"}, {"type": "none"}, {"enum": []}, {"pattern": "(a+)+$"},
    {"type": "string", "pattern": "["}, {"$ref": "#/nowhere"}, {"$ref": "#"},
    {"type": "string", "minLength": 9, "maxLength": 1}, {"const": "x" * 3000},
    {"type": "object", "properties": {str(i): {"type": "integer"} for i in range(300)}},
    {"x-guidance": {"whitespace_flexible": True}}, {"allOf": [{"type": "string"}] * 50},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, 1e308, -1e308, 1 << 31, 1 << 63, -(1 << 63), 10**40, "",
    "a", "ab" * 4000, "\x00", "\u202e", "😀", "<|im_end|>", "{{ 7 * 7 }}",
    "{% for i in range(10**9) %}",
    [], [[]], [None], [1, 2], ["a", "b"], [["a"]], {}, {"a": 1}, {"type": "function"}, {"97": 1},
    {"99999": 1}, {"97": False},
    [[97, False], ["98", 1]], [[97]], [[[], 1]],
    {"include_usage": True}, {"off": True}, {"most": 64}, {"drafters": ["suffix"]},
    {"drafters": ["tree"]},
    {"type": "json_object"}, {"format": {"type": "json_object"}}, [{"role": "user"}],
    [{"role": "tool", "content": "x"}], [{"role": "system", "content": []}], TALK * 40,
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}],
    {"type": "function", "name": "f"}, [{"type": "function_call_output", "call_id": "a"}],
    [{"type": "function_call_output", "call_id": "a", "output": "b"}], [{"type": "reasoning"}],
    [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
    {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "required",
     "tools": [{"type": "function", "function": {"name": "f"}}]}},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    [{"name": "f", "input_schema": {"type": "object"}}], {"type": "any"}, {"type": "tool"},
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
    [{"type": ["x"]}], [{"filename": "a.py", "text": "ab" * 40}] * 30, [{"text": None}],
    ["content", "timings/prompt_n", "/", "a/b"], "required", "auto", "none", "json", "mean",
]  # fmt: skip


def request(seed: int, path: str = "") -> tuple[str, bytes]:
    """An address, unless it is given, and a body."""
    r = random.Random(seed)
    path = path or r.choice(list(SOUND))
    body = dict(SOUND[path])
    for _ in range(r.randint(0, 3)):
        body[r.choice(FIELDS)] = r.choice(VALUES)
    if r.random() < 0.15:
        schema = {**FORM["json_schema"], "schema": r.choice(SCHEMAS)}  # type: ignore[dict-item]
        body["response_format"] = {**FORM, "json_schema": schema}
    if r.random() < 0.05:
        body.pop(r.choice(list(body)), None)
    raw = json.dumps(body).encode()
    if r.random() < 0.1:
        at = r.randrange(len(raw))
        raw = raw[:at] + bytes([r.randrange(256)]) + raw[at + r.randint(0, 4) :]
    return path, raw


def complaint(status: int, text: str) -> str:
    """What is wrong with a reply; empty where it is one that may be given."""
    if status == 200:
        return ""
    if not 400 <= status < 500:
        return f"status {status}"
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError):
        return f"no message in {text[:200]!r}"
    return "" if message and "\n" not in message and len(message) < 1000 else f"said {message!r}"
