"""The CPU's thread pool under stress: random programs, forks, signals, two callers, two sessions.

    python scripts/stress_pool.py [--programs 10000] [--seed 0]

Every program is a random chain of element-wise kernels over shared arrays, with barriers only where
the next instruction needs one; its result must be bit-equal to NumPy's. Programs run on pools of 1,
2 and 4 threads, from one or two Python threads, some of whom come late. In between: the process
forks after use and the child runs on, a signal raises an exception while a program runs, workers
get time to fall asleep, and two sessions run their plans from two Python threads. A stop of 120 s
without progress counts as a hang: all stacks are printed and the status is 1.
"""

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph import Graph, Session, input, open_backend, ops, weight
from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.kernels.nest import register
from ggraph.backends.cpu.kernels.nest_form import names
from ggraph.backends.cpu.lowering.loops import Planned, plan_nests
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler, Flat, Range, Touched

KERNELS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
}
HANG = 120  # seconds
THREADS = (1, 2, 4)


class Interrupted(Exception):
    """Raised by a signal in the middle of something."""


@dataclass
class Case:
    """A program, the arrays it changes, and what they must become."""

    program: Flat
    arrays: list[np.ndarray]
    start: list[np.ndarray]
    want: list[np.ndarray]

    def reset(self) -> None:
        """The arrays as they were before the first run."""
        for a, s in zip(self.arrays, self.start, strict=True):
            a[:] = s

    def check(self) -> None:
        """AssertionError unless every bit is right."""
        for i, (a, w) in enumerate(zip(self.arrays, self.want, strict=True)):
            assert (a.view(np.uint32) == w.view(np.uint32)).all(), f"array {i} of {len(self.want)}"


@dataclass(frozen=True)
class Step:
    """y[: n - shift] = a[shift :] op b[: n - shift]; a shift makes threads read of one another."""

    name: str
    a: int
    b: int
    y: int
    shift: int


def random_case(r: random.Random) -> Case:
    """Up to 40 instructions over up to 6 arrays of equal, odd sizes."""
    n, count = r.choice((1, 7, 64, 333, 1500)), r.randint(2, 6)
    rng = np.random.default_rng(r.getrandbits(32))
    arrays = [rng.standard_normal((1, n)).astype(np.float32) for _ in range(count)]
    start = [a.copy() for a in arrays]
    want = [a.copy() for a in arrays]
    steps = [_step(r, count, n) for _ in range(r.randint(0, 40))]
    asm = Assembler(host_jit())
    for s in steps:
        width = n - s.shift
        p = planned(s.name, width)
        sources = [arrays[s.y], arrays[s.a][:, s.shift :], arrays[s.b]]
        words: dict[str, Any] = dict(zip(p.nest.axes, (a.extent for a in p.axes), strict=True))
        for i, (operand, source) in enumerate(zip(names(3), sources, strict=True)):
            words |= {operand: source}
            words |= {operand + x: a.strides[i] for x, a in zip(p.nest.axes, p.axes, strict=True)}
        read, written = ([_range(arrays[i]) for i in at] for at in ((s.a, s.b), (s.y,)))
        told = r.random() < 0.8  # else everybody waits
        access = Touched(tuple(read), tuple(written)) if told else None
        asm.add(register(p.nest).name, access=access, **words)
        result = KERNELS[s.name](want[s.a][:, s.shift :], want[s.b][:, :width])
        want[s.y][:, :width] = result
    return Case(asm.freeze(), arrays, start, want)


@cache
def planned(name: str, n: int) -> Planned:
    """The loop nest of one of the ops over n numbers."""
    nests = plan_nests(getattr(ops, name)(input("a", (n,)), input("b", (n,))))
    assert nests is not None
    (nest,) = nests.result
    return nest


def _step(r: random.Random, count: int, n: int) -> Step:
    a, b, y = (r.randrange(count) for _ in range(3))
    shift = r.randrange(n) if r.random() < 0.5 and y not in (a, b) else 0
    return Step(r.choices(list(KERNELS), (3, 4, 1))[0], a, b, y, shift)


def _range(a: np.ndarray) -> Range:
    return a.ctypes.data, a.ctypes.data + a.nbytes


def run_one(pool: Pool, case: Case, late: float | None = None) -> None:
    """Run, check, and make it ready to run again; with a caller who comes `late` seconds late."""
    case.reset()
    if late is not None:
        case.program.usual.least = 1.0  # it counts as long
        end = time.perf_counter() + late
        pool.meanwhile(lambda: time.sleep(max(0.0, end - time.perf_counter())))
    pool.run(case.program)
    case.check()


def run_from_two_threads(pools: list[Pool], cases: list[Case]) -> None:
    """Two Python threads at once, on one pool or two."""
    failed: list[BaseException] = []

    def caller(pool: Pool, case: Case) -> None:
        try:
            for _ in range(3):
                run_one(pool, case)
        except BaseException as error:
            failed.append(error)

    callers = [
        threading.Thread(target=caller, args=pair) for pair in zip(pools, cases, strict=True)
    ]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    if failed:
        raise failed[0]


def run_in_a_child(pool: Pool, case: Case) -> None:
    """Fork after use: parent and child both go on."""
    run_one(pool, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forking with threads is delicate
        child = os.fork()
    if child == 0:
        try:
            run_one(pool, case)
            os._exit(0)
        except BaseException:
            os._exit(1)
    run_one(pool, case)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"


def run_interrupted(pool: Pool, case: Case, delay: float) -> bool:
    """A signal during repeated runs; the pool must work afterwards. Whether it came in time."""

    armed = [True]

    def handler(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    came = False
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        for i in range(50):
            if i % 2:
                case.program.usual.least = 1.0
                pool.meanwhile(lambda: None)
            pool.run(case.program)
        armed.clear()
    except Interrupted:
        came = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    run_one(pool, case)
    return came


def session_case(seed: int) -> Callable[[], None]:
    """A session of its own with a small plan; the returned function runs and checks it."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((48, 64)).astype(np.float32)
    x = input("x", (5, 64))
    graph = Graph.of({"y": ops.silu(ops.mul_mat(weight("w", (48, 64)), x))})
    session = Session({"cpu": open_backend("cpu", threads=2)})
    session.prepare("step", lambda: graph, lambda t: w)
    feeds = {"x": rng.standard_normal((5, 64)).astype(np.float32)}
    want = session.run("step", feeds)["y"].copy()

    def run() -> None:
        for _ in range(20):
            got = session.run("step", feeds)["y"]
            assert (got == want).all(), f"session {seed} differs"

    return run


def run_sessions(runs: list[Callable[[], None]]) -> None:
    """Two sessions at once from two Python threads."""
    failed: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    callers = [threading.Thread(target=guarded, args=(r,)) for r in runs]
    for c in callers:
        c.start()
    for c in callers:
        c.join()
    if failed:
        raise failed[0]


def stress(programs: int, seed: int) -> Counter[str]:
    """Run everything; counts of what happened."""
    r, done = random.Random(seed), Counter[str]()
    pools = {t: Pool(t) for t in THREADS}
    sessions = [session_case(seed), session_case(seed + 1)]
    while done["programs"] < programs:
        faulthandler.dump_traceback_later(HANG, exit=True)
        pool, case = pools[r.choice(THREADS)], random_case(r)
        chance = r.random()
        if chance < 0.60:
            run_one(pool, case)
        elif chance < 0.80:
            run_one(pool, case, r.choice((0.0, 1e-5, 1e-4)))
            done["late callers"] += 1
        elif chance < 0.92:
            other = pools[r.choice(THREADS)]
            run_from_two_threads([pool, other], [case, random_case(r)])
            done["programs"] += 1
            done["from two threads"] += 1
        elif chance < 0.95:
            run_in_a_child(pool, case)
            done["forks"] += 1
        elif chance < 0.98:
            done["exceptions"] += run_interrupted(pool, case, r.uniform(1e-5, 2e-3))
        elif chance < 0.99:
            time.sleep(0.003)  # long enough for workers to go to sleep
            run_one(pool, case)
            done["pauses"] += 1
        else:
            run_sessions(sessions)
            done["session pairs"] += 1
        done["programs"] += 1
    faulthandler.cancel_dump_traceback_later()
    for pool in pools.values():
        pool.close()
    return done


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    np.seterr(over="ignore", invalid="ignore")
    begun = time.perf_counter()
    done = stress(given.programs, given.seed)
    counts = ", ".join(f"{n} {name}" for name, n in done.items())
    print(f"{counts}: no difference, no hang, {time.perf_counter() - begun:.0f} s")
    sys.exit(0)


if __name__ == "__main__":
    main()
