"""Heavy packages that most runs never touch, imported when first asked for something.

    if TYPE_CHECKING:
        import networkx as nx
    else:
        nx = lazy("networkx")

The import still stands at the top of its file, where people and linters look for it; what moves is
its cost (0.1 to 0.3 s and 20 to 30 MB each), which a run that prints one answer need not pay.
"""

import importlib
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    """Stands for a module until an attribute is wanted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy(name: str) -> ModuleType:
    """The package `name`, not imported yet. ImportError comes with the first use."""
    return _Lazy(name)
