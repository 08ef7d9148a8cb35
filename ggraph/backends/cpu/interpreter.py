"""The compiled interpreter: threads that replay a flat program without Python. Floor 6.

A program is an array of instructions of `WORDS` 64-bit words: the kernel's address, flags, then the
kernel's arguments. Every thread runs every instruction and each kernel takes its own share of it;
where the flag `BARRIER` is set, all threads meet before the next instruction. The caller is thread
0. The others live in `pool_work`: they run a job, look out for the next one for a while, then sleep
in a blocking read of a pipe, which needs neither Python nor its lock.

States of a worker: ASLEEP (in the read), AWAKE (looking out), JOB (has something to run), QUIT.
"""

from llvmlite import ir

from ggraph.backends.cpu.simd import HEADER_WORDS, I32, I64, Kernel, Val, Var, kernel

WORDS = 24  # of an instruction
BARRIER = 1
ASLEEP, AWAKE, JOB, QUIT = range(4)
LINE = 64  # bytes between words that different threads write
SPINS = 300  # turns of looking out before the processor is offered to others
YIELDS = 3000  # turns of offering before a worker goes to sleep (about a millisecond)


def _atomic_load(k: Kernel, address: Val) -> Val:
    return Val(k, k.b.load_atomic(k.pointer(address), "acquire", 8, typ=I64))


def _atomic_store(k: Kernel, address: Val, value: int) -> None:
    k.b.atomic_rmw("xchg", k.pointer(address), I64(value), "release")


def _atomic(k: Kernel, op: str, address: Val, value: int) -> Val:
    """The word's value before `op` ("add", "xchg")."""
    return Val(k, k.b.atomic_rmw(op, k.pointer(address), I64(value), "acq_rel"))


def _call(k: Kernel, function: Val, result: ir.Type, *args: Val) -> Val:
    kind = ir.FunctionType(result, [a.v.type for a in args])
    pointer = k.b.inttoptr(function.v, kind.as_pointer())
    return Val(k, k.b.call(pointer, [a.v for a in args]))


def _pause(k: Kernel) -> None:
    """Tell the processor that this is a waiting loop."""
    if k.isa.is_x86:
        k.intrinsic("llvm.x86.sse2.pause", ir.VoidType())
    elif k.isa.triple.startswith(("aarch64", "arm64")):
        k.intrinsic("llvm.aarch64.hint", ir.VoidType(), I32(1))


def _relax(k: Kernel, turns: Var) -> None:
    """One turn of waiting: a pause at first, then the processor is offered to others."""
    turns.value = turns.value + 1
    with k.if_else(turns.value < SPINS) as (early, late):
        with early:
            _pause(k)
        with late:
            _call(k, k.arg("yield"), I32)


def _wait_for(k: Kernel, address: Val, target: Val) -> None:
    """Until the counter at `address` reaches `target`."""
    turns = k.var(0)
    with k.while_(lambda: _atomic_load(k, address) < target):
        _relax(k, turns)


def _replay(k: Kernel, code: Val, count: Val, arrived: Val) -> None:
    """Run the program; `arrived` counts barrier arrivals since its start."""
    meetings = k.var(0)
    for i in k.loop(0, count):
        at = code + i * (8 * WORDS)
        _call(k, k.load(at, I64), ir.VoidType(), at, k.thread, k.threads)
        with k.when((k.load(at + 8, I64) & BARRIER).ne(0)):
            meetings.value = meetings.value + k.threads
            _atomic(k, "add", arrived, 1)
            _wait_for(k, arrived, meetings.value)


def _state(k: Kernel, worker: Val) -> Val:
    return k.arg("states") + worker * LINE


@kernel("code count arrived finished states pipes write yield")
def pool_run(k: Kernel) -> None:
    """Thread 0: hand the program to `threads` - 1 workers, run it, wait until all are through."""
    arrived, finished = k.words("arrived finished")
    _atomic_store(k, arrived, 0)
    _atomic_store(k, finished, 0)
    for worker in k.loop(1, k.threads):
        before = _atomic(k, "xchg", _state(k, worker), JOB)
        with k.when(before.eq(ASLEEP)):
            pipe = k.cast("trunc", k.load(k.arg("pipes") + worker * 8, I64), I32)
            _call(k, k.arg("write"), I64, pipe, arrived, k.const(1, I64))
    _replay(k, k.arg("code"), k.arg("count"), arrived)
    _wait_for(k, finished, k.threads - 1)


def _look_out(k: Kernel, state: Val) -> None:
    """Until there is a job; leaves the state ASLEEP if none comes for a while."""
    turns = k.var(0)
    with k.while_(
        lambda: (
            k.select(_atomic_load(k, state).eq(AWAKE), turns.value, SPINS + YIELDS) < SPINS + YIELDS
        )
    ):
        _relax(k, turns)
    k.b.cmpxchg(k.pointer(state), I64(AWAKE), I64(ASLEEP), "acq_rel", "acquire")


def _sleep(k: Kernel, state: Val) -> None:
    """Block in read() until the state is no longer ASLEEP; a signal may end a read early."""
    byte = k.scratch(8)
    pipe = k.cast("trunc", k.load(k.arg("pipes") + k.thread * 8, I64), I32)
    with k.while_(lambda: _atomic_load(k, state).eq(ASLEEP)):
        _call(k, k.arg("read"), I64, pipe, byte, k.const(1, I64))


@kernel("job pipes states read yield")
def pool_work(k: Kernel) -> None:
    """The life of worker `thread`; `job` is the address of pool_run's instruction."""
    state = _state(k, k.thread)
    job = [k.arg("job") + 8 * (HEADER_WORDS + i) for i in range(4)]
    with k.while_(lambda: _atomic_load(k, state).ne(QUIT)):
        _look_out(k, state)
        _sleep(k, state)
        with k.when(_atomic_load(k, state).eq(JOB)):
            code, count, arrived, finished = (k.load(at, I64) for at in job)
            _replay(k, code, count, arrived)
            _atomic_store(k, state, AWAKE)  # before `finished`: the next job may come right after
            _atomic(k, "add", finished, 1)


__all__ = ["ASLEEP", "BARRIER", "LINE", "QUIT", "WORDS", "pool_run", "pool_work"]
