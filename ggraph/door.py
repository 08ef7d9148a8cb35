"""What callers give to a public function, checked by what its signature says.

A function behind this door gets nothing but the kinds of values that it is annotated with: all
else is one error that names the function, the parameter and the value. NumPy's numbers become
Python's, lists of them tuples; of mappings and functions only that they are such is asked.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

from ggraph.errors import GgraphError, InputError

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[Any], Any]  # the value as Python's own, or TypeError


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _whole(value: Any) -> int:
    if _is_bool(value) or isinstance(value, np.ndarray):
        raise TypeError
    return operator.index(value)


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


def _check(annotation: Any, words: Mapping[Any, str]) -> tuple[str, Check]:
    """What a parameter of this annotation takes, in words, and the check of a value."""
    if annotation in PLAIN:
        return PLAIN[annotation]
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
        plural = one.split(" (")[0].removeprefix("a ") + "s"
        return (f"{count} {plural}" if count else f"several {plural}"), _each(check, count)
    kind = origin or annotation
    if kind is Callable:
        return "a function", _of_type(Callable)
    named = words.get(kind, f"a {kind.__name__}")
    return named, _of_type(kind)


def checked(
    build: F, error: type[GgraphError] = InputError, words: Mapping[Any, str] | None = None
) -> F:
    """`build` behind a check of what it is given; `error` for the rest. `words` say what is
    expected where a type's name would not do."""
    given = inspect.signature(build)
    known = {
        name: (p.kind, *_check(p.annotation, words or {})) for name, p in given.parameters.items()
    }

    def admit(name: str, value: Any) -> Any:
        kind, expected, check = known[name]
        try:
            if kind is inspect.Parameter.VAR_POSITIONAL:
                return tuple(map(check, value))
            return value if kind is inspect.Parameter.VAR_KEYWORD else check(value)
        except (TypeError, ValueError, OverflowError):
            called = build.__name__.rstrip("_")
            raise error(f"{called}: {name}={value!r:.60}: expected {expected}") from None

    @wraps(build)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = given.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = admit(name, value)
        return build(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]  # the same calls
