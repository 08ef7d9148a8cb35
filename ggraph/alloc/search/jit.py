"""The one place where this room meets numba: functions with a plain and a compiled form.

The plain form is what tests compare the machine's with. numba is an extra: planning does without
it, and this room says how to get it.

numba's own cache believes whatever lies in its folder and fails where it cannot write; so the
machine code is kept as everything else is (`ggraph/kept.py`), under a hash of this room's sources.
"""

import hashlib
import pickle
import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from ggraph.errors import AllocError
from ggraph.kept import folder, read, write
from ggraph.lazy import lazy

if TYPE_CHECKING:
    import numba
else:
    numba = lazy("numba")

P = ParamSpec("P")
R = TypeVar("R")


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Machine:
    """What numba asks for, and hands over, the machine code of one function by its signature."""

    cache_path = ""  # numba shows it to people

    def __init__(self, function: FunctionType) -> None:
        self._file = f"{function.__name__}.numba"
        versions = f"{sys.version}|{numba.__version__}|{_source_hash()}"
        self._key = f"{function.__qualname__}|{versions}"

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function for `target`; None where it was not kept."""
        target.refresh()  # else it does not know the types that are built in
        code = read(folder("search"), self._file, self._of(signature, target.codegen()))
        if code is None:
            return None
        return numba.core.compiler.CompileResult._rebuild(target, *pickle.loads(code))

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled function."""
        code = numba.core.serialize.dumps(result._reduce())
        key = self._of(signature, result.codegen)
        write(folder("search"), self._file, key, code)

    def _of(self, signature: Any, codegen: Any) -> str:
        return f"{self._key}|{signature}|{codegen.magic_tuple()}"


def _machine(function: FunctionType) -> Any:
    try:
        made = numba.njit(nogil=True)(function)
    except ModuleNotFoundError as error:
        raise AllocError(
            f"the search for a smaller arena (memory mode 'offline') needs {error.name}, which is "
            "not installed: pip install 'ggraph-runtime[search]'"
        ) from None
    made._cache = Machine(function)
    return made


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
        return self._form(_machine, "machine")

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
