"""What callers give to a public function, checked by what its signature says.

A function behind this door gets nothing but the kinds of values that it is annotated with: all
else is one error that names the function, the parameter and the value. NumPy's numbers become
Python's, lists of them tuples; of mappings and functions only that they are such is asked. Records
(dataclasses) are asked all through, by the annotations of their fields: `unfit`. What is taken by a
protocol is asked for its members alone.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from ggraph.errors import GgraphError, InputError, shown

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[Any], Any]  # the value as Python's own, or TypeError
Walk = Callable[[Any, set[int]], "Unfit | None"]
Unfit = tuple[str, object, str]  # the way to what does not fit, what stands there, what should


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _whole(value: Any) -> int:
    if _is_bool(value) or isinstance(value, np.ndarray):
        raise TypeError
    # A class of numbers may hold more: what `ggraph.decode.given` has in the place of tokens does
    return value if isinstance(value, int) else operator.index(value)


def _real(value: Any) -> float:
    if _is_bool(value) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError
    return float(value)


def _truth(value: Any) -> bool:
    if not _is_bool(value):
        raise TypeError
    return bool(value)


def _numbers(value: Any) -> Any:
    found = np.asarray(value) if isinstance(value, list | tuple) else value
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf":
        raise TypeError
    return found


def _anything(value: Any) -> Any:
    return value


def _of_type(*kinds: type) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return value

    return check


def _with_members(names: Sequence[str]) -> Check:
    def check(value: Any) -> Any:
        if isinstance(value, type) or not all(hasattr(value, name) for name in names):
            raise TypeError
        return value

    return check


def _each(check: Check, count: int | None) -> Check:
    def several(value: Any) -> tuple[Any, ...]:
        whole = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not whole or count not in (None, len(value)):
            raise TypeError
        return tuple(map(check, value))

    return several


def _either(checks: Sequence[Check]) -> Check:
    def either(value: Any) -> Any:
        for check in checks:
            try:
                return check(value)
            except (TypeError, ValueError):
                pass
        raise TypeError

    return either


PLAIN: dict[Any, tuple[str, Check]] = {
    int: ("a whole number", _whole),
    float: ("a number", _real),
    bool: ("True or False", _truth),
    str: ("a string", _of_type(str)),
    NoneType: ("None", _of_type(NoneType)),
    object: ("anything", _anything),
    Any: ("anything", _anything),
}


EXACT = (int, str, bool, inspect.Parameter.empty)  # values that are of such a type are let in as is


def _is_exactly(value: object, kind: Any) -> bool:
    return type(value) is kind or kind is inspect.Parameter.empty


def _check(annotation: Any, words: Mapping[Any, str]) -> tuple[str, Check]:
    """What a parameter of this annotation takes, in words, and the check of a value."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    if annotation is inspect.Parameter.empty:  # self
        return PLAIN[object]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        told, checks = zip(*(_check(a, words) for a in inner), strict=True)
        return " or ".join(told), _either(checks)
    if origin is type:
        return "NumPy's type", _of_type(type, np.dtype)
    if origin is np.ndarray:
        return "an array of numbers", _numbers
    if origin in (tuple, Sequence):
        one, check = _check(inner[0], words)
        count = len(inner) if origin is tuple and inner[-1] is not Ellipsis else None
        if " or " in one:
            return f"several, each {one}", _each(check, count)
        plural = one.split(" (")[0].removeprefix("a ").removeprefix("an ")
        plural += "es" if plural.endswith("s") else "s"
        return (f"{count} {plural}" if count else f"several {plural}"), _each(check, count)
    kind = origin or annotation
    if kind is Callable:
        return "a function", _of_type(Callable)
    named = words.get(kind, article(kind))
    if _is_protocol(kind):
        members = [n for n in {**get_type_hints(kind), **vars(kind)} if n[0] != "_"]
        return named, _with_members(members)
    return named, _of_type(kind)


def _is_protocol(annotation: Any) -> bool:
    """Whether a protocol, or a sequence or a choice with one."""
    return getattr(annotation, "_is_protocol", False) or any(
        _is_protocol(inner) for inner in get_args(annotation)
    )


def article(kind: type) -> str:
    """A class in a sentence: "an Explanation"."""
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


class _Record:
    """The fields of a class of records: what each takes, and how to walk what lies in it."""

    def __init__(self, kind: type) -> None:
        hints = get_type_hints(kind)
        self.names = tuple(f.name for f in fields(kind))
        self.get = operator.attrgetter(*self.names, "__class__")  # a tuple, of one field too
        self.checks = tuple(_check(hints[name], {}) for name in self.names)
        walks = tuple(_walk(hints[name], kind) for name in self.names)
        self.inner = tuple((i, walk) for i, walk in enumerate(walks) if walk is not None)
        self.known: set[tuple[type, ...]] = set()  # types of fields that were found to fit

    def unfit(self, value: Any, seen: set[int]) -> Unfit | None:
        """The first field that does not fit, if any. A record is walked once."""
        if id(value) in seen:
            return None
        seen.add(id(value))
        held = self.get(value)
        if (kinds := tuple(map(type, held))) not in self.known:
            for name, field, (expected, check) in zip(self.names, held, self.checks, strict=False):
                if not _passes(check, field):
                    return f".{name}", field, expected
            self.known.add(kinds)
        for i, walk in self.inner:
            if found := walk(held[i], seen):
                return f".{self.names[i]}{found[0]}", found[1], found[2]
        return None


_record = cache(_Record)


@cache
def _is_asked(kind: Any) -> bool:
    """Whether a class of records, but for one with a `__post_init__`, which asks for itself."""
    return is_dataclass(kind) and not hasattr(kind, "__post_init__")


def unfit(value: Any) -> Unfit | None:
    """What in a record, or in a record that it holds, is not of the kind that its class says."""
    return _record(value.__class__).unfit(value, set())


def fit(value: Any, error: type[GgraphError] = InputError) -> None:
    """`error` unless all of a record is of the kind that its class says: for `__post_init__`."""
    if found := unfit(value):
        where, got, expected = found
        raise error(f"{type(value).__name__}{where}: expected {expected}, got {shown(got)}")


def _passes(check: Check, value: object) -> bool:
    try:
        check(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _walk(annotation: Any, within: type) -> Walk | None:
    """How to walk what such a field holds; None where its type says all. A record `within` one of
    its own class is not walked: it is listed elsewhere as well."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        parts = [(_check(a, {})[1], _walk(a, within)) for a in inner]
        return _one_of(parts, _check(annotation, {})[0]) if any(walk for _, walk in parts) else None
    if origin in (tuple, Sequence, list, frozenset):
        return _items(_entry(inner[0], within))
    if origin in (Mapping, dict):
        return _table(_entry(inner[0], within), _entry(inner[1], within))
    if origin is np.ndarray:
        return lambda held, seen: None if _passes(_numbers, held) else ("", held, "numbers")
    if _is_asked(annotation) and annotation is not within:
        return lambda held, seen: _record(held.__class__).unfit(held, seen)
    return None


def _entry(annotation: Any, within: type) -> Walk:
    (expected, check), walk = _check(annotation, {}), _walk(annotation, within)
    known: set[type] = set()

    def one(value: Any, seen: set[int]) -> Unfit | None:
        if type(value) not in known:
            if not _passes(check, value):
                return "", value, expected
            known.add(type(value))
        return walk(value, seen) if walk is not None else None

    return one


def _items(entry: Walk) -> Walk:
    def all_of(held: Any, seen: set[int]) -> Unfit | None:
        for i, value in enumerate(held):
            if found := entry(value, seen):
                return f"[{i}]{found[0]}", found[1], found[2]
        return None

    return all_of


def _table(key: Walk, value: Walk) -> Walk:
    def all_of(held: Any, seen: set[int]) -> Unfit | None:
        for k, v in held.items():
            if found := key(k, seen) or value(v, seen):
                return f"[{shown(k)}]{found[0]}", found[1], found[2]
        return None

    return all_of


def _one_of(parts: Sequence[tuple[Check, Walk | None]], expected: str) -> Walk:
    whole: set[type] = set()  # types that say all

    def first(held: Any, seen: set[int]) -> Unfit | None:
        if type(held) in whole:
            return None
        for check, walk in parts:
            if _passes(check, held):
                if walk is not None:
                    return walk(held, seen)
                whole.add(type(held))
                return None
        return "", held, expected

    return first


def checked(
    build: F, error: type[GgraphError] = InputError, words: Mapping[Any, str] | None = None
) -> F:
    """`build` behind a check of what it is given; `error` for the rest. `words` say what is
    expected where a type's name would not do."""
    given = inspect.signature(build)
    known = {
        name: (p.kind, *_check(p.annotation, words or {}), not _is_protocol(p.annotation))
        for name, p in given.parameters.items()
    }

    gathers = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given.parameters.values())
    exact = [p.annotation for p in given.parameters.values()]
    quick = all(kind in EXACT for kind in exact)
    called = build.__qualname__.removesuffix(".__init__").rstrip("_")

    @cache
    def binds(count: int, names: tuple[str, ...]) -> bool:
        """Whether so many arguments by place and these by name are what it takes, one each."""
        try:
            given.bind(*[None] * count, **dict.fromkeys(names))
        except TypeError:
            return False
        return not gathers

    def pass_on(name: str, value: Any, expected: str, check: Check) -> Any:
        try:
            return check(value)
        except (TypeError, ValueError, OverflowError):
            raise error(f"{called}: {name}={shown(value)}: expected {expected}") from None

    def admit(name: str, value: Any) -> Any:
        kind, expected, check, is_walked = known[name]
        if kind is inspect.Parameter.VAR_KEYWORD:
            return {key: pass_on(key, one, expected, check) for key, one in value.items()}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple([pass_on(name, one, expected, check) for one in value])
        value = pass_on(name, value, expected, check)
        for record in value if isinstance(value, tuple) else (value,):
            if is_walked and _is_asked(record.__class__) and (found := unfit(record)):
                where, got, wanted = found
                raise error(f"{called}: {name}{where}={shown(got)}: expected {wanted}")
        return value

    @wraps(build)
    def call(*args: Any, **kwargs: Any) -> Any:
        whole = quick and not kwargs and len(args) == len(exact)
        if whole and all(map(_is_exactly, args, exact)):  # some are called for every token
            return build(*args)
        if binds(len(args), tuple(kwargs)):  # a third of the time that it takes to bind them
            return build(*map(admit, known, args), **{n: admit(n, v) for n, v in kwargs.items()})
        try:
            bound = given.bind(*args, **kwargs)
        except TypeError as missing:  # Python's own words do not say of what
            raise TypeError(f"{called}({', '.join(known)}): {missing}") from None
        for name, value in bound.arguments.items():
            bound.arguments[name] = admit(name, value)
        return build(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]  # the same calls
