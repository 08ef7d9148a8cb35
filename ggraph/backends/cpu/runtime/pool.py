"""Persistent threads that run flat programs.

Workers are Python threads that enter compiled code once and stay there; a run costs one foreign
call that holds no Python lock. Runs of one pool are serialised by a lock, so two sessions may share
it from two threads. After a fork the child has workers of its own.

Who has something else to do than to run a program may do it while the workers have begun: see
`meanwhile`.
"""

import ctypes
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from ggraph import env
from ggraph.backends.cpu.codegen.jit import ENTRY, Jit, host_jit
from ggraph.backends.cpu.runtime.interpreter import (
    ASLEEP,
    BEGIN,
    CPU_SET,
    ENDED,
    JOIN,
    QUIT,
    SHARED,
    SPINS_ALONE,
    SPINS_CROWDED,
)  # fmt: skip
from ggraph.backends.cpu.runtime.pages import LINE
from ggraph.backends.cpu.runtime.program import Argument, Flat, encode, one_call
from ggraph.backends.cpu.runtime.tempo import Tempo
from ggraph.errors import BackendError
from ggraph.tensor import Array

SHORT = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)  # keeps the lock
STATE_WORDS = LINE // 8
CALLER = 2 * STATE_WORDS + SHARED // 8  # the word of the counters that says how far its run is


_NEITHER: list[Any] = [None, None]


def _system_calls() -> dict[str, int]:
    """Addresses of the system's calls that threads need; 0 for what it does not offer."""
    if sys.platform == "win32":
        library = ctypes.cdll.msvcrt
        found: list[Any] = [library._read, library._write, ctypes.windll.kernel32.SwitchToThread]
    else:
        library = ctypes.CDLL(None)
        found = [library.read, library.write, library.sched_yield]
    has_affinity = sys.platform == "linux" and hasattr(library, "sched_getcpu")
    found += [library.sched_getcpu, library.sched_setaffinity] if has_affinity else _NEITHER
    names = ("read", "write", "yield", "getcpu", "setcpu")
    return {n: _address(f) for n, f in zip(names, found, strict=True)}


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0


def _allowed() -> Array:
    """The processors this process may use, as a Linux cpu_set_t."""
    bits = np.zeros(CPU_SET * 8, np.uint8)
    if hasattr(os, "sched_getaffinity"):
        bits[[c for c in os.sched_getaffinity(0) if c < len(bits)]] = 1
    return np.packbits(bits, bitorder="little")


class Pool:
    """`threads` threads, the caller among them. Close it, or let it be collected.

    `alone` says whether the latest run of a long program was the caller's alone: times of both
    kinds do not compare.
    """

    def __init__(self, threads: int, jit: Jit | None = None) -> None:
        if not 1 <= threads <= env.MOST_THREADS:
            raise BackendError(f"a pool has 1 to {env.MOST_THREADS} threads, not {threads}")
        self.threads = threads
        self.jit = jit or host_jit()
        crowded = threads > env.usable_cores()
        self._spins = SPINS_CROWDED if crowded else SPINS_ALONE
        self._entry, self._short = (f(self.jit.address("pool_run")) for f in (ENTRY, SHORT))
        self._tempos = defaultdict[int, Tempo](Tempo)  # of long programs, by length
        self.alone = threads == 1
        self._start()
        _POOLS.add(self)

    def _start(self) -> None:
        """Fresh control words, pipes and workers."""
        self._lock = threading.Lock()
        self._crew: list[threading.Thread] = []
        self._pipes: list[tuple[int, int]] = []
        self._meanwhile: dict[int, Callable[[], object]] = {}  # by the thread that asked for it
        self._counters = np.zeros(3 * STATE_WORDS, np.int64)
        self._counters[CALLER] = ENDED
        self._states = np.full((self.threads, STATE_WORDS), ASLEEP, np.int64)
        self._readers, self._writers = np.zeros((2, self.threads), np.int64)
        self._calls, self._allowed = _system_calls(), _allowed()
        self._job = np.array([0, 0, *self._job_words()], np.int64)
        self._job_at = int(self._job.ctypes.data)
        self._stop: Any = weakref.finalize(self, _dismiss, self._states, self._crew, self._pipes)
        try:
            for worker in range(1, self.threads):
                pipe = os.pipe()
                self._pipes.append(pipe)
                self._readers[worker], self._writers[worker] = pipe
                self._hire(worker)
        except (OSError, RuntimeError):  # the system has no more files, no more threads
            self._stop()
            raise

    def _job_words(self) -> list[int]:
        base = self._counters.ctypes.data
        return encode(
            "pool_run",
            {
                "code": 0, "count": 0, "arrived": base, "finished": base + LINE,
                "caller": base + 2 * LINE, "states": self._states, "pipes": self._writers,
                "spins": self._spins, "do": 0,
                **{name: self._calls[name] for name in ("write", "yield", "getcpu")},
            },
        )  # fmt: skip

    def _hire(self, worker: int) -> None:
        values: dict[str, Argument] = {
            "job": self._job, "pipes": self._readers, "states": self._states,
            "allowed": self._allowed, "spins": self._spins,
            **{name: self._calls[name] for name in ("read", "yield", "getcpu", "setcpu")},
        }  # fmt: skip
        own = self._counters, self._writers  # the job's words point at these
        thread = one_call(
            self.jit, "pool_work", values, *own, thread=worker, threads=self.threads,
            title=f"ggraph-cpu-{worker}",
        )  # fmt: skip
        self._crew.append(thread)

    def meanwhile(self, work: Callable[[], object]) -> None:
        """Have `work` done once by this thread's next run: while the workers have begun with the
        program, where it is long enough to be worth it, else before. It must not run this pool."""
        self._meanwhile[threading.get_ident()] = work

    def run(self, program: Flat) -> None:
        """Run a program to its end. Other threads that call this wait for their turn."""
        work = self._meanwhile.pop(threading.get_ident(), None)
        with self._lock:
            if not self._stop.alive:
                raise BackendError("the pool is closed")
            self._join()
            usual, tempo = program.usual, self.tempo_of(program)
            long = usual.long
            alone = self.threads == 1 or tempo.choose(usual)
            if work is not None and (self.threads == 1 or not long):
                work()
                work = None
            if long and self.alone and not alone:
                self._wake()
            self._job[2], self._job[3] = program.address, len(program.code)
            if self.threads == 1:
                self._call(BEGIN | JOIN, 1)
                return
            computed, begun = time.process_time() if long else 0.0, time.perf_counter()
            if work is not None and alone:
                work()  # counts as it does beside: what is compared is all that a run takes
                work = None
            if work is None:
                self._call(BEGIN | JOIN, 1 if alone else self.threads)
            else:
                self._run_beside(work)
            seconds = time.perf_counter() - begun
            computed = time.process_time() - computed if long else 0.0
            tempo.note(usual, seconds, self.threads - computed / max(seconds, 1e-9))
            self.alone = alone if long else self.alone
            if not alone:
                usual.add(seconds)

    def _wake(self) -> None:
        """Run nothing on all threads. On a busy host they may take as long as a token to wake; as
        part of a run on all of them, that would be a reason to let them sleep on."""
        self._job[3] = 0
        self._call(BEGIN | JOIN, self.threads)

    def _run_beside(self, work: Callable[[], object]) -> None:
        """The workers begin, and the caller joins them when its work is done."""
        try:
            self._job[-1] = BEGIN
            self._short(self._job_at, 0, self.threads)
            work()
        finally:
            self._join()

    def _join(self) -> None:
        """See the end of a run that was begun; a signal may have come before, or at its end."""
        if self._counters[CALLER] != ENDED:
            self._call(JOIN, self.threads)

    def _call(self, do: int, threads: int) -> None:
        self._job[-1] = do
        self._entry(self._job_at, 0, threads)

    def tempo_of(self, program: Flat) -> Tempo:
        """What decides by how many threads a program runs."""
        usual = program.usual
        return self._tempos[usual.length] if usual.long else program.tempo

    def close(self) -> None:
        """End the workers; the pool cannot run again."""
        with self._lock:
            if self._stop.alive:
                self._join()
            self._stop()

    def after_fork(self) -> None:
        """In a child process: the parent's workers are not here, so hire new ones."""
        if not self._stop.alive:
            return
        self._stop.detach()
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)
        self._start()


def _dismiss(states: Array, crew: list[threading.Thread], pipes: list[tuple[int, int]]) -> None:
    """Make every worker leave, then close its pipe."""
    for worker, (_, end) in enumerate(pipes, 1):
        states[worker, 0] = QUIT
        os.write(end, b"q")
    for thread in crew:
        if thread is not threading.current_thread():
            thread.join()
    for pipe in pipes:
        for end in pipe:
            os.close(end)


_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
