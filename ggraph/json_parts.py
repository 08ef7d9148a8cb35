"""A large JSON object, read part by part: its members one by one, long lists item by item.

Whatever the text, no more is held at a time than one part of bounded size: how many items there are
is counted while they are read, so that a hostile text cannot fill the memory before it is refused.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ggraph.errors import FormatError, shown

WINDOW = 1 << 16  # bytes that are decoded at a time; more where a part is longer
LARGEST = 1 << 25  # bytes of one part: a command with a million accesses fits
CUT = 3  # characters behind a number that show whether it goes on: 1.5 and e+ and 3
MOST_OPENED = 1 << 21  # brackets and braces that one part may open
MAX_NAME = 4096  # characters
A_NAME = f"a text of at most {MAX_NAME} characters, without half characters (surrogates)"

_SPACE = re.compile(r"[ \t\n\r]*")


class Parts:
    """A cursor over UTF-8 bytes, with JSON's grammar of one level. FormatError for all else."""

    def __init__(self, raw: bytes) -> None:
        marked = raw.startswith(codecs.BOM_UTF8)  # as editors and shells of Windows write it
        self._raw, self._read = raw, len(codecs.BOM_UTF8) * marked  # bytes decoded so far
        self._text, self._at = "", 0  # the window, and the place in it
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)

    def members(self) -> Iterator[str]:
        """The object's keys; the caller reads each one's value (`value` or `items`) in turn."""
        if not (begins := self._next()):
            self._refuse("the text is empty")
        if begins != "{":
            raise FormatError(f"plan: expected an object, got {shown(self.value(), 80)}")
        self._at += 1
        known: set[str] = set()
        for _ in self._listed("}"):
            key = self.value()
            if not isinstance(key, str):
                self._refuse("a key is no text")
            if key in known:
                raise FormatError(f"plan: a key is repeated: {key!r}")
            known.add(key)
            self._expect(":")
            yield key
        if self._next():
            self._refuse("more follows the object")

    def begins_list(self) -> bool:
        """Whether a list is what comes next."""
        return self._next() == "["

    def items(self) -> Iterator[Any]:
        """The items of the list that comes next."""
        self._expect("[")
        for _ in self._listed("]"):
            yield self.value()

    def value(self) -> Any:
        """The next value as a whole, decoded."""
        self._next()
        while True:
            try:
                found, end = self._json.raw_decode(self._text, self._at)
            except RecursionError:
                self._refuse("nested too deep")
            except ValueError as error:  # of the grammar; or a number of too many digits
                if not self._more():
                    self._refuse(getattr(error, "msg", str(error)), getattr(error, "pos", None))
                continue
            if end + CUT <= len(self._text) or not self._more():
                self._at = end
                return found

    def _listed(self, close: str) -> Iterator[None]:
        """Once for each item up to the bracket that closes; checks the commas between."""
        if self._next() == close:
            self._at += 1
            return
        while True:
            yield
            if self._next() == close:
                self._at += 1
                return
            self._expect(",")

    def _expect(self, mark: str) -> None:
        if (got := self._next()) != mark:
            self._refuse(f"expected {mark!r}, got {got!r}")
        self._at += 1

    def _next(self) -> str:
        """The next character that is no space, not yet passed; nothing at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found is not None else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Decode a further window behind what is left; False at the end of the text."""
        left = self._text[self._at :]
        if self._read == len(self._raw):
            return False
        if len(left) > LARGEST or left.count("[") + left.count("{") > MOST_OPENED:
            self._refuse(f"one part of more than {LARGEST} bytes or {MOST_OPENED} brackets")
        step = max(WINDOW, len(left))  # doubles while one part goes on
        fresh = self._raw[self._read : self._read + step]
        self._read += len(fresh)
        try:
            text = self._utf8.decode(fresh, final=self._read == len(self._raw))
        except UnicodeDecodeError as error:
            at = self._read - len(error.object) + error.start
            raise FormatError(f"plan: not UTF-8: {error.reason}, position {at}") from None
        self._text, self._at = left + text, 0
        return True

    def _refuse(self, why: str, at: int | None = None) -> NoReturn:
        """Name a place of the window, by default the one that is read, as one of the document."""
        ahead = len(self._text[self._at if at is None else at :].encode())
        byte = self._read - len(self._utf8.getstate()[0]) - ahead
        line, begins = self._raw.count(b"\n", 0, byte) + 1, self._raw.rfind(b"\n", 0, byte) + 1
        raise FormatError(f"plan: not JSON: {why} (line {line}, byte {byte - begins + 1} of it)")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise FormatError(f"plan: a key is repeated in {[k for k, _ in pairs][:20]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise FormatError(f"plan: {name} is no number")


def texts(value: Any) -> Iterator[str]:
    """All texts within a value made of mappings, lists and tuples, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from texts(pair)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from texts(held)


def is_name(text: str) -> bool:
    """Whether a plan may call something so. UTF-8 has no bytes for halves of characters."""
    halves = not text.isascii() and any("\ud800" <= ch <= "\udfff" for ch in text)
    return len(text) <= MAX_NAME and not halves
