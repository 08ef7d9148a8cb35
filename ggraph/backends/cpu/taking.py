"""How threads share out what takes long: each takes the next piece when it is done with one.

With a part for each, a thread whose processor is slower than others', or somebody else's for a
while, keeps all of them waiting.
"""

from collections.abc import Iterator

from ggraph.backends.cpu.interpreter import WORDS, atomic, atomic_store
from ggraph.backends.cpu.simd import Kernel, Val

TAKEN = WORDS - 1  # the word of an instruction that counts; 0 before and after a run


def taken(k: Kernel, count: Val) -> Iterator[Val]:
    """Those of range(count) that this thread is the first to take, one after the other."""
    word = k.instruction + 8 * TAKEN
    mine = k.var(atomic(k, "add", word, 1))
    with k.while_(lambda: mine.value < count):
        yield mine.value
        mine.value = atomic(k, "add", word, 1)
    with k.when(mine.value.eq(count + (k.threads - 1))):  # every other thread has asked in vain
        atomic_store(k, word, 0)


__all__ = ["taken"]
