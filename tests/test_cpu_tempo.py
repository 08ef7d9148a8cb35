"""The number of threads follows what was measured, and comes back when the machine is free."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Graph, Session, input, open_backend, ops
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler
from ggraph.backends.cpu.runtime.tempo import (
    FIRST_TRY,
    MOST_ALONE,
    MOST_GAP,
    SURPRISES,
    Tempo,
    Usual,
)
from ggraph.dtype import F32


def played(
    tempo: Tempo,
    crew: list[float],
    alone: float,
    usual: Usual | None = None,
    missing: float = 1.0,
) -> list[bool]:
    """Which runs of a program were the caller's alone, where the crew takes `crew[i]` in the
    i-th, in which its threads lacked `missing` processors."""
    chosen = []
    usual = usual or Usual()
    for seconds in crew:
        chosen.append(tempo.choose(usual))
        tempo.note(usual, alone if chosen[-1] else seconds, missing)
        if not chosen[-1]:
            usual.add(seconds)
    return chosen


def test_a_crew_that_is_faster_is_seldom_left() -> None:
    chosen = played(Tempo(), [1.0] * 2000, 1.8)
    assert sum(chosen[:1000]) <= 9
    assert sum(chosen[1000:]) <= 1000 / MOST_GAP + 1


def test_a_crew_with_its_processors_to_itself_is_hardly_left_unless_it_is_surprised() -> None:
    tempo, usual = Tempo(), Usual()
    assert sum(played(tempo, [1.0] * 2000, 1.8, usual, missing=0.2)) <= 2000 / MOST_GAP
    assert any(played(tempo, [6.0] * 5, 2.0, usual, missing=0.2)), "a host may hide what it takes"
    assert sum(played(Tempo(), [5.0] * 2000, 1.0, missing=0.2)) >= 1600


def test_a_crew_that_waits_is_given_up_soon_and_taken_back_when_it_no_longer_does() -> None:
    tempo, usual = Tempo(), Usual()
    quiet = played(tempo, [1.0] * 100, 1.8, usual)
    taken = played(tempo, [6.0] * 300, 2.0, usual)
    free = played(tempo, [1.0] * 600, 1.8, usual)
    assert sum(quiet) <= 4
    assert taken[:8].count(False) <= 6
    assert taken[8:].count(False) <= 8
    assert not any(free[-200:][i] and free[-200:][i + 1] for i in range(199))
    assert free.index(False) <= MOST_ALONE


def test_a_busy_start_is_noticed_without_a_quiet_run_to_compare_with() -> None:
    assert played(Tempo(), [5.0] * 60, 1.0)[10:].count(True) >= 40


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_the_worse_way_costs_little(crew: float, alone: float) -> None:
    chosen = played(Tempo(), [crew] * 400, alone)
    spent = sum(alone if a else crew for a in chosen)
    best, worst = sorted((crew, alone))
    assert spent <= 400 * best / 0.94 + 18 * (worst - best)


@given(st.dictionaries(st.integers(0, 1999), st.floats(1.0, 200.0), max_size=12))
def test_interruptions_do_not_drive_the_crew_away(interrupted: dict[int, float]) -> None:
    """As long as they are single: no three in a row, and not both runs that a try is held
    against."""
    apart = {i: s for i, s in interrupted.items() if i - 1 not in interrupted}
    crew = [apart.get(i, 1.0) for i in range(2000)]
    chosen = played(Tempo(), crew, 1.5)
    assert sum(chosen) <= 9 + 2000 / MOST_GAP + (SURPRISES + MOST_ALONE) * len(apart) / 4


def test_what_one_program_found_out_holds_for_one_that_runs_seldom() -> None:
    """The second program runs once in ten times: it pays for a tenth of the tries."""
    tempo, often, seldom = Tempo(), Usual(), Usual()
    alone = [0, 0]
    for i in range(1000):
        usual = seldom if i % 10 == 9 else often
        seconds = 3.0 if i % 10 == 9 else 1.0
        chosen = tempo.choose(usual)
        alone[i % 10 == 9] += chosen
        tempo.note(usual, 1.6 * seconds if chosen else seconds)
        if not chosen:
            usual.add(seconds)
    assert sum(alone) <= 9
    assert alone[1] <= 2


def test_what_comes_new_while_the_crew_is_left_does_not_stay_alone() -> None:
    """A text grows beyond its plan just when another program had a processor: the next plan's
    tokens ran at half their speed from then on, as one that had not run on all threads could not
    try them."""
    for known in range(5):
        tempo, before, new = Tempo(), Usual(), Usual()
        played(tempo, [1.0] * 20, 1.8, before)
        assert played(tempo, [6.0] * 40, 2.0, before)[-1]
        for _ in range(known):
            new.add(1.0)
        taken = played(tempo, [6.0] * 100, 2.0, new)
        assert taken.count(False) <= 12, "and while the processor is taken it costs little"
        free = played(tempo, [1.0] * 600, 1.8, new)
        assert free.index(False) <= MOST_ALONE
        assert not any(free[i] and free[i + 1] for i in range(2 * MOST_ALONE, 599))


def test_a_dear_program_leaves_tries_to_a_cheap_one() -> None:
    """Chunks of prompts, a second each, between texts of nine tokens, 30 ms each: behind the first
    try no chunk runs at half the speed."""
    tempo, chunk, token = Tempo(), Usual(), Usual()
    tried = {id(chunk): 0, id(token): 0}
    for _ in range(60):
        for usual, seconds, count in ((chunk, 1.0, 9), (token, 0.03, 9)):
            tried[id(usual)] += sum(played(tempo, [seconds] * count, 1.8 * seconds, usual))
    assert tried[id(chunk)] <= 1
    assert 4 <= tried[id(token)] <= 60


def test_a_short_program_that_waits_at_times_is_not_a_long_one() -> None:
    """Feeds are copied in 0.1 ms; waking a thread for it may take 1 ms, so that the mean says
    little. What such a program finds out must hold for nobody else: a server's steps of 190 rows
    ran on one thread, since that was better for their copies."""
    usual = Usual()
    assert not usual.long, "nothing is known yet"
    for i in range(50):
        usual.add(1e-3 if i % 3 else 1e-4)
        assert not usual.long
    token = Usual()
    for _ in range(5):
        token.add(4e-3)
    assert token.long


def test_what_holds_for_a_token_need_not_hold_for_a_prompt() -> None:
    """Where memory bounds tokens, one thread may be as quick for them; prompts, which compute, then
    took twice their time for as long as only prompts came."""
    pool, jit = Pool(2), host_jit()
    token, other, prompt, copy = (Assembler(jit).freeze() for _ in range(4))
    for seconds, program in ((3e-3, token), (4e-3, other), (3e-2, prompt), (1e-4, copy)):
        program.usual.add(seconds)
    assert pool.tempo_of(token) is pool.tempo_of(other) is not pool.tempo_of(prompt)
    assert pool.tempo_of(copy) is copy.tempo
    pool.close()


def test_a_pool_says_how_its_latest_long_program_ran() -> None:
    """What keeps times apart is what really happened, a single try of the other way included."""
    backend = open_backend("cpu", threads=2)
    assert isinstance(backend, CpuBackend)
    x = input("x", (1 << 11, 1 << 10), F32)
    graph = Graph.of({"y": ops.silu(ops.silu(x))})
    session, feeds = Session({"cpu": backend}), {"x": np.ones(x.shape, np.float32)}
    session.prepare("wide", lambda: graph, lambda t: np.zeros(0))
    pool, seen = backend.pool, []
    for _ in range(FIRST_TRY + MOST_GAP):
        session.run("wide", feeds)
        seen.append(pool.alone)
    assert not seen[0] and any(seen), "the other way is tried, if late where no processor is taken"
    alone = open_backend("cpu", threads=1)
    assert isinstance(alone, CpuBackend) and alone.pool.alone
    session.close()
    alone.close()
