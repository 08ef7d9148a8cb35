"""Grammars in Lark's notation, as llguidance reads it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import Refused
from .grammar import MOST_SCHEMA, dumped


@dataclass
class Lark:
    """The rules of a grammar. `special` are the ids of texts that are special tokens, which no
    regular expression and no other text matches. A text's own schema is followed as far as that can
    be where it is `lenient`."""

    special: Mapping[str, int]
    lenient: bool = False
    rules: dict[str, str] = field(
        default_factory=lambda: {"TEXT": "/(.|\\n)*/", "WS": "/[ \\n]{1,4}/"}
    )
    _formed: dict[str, str] = field(default_factory=dict)  # names of schemas' rules, by their texts
    _size: int = 0  # letters of schemas

    def add(self, name: str, body: str, *, lazy: bool = False) -> str:
        """A rule; a lazy one matches as little as it can."""
        self.rules[f"{name}[lazy]" if lazy else name] = body
        return name

    def json(self, schema: dict[str, Any]) -> str:
        """A rule of JSON that a part of a counted schema describes; the same one for the same. What
        it refers to is counted, since other parts have it too."""
        known = "$ref" not in str(schema)
        text = dumped(schema, lenient=True) if known else self.counted(schema)
        if text not in self._formed:
            self._formed[text] = self.add(f"json{len(self._formed)}", f"%json {text}")
        return self._formed[text]

    def counted(self, schema: dict[str, Any], *, lenient: bool = True) -> str:
        """A schema as text, followed as far as that can be unless it is not to be `lenient`:
        functions have them that nobody wrote for a grammar. Refused where all together become too
        long."""
        text = dumped(schema, lenient=lenient)
        self._size += len(text)
        if self._size > MOST_SCHEMA:
            raise Refused(f"schema: expected at most {MOST_SCHEMA} bytes together", param="tools")
        return text

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
        missing. A tree of rules, since llguidance goes down a chain of them by recursion."""
        if not entries:
            return self.add(name, '""')
        each, optional = self._some(name, entries, self.literal(joint) if joint else "")
        return self.add(name, f"{each}{'?' if optional else ''}")

    def _some(self, name: str, entries: Sequence[tuple[str, bool]], joint: str) -> tuple[str, bool]:
        """A rule of one or more of some entries, and whether all may be missing."""
        if len(entries) == 1:
            ((entry, required),) = entries
            return entry, not required
        half = len(entries) // 2
        left, left_may_miss = self._some(f"{name}_l", entries[:half], joint)
        right, right_may_miss = self._some(f"{name}_r", entries[half:], joint)
        both = f"{left} ({joint} {right}){'?' if right_may_miss else ''}"
        rule = self.add(f"{name}_some", f"{both} | {right}" if left_may_miss else both)
        return rule, left_may_miss and right_may_miss

    def __str__(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self.rules.items())
