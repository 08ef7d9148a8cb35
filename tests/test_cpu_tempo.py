"""The number of threads follows what was measured, and comes back when the machine is free."""

from hypothesis import given
from hypothesis import strategies as st

from ggraph.backends.cpu.tempo import MOST_GAP, Tempo


def played(tempo: Tempo, crew: list[float], alone: float) -> list[bool]:
    """Which runs were the caller's alone, where the crew takes `crew[i]` in the i-th."""
    chosen = []
    for seconds in crew:
        chosen.append(tempo.choose())
        tempo.note(alone if chosen[-1] else seconds)
    return chosen


def test_a_crew_that_is_faster_is_seldom_left() -> None:
    chosen = played(Tempo(), [1.0] * 2000, 1.8)
    assert sum(chosen[:1000]) <= 9
    assert sum(chosen[1000:]) <= 1000 / MOST_GAP + 1


def test_a_crew_that_waits_is_given_up_soon_and_taken_back_when_it_no_longer_does() -> None:
    tempo = Tempo()
    quiet = played(tempo, [1.0] * 100, 1.8)
    taken = played(tempo, [6.0] * 300, 2.0)
    free = played(tempo, [1.0] * 600, 1.8)
    assert sum(quiet) <= 4
    assert taken[:8].count(False) <= 6
    assert taken[8:].count(False) <= 8
    assert not any(free[-200:][i] and free[-200:][i + 1] for i in range(199))
    assert free.index(False) <= MOST_GAP


def test_a_busy_start_is_noticed_without_a_quiet_run_to_compare_with() -> None:
    assert played(Tempo(), [5.0] * 60, 1.0)[10:].count(True) >= 40


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_the_worse_way_costs_little(crew: float, alone: float) -> None:
    chosen = played(Tempo(), [crew] * 400, alone)
    spent = sum(alone if a else crew for a in chosen)
    best, worst = sorted((crew, alone))
    assert spent <= 400 * best / 0.94 + 18 * (worst - best)
