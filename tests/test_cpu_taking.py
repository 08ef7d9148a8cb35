"""Pieces that threads take as they get done: each is done once, whoever is late, run after run."""

import numpy as np
import pytest
from cpu_calls import pool

from ggraph.backends.cpu.codegen.jit import host_jit
from ggraph.backends.cpu.codegen.simd import I64, KERNELS, Kernel, KernelSpec, Val
from ggraph.backends.cpu.runtime.interpreter import atomic_load
from ggraph.backends.cpu.runtime.program import Assembler, Flat, Touched
from ggraph.backends.cpu.runtime.taking import TAKEN, taken

PATIENCE = 1 << 33  # turns of waiting, some seconds: where nobody takes what is left, it ends


def _build(k: Kernel) -> None:
    """times[i] + 1 and owner[i] = thread for each piece; thread `late` stays with its first piece
    until no other is left."""
    times, owner, count, late = k.words("times owner count late")
    for i in taken(k, count):
        k.store(times + i * 8, k.load(times + i * 8, I64) + 1)
        k.store(owner + i * 8, k.thread)
        with k.when(k.thread.eq(late)):
            _stay(k, count)


def _stay(k: Kernel, count: Val) -> None:
    turns, asked = k.var(0), k.instruction + 8 * TAKEN

    def waits() -> Val:
        return k.select(atomic_load(k, asked) < count, turns.value, PATIENCE) < PATIENCE

    with k.while_(waits):
        turns.value = turns.value + 1


SPEC = KernelSpec("take_pieces", ("times", "owner", "count", "late"), _build)


def program(count: int, late: int, instructions: int = 1) -> tuple[Flat, list[np.ndarray]]:
    KERNELS[SPEC.name] = SPEC
    asm, arrays = Assembler(host_jit()), []
    for _ in range(instructions):
        times, owner = np.zeros(count + 1, np.int64), np.full(count + 1, -1, np.int64)
        values = {"times": times, "owner": owner, "count": count, "late": late}
        asm.add(SPEC.name, access=Touched((), ()), **values)
        arrays += [times, owner]
    del KERNELS[SPEC.name]  # tests that go through all kernels shall not meet it
    return asm.freeze(), arrays


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 64])
def test_each_piece_is_taken_once_in_every_run(count: int, threads: int) -> None:
    flat, arrays = program(count, -1, instructions=3)  # nobody meets anybody between them
    for run in range(1, 30):
        pool(threads).run(flat)
        for times in arrays[::2]:
            assert times[:count].tolist() == [run] * count
            assert times[count] == 0
        assert not flat.code[:, TAKEN].any()


@pytest.mark.parametrize("late", [0, 1])
def test_others_take_what_a_late_thread_leaves(late: int) -> None:
    for _ in range(5):  # each time a new program, which is not tried on one thread yet
        flat, (_, owner) = program(20, late)
        pool(2).run(flat)
        assert (owner[:20] == late).sum() <= 1
