"""A conversation to token ids: a template's markers count, those that somebody typed do not.

A template may do anything with a text: trim it, split it, look for a word in it. So the text goes
through whole, but for a `seam`, a letter that nobody uses, put into every marker that stands in it
(and behind what could begin one at its end, or before what could end one). In the rendered prompt
a marker with a seam in it is text. Keys of mappings are texts, too: calls and schemas have any.
Texts without markers go through as they are, and so do a message's role, types that have a name in
schemas, and names that a template asks for, but for markers in them: those are a program's words. A
template that itself writes a marker around a text, as `<|{{ content }}|>` would, means that.
One that knows messages as lists of parts alone gets their texts so.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ggraph.errors import InputError
from ggraph.json_parts import texts
from ggraph.text.chat import ChatTemplate, check_messages
from ggraph.text.tokenizer import Tokenizer

_PRIVATE = range(0x100000, 0x10FFFE)  # letters that Unicode leaves to whoever wants them

_TYPES = frozenset(
    (
        "function",
        "text",
        "image",
        "object",
        "array",
        "string",
        "number",
        "integer",
        "boolean",
        "null",
    )
)  # which templates compare with


def prompt_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> list[int]:
    """Ids of the messages within the vocabulary's chat template.

    Whatever texts `messages` and `extra` hold, the only control tokens are those that the template
    itself writes. `extra` and the errors are those of `ChatTemplate.render`.
    """
    asked = {"add_generation_prompt": add_generation_prompt, **extra}
    return tokenizer.encode_sewn(*sewn_prompt(tokenizer, messages, **asked))


def sewn_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **extra: Any,
) -> tuple[str, str]:
    """The prompt's text with seams in it, and the seam: what `Tokenizer.encode_sewn` makes ids of.
    It ends with the last message's text where that is to be continued. InputError where a template
    does not show that text once."""
    template = ChatTemplate.of(tokenizer)
    check_messages(messages)
    used = [template.source, *texts([messages, extra])]
    seam = _unused(used)
    sew = Sewing(tokenizer.control_texts, seam)
    said = [{**sew(m), "role": m["role"]} for m in messages]
    variables = {k: sew(v) for k, v in extra.items()}
    end = _unused([*used, seam])
    if continue_final_message:
        if not said or not isinstance(said[-1].get("content"), str):
            raise InputError("to go on with the last message, it must have a text")
        said[-1]["content"] += end
    if template.wants_parts:
        said = [_in_parts(m) for m in said]
    text = template.render(said, add_generation_prompt=add_generation_prompt, **variables)
    if continue_final_message:
        text, *rest = text.split(end)
        if len(rest) != 1:
            raise InputError("the chat template does not show the last message's text as it is")
    return text, seam


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text is a part."""
    text = message.get("content")
    is_text = isinstance(text, str)
    return {**message, "content": [{"type": "text", "text": text}]} if is_text else message


class Sewing:
    """Puts `seam` into the `markers` of every text within a value made of dicts and lists."""

    def __init__(self, markers: Sequence[str], seam: str) -> None:
        self._markers, self._seam = markers, seam
        self._starts = {m[:n] for m in markers for n in range(1, len(m))}
        self._ends = {m[n:] for m in markers for n in range(1, len(m))}
        self._longest = max(map(len, markers), default=0)

    def __call__(self, value: Any) -> Any:
        """The value with every text in it sewn; what is no text, dict or list stays itself."""
        if isinstance(value, str):
            return self._sewn(value)
        if isinstance(value, Mapping):
            return {self._key(k): v if _is_type(k, v) else self(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(v) for v in value]
        return value

    def _key(self, key: Any) -> Any:
        """A name that a template may ask for stays that, unless a marker is in it."""
        if not isinstance(key, str):
            return key
        return self._parted(key) if key.isidentifier() else self._sewn(key)

    def _parted(self, text: str) -> str:
        for marker in self._markers:
            while marker in text:  # those that overlap come up one after the other
                text = text.replace(marker, marker[0] + self._seam + marker[1:])
        return text

    def _sewn(self, text: str) -> str:
        text = self._parted(text)
        core = text.strip()  # as templates like to have it
        lengths = range(1, min(len(core), self._longest) + 1)
        begun = any(core[-n:] in self._starts for n in lengths)
        ended = any(core[:n] in self._ends for n in lengths)
        if not begun and not ended:
            return text
        sewn = self._seam * ended + core + self._seam * begun
        return text.replace(core, sewn, 1)


def _is_type(key: Any, value: Any) -> bool:
    return key == "type" and isinstance(value, str) and value in _TYPES


def _unused(texts: Iterable[str]) -> str:
    """A letter that stands in none of the texts."""
    used = set().union(*texts)
    return next(c for c in map(chr, reversed(_PRIVATE)) if c not in used)
