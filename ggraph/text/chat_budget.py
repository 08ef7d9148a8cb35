"""Work that a template may cause, counted in units.

A chat template is a program out of a downloaded file. It cannot be trusted to end, so everything it
does is paid for: a unit is about one step of the interpreter, one element of a list or 16 letters.
The count does not depend on the machine, so the same template always ends the same way. What is
paid where is in chat_sandbox.py.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

LETTERS = 16  # letters per unit: copying so many costs about as much as one step
MAX_LETTERS = 1 << 23  # of one string; four million tokens of prompt are shorter
MAX_BITS = 256  # of one whole number
MAX_COUNT = 10_000  # columns, padding and widths that a template may ask for
_SIZED = (list, tuple, dict, range)


class TooMuchWork(Exception):
    """A template asked for more than its budget or for a value beyond any use."""


class Budget:
    """Units left to one rendering."""

    def __init__(self, units: int) -> None:
        self.left = units

    def spend(self, units: int) -> None:
        """Pay. TooMuchWork when nothing is left."""
        self.left -= units
        if self.left < 0:
            raise TooMuchWork("it takes too much work (a loop or a value without bounds?)")


BUDGET: ContextVar[Budget] = ContextVar("ggraph_template_budget")
"""The budget of the rendering in progress; context-local, so that threads do not share it."""


def spend(units: int) -> None:
    """Pay from the current budget. TooMuchWork when nothing is left."""
    BUDGET.get().spend(units)


def letters(count: int) -> int:
    """Units of a string of `count` letters. TooMuchWork when none may be that long."""
    if count > MAX_LETTERS:
        raise TooMuchWork(f"a string of {count} letters (at most {MAX_LETTERS})")
    return 1 + count // LETTERS


def weigh(value: Any) -> int:
    """Pay for going through all of `value`, shared parts as often as they occur; the units paid.

    Printing, comparing and copying cost no more than this, so it is called before them.
    """
    total, budget, stack = 0, BUDGET.get(), [value]
    while stack:
        v = stack.pop()
        units = size(v)
        total += units
        budget.spend(units)
        stack.extend(_parts(v))
    return total


def size(value: Any) -> int:
    """Units of the outermost layer of `value`."""
    if isinstance(value, str | bytes):
        return letters(len(value))
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise TooMuchWork(f"a number of {value.bit_length()} bits (at most {MAX_BITS})")
        return 1
    if isinstance(value, _SIZED):
        return 1 + len(value)
    return 4 if isinstance(value, Namespace) else 1  # its inside is slow to look at


def count_of(value: Any) -> int:
    """`value` as a width or count. TooMuchWork when it is beyond use."""
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise TooMuchWork(f"a width or count of {value} (at most {MAX_COUNT})")
    return int(value) if isinstance(value, int) else 0


class Counted:
    """An iterable whose every item costs `units`. Has a length where the inner one has."""

    def __init__(self, inner: Any, units: int) -> None:
        self._inner = inner
        self.units = units

    def __iter__(self) -> Iterator[Any]:
        budget = BUDGET.get()
        for item in self._inner:
            budget.spend(self.units)
            yield item

    def __len__(self) -> int:
        return len(self._inner)


def settled(value: Any) -> Any:
    """`value`, or a list of what it yields: an iterator cannot be weighed before it is used."""
    return list(Counted(value, 1)) if isinstance(value, Iterator) else value


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, str | int):
        return ()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, Namespace):
        # Printing a namespace prints what it holds, so it cannot hide a large value.
        return tuple(object.__getattribute__(value, "_Namespace__attrs").values())
    return ()
