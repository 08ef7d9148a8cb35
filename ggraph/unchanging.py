"""What graphs and their tensors have in common: they never change."""

from typing import Any, NoReturn, Self

from ggraph.errors import GraphError


class Unchanging:
    """What never changes, so that a copy of it is itself. It is compared by identity, and its ops
    are functions, so that other processes have to make their own: GraphError where it is pickled.
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__.lower()
        raise GraphError(f"a {kind} cannot be pickled: make it in each process that needs it")
