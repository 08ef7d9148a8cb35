"""The slots of one cache that nobody uses."""

from collections.abc import Iterable, Sequence

from ggraph.errors import InputError


class Slots:
    """Free slots of 0 .. count - 1. The latest given back go first: they may still be in a cache.

    InputError for a slot that is given back twice, or was never handed out.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InputError(f"a pool of {count} slots: expected one or more")
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._is_free = bytearray(b"\1" * count)

    @property
    def free(self) -> int:
        """How many there are to take."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` slots, neighbours where they can be. InputError where there are fewer."""
        if not 0 <= count <= len(self._free):
            raise InputError(f"{count} slots wanted, {len(self._free)} are free")
        kept = len(self._free) - count
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        for slot in taken:
            self._is_free[slot] = 0
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Take slots back."""
        for slot in slots:
            if not 0 <= slot < self.count or self._is_free[slot]:
                raise InputError(f"slot {slot} of {self.count} is given back, but nobody has it")
            self._is_free[slot] = 1
        self._free.extend(reversed(slots))

    def check(self, held: Iterable[int]) -> None:
        """InputError unless `held` are exactly the slots that are out, each once."""
        out = sorted(held)
        if out != [s for s in range(self.count) if not self._is_free[s]]:
            raise InputError(f"{len(out)} slots are held, {self.count - self.free} are out")
