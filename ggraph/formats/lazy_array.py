"""Arrays whose rows are made when they are read.

A device that keeps weights in a form of its own reads each of them once, a piece at a time. So a
weight that is not in its file as it is computed with, because it is in codes, its experts lie apart
or its rows in another order, need never be whole beside that form.

Legend: an array [.., k] has rows [k], numbered through all axes but the last.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ggraph.lazy import lazy

if TYPE_CHECKING:
    from concurrent import futures
else:
    futures = lazy("concurrent.futures")

Array = np.ndarray[Any, Any]
Read = Callable[[int, int], Array]  # rows first .. stop - 1 as [stop - first, k], by any thread
PIECE = 1 << 22  # numbers that are made at a time where all are wanted; bounds the temporaries


@dataclass(frozen=True, eq=False)
class LazyArray:
    """An array of this shape and type, of which `np.asarray` makes a new one at each call.

    `windows` are the arrays of which `read` makes rows. `whole` is the one of which this has some
    rows, one behind the other, where it is such a part.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Read = field(repr=False)
    windows: tuple[Array, ...] = field(default=(), repr=False)
    whole: "LazyArray | None" = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """How many numbers."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of them all."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """All of it. ValueError for what NumPy asks to be no copy."""
        if copy is False:
            raise ValueError(f"an array {list(self.shape)} that is made when it is read is a copy")
        n, k = prod(self.shape[:-1]), self.shape[-1]
        out = np.empty((n, k), self.dtype)
        for i in range(0, n if k else 0, step := max(PIECE // max(k, 1), 1)):
            out[i : i + step] = self.read(i, min(i + step, n))
        return out.reshape(self.shape).astype(dtype or self.dtype, copy=False)


Storage = Array | LazyArray


def rows_of(of: Storage) -> Read:
    """The function that reads rows; those of an array in memory are windows on it."""
    if isinstance(of, LazyArray):
        return of.read
    flat = of.reshape(-1, of.shape[-1])
    return lambda first, stop: flat[first:stop]


def windows_of(of: Storage) -> tuple[Array, ...]:
    """The arrays whose bytes it is made of."""
    return of.windows if isinstance(of, LazyArray) else (of,)


def row_numbers(of: Storage) -> Array:
    """The number of each row, in the shape of all axes but the last; of each value of a vector."""
    shape = of.shape[:-1] or of.shape
    return np.arange(prod(shape)).reshape(shape)


def taken(of: Storage, rows: Array) -> Storage:
    """The rows of these numbers [..], as [.., k]; of a vector the values. What lies together is a
    window; else runs of rows that do are read at once."""
    flat, shape = rows.reshape(-1), (*rows.shape, *of.shape[-1:])
    if len(of.shape) == 1:
        return np.asarray(of)[rows]
    if not flat.size:
        return np.zeros(shape, of.dtype)
    read, first = rows_of(of), int(flat[0])
    if np.array_equal(flat, np.arange(first, first + flat.size)):
        if not isinstance(of, LazyArray):
            return read(first, first + flat.size).reshape(shape)

        def part(i: int, j: int) -> Array:
            return read(first + i, first + j)

        return LazyArray(shape, of.dtype, part, of.windows, of.whole or of)

    def gathered(i: int, j: int) -> Array:
        own = flat[i:j]
        runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
        return _joined([read(int(run[0]), int(run[-1]) + 1) for run in runs])

    return LazyArray(shape, of.dtype, gathered, windows_of(of))


def columns_taken(of: Storage, order: Array) -> Storage:
    """Of each row [k] the values at these places, in this order."""
    read, shape = rows_of(of), (*of.shape[:-1], len(order))
    return LazyArray(shape, of.dtype, lambda i, j: read(i, j)[:, order], windows_of(of))


def stacked(parts: Sequence[Storage]) -> Storage:
    """Arrays of one shape and type as one with an axis more, in front."""
    first, readers = parts[0], [rows_of(p) for p in parts]
    n, shape = prod(first.shape[:-1]), (len(parts), *first.shape)
    if not prod(shape):
        return np.zeros(shape, first.dtype)

    def read(i: int, j: int) -> Array:
        each = range(i // n, -(-j // n))
        return _joined([readers[p](max(i - p * n, 0), min(j - p * n, n)) for p in each])

    return LazyArray(shape, first.dtype, read, tuple(w for p in parts for w in windows_of(p)))


def pieces(of: Storage, crew: int) -> Iterator[Array]:
    """All rows in order, some at a time. Those of an array that is made when it is read are made by
    `crew` threads, of which none is further ahead than the others are many."""
    if not isinstance(of, LazyArray):
        yield of
        return
    n, k = prod(of.shape[:-1]), of.shape[-1]
    step = max(PIECE // max(k, 1), 1)
    starts = range(0, n if k else 0, step)
    with futures.ThreadPoolExecutor(crew) as threads:
        waiting = deque[futures.Future[Array]]()
        for i in starts:
            waiting.append(threads.submit(of.read, i, min(i + step, n)))
            if len(waiting) > crew:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
