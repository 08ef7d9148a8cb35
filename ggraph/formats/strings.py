"""Long lists of texts in one piece of memory.

A vocabulary of 49,000 tokens takes 4 MB as Python strings and 0.6 MB here; a text becomes a string
when it is asked for.
"""

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T", str, bytes)


class _Joined(Sequence[T], Generic[T]):
    """Items cut out of one `bytes` object; `_item` says what a cut-out is."""

    def __init__(self, items: Iterable[bytes]) -> None:
        joined, stops = bytearray(), array("q", [0])
        for item in items:
            joined += item
            stops.append(len(joined))
        self._bytes, self._stops = bytes(joined), stops

    @abstractmethod
    def _item(self, raw: bytes) -> T: ...

    def __len__(self) -> int:
        return len(self._stops) - 1

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = at + len(self) if at < 0 else at
        if not 0 <= i < len(self):
            raise IndexError(f"item {at} of {len(self)}")
        return self._item(self._bytes[self._stops[i] : self._stops[i + 1]])

    def __eq__(self, other: object) -> bool:
        """Item by item, with any sequence but a single text."""
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list: it is compared by its items

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items, {len(self._bytes)} bytes)"


class Pieces(_Joined[bytes]):
    """A list of byte strings."""

    def _item(self, raw: bytes) -> bytes:
        return raw


class Texts(_Joined[str]):
    """A list of strings."""

    def __init__(self, items: Iterable[str]) -> None:
        super().__init__(t.encode("utf-8") for t in items)

    def _item(self, raw: bytes) -> str:
        return raw.decode("utf-8")
