"""What the schema of a function's parameters says of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from .errors import Refused

_ANYTHING: dict[str, Any] = {}
TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


@dataclass(frozen=True)
class Parameters:
    """A schema with all that it refers to. Refused where it cannot be read. What leads back to
    itself says nothing."""

    root: Any
    _resolved: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the identity of parts
    _types: dict[int, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def known(self) -> dict[str, Any]:
        """The schemas of named parameters."""
        return self.named(self.root)

    @cached_property
    def required(self) -> frozenset[str]:
        """Those that must be there."""
        return frozenset(_required(self.resolved(self.root)))

    @property
    def free(self) -> bool:
        """Whether any names will do: the schema names none."""
        return not self.known and self.resolved(self.root).get("additionalProperties") is not False

    def named(self, schema: Any) -> dict[str, Any]:
        """The schemas of what an object has: its properties, and what it requires beside them."""
        found = self.resolved(schema)
        properties = found.get("properties", {})
        if not isinstance(properties, dict):
            raise Refused(f"schema: properties: expected an object, got {properties!r:.60}")
        required = [k for k in _required(found) if k not in properties]
        return {**properties, **dict.fromkeys(required, True)}

    def resolved(self, schema: Any) -> dict[str, Any]:
        """A schema without references, or with `allOf`, at its top; the same one each time."""
        if schema is True or schema is None:
            return _ANYTHING
        if not isinstance(schema, dict):
            raise Refused(f"schema: expected an object, got {schema!r:.60}")
        known = id(schema)
        if known not in self._resolved:
            self._resolved[known] = _ANYTHING
            found = schema
            if "$ref" in schema:
                found = self.resolved(self.at(schema["$ref"]))
            elif parts := _list(schema, "allOf"):
                rest = {k: v for k, v in schema.items() if k != "allOf"}
                found = {k: v for p in parts for k, v in self.resolved(p).items()} | rest
            self._resolved[known] = found
        return self._resolved[known]

    def at(self, reference: Any) -> Any:
        """What a reference leads to."""
        found, (head, *names) = self.root, str(reference).split("/")
        try:
            for name in names:
                key = unquote(name).replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            head = ""
        if head != "#":
            raise Refused(f"schema: $ref {str(reference)[:60]!r} leads nowhere")
        return found

    def types(self, schema: Any) -> frozenset[str]:
        """The types of values that it lets through."""
        found = self.resolved(schema)
        if "const" in found or "enum" in found:
            return frozenset(map(type_of, values_of(found)))
        if id(found) not in self._types:
            self._types[id(found)] = TYPES
            types = frozenset(types_named(found)) or TYPES
            for key in ("anyOf", "oneOf"):
                if ways := _list(found, key):
                    types &= frozenset[str]().union(*map(self.types, ways))
            self._types[id(found)] = types
        return self._types[id(found)]

    def alone(self, schema: Any) -> Any:
        """The schema of a part, with all that it refers to."""
        names, referred = dict[str, str](), dict[str, Any]()

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [moved(v) for v in value]
            if not isinstance(value, dict):
                return value
            found = {k: moved(v) for k, v in value.items()}
            if isinstance(ref := value.get("$ref"), str):
                if ref not in names:
                    names[ref] = f"part{len(names)}"
                    referred[names[ref]] = moved(self.at(ref))
                found["$ref"] = f"#/$defs/{names[ref]}"
            return found

        top = moved(schema)
        return {**top, "$defs": referred} if referred else top


def types_named(schema: dict[str, Any]) -> list[str]:
    """The types that a schema names; none is any."""
    named = schema.get("type", [])
    found = [named] if isinstance(named, str) else named
    if not isinstance(found, list) or not all(isinstance(t, str) and t in TYPES for t in found):
        raise Refused(f"schema: type: expected {', '.join(sorted(TYPES))}, got {named!r:.60}")
    return found


def values_of(schema: dict[str, Any]) -> list[Any]:
    """The values that a schema lists."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def named_as(pattern: str, name: str) -> str:
    """A parameter's name. Refused where a notation cannot write it so that it is read."""
    if re.fullmatch(pattern, name) is None:
        raise Refused(f"tools: {name[:60]!r} is no name that this model can write", param="tools")
    return name


def type_of(value: Any) -> str:
    """The type of a value of JSON."""
    kinds: Iterable[tuple[type, str]] = (
        (str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"),
        (dict, "object"),
    )  # fmt: skip
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _required(schema: dict[str, Any]) -> list[str]:
    found = _list(schema, "required")
    if not all(isinstance(name, str) for name in found):
        raise Refused(f"schema: required: expected names, got {found!r:.60}")
    return found


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key, [])
    if not isinstance(found, list):
        raise Refused(f"schema: {key}: expected a list, got {found!r:.60}")
    return found
