"""The thread pool: order, stress, two callers at once, fork, close."""

import os
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from cpu_calls import call, sum_of
from hypothesis import given
from hypothesis import strategies as st

from ggraph import open_backend
from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.codegen.simd import BARRIER
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler, Flat, Touched, encode
from ggraph.backends.cpu.runtime.tempo import Tempo
from ggraph.env import MOST_THREADS
from ggraph.errors import BackendError, InputError


def counting(length: int, n: int = 1500) -> tuple[Flat, np.ndarray[Any, Any]]:
    """A program that doubles and adds one, `length` times: any lost barrier shows."""
    x, one = np.zeros((1, n), np.float32), np.ones((1, n), np.float32)
    asm = Assembler(host_jit())
    name, words = sum_of(1, n, y=(x, 0), a=(x, 0), b=(one, 0))
    for _ in range(length):
        asm.add(name, **words)
    return asm.freeze(), x


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_instruction_runs_once_and_in_order(threads: int) -> None:
    pool = Pool(threads)
    program, x = counting(20)
    for turn in range(1, 30):
        pool.run(program)
        assert (x == 20 * turn).all()
    pool.close()


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def seems_long(program: Flat) -> None:
    """As far as the pool knows, and it has not run often enough to be tried on one thread."""
    program.usual.runs, program.usual.least = 1, 1.0


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_run_begins_without_its_caller_who_joins_it(threads: int) -> None:
    """However late the caller is: amid the program, behind its end, or before its first meeting."""
    pool, seen = Pool(threads), Counter[str]()
    # More threads than processors meet when the system lets them: fewer meetings, fewer turns.
    meetings, turns = (300, 200) if threads <= 2 else (60, 50)
    program, x = counting(meetings)
    for turn in range(1, turns):
        called = list[int]()
        seems_long(program)

        def work(turn: int = turn, called: list[int] = called) -> None:
            wait = time.sleep if turn % 3 else busy
            wait((turn % 20) ** 2 * 1e-5)
            seen["after the end" if x[0, -1] == meetings * turn else "before the end"] += 1
            called.append(threading.get_ident())

        pool.meanwhile(work)
        pool.run(program)
        assert (x == meetings * turn).all()
        assert called == [threading.get_ident()]
    if threads == 2:  # more of them than processors may take any time
        assert seen["before the end"] and seen["after the end"], seen
    pool.close()


def test_other_threads_and_short_programs_do_not_take_a_callers_work() -> None:
    pool, called = Pool(2), list[int]()
    program, x = counting(10)
    pool.meanwhile(lambda: called.append(int(x[0, 0])))
    other = threading.Thread(target=pool.run, args=(program,))
    other.start()
    other.join()
    assert not called
    program.usual.least = 1e-6  # however long it had to wait for a processor
    pool.run(program)
    assert called == [10], "before a program that is not known to be long"
    pool.run(program)
    assert called == [10], "once"
    pool.close()


class SlowToWake(Pool):
    """A pool on a host that has given away the processors of threads that slept. What its runs take
    is played: 1 on all threads, 1.6 on the caller's, which wakes the others in 2 more."""

    now, asleep = 0.0, False

    def perf_counter(self) -> float:
        """Seconds since it was made."""
        return self.now

    process_time = perf_counter

    def _call(self, do: int, threads: int) -> None:
        alone, something = threads == 1, self._job[3] > 0
        self.now += (1.6 if alone else 1.0) * something + 2.0 * (self.asleep and not alone)
        self.asleep = alone
        super()._call(do, threads)


def test_threads_that_wake_slowly_are_neither_left_for_it_nor_kept_asleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = SlowToWake(2)
    monkeypatch.setattr("ggraph.backends.cpu.runtime.pool.time", pool)
    program, x = counting(3)
    for _ in range(400):
        pool.run(program)
    assert (x == 400 * 3).all(), "waking runs nothing"
    assert pool.now <= 400 * 1.05
    pool.close()


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_done_meanwhile_counts_as_much_alone(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one thread would look better than two, by what only those are asked to do beside."""
    noted = list[float]()
    monkeypatch.setattr(Tempo, "choose", lambda self, usual: alone)
    monkeypatch.setattr(Tempo, "note", lambda self, usual, seconds, missing: noted.append(seconds))
    pool = Pool(2)
    program, _ = counting(3)
    for _ in range(3):
        seems_long(program)
        pool.meanwhile(lambda: busy(0.02))
        pool.run(program)
    assert min(noted) >= 0.02
    pool.close()


def test_work_that_fails_leaves_a_whole_run_behind() -> None:
    pool = Pool(2)
    program, x = counting(50)

    def fail() -> None:
        raise ValueError("from work")

    for turn in range(1, 20):
        pool.meanwhile(fail)
        seems_long(program)
        with pytest.raises(ValueError, match="from work"):
            pool.run(program)
        assert (x == 100 * turn - 50).all()
        pool.run(program)
        assert (x == 100 * turn).all()
    pool.close()


def test_an_empty_program_and_the_last_barrier() -> None:
    pool = Pool(2)
    pool.run(Assembler(host_jit()).freeze())
    program, x = counting(1)
    assert program.code[-1, 1] == 0, "the end of a run is a meeting of its own"
    pool.run(program)
    assert (x == 1).all()
    pool.close()


def test_two_callers_share_a_pool() -> None:
    pool = Pool(2)
    jobs = [counting(10) for _ in range(4)]

    def caller(program: Flat) -> None:
        for _ in range(25):
            pool.run(program)

    callers = [threading.Thread(target=caller, args=(p,)) for p, _ in jobs]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    assert all((x == 250).all() for _, x in jobs)
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_child_process_has_workers_of_its_own() -> None:
    pool = Pool(2)
    program, x = counting(5)
    pool.run(program)
    child = os.fork()
    if child == 0:
        pool.run(program)
        os._exit(0 if (x == 10).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.run(program)
    assert (x == 10).all()
    pool.close()


def test_close_ends_the_workers() -> None:
    before = threading.active_count()
    pool = Pool(4)
    assert threading.active_count() == before + 3
    pool.close()
    pool.close()
    assert threading.active_count() == before
    with pytest.raises(BackendError, match="closed"):
        pool.run(counting(1)[0])


def test_a_run_that_waits_while_its_pool_closes_is_refused() -> None:
    """It must not begin with workers that are gone."""
    pool, found = Pool(2), list[str]()

    def late() -> None:
        try:
            pool.run(counting(1)[0])
        except BackendError as e:
            found.append(str(e))

    pool.run(counting(1)[0])
    thread = threading.Thread(target=late, daemon=True)
    with pool._lock:
        thread.start()
        time.sleep(0.1)
        pool._stop()
    thread.join(10)
    assert found == ["the pool is closed"]


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [(os, "pipe", OSError("too many files")), (threading.Thread, "start", RuntimeError("no"))],
)
def test_a_pool_that_cannot_have_its_threads_gives_back_those_it_has(
    of: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(of, name), [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise error
        return real(*given)

    host_jit().address("pool_work")
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(of, name, failing)
    with pytest.raises(type(error), match=str(error)):
        Pool(8)
    monkeypatch.undo()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_more_threads_than_a_pool_has_are_refused_alike() -> None:
    with pytest.raises(InputError, match=f"from 1 to {MOST_THREADS}"):
        open_backend("cpu", threads=MOST_THREADS + 1)


def test_a_forgotten_pool_ends_its_workers() -> None:
    before = threading.active_count()
    pool = Pool(3)
    pool.run(counting(2)[0])
    del pool
    assert threading.active_count() == before


def test_bad_arguments() -> None:
    with pytest.raises(BackendError, match="1 to 256 threads, not 0"):
        Pool(0)
    with pytest.raises(BackendError, match="expected arguments"):
        call("copy", a=1)
    with pytest.raises(BackendError, match="is an integer, got"):
        encode("copy", {"to": 1.5, "at": 0, "nbytes": 0})
    with pytest.raises(BackendError, match="is a number"):
        encode("rms_norm", {n: np.zeros(1) for n in ["x", "w", "y", "m", "n", "xs", "ys", "eps"]})


@given(st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=1, max_size=24))
def test_threads_meet_between_conflicts_and_nowhere_else(drawn: list[tuple[int, ...]]) -> None:
    """Against all pairs: a barrier between every two that conflict, and none that nobody needs."""
    asm, x = Assembler(host_jit()), np.zeros((1, 8), np.float32)
    accesses = [Touched(((a, a + b % 4),), ((c, c + d % 3),)) for a, b, c, d in drawn]
    for access in accesses:
        asm.add("copy", access=access, to=x, at=x, nbytes=32)
    meets = [bool(word & BARRIER) for word in asm.freeze().code[:, 1]]

    def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return bool(set(range(*a)) & set(range(*b)))

    def conflict(i: int, j: int) -> bool:
        (ri,), (wi,), (rj,), (wj,) = (
            accesses[i].reads, accesses[i].writes, accesses[j].reads, accesses[j].writes
        )  # fmt: skip
        return overlap(wi, wj) or overlap(wi, rj) or overlap(ri, wj)

    begun = 0
    for j in range(len(accesses)):
        for i in range(j):
            assert not conflict(i, j) or any(meets[i:j])
        if j and meets[j - 1]:
            assert any(conflict(i, j) for i in range(begun, j))
            begun = j


def test_an_instruction_that_does_not_say_what_it_accesses_waits_for_all() -> None:
    asm, x = Assembler(host_jit()), np.zeros((1, 8), np.float32)
    values = {"to": x, "at": x, "nbytes": 32}
    far = [Touched((), ((100 * i, 100 * i + 8),)) for i in range(2)]
    asm.add("copy", access=far[0], **values)
    asm.add("copy", access=far[1], **values)
    asm.add("copy", **values)
    asm.add("copy", access=far[0], **values)
    assert [word & BARRIER for word in asm.freeze().code[:, 1]] == [0, BARRIER, BARRIER, 0]
