"""The compiled interpreter: threads that replay a flat program without Python.

A program is an array of instructions of `WORDS` 64-bit words: the kernel's address, flags, then the
kernel's arguments. Every thread runs every instruction and each kernel takes its own share of it;
where the flag `BARRIER` is set, all threads meet before the next instruction. The caller is thread
0. An instruction's last word is its kernel's, to count in (`taking.py`).

The others live in `pool_work`: they run a job, look out for the next one for a while, then sleep
in a blocking read of a pipe, which needs neither Python nor its lock.

A thread that is woken may be put on its waker's processor and stay there for many milliseconds
although another is idle; then both wait for each other. So each thread notes the processor it runs
on, and a worker that finds itself on one of an earlier thread's moves away at once.

A run may begin without its caller, who has something else to do: the workers share the program
among themselves until the caller is there, and with it from then on. That changes at a meeting
alone, since instructions without one between them must be shared out alike. The first worker
decides at which: before it arrives there it says from which instruction on the caller takes part.

States of a worker: ASLEEP (in the read), AWAKE (looking out), JOB (has something to run), QUIT.
"""

from collections.abc import Sequence
from functools import partial

from llvmlite import ir

from ggraph.backends.cpu.codegen.simd import (
    BARRIER,
    HEADER_WORDS,
    I32,
    I64,
    Kernel,
    Num,
    Val,
    Var,
    kernel,
)
from ggraph.backends.cpu.runtime.pages import LINE

WORDS = 64  # of an instruction
ASLEEP, AWAKE, JOB, QUIT = range(4)
CPU_AT = 8  # offset of a thread's processor number in its line of `states`
# Turns of pausing (10 to 50 ns each) before a waiting thread offers its processor to others. An
# offer that another process takes costs milliseconds, so threads with a core each wait longer.
SPINS_ALONE, SPINS_CROWDED = 10000, 300
CPU_SET = 128  # bytes of a Linux cpu_set_t
YIELDS = 3000  # turns of offering before a worker goes to sleep (about a millisecond)
BEGIN, JOIN = 1, 2  # what a call of `pool_run` does; both at once where the caller is there
# Words of the caller's line: the address of the first instruction in which it takes part, how many
# arrivals are before that, and whether it is there.
SHARED, BEFORE, THERE = 0, 8, 16
UNKNOWN = 1 << 62  # `SHARED` of a run whose caller is missed
ENDED = UNKNOWN + 1  # and of one that the caller has seen the end of


def atomic_load(k: Kernel, address: Val) -> Val:
    """A word that other threads write."""
    return Val(k, k.b.load_atomic(k.pointer(address), "acquire", 8, typ=I64))


def atomic_store(k: Kernel, address: Val, value: Num) -> None:
    """Write a word that other threads read."""
    k.b.atomic_rmw("xchg", k.pointer(address), k.same(value, address).v, "release")


def atomic(k: Kernel, op: str, address: Val, value: int) -> Val:
    """The word's value before `op` ("add", "xchg")."""
    return Val(k, k.b.atomic_rmw(op, k.pointer(address), I64(value), "acq_rel"))


def call(k: Kernel, function: Val, result: ir.Type, *args: Val) -> Val:
    """Call the function at an address."""
    kind = ir.FunctionType(result, [a.v.type for a in args])
    pointer = k.b.inttoptr(function.v, kind.as_pointer())
    return Val(k, k.b.call(pointer, [a.v for a in args]))


def _pause(k: Kernel) -> None:
    """Tell the processor that this is a waiting loop."""
    if k.isa.is_x86:
        k.intrinsic("llvm.x86.sse2.pause", ir.VoidType())
    elif k.isa.is_arm:
        k.intrinsic("llvm.aarch64.hint", ir.VoidType(), I32(1))


def _relax(k: Kernel, turns: Var) -> None:
    """One turn of waiting: a pause at first, then the processor is offered to others."""
    turns.value = turns.value + 1
    with k.if_else(turns.value < k.arg("spins")) as (early, late):
        with early:
            _pause(k)
        with late:
            call(k, k.arg("yield"), I32)


def _wait_for(k: Kernel, address: Val, target: Val) -> None:
    """Until the counter at `address` reaches `target`."""
    turns = k.var(0)
    with k.while_(lambda: atomic_load(k, address) < target):
        _relax(k, turns)


def _replay(k: Kernel, job: Sequence[Val], first: Val, met: Num) -> None:
    """Run a job's program from the instruction at `first` on, before which there are `met`
    arrivals. As long as workers are without the caller, they are numbered from 0."""
    code, count, arrived, _, caller = job
    at, end, meetings = k.var(first), code + count * (8 * WORDS), k.var(met)
    thread, threads = k.var(k.thread), k.var(k.threads)

    def look() -> None:
        missed = atomic_load(k, caller + SHARED) > at.value
        absent = k.select(missed, k.const(1, I64), 0)
        thread.value, threads.value = k.thread - absent, k.threads - absent

    look()
    with k.while_(lambda: at.value < end):
        call(k, k.load(at.value, I64), ir.VoidType(), at.value, thread.value, threads.value)
        flags = k.load(at.value + 8, I64)
        at.value = at.value + 8 * WORDS
        with k.when((flags & BARRIER).ne(0)):
            meetings.value = meetings.value + threads.value
            absent = threads.value < k.threads
            with k.when(absent & thread.value.eq(0)), k.when(atomic_load(k, caller + THERE).ne(0)):
                k.store(caller + BEFORE, meetings.value)
                atomic_store(k, caller + SHARED, at.value)
            atomic(k, "add", arrived, 1)
            _wait_for(k, arrived, meetings.value)
            with k.when(absent):
                look()
    with k.when((threads.value < k.threads) & thread.value.eq(0)):
        atomic_store(k, caller + SHARED, end)


def _state(k: Kernel, worker: Val) -> Val:
    return k.arg("states") + worker * LINE


def _note_processor(k: Kernel) -> Val:
    """Write down, and return, the processor this thread runs on."""
    here = k.cast("sext", call(k, k.arg("getcpu"), I32), I64)
    k.store(_state(k, k.thread) + CPU_AT, here)
    return here


def _move_away(k: Kernel) -> None:
    """Force a move to an allowed processor without an earlier thread, then allow all again."""
    allowed, chosen = k.arg("allowed"), k.scratch(CPU_SET)
    for i in k.loop(0, CPU_SET, 8):
        k.store(chosen + i, k.load(allowed + i, I64))
    for other in k.loop(0, k.thread):
        cpu = k.load(_state(k, other) + CPU_AT, I64)
        word = chosen + (cpu // 64 % (CPU_SET // 8)) * 8
        k.store(word, k.load(word, I64) & ((k.const(1, I64) << (cpu % 64)) ^ -1))
    for mask in (chosen, allowed):
        call(k, k.arg("setcpu"), I32, k.const(0, I32), k.const(CPU_SET, I64), mask)


def _spread(k: Kernel) -> None:
    """Leave a processor that an earlier thread runs on (where the system offers the calls)."""
    with k.when(k.arg("getcpu").ne(0)):
        here = _note_processor(k)
        shared = k.var(0)
        for other in k.loop(0, k.thread):
            same = k.load(_state(k, other) + CPU_AT, I64).eq(here)
            shared.value = k.select(same, shared.value + 1, shared.value)
        with k.when(shared.value > 0):
            _move_away(k)
            _note_processor(k)


JOB_WORDS = "code count arrived finished caller"


@kernel(f"{JOB_WORDS} states pipes write yield getcpu spins do")
def pool_run(k: Kernel) -> None:
    """Thread 0: hand the program to `threads` - 1 workers, and run it with them to its end."""
    job = k.words(JOB_WORDS)
    with k.when((k.arg("do") & BEGIN).ne(0)):
        _begin(k, job)
    with k.when((k.arg("do") & JOIN).ne(0)):
        _join(k, job)


def _begin(k: Kernel, job: Sequence[Val]) -> None:
    code, _, arrived, finished, caller = job
    for word in (arrived, finished, caller + BEFORE, caller + THERE):
        atomic_store(k, word, 0)
    is_there = (k.arg("do") & JOIN).ne(0)
    atomic_store(k, caller + SHARED, k.select(is_there, code, UNKNOWN))
    with k.when(k.arg("getcpu").ne(0)):
        _note_processor(k)
    for worker in k.loop(1, k.threads):
        before = atomic(k, "xchg", _state(k, worker), JOB)
        with k.when(before.eq(ASLEEP)):
            pipe = k.cast("trunc", k.load(k.arg("pipes") + worker * 8, I64), I32)
            call(k, k.arg("write"), I64, pipe, arrived, k.const(1, I64))


def _join(k: Kernel, job: Sequence[Val]) -> None:
    """Take part from where the first worker says on, to the end."""
    _, _, arrived, finished, caller = job
    turns, shared = k.var(0), partial(atomic_load, k, caller + SHARED)
    atomic_store(k, caller + THERE, 1)
    with k.while_(lambda: shared().eq(UNKNOWN)):
        _relax(k, turns)
    first, met = shared(), k.load(caller + BEFORE, I64)
    _wait_for(k, arrived, met)
    _replay(k, job, first, met)
    _wait_for(k, finished, k.threads - 1)
    atomic_store(k, caller + SHARED, ENDED)


def _look_out(k: Kernel, state: Val) -> None:
    """Until there is a job; leaves the state ASLEEP if none comes for a while."""
    turns, limit = k.var(0), k.arg("spins") + YIELDS

    def looking() -> Val:
        return atomic_load(k, state).eq(AWAKE) & (turns.value < limit)

    with k.while_(looking):
        _relax(k, turns)
    k.b.cmpxchg(k.pointer(state), I64(AWAKE), I64(ASLEEP), "acq_rel", "acquire")


def _sleep(k: Kernel, state: Val) -> None:
    """Block in read() until the state is no longer ASLEEP; a signal may end a read early."""
    byte = k.scratch(8)
    pipe = k.cast("trunc", k.load(k.arg("pipes") + k.thread * 8, I64), I32)
    with k.while_(lambda: atomic_load(k, state).eq(ASLEEP)):
        call(k, k.arg("read"), I64, pipe, byte, k.const(1, I64))


@kernel("job pipes states read yield getcpu setcpu allowed spins")
def pool_work(k: Kernel) -> None:
    """The life of worker `thread`; `job` is the address of pool_run's instruction."""
    state = _state(k, k.thread)
    words = [k.arg("job") + 8 * (HEADER_WORDS + i) for i in range(len(JOB_WORDS.split()))]
    with k.while_(lambda: atomic_load(k, state).ne(QUIT)):
        _look_out(k, state)
        _sleep(k, state)
        with k.when(atomic_load(k, state).eq(JOB)):
            job = [k.load(at, I64) for at in words]
            _spread(k)
            _replay(k, job, job[0], 0)
            atomic_store(k, state, AWAKE)  # before `finished`: the next job may come right after
            atomic(k, "add", job[3], 1)
