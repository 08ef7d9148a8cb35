"""ggml's free-list allocator, at the level of bytes. Knows no tensors.

It plans offsets for tensors that live and die (compute buffers) and follows upstream's observable
behaviour exactly, quirks included; the rule numbers A1 to A8 are those of docs/ggml_allocator.md.

Legend: c = chunk index, i = index of a free block within a chunk. All sizes are bytes.
"""

from dataclasses import dataclass, field

from ggraph.errors import AllocError

MAX_CHUNKS = 16  # A1
MAX_FREE_BLOCKS = 256  # A1
SIZE_MAX = 2**64 - 1
ENDLESS = SIZE_MAX // 2  # A2: the size of a chunk that never refuses


@dataclass(frozen=True, order=True)
class Address:
    """A place in a chunked buffer."""

    chunk: int
    offset: int


@dataclass
class Chunk:
    """Free blocks [offset, size], sorted by offset, and the high-water mark (A1)."""

    free: list[list[int]]
    max_size: int = 0


def align_up(nbytes: int, alignment: int) -> int:
    """The least multiple of `alignment` (a power of two) that is >= `nbytes`."""
    return (nbytes + alignment - 1) & -alignment


def check_alignment(alignment: int, where: str) -> None:
    """Raise AllocError unless `alignment` is a power of two."""
    if alignment < 1 or alignment & (alignment - 1):
        raise AllocError(f"{where}: alignment {alignment} is not a power of two")


@dataclass
class DynAllocator:
    """Offsets for blocks that come and go in list order (A1 to A8).

    Nothing is allocated: `size` tells what a backend would have to. Sizes are rounded up to
    `alignment` before placement (A3). Raises AllocError for a negative or enormous size, and when
    a chunk would need more than 256 free blocks.
    """

    alignment: int
    max_chunk: int = ENDLESS
    chunks: list[Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_alignment(self.alignment, "allocator")
        self.max_chunk = min(self.max_chunk, ENDLESS)  # A2

    @property
    def size(self) -> int:
        """Bytes of the buffer: the sum of the chunks' high-water marks (A8)."""
        return sum(c.max_size for c in self.chunks)

    def alloc(self, nbytes: int, name: str = "tensor") -> Address:
        """Place `nbytes` and return where. `name` appears in errors."""
        size = self._rounded(nbytes, name)
        found = self._inner_block(size) or self._last_block(size) or self._new_chunk(size, name)
        c, i = found
        chunk = self.chunks[c]
        block = chunk.free[i]
        at = Address(c, block[0])
        block[0] += size  # A6: the low end of the block is taken
        block[1] -= size
        if block[1] == 0:
            del chunk.free[i]
        chunk.max_size = max(chunk.max_size, at.offset + size)
        return at

    def free(self, at: Address, nbytes: int, name: str = "tensor") -> None:
        """Give the block of `nbytes` at `at` back (A7)."""
        size = self._rounded(nbytes, name)
        blocks = self.chunks[at.chunk].free
        for i, block in enumerate(blocks):
            if block[0] + block[1] == at.offset:
                block[1] += size
                _merge_next(blocks, i)
                return
            if at.offset + size == block[0]:
                block[0], block[1] = at.offset, block[1] + size
                if i:
                    _merge_next(blocks, i - 1)
                return
        self._insert(blocks, at.offset, size, name)

    def _rounded(self, nbytes: int, name: str) -> int:
        if not 0 <= nbytes <= ENDLESS - self.alignment:
            raise AllocError(f"%{name}: size {nbytes} is outside 0..{ENDLESS - self.alignment}")
        return align_up(nbytes, self.alignment)

    def _inner_block(self, size: int) -> tuple[int, int] | None:
        """A4: best fit over all blocks but each chunk's last; ties and later chunks win."""
        found = None
        for c, chunk in enumerate(self.chunks):
            best = SIZE_MAX
            for i, (_, room) in enumerate(chunk.free[:-1]):
                if size <= room <= best:
                    found, best = (c, i), room
        return found

    def _last_block(self, size: int) -> tuple[int, int] | None:
        """A5: the last block that grows its chunk least, else the one that wastes least."""
        found, best = None, -SIZE_MAX
        for c, chunk in enumerate(self.chunks):
            if not chunk.free or chunk.free[-1][1] < size:
                continue
            reuse = chunk.max_size - chunk.free[-1][0] - size
            if best < 0 < reuse - best or 0 <= reuse < best:
                found, best = (c, len(chunk.free) - 1), reuse
        return found

    def _new_chunk(self, size: int, name: str) -> tuple[int, int]:
        """A6, A2: one more chunk; the last possible one is endless."""
        c = len(self.chunks)
        if c >= MAX_CHUNKS:
            raise AllocError(f"%{name}: {size} bytes do not fit into {MAX_CHUNKS} chunks")
        room = ENDLESS if c == MAX_CHUNKS - 1 else max(size, self.max_chunk)
        self.chunks.append(Chunk([[0, room]]))
        return c, 0

    def _insert(self, blocks: list[list[int]], offset: int, size: int, name: str) -> None:
        if len(blocks) >= MAX_FREE_BLOCKS:
            raise AllocError(f"%{name}: more than {MAX_FREE_BLOCKS} free blocks in one chunk")
        i = next((i for i, b in enumerate(blocks) if b[0] >= offset), len(blocks))
        blocks.insert(i, [offset, size])


def _merge_next(blocks: list[list[int]], i: int) -> None:
    """Join block i with the next one where they touch."""
    if i + 1 < len(blocks) and blocks[i][0] + blocks[i][1] == blocks[i + 1][0]:
        blocks[i][1] += blocks[i + 1][1]
        del blocks[i + 1]
