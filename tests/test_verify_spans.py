"""The verifier's ranges, histories and clocks by themselves, against their definitions."""

from collections import Counter
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st
from plan_brute import happens_before

from ggraph.plan import HOST_ACTOR, Actor, Command, Do
from ggraph.verify.clocks import Clocks, clocks
from ggraph.verify.segments import History, Tag
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


@given(
    st.dictionaries(
        SOME | st.integers(0, 9).map(lambda at: (at, at)),
        st.tuples(st.integers(0, 20), st.integers(0, 20)),
        max_size=6,
    )
)
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


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), max_size=8)


@given(st.integers(0, 8), STEPS)
def test_a_history_is_that_of_each_byte(nbytes: int, steps: list[tuple[bool, int, int]]) -> None:
    """Writes and reads of ranges, also of none: each byte knows its last write and its readers."""
    history = History(nbytes)
    known: list[tuple[Tag | None, int, dict[int, int]]] = [(None, -1, {}) for _ in range(nbytes)]
    for u, (writes, begin, end) in enumerate([*steps, (False, 0, nbytes)]):
        start, stop = min(begin, nbytes), min(end, nbytes)
        if writes:
            history.write(start, stop, ("v", u), u)
        for b in range(start, stop):
            known[b] = (("v", u), u, {}) if writes else known[b]
        found = history.within(start, stop)
        assert [b for s in found for b in range(s.start, s.stop)] == list(range(start, stop))
        for s in found:
            assert s.start < s.stop
            assert all(known[b] == (s.tag, s.writer, s.readers) for b in range(s.start, s.stop))
            s.readers[u % 2] = u
        for b in range(start, stop):
            known[b][2][u % 2] = u


STREAMS = (Actor("a", 0), Actor("a", 1), Actor("b", 0))
ORDERING = (
    *(Command(do, s, "x", event=f"{s.device}{n}") for s in STREAMS for do in (Do.RECORD,)
      for n in "12"),
    *(Command(Do.WAIT, s, "x", event=e) for s in STREAMS for e in ("a1", "a2", "b1", "b2")),
    *(Command(Do.HOST_SYNC, HOST_ACTOR, "x", event=e) for e in ("a1", "b1")),
    *(Command(Do.HOST_SYNC, HOST_ACTOR, "x", waits_for=s) for s in (*STREAMS, None)),
    *(Command(Do.LAUNCH, s, "x") for s in STREAMS),
    Command(Do.HOST_WRITE, HOST_ACTOR, "x"),
)  # fmt: skip


WORK, MARK = Command(Do.LAUNCH, STREAMS[0], "x"), Command(Do.RECORD, STREAMS[0], "x", event="a1")


@given(st.lists(st.sampled_from(ORDERING), min_size=1, max_size=12), st.integers(1, 3))
@example([WORK, MARK, WORK, Command(Do.HOST_SYNC, HOST_ACTOR, "x", event="a1")], 2)
def test_clocks_order_what_a_chain_of_rules_orders(commands: list[Command], runs: int) -> None:
    order, before = clocks(commands, runs), happens_before(commands * runs)
    for v, earlier in enumerate(before):
        assert {u for u in range(v) if order.ordered(u, v)} == earlier
    hosts = [i for i, c in enumerate(commands) if c.actor == HOST_ACTOR]
    work = [u for u, c in enumerate(commands * runs) if c.actor != HOST_ACTOR]
    ends = [k * len(commands) + hosts[-1] for k in range(runs)] if hosts else []
    complete = all(
        u in before[end] for k, end in enumerate(ends) for u in work if u < (k + 1) * len(commands)
    )
    assert order.ends_complete(runs) == bool(hosts and complete)


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
