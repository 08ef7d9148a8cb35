"""The one place where this room meets numba: functions with a plain and a compiled form.

Loading numba and one cached function costs about 0.3 s and 30 MB, more than planning a model by
plain Python; so callers take `plain` for small problems and call the function itself for others.
"""

from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from ggraph.lazy import lazy

if TYPE_CHECKING:
    import numba
else:
    numba = lazy("numba")

P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """A function of plain loops over arrays. Calling it runs cached machine code.

    In either form, the other functions of this kind that it calls are of the same form.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        assert isinstance(function, FunctionType), function
        self.source = function
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.machine(*args, **kwargs)
        return result

    @cached_property
    def machine(self) -> Any:
        """numba's form, compiled or loaded at its first call."""
        return self._form(numba.njit(cache=True, nogil=True), "machine")

    @cached_property
    def plain(self) -> Callable[P, R]:
        """Ordinary Python; arrays may be given as lists, which it reads faster."""
        made: Callable[P, R] = self._form(lambda f: f, "plain")
        return made

    def _form(self, finish: Callable[[FunctionType], Any], form: str) -> Any:
        """The function in a scope of its own, in which its companions are of the same form."""
        f, scope = self.source, dict(self.source.__globals__)
        copied = FunctionType(f.__code__, scope, f.__name__, f.__defaults__, f.__closure__)
        copied.__module__, copied.__qualname__ = f.__module__, f.__qualname__
        made = finish(copied)
        self.__dict__[form] = made  # it may call itself
        for name in f.__code__.co_names:
            if isinstance(scope.get(name), Compiled):
                scope[name] = getattr(scope[name], form)
        return made


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Decorator: `function` in both forms."""
    return Compiled(function)
