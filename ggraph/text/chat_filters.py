"""Filters, tests and functions for chat templates, each with its price.

Everything a template can call is here or priced here, on the terms of chat_budget.py: a call pays
for going through its arguments and for what it makes, before it makes it wherever the size can be
known. What is not listed does not exist for a template. The environment that uses these is in
chat_sandbox.py.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2 import filters as jinja_filters
from jinja2 import tests as jinja_tests
from jinja2.runtime import Context
from jinja2.utils import Cycler, Joiner, Namespace, pass_context

from ggraph.text.chat_budget import (
    LETTERS,
    Counted,
    TooMuchWork,
    count_of,
    letters,
    settled,
    size,
    spend,
    weigh,
)

FILTERS: dict[str, Any] = dict(jinja_filters.FILTERS)
TESTS: dict[str, Any] = dict(jinja_tests.TESTS)


def words(text: str) -> frozenset[str]:
    """The words of `text`, as a set of names."""
    return frozenset(text.split())


_LOOKUPS = words("get items keys values")
# str methods whose time is the product of both lengths (CPython searches backwards naively).
_PRODUCTS = words("strip lstrip rstrip rfind rindex rsplit rpartition")

# Filters by what they cost: one look, one layer, or all of their arguments.
_LOOKING = words("default d first last length count")
_SHALLOW = words("list items reverse map select reject selectattr rejectattr")
_DEEP = words(
    "abs batch capitalize center dictsort e escape float groupby indent int join lower max min"
    " replace round safe slice sort string sum title tojson trim truncate unique upper wordcount"
)
_DEEP_TESTS = words("in eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= lower upper")
_WIDTHS = {"batch": "linecount", "center": "width", "slice": "slices", "truncate": "length"}


class Refusal(TemplateError):
    """The template itself refused its input (raise_exception)."""


def priced_filters() -> dict[str, Any]:
    """Every filter a template may use. Those with @ come from the rewritten syntax tree."""
    filters = {n: _priced(FILTERS[n], _pay_look) for n in _LOOKING}
    filters |= {n: _priced(FILTERS[n], _pay_layer) for n in _SHALLOW}
    filters |= {n: _priced(FILTERS[n], weigh, _WIDTHS.get(n)) for n in _DEEP}
    filters |= {"tojson": _tojson, "join": _join, "replace": _replace, "indent": _indent}
    filters |= {"round": _round, "sum": _sum, "trim": _trim}
    return filters | {"@loop": Counted, "@weigh": _weighed, "@spend": spend, "@concat": _concat}


def priced_tests() -> dict[str, Any]:
    """Every test (`is ...`) a template may use."""
    return {n: _priced(f, weigh if n in _DEEP_TESTS else _pay_look) for n, f in TESTS.items()}


def template_globals() -> dict[str, Any]:
    """Every function a template finds."""
    return {
        "range": _range,
        "namespace": Namespace,
        "dict": dict,
        "cycler": Cycler,
        "joiner": Joiner,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }


@pass_context
def finalize(context: Context, value: Any) -> Any:
    """What is printed, once its text is paid for."""
    # Taking the context also keeps jinja2 from printing constants at compile time.
    weigh(value)
    return value


def _weighed(value: Any) -> Any:
    value = settled(value)
    weigh(value)
    return value


def _concat(parts: Iterable[Any]) -> str:
    texts = [str(_weighed(part)) for part in parts]
    spend(letters(sum(map(len, texts))))
    return "".join(texts)


def _priced(
    function: Callable[..., Any], pay: Callable[[Any], Any], width: str | None = None
) -> Callable[..., Any]:
    """A filter or test that pays before it runs, and for what it makes.

    `width` names the argument that is a number of columns or parts.
    """

    @wraps(function)  # keeps jinja2's mark of who wants the context
    def priced(*args: Any, **kwargs: Any) -> Any:
        if pay is weigh:
            args = tuple(settled(a) for a in args)
        for value in (*args, *kwargs.values()):
            pay(value)
        if width is not None:
            for value in (*args[1:], kwargs.get(width)):
                count_of(value)
        result = function(*args, **kwargs)
        spend(size(result))
        return result

    return priced


def _pay_look(value: Any) -> None:
    spend(1)


def _pay_layer(value: Any) -> None:
    # Letter by letter: these filters take strings apart.
    spend(2 * (len(value) if isinstance(value, str) else size(value)))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: not escaped for HTML."""
    value = _weighed(value)
    if len(str(indent)) > 64 or count_of(indent) > 64 or len(str(separators)) > 64:
        raise TooMuchWork(f"JSON with indent {str(indent)[:20]!r}, {str(separators)[:20]!r}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    chunks: list[str] = []
    total = 0
    for chunk in encoder.iterencode(value):  # indentation depends on depth: paid as it comes
        chunks.append(chunk)
        total += len(chunk)
        spend(letters(len(chunk)))
        letters(total)
    return "".join(chunks)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: Any = None) -> Any:
    items, separator = list(Counted(value, 1)), str(_weighed(d))
    weigh(items)
    spend(letters(len(items) * len(separator)))
    return FILTERS["join"](context.eval_ctx, items, separator, attribute)


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: Any = None) -> Any:
    text, old, new = (str(_weighed(v)) for v in (s, old, new))
    _pay_replace(text, old, new)
    return FILTERS["replace"](context.eval_ctx, s, old, new, count)


def _pay_replace(text: str, old: str, new: str) -> None:
    spend(letters(len(text) + text.count(old) * len(new)))


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    text = str(_weighed(s))
    columns = len(str(_weighed(width))) if isinstance(width, str) else count_of(width)
    spend(letters(len(text) + columns * (1 + len(text.splitlines()))))
    return FILTERS["indent"](s, width, first, blank)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    spend(size(value))
    if not isinstance(precision, int) or abs(precision) > 300:
        raise TooMuchWork(f"round to {str(precision)[:20]} places")
    return FILTERS["round"](value, precision, method)


@pass_context
def _sum(context: Context, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise TooMuchWork(f"a sum that starts with a {type(start).__name__}")
    return FILTERS["sum"](context.environment, _weighed(iterable), attribute, start)


def _trim(value: Any, chars: str | None = None) -> str:
    text = str(_weighed(value))
    spend(len(text) * len(chars or "") // LETTERS)
    return text.strip(chars)


def _range(*args: int) -> range:
    value = range(*args)
    spend(1)
    if len(value) > 1 << 20:
        raise TooMuchWork(f"a range of {len(value)} numbers")
    return value


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise TooMuchWork(f"a date format of {len(form)} letters")
    return datetime.now().strftime(form)


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Pay for `left operator right`. TooMuchWork when the result would be beyond use."""
    spend(size(left) + size(right))
    if operator == "*":
        _check_product(left, right)
    elif operator == "**":
        _check_power(left, right)
    elif operator == "%" and isinstance(left, str):
        check_format(left, "%", right)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        letters(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    times, value = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(times, int) and isinstance(value, str | bytes):
        spend(letters(len(value) * max(times, 0)))
    elif isinstance(times, int) and isinstance(value, list | tuple):
        spend(len(value) * max(times, 0))


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > 256:
        raise TooMuchWork(f"{base} ** {exponent}")


def check_format(template: str, mark: str, values: Any) -> None:
    """Formatting can repeat a value and pad it: refuse widths of five digits and computed ones."""
    if len(template) > 2000:
        raise TooMuchWork(f"a format of {len(template)} letters (at most 2000)")
    if re.search(r"\d{5}", template) or re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{", template):
        raise TooMuchWork(f"a width or count in the format {template[:40]!r}")
    spend((weigh(values) + letters(9999)) * template.count(mark))


def pay_call(obj: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Pay for a call that is none of a macro or loop; the arguments to use."""
    spend(5)
    owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
    given = [*args, *kwargs.values()]
    for value in given:
        weigh(value)
    if isinstance(owner, str):
        _pay_str_method(owner, name, given)
    elif isinstance(owner, list | tuple) or (isinstance(owner, dict) and name not in _LOOKUPS):
        weigh(owner)
    return args


def _pay_str_method(text: str, name: str, args: list[Any]) -> None:
    spend(letters(len(text)))
    texts = [a for a in args if isinstance(a, str)]
    if name in _PRODUCTS and texts:
        spend(len(text) * len(texts[0]) // LETTERS)
    if name in ("split", "rsplit") and texts and texts[0]:
        spend(2 * text.count(texts[0]))
    elif name in ("split", "rsplit", "splitlines"):
        spend(len(text) // 2)
    elif name in ("center", "ljust", "rjust", "zfill"):
        spend(letters(count_of(args[0] if args else 0)))
    elif name == "replace" and len(texts) >= 2:
        _pay_replace(text, texts[0], texts[1])
    elif name == "join" and args:
        spend(letters(len(text) * size(args[0])))
