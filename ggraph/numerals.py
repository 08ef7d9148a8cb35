"""Numbers beside tensors: what is one, and what float32 makes of it. Imports errors alone."""

from math import copysign, frexp
from typing import TypeGuard

import numpy as np

from ggraph.errors import ShapeError, shown


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, Python's or NumPy's."""
    kinds = int | float | np.integer | np.floating
    return isinstance(value, kinds) and not isinstance(value, bool)


def real(value: float) -> float:
    """A number as Python's float. ShapeError for whole numbers that no float is near."""
    try:
        return float(value)
    except OverflowError:
        raise ShapeError(f"{shown(value, 20)}: beyond what a float can hold") from None


def has_reciprocal(value: float) -> bool:
    """Whether 1 / value is exact and a normal number of float32, as value is."""
    return abs(frexp(value)[0]) == 0.5 and 2.0**-126 <= abs(value) <= 2.0**126


def is_plus_0(value: float) -> bool:
    """Whether a number is 0, and not -0."""
    return value == 0 and copysign(1, value) > 0
