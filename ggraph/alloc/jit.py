"""The one place where this room meets numba: a typed decorator. Floor 6."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function` as machine code, cached beside its source; it must be plain loops over arrays."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))
