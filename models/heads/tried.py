"""Steps of a head that are built while it is opened, so that a tensor that is missing, misshapen or
of no use is refused at once."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ggraph import Graph, ModelError
from ggraph.decode.draft.head import DraftShape
from ggraph.formats.checkpoint import RawTensor
from ggraph.tensor import Kind


class Tried(Protocol):
    """What a head has for it."""

    PREFIX: str

    @property
    def catalogue(self) -> Mapping[str, RawTensor]:
        """Its own tensors."""
        ...

    def build(self, shape: DraftShape) -> Graph:
        """The graph of one draft step."""
        ...


BOTH = (DraftShape(2, 2, 1, 3, False), DraftShape(2, 2, 1, 3, True))
"""A step behind the target, and one of what the head made itself."""


def attempt(
    head: Tried,
    where: Path | str,
    what: str,
    shapes: Sequence[DraftShape] = BOTH,
    spare: Callable[[str], object] = lambda name: False,
) -> None:
    """Build steps of these shapes. ModelError, from `where`, for what no step can be built of, and
    for tensors that none uses and that are not `spare`."""
    used: set[str] = set()
    for shape in shapes:
        try:
            graph = head.build(shape)
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from error
        used |= {t.name.removeprefix(head.PREFIX) for t in graph.leaves(Kind.WEIGHT)}
    needless = [n for n in head.catalogue if n not in used and not spare(n)]
    if needless:
        raise ModelError(f"{where}: no place for tensor {needless[0]!r} in this {what}")
