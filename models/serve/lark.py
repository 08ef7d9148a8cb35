"""Grammars in Lark's notation, as llguidance reads it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .errors import Refused
from .grammar import MOST_SCHEMA


@dataclass
class Lark:
    """The rules of a grammar. `special` are the ids of texts that are special tokens, which no
    regular expression and no other text matches."""

    special: Mapping[str, int]
    rules: dict[str, str] = field(
        default_factory=lambda: {"TEXT": "/(.|\\n)*/", "WS": "/[ \\n]{1,4}/"}
    )
    _size: int = 0

    def add(self, name: str, body: str, *, lazy: bool = False) -> str:
        """A rule; a lazy one matches as little as it can. Refused where they become too many."""
        self.rules[f"{name}[lazy]" if lazy else name] = body
        self._size += len(name) + len(body)
        if self._size > MOST_SCHEMA:
            raise Refused(f"schema: expected at most {MOST_SCHEMA} bytes together", param="tools")
        return name

    def literal(self, text: str) -> str:
        """A text as it stands."""
        around = "|".join(map(re.escape, self.special))
        parts = re.split(f"({around})", text) if around else [text]
        return " ".join(
            f"<[{self.special[p]}]>" if p in self.special else json.dumps(p)
            for p in parts
            if p or not text
        )

    def spaced(self, text: str) -> str:
        """A text in which a space is white space that may be missing."""
        parts = (p for p in re.split("( )", text) if p)
        return " ".join("WS?" if p == " " else self.literal(p) for p in parts)

    def until(self, name: str, marker: str, text: str = "TEXT") -> str:
        """A text up to a marker, and this: the first one, also where it is spelt."""
        token = f" | {text} {self.literal(marker)}" if marker in self.special else ""
        self.add(f"spelt_{name}", f"{text} {json.dumps(marker)}", lazy=True)
        return self.add(name, f"spelt_{name}{token}")

    def without(self, name: str, pattern: str) -> str:
        """Any text that a pattern does not match."""
        return self.add(name, f"TEXT & ~/{pattern}/")

    def entries(self, name: str, entries: Sequence[tuple[str, bool]], joint: str) -> str:
        """Entries in this order with a joint between them; those that are not required may be
        missing."""
        first, more = '""', '""'  # of those from here on: where none is before them, and behind one
        for i, (entry, required) in reversed(list(enumerate(entries))):
            begun = f"{entry} {more}"
            behind = f"{self.literal(joint)} {begun}" if joint else begun
            first = self.add(f"{name}_{i}", begun if required else f"{begun} | {first}")
            more = self.add(f"{name}_more{i}", behind if required else f"{behind} | {more}")
        return self.add(name, first)

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self.rules.items())
