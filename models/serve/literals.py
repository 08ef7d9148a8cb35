"""Arguments as literals of a language: Python's, and what Gemma 4 writes."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .arguments import Growing, joined, quoted
from .lark import Lark
from .parameters import Parameters, named_as, types_named, values_of

NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_NAME = r"[\w$](?:[\w.$ -]*[\w.$-])?"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


@dataclass(frozen=True)
class Literals:
    """Names, `assign`, and values, with a `joint` between. Not held: what a schema says of strings
    but their `enum`, of how many things there are, of the names of further arguments, and what
    `anyOf` adds to a type."""

    quotes: tuple[str, ...]  # around a string; the first is how it is told
    assign: str
    colon: str  # behind a name within a value, which is `named` as a string is, or stands bare
    joint: str
    named: bool
    escaped: bool  # whether a backslash in a string means anything
    words: Mapping[str, tuple[str, ...]]  # of JSON, and how they are told, or read as well
    ordered: bool = False  # names in the order of the alphabet, as the template has them

    @property
    def texts(self) -> tuple[str, ...]:
        """See `Arguments`."""
        return self.quotes

    def rule(self, lark: Lark, name: str, schema: dict[str, Any] | None) -> str:
        """See `Arguments`."""
        return _Rules(self, lark, name, Parameters(schema)).all()

    def read(self, text: str, at: int, schema: dict[str, Any] | None) -> tuple[str, int] | None:
        """See `Arguments`. Spaces may be anywhere."""
        try:
            return self._entries(text, at, self._bare(self.assign))
        except (ValueError, RecursionError):
            return None

    def growing(self, text: str, at: int) -> Growing | None:
        """See `Arguments`: a name may come twice, and the last value counts."""
        return None

    def written(self, given: Any) -> str:
        """See `Arguments`."""
        return self.joint.join(f"{k}{self.assign}{self.value(v)}" for k, v in given.items())

    def value(self, given: Any) -> str:
        """A value as it is written."""
        if isinstance(given, str):
            return self.string(given)
        if isinstance(given, list):
            return f"[{self.joint.join(map(self.value, given))}]"
        if isinstance(given, dict):
            names = (self.string(k) if self.named else k for k in given)
            entries = zip(names, map(self.value, given.values()), strict=True)
            return "{" + self.joint.join(f"{k}{self.colon}{v}" for k, v in entries) + "}"
        word = json.dumps(given)
        return self.words[word][0] if word in self.words else word

    def string(self, text: str) -> str:
        """A string as it is written."""
        quote = self.quotes[0]
        if self.escaped:
            text = text.replace("\\", "\\\\").replace(quote, f"\\{quote}").replace("\n", "\\n")
        return f"{quote}{text}{quote}"

    def _bare(self, sign: str) -> Callable[[str, int], tuple[str, int]]:
        """Reads a name and the sign behind it. ValueError where there is none."""
        pattern = re.compile(rf"\s*({_NAME})\s*{re.escape(sign.strip())}")

        def read(text: str, at: int) -> tuple[str, int]:
            found = pattern.match(text, at)
            if found is None:
                raise ValueError(at)
            return found[1], found.end()

        return read

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        """Reads a name that is a string, and the colon behind it."""
        name, at = self._string(text, _past(text, at))
        return name, _behind(text, at, self.colon)

    def _entries(
        self, text: str, at: int, name: Callable[[str, int], tuple[str, int]]
    ) -> tuple[str, int]:
        """As many entries as there are, in JSON. ValueError where one is cut."""
        found = dict[str, str]()
        try:
            key, at = name(text, at)
        except ValueError:
            return "{}", at
        while True:
            found[key], at = self._value(text, at)
            if not text.startswith(self.joint.strip(), _past(text, at)):
                return joined(found), at
            key, at = name(text, _behind(text, at, self.joint))

    def _value(self, text: str, at: int) -> tuple[str, int]:
        at = _past(text, at)
        if text.startswith(self.quotes, at):
            string, at = self._string(text, at)
            return quoted(string), at
        if text.startswith("{", at):
            name = self._quoted if self.named else self._bare(self.colon)
            entries, at = self._entries(text, at + 1, name)
            return entries, _behind(text, at, "}")
        if text.startswith("[", at):
            return self._list(text, at + 1)
        for word, ways in self.words.items():
            if way := next((w for w in ways if text.startswith(w, at)), ""):
                return word, at + len(way)
        if number := re.compile(NUMBER).match(text, at):
            return number[0], number.end()
        raise ValueError(at)

    def _list(self, text: str, at: int) -> tuple[str, int]:
        found = list[str]()
        while not text.startswith("]", _past(text, at)):
            value, at = self._value(text, _behind(text, at, self.joint) if found else at)
            found.append(value)
        return f"[{', '.join(found)}]", _behind(text, at, "]")

    def _string(self, text: str, at: int) -> tuple[str, int]:
        quote = next((q for q in self.quotes if text.startswith(q, at)), None)
        if quote is None:
            raise ValueError(at)
        start = at + len(quote)
        if not self.escaped:
            end = text.index(quote, start)
            return text[start:end], end + len(quote)
        found = re.compile(rf"((?:[^\\{quote}]|\\.)*+){quote}", re.DOTALL).match(text, start)
        if found is None:
            raise ValueError(at)
        return _ESCAPE.sub(_unescaped, found[1]), found.end()


@dataclass
class _Rules:
    """Makes the rules of one function's arguments."""

    style: Literals
    lark: Lark
    name: str
    given: Parameters
    referred: dict[int, str] = field(default_factory=dict)  # rules of what is referred to
    count: int = 0

    def all(self) -> str:
        """All its arguments."""
        self.lark.counted(self.given.root or {})
        if self.given.free:
            head = f"KEY {self.lark.literal(self.style.assign)}"
            return self.lark.add(self.name, self._any_entries(head))
        return self._entries(self.name, self.given.root, self.style.assign, named=False)

    def _entries(self, name: str, schema: Any, sign: str, *, named: bool) -> str:
        known, required = self.given.named(schema), self.given.resolved(schema).get("required", ())
        entries = list[tuple[str, bool]]()
        for key in sorted(known, key=str.lower) if self.style.ordered else known:
            told = self.style.string(key) if named else named_as(_NAME, key)
            head = self.lark.literal(f"{told}{sign}")
            entry = self._new(f"{head} {self.value(known[key])}")
            entries.append((entry, key in required))
        return self.lark.entries(name, entries, self.style.joint)

    def value(self, schema: Any) -> str:
        """What a value of a schema looks like."""
        found = self.given.resolved(schema)
        return self._value(found) if found is schema else self._referred(found)

    def _referred(self, found: dict[str, Any]) -> str:
        """A rule of its own, which what leads back to it names."""
        if id(found) not in self.referred:
            rule = self.referred[id(found)] = f"{self.name}_ref{len(self.referred)}"
            self.lark.add(rule, self._value(found))
        return self.referred[id(found)]

    def _value(self, found: dict[str, Any]) -> str:
        if "const" in found or "enum" in found:
            ways = [self.lark.literal(self.style.value(v)) for v in values_of(found)]
        elif types := types_named(found):
            ways = [self._typed(t, found) for t in types]
        elif parts := found.get("anyOf") or found.get("oneOf"):
            ways = [self.value(p) for p in parts]
        elif self.given.named(found):
            ways = [self._typed("object", found)]
        else:
            return self._anything()
        return f"({' | '.join(ways)})"

    def _typed(self, kind: str, schema: dict[str, Any]) -> str:
        """A value of one type."""
        if kind == "string":
            return self._string()
        if kind in ("number", "integer"):
            bounds = {k: v for k, v in schema.items() if k in _BOUNDS}
            return self.lark.json({"type": kind, **bounds})
        if kind == "boolean":
            return f"{self._word('true')} | {self._word('false')}"
        if kind == "null":
            return self._word("null")
        if kind == "array":
            return self._array(self.value(schema.get("items", True)))
        if not self.given.named(schema):
            return self._object(self._any_entries(self._any_name()))
        self.count += 1
        inner, style = f"{self.name}_object{self.count}", self.style
        return self._object(self._entries(inner, schema, style.colon, named=style.named))

    def _anything(self) -> str:
        """A value of any type."""
        if "anything" not in self.lark.rules:
            self.lark.rules["anything"] = ""  # which the rules within it name
            number = self.lark.add("NUMBER", f"/{NUMBER}/")
            ways = [self._string(), number, *map(self._word, ("true", "false", "null"))]
            ways.append(self._array("anything"))
            ways.append(self._object(self._any_entries(self._any_name())))
            self.lark.add("anything", " | ".join(ways))
        return "anything"

    def _any_name(self) -> str:
        sign = self.lark.literal(self.style.colon)
        return f"{self._string()} {sign}" if self.style.named else f"KEY {sign}"

    def _any_entries(self, name: str) -> str:
        self.lark.add("KEY", "/[A-Za-z_][A-Za-z0-9_]*/")
        entry, joint = f"{name} {self._anything()}", self.lark.literal(self.style.joint)
        return f"({entry} ({joint} {entry})*)?"

    def _array(self, item: str) -> str:
        joint = self.lark.literal(self.style.joint)
        return self._new(f'"[" ({item} ({joint} {item})*)? "]"')

    def _object(self, entries: str) -> str:
        return self._new(f'"{{" {entries} "}}"')

    def _string(self) -> str:
        if self.style.escaped:
            ways = (f"/{q}([^{q}\\\\]|\\\\(.|\\n))*{q}/" for q in self.style.quotes)
            return self.lark.add("STRING", " | ".join(ways))
        (quote,) = self.style.quotes
        rest = self.lark.until("raw", quote)
        return self.lark.add("string", f"{self.lark.literal(quote)} {rest}")

    def _word(self, word: str) -> str:
        return self.lark.literal(self.style.words[word][0])

    def _new(self, body: str) -> str:
        self.count += 1
        return self.lark.add(f"{self.name}_part{self.count}", body)


def _past(text: str, at: int) -> int:
    """The place behind spaces."""
    while text.startswith((" ", "\n", "\t"), at):
        at += 1
    return at


def _behind(text: str, at: int, sign: str) -> int:
    """The place behind a sign. ValueError where it is not there."""
    at, sign = _past(text, at), sign.strip()
    if not text.startswith(sign, at):
        raise ValueError(at)
    return at + len(sign)


def _unescaped(found: re.Match[str]) -> str:
    """What a backslash and what follows it mean in Python, where an unknown letter stays."""
    said = found[1]
    if len(said) > 1:
        code = int(said[1:], 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    return _ESCAPED.get(said, said if said in "\\'\"" else f"\\{said}")
