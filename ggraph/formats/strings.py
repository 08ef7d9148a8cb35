"""Long lists of texts in one piece of memory.

A vocabulary of 49,000 tokens takes 4 MB as Python strings and 0.6 MB here; a text becomes a string
when it is asked for.
"""

from abc import abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Generic, TypeVar, overload

import numpy as np

from ggraph.tensor import Array

T = TypeVar("T", str, bytes)

ABSENT = -1
_BASE = 0x9E3779B97F4A7C15  # any odd number of 64 bits without a pattern
_WHOLE = 1 << 64
_INVERSE = pow(_BASE, -1, _WHOLE)
_BLOCK = 1 << 16  # bytes whose powers of the base are in memory at a time


def checksums(raw: bytes, *marks: Array) -> list[Array]:
    """Of the bytes b between each mark and the one in its place in the next list the sum of
    (b[i] + 1) BASE**i modulo 2**64 (i from 0), u64. Marks ascend in their lists.

    Two of a vocabulary's texts agree by a chance of some 1e-9; texts of a thousand letters can be
    made that do.
    """
    powers, inverse = (_powers(b, min(_BLOCK, len(raw))) for b in (_BASE, _INVERSE))
    before = [np.empty(len(m), np.uint64) for m in marks]  # the sum of all bytes before a mark
    turn = [np.empty(len(m), np.uint64) for m in marks]  # what takes it for a beginning
    total, grown, shrunk = (np.full(1, n, np.uint64) for n in (0, 1, 1))
    for first in range(0, len(raw) + 1, _BLOCK):
        some = np.frombuffer(raw[first : first + _BLOCK], np.uint8) + np.uint64(1)
        sums = np.append(total, total + grown * np.cumsum(some * powers[: len(some)]))
        turns = shrunk * inverse
        for m, sum_before, turned in zip(marks, before, turn, strict=True):
            here = slice(*np.searchsorted(m, (first, first + _BLOCK)))
            sum_before[here] = sums[m[here] - first]
            turned[here] = turns[m[here] - first]
        total, grown, shrunk = sums[-1:], grown * powers[-1], turns[-1:]
    return [(stop - start) * by for (start, stop), by in zip(pairwise(before), turn, strict=False)]


def _powers(base: int, most: int) -> Array:
    factors = np.full(most + 1, base, np.uint64)
    factors[0] = 1
    powers: Array = np.cumprod(factors)
    return powers


def joined_checksums(first: Array, lengths: Array, second: Array) -> Array:
    """The `checksums` of texts, each made of a first of so many bytes and a second."""
    both: Array = first + second * np.power(np.uint64(_BASE), lengths.astype(np.uint64))
    return both


class _Joined(Sequence[T], Generic[T]):
    """Items cut out of one `bytes` object; `_read` says what cut-outs are."""

    def __init__(self, items: Iterable[bytes]) -> None:
        held = items if isinstance(items, list) else list(items)
        self.joined = b"".join(held)
        self._stops = array("q", accumulate(map(len, held), initial=0))

    @property
    def bounds(self) -> Array:
        """Where in `joined` each item begins and, at the next place, stops: i64 [items + 1]."""
        return np.frombuffer(self._stops, np.int64)

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
        return next(self._read((self.joined[self._stops[i] : self._stops[i + 1]],)))

    def __iter__(self) -> Iterator[T]:
        return self._read(self._cuts(slice(None)))

    def _cuts(self, places: slice) -> Iterator[bytes]:
        starts, stops = self._stops[:-1][places], self._stops[1:][places]
        return map(self.joined.__getitem__, map(slice, starts, stops))

    def __eq__(self, other: object) -> bool:
        """Item by item, with any sequence but a single text."""
        if isinstance(other, str | bytes) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list: it is compared by its items

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items, {len(self.joined)} bytes)"


class Pieces(_Joined[bytes]):
    """A list of byte strings."""

    def _read(self, raw: Iterable[bytes]) -> Iterator[bytes]:
        return iter(raw)


class Texts(_Joined[str]):
    """A list of strings."""

    def __init__(self, items: Iterable[str]) -> None:
        super().__init__([t.encode("utf-8") for t in items])

    @classmethod
    def of_utf8(cls, raw: bytes, bounds: Array, skipped: int = 0) -> "Texts":
        """From texts one behind the other, each with so many bytes before it that are not its own.
        UnicodeError where one is no UTF-8."""
        own = np.ones(len(raw), bool)
        for place in range(skipped):
            own[bounds[:-1] + place] = False
        found = cls.__new__(cls)
        found.joined = np.frombuffer(raw, np.uint8)[own].tobytes()
        found._stops = array("q", (bounds - skipped * np.arange(len(bounds))).tobytes())
        found.joined.decode("utf-8")
        begins = found.bounds[:-1][np.diff(found.bounds) > 0]
        if (np.frombuffer(found.joined, np.uint8)[begins] & 0xC0 == 0x80).any():
            raise UnicodeError("a text begins within a letter")
        return found

    def _read(self, raw: Iterable[bytes]) -> Iterator[str]:
        return map(bytes.decode, raw)

    def encoded(self) -> list[bytes]:
        """All of them in UTF-8."""
        return list(self._cuts(slice(None)))

    def find(self, text: str) -> int | None:
        """The first place where `text` stands; None where it does not."""
        wanted = 0
        for byte in reversed(text.encode("utf-8", "replace")):
            wanted = (wanted * _BASE + byte + 1) % _WHOLE
        sums, places = self._by_sum
        for at in range(bisect_left(sums, wanted), len(sums)):
            if sums[at] != wanted:
                break
            if self[places[at]] == text:
                return places[at]
        return None

    def find_sums(self, sums: Array) -> Array:
        """The first places i64 of texts with these `checksums`, ABSENT where there are none."""
        if not len(self):
            return np.full(len(sums), ABSENT)
        known, places = (np.frombuffer(a, a.typecode) for a in self._by_sum)
        at = np.searchsorted(known[:-1], sums)
        return np.where(known[at] == sums, places[at].astype(np.int64), ABSENT)

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Two places of each text that stands twice."""
        sums, places = (np.frombuffer(a, a.typecode) for a in self._by_sum)
        for at in np.flatnonzero(sums[1:] == sums[:-1]).tolist():
            first, second = places[at : at + 2].tolist()
            if self[first] == self[second]:
                yield first, second

    @cached_property
    def _by_sum(self) -> tuple["array[int]", "array[int]"]:
        """Checksums in order, and whose they are: an eighth of what a dictionary takes."""
        (sums,) = checksums(self.joined, self.bounds[:-1], self.bounds[1:])
        order = np.argsort(sums, kind="stable")
        return array("Q", sums[order].tobytes()), array("i", order.astype(np.int32).tobytes())
