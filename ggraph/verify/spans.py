"""Which of many byte ranges overlap, without comparing every two of them."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise

Span = tuple[int, int, int]  # first byte, past the last, whose


class Disjoint:
    """Ranges of which no two overlap; `add` says whether a further one keeps to that."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> bool:
        """Whether [start, stop) meets none of the ranges; it is one of them from then on."""
        if start >= stop:
            return True
        i = bisect_right(self._starts, start)
        before = i == 0 or self._stops[i - 1] <= start
        after = i == len(self._starts) or stop <= self._starts[i]
        if before and after:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)
        return before and after


def meetings(one: Sequence[Span], other: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Whose ranges of `one` and of `other` overlap, as (one, other), each pair once per overlap.

    Time: sorting, and one step for each pair that overlaps, or that a longer range of its own list
    hides from view.
    """
    if len(one) == 1:  # a launch's only result, say
        ((start, stop, who),) = one
        met = [s for s in other if start < s[1] and s[0] < stop and s[0] < s[1] and start < stop]
        yield from ((who, s[2]) for s in sorted(met))
        return
    firsts, seconds = sorted(one), sorted(other)
    open_first: list[Span] = []
    open_second: list[Span] = []
    i = j = 0
    while i < len(firsts) or j < len(seconds):
        if j == len(seconds) or (i < len(firsts) and firsts[i][0] <= seconds[j][0]):
            span, i = firsts[i], i + 1
            open_second = [s for s in open_second if s[1] > span[0]]
            yield from ((span[2], s[2]) for s in open_second if span[0] < span[1])
            open_first.append(span)
        else:
            span, j = seconds[j], j + 1
            open_first = [s for s in open_first if s[1] > span[0]]
            yield from ((s[2], span[2]) for s in open_first if span[0] < span[1])
            open_second.append(span)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as ranges that do not touch, in order."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def first_and_last(uses: Mapping[tuple[int, int], tuple[int, int]]) -> Iterator[Span]:
    """The ranges cut where any of them begins or ends: bytes of each part, and the least first and
    the largest last number of the ranges that cover it. Gaps are left out."""
    if len(uses) == 1:
        (((start, stop), (first, last)),) = uses.items()
        yield stop - start, first, last
        return
    waiting = sorted((start, stop, *numbers) for (start, stop), numbers in uses.items())
    first_of: list[tuple[int, int]] = []  # heaps: first number, stop; minus last number, stop
    last_of: list[tuple[int, int]] = []
    k = 0
    for start, end in pairwise(sorted({at for span in uses for at in span})):
        while k < len(waiting) and waiting[k][0] <= start:
            heappush(first_of, (waiting[k][2], waiting[k][1]))
            heappush(last_of, (-waiting[k][3], waiting[k][1]))
            k += 1
        for heap in (first_of, last_of):
            while heap and heap[0][1] <= start:
                heappop(heap)
        if first_of:
            yield end - start, first_of[0][0], -last_of[0][0]
