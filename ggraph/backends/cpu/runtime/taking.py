"""How threads share out what takes long: each takes the next piece when it is done with one.

With a part for each, a thread whose processor is slower than others', or somebody else's for a
while, keeps all of them waiting.
"""

from collections.abc import Iterator

from ggraph.backends.cpu.codegen.simd import Kernel, Val
from ggraph.backends.cpu.runtime.interpreter import WORDS, atomic, atomic_store

TAKEN = WORDS - 1  # the word of an instruction that counts; 0 before and after a run
SHARES = 4  # pieces of each thread at least, where there are as many: a wait is a quarter at most


class Taking:
    """Pieces of an instruction, numbered from 0: each is done by the thread that is the first to
    take it. All threads go through them in the same order."""

    def __init__(self, k: Kernel) -> None:
        self._k, self._word = k, k.instruction + 8 * TAKEN
        self._mine = k.var(self._next())

    def _next(self) -> Val:
        return atomic(self._k, "add", self._word, 1)

    def before(self, end: Val) -> Iterator[Val]:
        """The pieces before `end` that this thread takes, one after the other."""
        mine = self._mine
        with self._k.while_(lambda: mine.value < end):
            yield mine.value
            mine.value = self._next()

    def finish(self, count: Val) -> None:
        """All `count` of them are taken."""
        with self._k.when(self._mine.value.eq(count + (self._k.threads - 1))):
            atomic_store(self._k, self._word, 0)  # every other thread has asked in vain


def taken(k: Kernel, count: Val) -> Iterator[Val]:
    """Those of `count` pieces that this thread takes."""
    pieces = Taking(k)
    yield from pieces.before(count)
    pieces.finish(count)
