"""Missing waits are named for races between runs, too, and order all of them."""

import random

from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import random_plan
from verify_kit import S0, S1, plan, record, run, wait

from ggraph.record import diagnose, with_waits
from ggraph.record.causes import Wait
from ggraph.verify import CounterExample, examine, races


def test_a_wait_for_the_run_before_is_named() -> None:
    """Stream 1 still reads x when the next run makes it anew on stream 0."""
    body = (run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x"))
    found = diagnose(plan({"x": 0, "y": 32}, *body))
    assert found is not None and found.fewest.waits == found.latest.waits == (Wait(3, 0),)
    assert [c.text for c in found.causes] == ["'x' on d.0 after 'y' on d.1 of the run before"]
    assert found.fewest.proved and found.latest.proved


def test_one_wait_where_runs_meet_is_enough_for_all_that_race_there() -> None:
    body = (run(S0, "x"), run(S0, "z"), record(S0), wait(S1), run(S1, "y", "x"), run(S1, "w", "z"))
    found = diagnose(plan({"x": 0, "z": 32, "y": 64, "w": 96}, *body))
    assert found is not None and found.fewest.waits == (Wait(5, 0),)
    assert len(found.causes[0].races) == 2
    assert set(found.latest.waits) == {Wait(4, 0), Wait(5, 1)}


def test_a_wait_within_the_run_serves_the_next_one_too() -> None:
    """Of two commands that race in either order, one wait in the list orders both."""
    found = diagnose(plan({"x": 0, "y": 0}, run(S0, "x"), run(S1, "y")))
    assert found is not None and Wait(0, 1) in found.fewest.waits and found.fewest.proved
    assert len(found.fewest.waits) == 2, "and y before the next run's x"


@given(st.randoms(use_true_random=False))
def test_the_named_waits_order_all_races_within_and_between_runs(r: random.Random) -> None:
    p = random_plan(r)
    verdict = examine(p)
    if isinstance(verdict, CounterExample) and verdict.kind in ("race", "stale", "unwritten"):
        found = diagnose(p)
        assert (found is None) == (not races(p))
        if found is not None:
            assert sum(len(c.races) for c in found.causes) == len(races(p))
            assert not any(races(with_waits(p, x.waits)) for x in (found.fewest, found.latest))
