"""The verifier's ranges and clocks by themselves, against their definitions."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ggraph.verify.clocks import Clocks
from ggraph.verify.spans import Disjoint, first_and_last, meetings, merged

RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """By the bytes themselves."""
    return not set(range(*one)).isdisjoint(range(*other))


@given(RANGES)
def test_a_range_is_disjoint_or_meets_one_that_was_added(ranges: list[tuple[int, int]]) -> None:
    known, added = Disjoint(), list[tuple[int, int]]()
    for r in ranges:
        apart = not any(overlap(r, other) for other in added)
        assert known.add(*r) == apart, (r, added)
        added += [r] if apart else []


@given(RANGES, RANGES)
def test_ranges_meet_where_they_share_a_byte(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    a, b = ([(*r, i) for i, r in enumerate(ranges)] for ranges in (one, other))
    found = list(meetings(a, b))
    assert len(found) == len(set(found))
    assert set(found) == {(i, j) for i, r in enumerate(one) for j, s in enumerate(other)
                          if overlap(r, s)}  # fmt: skip


SOME = st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1]))


@given(st.lists(SOME, max_size=6))
def test_merged_ranges_are_the_same_bytes_and_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    found = merged(ranges)
    assert {b for r in found for b in range(*r)} == {b for r in ranges for b in range(*r)}
    assert all(start < stop for start, stop in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))


@given(st.dictionaries(SOME, st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6))
def test_each_byte_has_the_first_and_the_last_number_of_what_covers_it(
    uses: dict[tuple[int, int], tuple[int, int]],
) -> None:
    wanted = Counter(
        (min(uses[r][0] for r in over), max(uses[r][1] for r in over))
        for byte in range(20)
        if (over := [r for r in uses if byte in range(*r)])
    )
    found = Counter[tuple[int, int]]()
    for nbytes, first, last in first_and_last(uses):
        found[first, last] += nbytes
    assert found == wanted


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_runs_end_complete_where_the_host_has_heard_of_all_work(
    work: list[int], runs: int, data: st.DataObject
) -> None:
    """`work` commands of each stream, and one of the host behind them that hears of some."""
    streams = range(1, len(work) + 1)
    heard = [[0, *(data.draw(st.integers(n * k, n * (k + 1))) for n in work)] for k in range(runs)]
    if data.draw(st.booleans()):
        heard = [[0, *(n * (k + 1) for n in work)] for k in range(runs)]
        if data.draw(st.booleans()):
            k, a = data.draw(st.integers(0, runs - 1)), data.draw(st.sampled_from(streams))
            heard[k][a] = max(0, heard[k][a] - 1)
    actor, place, others = list[int](), list[int](), list[list[int]]()
    for k in range(runs):
        for a, n in zip(streams, work, strict=True):
            actor += [a] * n
            place += range(k * n + 1, (k + 1) * n + 1)
            others += [[0] * (len(work) + 1) for _ in range(n)]
        actor, place, others = [*actor, 0], [*place, k + 1], [*others, heard[k]]
    whole = [[0, *(n * (k + 1) for n in work)] for k in range(runs)]
    assert Clocks(actor, place, others).ends_complete(runs) == (heard == whole)


def test_runs_without_the_host_never_end_complete() -> None:
    assert not Clocks([1], [1], [[0, 0]]).ends_complete(1)
    assert Clocks([], [], []).ends_complete(1)
