"""Ids to text while they come: whole characters only, stop strings never shown.

A token can end inside a character, and a stop string can be spread over many tokens; so both
classes hold back what may still change. What they emit does not depend on how the text was cut into
tokens. Of an answer in parts (gpt-oss's, Gemma 4's, `<think>`) what is meant for the user is text,
and the rest is thought. Not here: when to stop for an end token (the generation loop's business).
"""

import codecs
from collections.abc import Iterable, Sequence

from ggraph.errors import InputError
from ggraph.text.tokenizer import Tokenizer

_NAMED, _BEGUN, _SAID = "named", "begun", "said"
# Markers of parts, and what stands behind each: a part's name, the part, or text again.
_GEMMA = {"<|channel>": _NAMED, "<channel|>": _SAID}
_HARMONY = {
    "<|start|>": _NAMED, "<|channel|>": _NAMED, "<|constrain|>": _NAMED, "<|message|>": _BEGUN,
    "<|end|>": _SAID,
}  # fmt: skip
_FUNCTION = "to=functions."  # before the name of one, in the header of a part that is for it


def is_harmony(tokenizer: Tokenizer) -> bool:
    """Whether a model with this vocabulary answers in gpt-oss's format, all of it in parts."""
    return tokenizer.id_of("<|channel|>") is not None


class _Parts:
    """Where in an answer of several parts a stream is; an answer begins with text. What is for
    functions is text where the marker that begins it is `shown`, and then an answer begins with a
    header."""

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[int]) -> None:
        markers = _HARMONY if is_harmony(tokenizer) else _GEMMA
        ids = {tokenizer.id_of(marker): kind for marker, kind in markers.items()}
        self._kinds = {i: kind for i, kind in ids.items() if i is not None}
        self._calls = any(self._kinds.get(i) == _BEGUN for i in shown)
        self._at, self._name = _NAMED if self._calls else _SAID, ""

    @property
    def markers(self) -> Iterable[int]:
        """Their ids."""
        return self._kinds.keys()

    def mark(self, token: int) -> str:
        """A marker is met. The text that it completes: a header, told in one way however it is
        written, of a part that is for a function."""
        self._at = self._kinds.get(token, self._at)
        if self._at == _SAID:
            self._name = ""
        elif self._at == _NAMED:
            self._name += " "  # the header goes on
        elif self._calls and (function := self._function):
            return f"<|channel|>commentary {function}<|message|>"
        return ""

    @property
    def _function(self) -> str:
        """Whom the part is for, where that is a function."""
        return next((w for w in self._name.split() if w.startswith(_FUNCTION)), "")

    def split(self, text: str) -> tuple[str, str]:
        """The text behind the last marker: what is for the user, and what was thought. Commentary
        without a recipient is for the user (source: OpenAI's description of harmony)."""
        if self._at == _SAID:
            return text, ""
        if self._at == _NAMED:
            self._name += text
            name, line, text = self._name.partition("\n")  # which ends a name of Gemma's
            if not line:
                return "", ""
            self._at, self._name = _BEGUN, name
        words = self._name.split()
        called = any(w.startswith("to=") for w in words)
        said = "final" in words or ("commentary" in words and not called)
        return (text, "") if said or (self._calls and self._function) else ("", text)


THINK, THOUGHT = "<think>", "</think>"  # around what comes before an answer's text


class _Thoughts:
    """Where a stream is in an answer with a thought before its text, which the prompt may have
    `opened`. Spaces and line ends around the markers belong to neither. A marker elsewhere is text
    like any."""

    def __init__(self, tokenizer: Tokenizer, opened: bool) -> None:
        found = {tokenizer.id_of(text): text for text in (THINK, THOUGHT)}
        self._texts = {i: text for i, text in found.items() if i is not None}
        self._at = _BEGUN if opened else _NAMED  # that is, neither has begun
        self._spaces: str | None = ""  # so far, where nothing else has been since the last marker

    @property
    def markers(self) -> Iterable[int]:
        """Their ids."""
        return self._texts.keys()

    def mark(self, token: int) -> str:
        """A marker is met. Its text, where it marks nothing."""
        text = self._texts.get(token, "")
        if self._at == _SAID:
            return text
        self._at, self._spaces = _BEGUN if text == THINK else _SAID, ""
        return ""

    def split(self, text: str) -> tuple[str, str]:
        """See `_Parts`."""
        if self._spaces is not None:
            self._spaces += text
            if not self._spaces.strip():
                return "", ""
            text = self._spaces if self._at == _NAMED else self._spaces.lstrip()
            self._spaces = None
        if self._at == _BEGUN:
            return "", text
        self._at = _SAID
        return text, ""


class Detokenizer:
    """Text of a stream of ids. Never half a character; bytes that are not UTF-8 give U+FFFD.

    Markers are left out, but for those of the ids `shown`, and so are parts that are not for the
    user, of which `thought` is what the last token brought. `thinking` says of an answer whose
    thought is between `<think>` and `</think>` whether the prompt has opened it; None that all is
    text. InputError on an id outside the vocabulary.
    """

    def __init__(
        self, tokenizer: Tokenizer, shown: Iterable[int] = (), thinking: bool | None = None
    ) -> None:
        self._tokenizer, self.thought = tokenizer, ""
        self._parts: _Parts | _Thoughts = _Parts(tokenizer, shown)
        if thinking is not None:
            self._parts = _Thoughts(tokenizer, thinking)
        self._hidden = tokenizer.special_ids.difference(shown).union(self._parts.markers)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def knows(self, token: int) -> bool:
        """Whether the id is in the vocabulary."""
        return 0 <= token < self._tokenizer.vocab_size

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe empty."""
        piece = self._tokenizer.token_bytes(token)
        if token in self._hidden:
            self.thought = ""
            return self._parts.mark(token)
        text, self.thought = self._parts.split(self._utf8.decode(piece))
        return text

    def finish(self) -> str:
        """What was held back; an unfinished character gives U+FFFD."""
        text, self.thought = self._parts.split(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text


class StopMatcher:
    """Passes text through up to the first stop string, which `stopped` then names.

    The first is the one that ends first and, of those, the one that starts first. Text that could
    be the start of a stop string waits until that is decided. Behind one of the texts `until`,
    which may stand anywhere or, `first`, before all, nothing is looked for any more.
    """

    def __init__(
        self, stops: Sequence[str] = (), until: Sequence[str] = (), *, first: bool = False
    ) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise InputError(f"stop strings: expected non-empty strings, got {stops!r}")
        self.stops, self._until, self._first = tuple(stops), tuple(until), first
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; empty once `stopped` is set."""
        if not self.stops:
            return text
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(s), at, s) for s in self.stops if (at := text.find(s)) >= 0]
        until = [u for u in self._until if not self._first or u.startswith(text[: len(u)])]
        over = [at + len(u) for u in until if (at := text.find(u)) >= 0]
        if found and (not over or min(found)[0] <= min(over)):
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        if over:
            self.stops, self._held = (), ""
            return text
        keep = max(_overlap(text, s) for s in (*self.stops, *until))
        self._held = text[len(text) - keep :]
        if self._first and keep < len(text):  # what is shown now is before all
            self._until = ()
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text


class TextStream:
    """A `Detokenizer` with a `StopMatcher` behind it: what a user may be shown, as it comes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        shown: Iterable[int] = (),
        thinking: bool | None = None,
        until: Sequence[str] = (),
        *,
        first: bool = False,
    ) -> None:
        self._text = Detokenizer(tokenizer, shown, thinking)
        self._match = StopMatcher(stops, until, first=first)
        self.letters = 0  # of text so far, held back or shown

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the stream, or None."""
        return self._match.stopped

    @property
    def thought(self) -> str:
        """What the last token, or the end, brought that is not for the user."""
        return self._text.thought

    def is_plain(self, token: int) -> bool:
        """Whether nothing but text can come of `token`: no stop string is looked for, and the id is
        in range."""
        return not self._match.stops and self._text.knows(token)

    def push(self, token: int) -> str:
        """The text that may be shown after `token`. InputError on an id out of range."""
        text = self._text.push(token)
        self.letters += len(text)
        return self._match.push(text)

    def finish(self) -> str:
        """The rest of the text, when generation ended without a stop string."""
        return self._match.push(self._text.finish()) + self._match.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
