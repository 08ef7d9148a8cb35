"""Large copies by all threads: what a run is fed and what is fetched of it.

Each thread takes a part that lies together, as it does of what kernels compute, so that most of it
stays in its own caches.
"""

import threading
from dataclasses import dataclass, field

from ggraph.backends.cpu.codegen.memo import Memo
from ggraph.backends.cpu.codegen.simd import HEADER_WORDS, I8, Kernel, kernel, vec
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler, Flat

PIECE = 256  # bytes that a turn moves
# Bytes from which threads share a copy: of 512 KB two take 13 us, as one does, of 1 MB 19 for 34
SHARED = 1 << 19


@kernel("to at nbytes")
def copy(k: Kernel) -> None:
    """`nbytes` bytes from `at` to `to`, which do not overlap."""
    to, at, nbytes = k.words("to at nbytes")
    whole = nbytes // PIECE
    for piece in k.share(whole):
        place, line = piece * PIECE, vec(I8, 64)
        for i in range(0, PIECE, 64):
            k.store(to + place + i, k.load(at + place + i, line))
    with k.when(k.thread.eq(0)):
        for byte in k.loop(whole * PIECE, nbytes):
            k.store(to + byte, k.load(at + byte, I8))


@dataclass(eq=False)
class Copier:
    """Copies of host memory on a pool; a program for each size, since each learns its own time."""

    pool: Pool
    _programs: Memo[Flat] = field(default_factory=Memo)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, to: int, at: int, nbytes: int) -> None:
        """Copy `nbytes` bytes between addresses whose ranges do not overlap."""
        with self._lock:
            program = self._programs.find(nbytes, lambda: self._of(nbytes))
            program.code[0, HEADER_WORDS : HEADER_WORDS + 2] = to, at
            self.pool.run(program)

    def _of(self, nbytes: int) -> Flat:
        asm = Assembler(self.pool.jit)
        asm.add("copy", to=0, at=0, nbytes=nbytes)
        return asm.freeze()
