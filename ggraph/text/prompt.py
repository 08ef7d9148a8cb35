"""A conversation to token ids: a template's markers count, those that somebody typed do not.

A template may do anything with a text: trim it, split it, look for a word in it. So the text goes
through whole, but for a `seam`, a letter that nobody uses, put into every marker that stands in it
(and behind what could begin one at its end, or before what could end one). In the rendered prompt
a marker with a seam in it is text. Texts without markers go through as they are, and so do roles
and types, which are a program's words. A template that itself writes a marker around a text, as
`<|{{ content }}|>` would, means that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ggraph.text.chat import ChatTemplate
from ggraph.text.tokenizer import Tokenizer

_PRIVATE = range(0x100000, 0x10FFFE)  # letters that Unicode leaves to whoever wants them

_WORDS = ("role", "type")


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
    template = ChatTemplate.of(tokenizer)
    seam = _unused([template.source, *_strings([messages, extra])])
    sew = Sewing(tokenizer.control_texts, seam)
    text = template.render(sew(messages), add_generation_prompt=add_generation_prompt, **sew(extra))
    return tokenizer.encode_sewn(text, seam)


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
            return {k: v if k in _WORDS else self(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(v) for v in value]
        return value

    def _sewn(self, text: str) -> str:
        for marker in self._markers:
            while marker in text:  # those that overlap come up one after the other
                text = text.replace(marker, marker[0] + self._seam + marker[1:])
        core = text.strip()  # as templates like to have it
        lengths = range(1, min(len(core), self._longest) + 1)
        begun = any(core[-n:] in self._starts for n in lengths)
        ended = any(core[:n] in self._ends for n in lengths)
        if not begun and not ended:
            return text
        sewn = self._seam * ended + core + self._seam * begun
        return text.replace(core, sewn, 1)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _strings(v)


def _unused(texts: Iterable[str]) -> str:
    """A letter that stands in none of the texts."""
    used = set().union(*texts)
    return next(c for c in map(chr, reversed(_PRIVATE)) if c not in used)
