"""Long lists of texts in one piece of memory.

A vocabulary of 49,000 tokens takes 4 MB as Python strings and 0.6 MB here; a text becomes a string
when it is asked for.
"""

from abc import abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Generic, TypeVar, overload
from zlib import crc32

import numpy as np

T = TypeVar("T", str, bytes)


class _Joined(Sequence[T], Generic[T]):
    """Items cut out of one `bytes` object; `_read` says what cut-outs are."""

    def __init__(self, items: Iterable[bytes]) -> None:
        held = items if isinstance(items, list) else list(items)
        self._bytes = b"".join(held)
        self._stops = array("q", accumulate(map(len, held), initial=0))

    @abstractmethod
    def _read(self, raw: Iterable[bytes]) -> Iterator[T]: ...

    def __len__(self) -> int:
        return len(self._stops) - 1

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, slice):
            return list(self._read(self._cuts(at)))
        i = at + len(self) if at < 0 else at
        if not 0 <= i < len(self):
            raise IndexError(f"item {at} of {len(self)}")
        return next(self._read((self._bytes[self._stops[i] : self._stops[i + 1]],)))

    def __iter__(self) -> Iterator[T]:
        return self._read(self._cuts(slice(None)))

    def _cuts(self, places: slice) -> Iterator[bytes]:
        starts, stops = self._stops[:-1][places], self._stops[1:][places]
        return map(self._bytes.__getitem__, map(slice, starts, stops))

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

    def _read(self, raw: Iterable[bytes]) -> Iterator[bytes]:
        return iter(raw)


class Texts(_Joined[str]):
    """A list of strings."""

    def __init__(self, items: Iterable[str]) -> None:
        super().__init__([t.encode("utf-8") for t in items])

    @classmethod
    def of_utf8(cls, items: list[bytes]) -> "Texts":
        """From texts that are encoded. UnicodeError where one is no UTF-8."""
        found = cls.__new__(cls)
        super(Texts, found).__init__(items)
        found._bytes.decode("utf-8")
        if any(item[0] & 0xC0 == 0x80 for item in items if item):
            raise UnicodeError("a text begins within a letter")
        return found

    def _read(self, raw: Iterable[bytes]) -> Iterator[str]:
        return map(bytes.decode, raw)

    def find(self, text: str) -> int | None:
        """The first place where `text` stands; None where it does not."""
        raw = text.encode("utf-8", "replace")
        sums, places = self._by_sum
        wanted = crc32(raw)
        for at in range(bisect_left(sums, wanted), len(sums)):
            if sums[at] != wanted:
                break
            if self[places[at]] == text:
                return places[at]
        return None

    @cached_property
    def _by_sum(self) -> tuple["array[int]", "array[int]"]:
        """Checksums in order, and whose they are: a twelfth of what a dictionary takes."""
        sums = np.fromiter(map(crc32, self._cuts(slice(None))), np.uint32, len(self))
        order = np.argsort(sums, kind="stable")
        return array("I", sums[order].tobytes()), array("i", order.astype(np.int32).tobytes())
