"""How models write the arguments of calls: as JSON, with tags, or as a language's literals."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .grammar import ANY_OBJECT
from .lark import Lark
from .parameters import Parameters, named_as, type_of, values_of

_VALUES = json.JSONDecoder(parse_int=str, parse_float=str)  # of any length and size
_NAME = r"[^<>\n]+"
OF_OTHERS = frozenset(  # what speaks of arguments beside those that `properties` names
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
     "minProperties", "dependentRequired", "dependentSchemas", "allOf", "anyOf", "oneOf", "not",
     "if", "$ref")
)  # fmt: skip
WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates written in Python say it


class Arguments(Protocol):
    """A way to write arguments. What a call's schema says is held as far as the way lets it."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What is around names and values, which may be special tokens."""
        ...

    def rule(self, lark: Lark, name: str, schema: dict[str, Any] | None) -> str:
        """The rule `name` of all arguments of a schema."""
        ...

    def read(self, text: str, at: int, schema: dict[str, Any] | None) -> tuple[str, int] | None:
        """Arguments from a place on, as JSON, and the place behind; None where they are cut."""
        ...

    def growing(self, text: str, at: int) -> "Growing | None":
        """Arguments from a place on that are told while they are written; None where they are
        known at the answer's end alone."""
        ...

    def written(self, given: Any) -> str:
        """Arguments that an earlier call was given."""
        ...


@dataclass(frozen=True)
class Json:
    """One object. The schema is held as far as llguidance can; of arguments that it does not name
    there are none where it names some, unless it says something of them."""

    texts: tuple[str, ...] = ()

    def rule(self, lark: Lark, name: str, schema: dict[str, Any] | None) -> str:
        """See `Arguments`."""
        return lark.add(name, f"%json {lark.counted(_closed(schema or ANY_OBJECT))}")

    def read(self, text: str, at: int, schema: dict[str, Any] | None) -> tuple[str, int] | None:
        """See `Arguments`; as the model wrote them."""
        end = behind_value(text, at)
        return None if end < 0 else (text[at:end], end)

    def growing(self, text: str, at: int) -> "Growing | None":
        """See `Arguments`. Where a number ends shows behind it alone, so values that are no object
        or list, which schemas of arguments hardly ever ask for, are read at the end."""
        return Growing(at) if text.startswith(("{", "["), at) else None

    def written(self, given: Any) -> str:
        """See `Arguments`."""
        return json.dumps(given)


JSON = Json()
_PART = re.compile(r'[{}\[\]"]')
_STRING = re.compile(r'(?:[^"\\]|\\.)*+("?)', re.DOTALL)


class Growing:
    """An object or list of JSON that is being written, from a place of a text on. Its last bracket
    is kept back until the whole is known to be right."""

    def __init__(self, start: int) -> None:
        self.start = self.at = start  # behind what was looked at
        self.ended = False  # whether it is whole, and right
        self._told = start  # place up to which it was told
        self._depth, self._quoted, self._open = 0, False, True

    def more(self, text: str) -> str:
        """What is new of it."""
        if self._open and self._closes(text):
            self._open = False
            self.ended = behind_value(text, self.start) == self.at
        end = len(text) if self._open else self.at if self.ended else self.at - 1
        told, self._told = self._told, end
        return text[told:end]

    def _closes(self, text: str) -> bool:
        """Look at what is new; whether the last bracket is there."""
        while True:
            if self._quoted:
                found = _STRING.match(text, self.at)
                assert found is not None, f"{_STRING.pattern} matches an empty text, too"
                self.at, self._quoted = found.end(), not found[1]
                if self._quoted:
                    return False
            part = _PART.search(text, self.at)
            if part is None:
                self.at = len(text)
                return False
            self.at, self._quoted = part.end(), part[0] == '"'
            self._depth += (part[0] in "{[") - (part[0] in "}]")
            if not self._depth:
                return True


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without further arguments, where it names some and does not speak of others. A
    small model that may go on with names of its own does so until its tokens are spent."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not named or OF_OTHERS.intersection(schema):
        return schema
    whole = isinstance(required, list) and all(r in list(named) for r in required)
    return {**schema, "additionalProperties": False} if whole else schema


@dataclass(frozen=True)
class Tagged:
    """Tags `before` and `between` a name and its value, and `after` this; a space in the first two
    is white space that may be missing. Strings stand as they are, other values as JSON. Not held:
    what a schema says of strings but their `enum`, and of the names of further arguments."""

    before: str
    between: str
    after: str

    @property
    def texts(self) -> tuple[str, ...]:
        """See `Arguments`."""
        return self.before, self.between, self.after

    def rule(self, lark: Lark, name: str, schema: dict[str, Any] | None) -> str:
        """See `Arguments`."""
        given = Parameters(schema)
        lark.counted(schema or {})
        before, between = lark.spaced(self.before), lark.spaced(self.between)
        if given.free:
            lark.add("NAME", f"/{_NAME}/")
            return lark.add(name, f"({before} NAME {between} {lark.until('raw', self.after)})*")
        entries = list[tuple[str, bool]]()
        for i, (key, part) in enumerate(given.known.items()):
            value = self._value(lark, given, part)
            entry = f"{before} {lark.literal(named_as(_NAME, key))} {between} {value}"
            entries.append((lark.add(f"{name}_entry{i}", entry), key in given.required))
        return lark.entries(name, entries, "")

    def _value(self, lark: Lark, given: Parameters, part: Any) -> str:
        """A value, and what is after it."""
        types, after = given.types(part), lark.literal(self.after)
        listed = given.resolved(part)
        if "string" not in types:
            return f"{lark.json(given.alone(part))} {after}"
        if "const" in listed or "enum" in listed:
            ways = (lark.literal(raw_of(v)) for v in values_of(listed))
            return f"({' | '.join(ways)}) {after}"
        return lark.until("raw", self.after)

    def read(self, text: str, at: int, schema: dict[str, Any] | None) -> tuple[str, int] | None:
        """See `Arguments`. What may be a string is one, unless it is another value that the schema
        lets through."""
        given, found = Parameters(schema), dict[str, str]()
        head = re.compile(f"{spaced(self.before)}({_NAME}?){spaced(self.between)}")
        while begun := head.match(text, at):
            types, start = given.types(given.known.get(begun[1], True)), begun.end()
            end = -1 if "string" in types else behind_value(text, start)
            end = text.find(self.after, start) if end < 0 else end
            if end < 0 or not text.startswith(self.after, end):
                return None
            found[begun[1]], at = _typed(text[start:end], types), end + len(self.after)
        return joined(found), at

    def growing(self, text: str, at: int) -> "Growing | None":
        """See `Arguments`: how often a name comes, and what a value is, shows behind it."""
        return None

    def written(self, given: Any) -> str:
        """See `Arguments`."""
        before, between = self.before.replace(" ", ""), self.between.replace(" ", "")
        return "".join(f"{before}{k}{between}{raw_of(v)}{self.after}" for k, v in given.items())


def spaced(text: str) -> str:
    """The pattern of a text in which a space is white space that may be missing."""
    return r"\s*".join(map(re.escape, text.split(" ")))


def joined(entries: Mapping[str, str]) -> str:
    """An object of names and values in JSON."""
    return "{" + ", ".join(f"{quoted(k)}: {v}" for k, v in entries.items()) + "}"


def quoted(text: str) -> str:
    """A string in JSON; half a pair of surrogates, which no reply can hold, becomes U+FFFD."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(whole, ensure_ascii=False)


def raw_of(value: Any) -> str:
    """A value as it stands between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _typed(raw: str, types: frozenset[str]) -> str:
    """A value between tags, in JSON."""
    word = WORDS.get(raw, raw)
    try:
        kind = type_of(json.JSONDecoder(parse_constant=_no_number, parse_int=_an_int).decode(word))
    except (ValueError, RecursionError):
        kind = "string"
    kinds = {"integer", "number"} if kind in ("integer", "number") else {kind}
    return word if kind != "string" and kinds & types else quoted(raw)


def _an_int(text: str) -> int:
    return 0  # whose value nobody asks: long ones would be refused


def _no_number(text: str) -> Any:
    raise ValueError(text)


def behind_value(text: str, at: int) -> int:
    """The place behind a JSON value; -1 where the value is cut."""
    try:
        return _VALUES.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return -1
