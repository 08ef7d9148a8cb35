"""The CPU as a backend: synchronous, host-visible memory, programs lowered once.

Launches become flat programs for the compiled interpreter; what has no kernel runs between them by
its NumPy reference, with block-type weights dequantised once and kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggraph.backends.cpu.codegen.isa import last_cache
from ggraph.backends.cpu.lowering.context import Lowering
from ggraph.backends.cpu.lowering.judge import judge
from ggraph.backends.cpu.lowering.lower import lower
from ggraph.backends.cpu.lowering.needs import is_weight
from ggraph.backends.cpu.lowering.numpy_step import is_fixed, logical, numpy_step
from ggraph.backends.cpu.lowering.packing import Form, LazyMemory, Packer, form_of, windows
from ggraph.backends.cpu.lowering.rehearsal import kernels, products
from ggraph.backends.cpu.profile import Piece, Profile, Span, pieces_of, step_piece
from ggraph.backends.cpu.runtime.copying import SHARED, Copier
from ggraph.backends.cpu.runtime.pages import by_file, drop_map, file_map
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.host import HostMemory
from ggraph.backends.protocol import Backend, Launch, Memory, Ref
from ggraph.device import DeviceSpec
from ggraph.errors import BackendError
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.lazy_array import LazyArray, Storage
from ggraph.plan import Buffer
from ggraph.tensor import Array, Tensor

# Bytes of a weight that is copied out of a mapped file: so many Linux maps around what is
# read (fault_around_bytes), most of which would be a smaller weight's neighbours.
SMALL = 1 << 16


@dataclass(frozen=True, eq=False)
class CpuProgram:
    """The steps of one run of launches."""

    launches: Sequence[Launch]
    steps: tuple[Callable[[], None], ...]
    fallbacks: tuple[str, ...]  # names of the tensors that the NumPy reference computes
    pieces: tuple[Piece, ...] = ()  # launch by launch, for a profile


@dataclass(eq=False)
class CpuBackend(HostMemory, Backend):
    """One CPU. `exact` keeps activations in float32; `profile` can time every launch."""

    spec: DeviceSpec
    pool: Pool
    exact: bool = False
    profile: Profile | None = None
    _decoded: dict[Memory, dict[Form, Array]] = field(default_factory=dict)  # as float32
    _closed: bool = False

    def __post_init__(self) -> None:
        self._copied, self._packer = Copier(self.pool), Packer(self.pool, self.exact)

    @property
    def is_synchronous(self) -> bool:
        """Every command runs before its call returns."""
        return True

    @property
    def copies_from(self) -> int:
        """Bytes from which all threads copy together."""
        return SHARED if self.pool.threads > 1 else super().copies_from

    def write(self, memory: Memory, offset: int, data: Array) -> None:
        """Put `data`'s bytes at `offset`, by all threads where they are many."""
        if data.nbytes < self.copies_from or not data.flags.c_contiguous:
            super().write(memory, offset, data)
            return
        held = memory.handle[offset : offset + data.nbytes]
        self._copied(held.ctypes.data, data.ctypes.data, held.nbytes)

    def read(self, memory: Memory, offset: int, nbytes: int) -> Array:
        """A copy of `nbytes` bytes from `offset`, by all threads where they are many."""
        if nbytes < self.copies_from:
            return super().read(memory, offset, nbytes)
        held, found = memory.handle[offset : offset + nbytes], np.empty(nbytes, np.uint8)
        self._copied(found.ctypes.data, held.ctypes.data, held.nbytes)
        return found

    def allocate(self, buffer: Buffer) -> Memory:
        """Zeroed host memory. BackendError when closed or when the host has no more."""
        if self._closed:
            raise BackendError(f"{self.spec.name} is closed; open another backend")
        return super().allocate(buffer)

    def free(self, memory: Memory) -> None:
        """Forget what was made of a weight; the bytes go with their last user."""
        self._packer.free(memory)
        self._decoded.pop(memory, None)

    def expect(self, weights: Iterable[RawTensor]) -> None:
        """Have what is likely to be missing of their kernels compiled, memory for their packed
        forms found, and their files read, until a program comes."""
        given = list(weights)
        self.pool.jit.expect(products(given, exact=self.exact))
        self._packer.expect(given)

    def load(self, buffer: Buffer, tensor: Tensor, raw: Storage) -> Memory:
        """The weight's bytes where they are: a mapped file is not copied.

        Vectors are, because reading one would map half a megabyte of its neighbours as well.
        """
        if raw.nbytes != tensor.nbytes:
            raise BackendError(f"{tensor.name!r}: {raw.nbytes} bytes, expected {tensor.nbytes}")
        if isinstance(raw, LazyArray) and raw.nbytes > SMALL:
            return LazyMemory(buffer, raw)
        flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        small = flat.nbytes <= SMALL and file_map(flat) is not None
        return Memory(buffer, flat.copy() if small else flat)

    def lower(self, launches: Sequence[Launch]) -> CpuProgram:
        """Flat programs with NumPy steps between them, for what has work to do."""
        self.pool.jit.prepare(
            name for x in launches for name in kernels(x.result.tensor, exact=self.exact)
        )
        steps: list[Callable[[], None]] = []
        pieces: list[Piece] = []
        spans: list[Span] = []
        fallbacks = []
        weights = {r.memory: r.tensor.nbytes for r in _weights(launches)}
        stream = sum(weights.values()) > last_cache()
        low = Lowering(self._packer, stream)
        for x in launches:
            first = len(low.asm.rows)
            if not x.result.tensor.size or lower(low, x):
                spans.append((x, first, len(low.asm.rows)))
                continue
            self._flush(low, steps, pieces, spans)
            low, spans = Lowering(self._packer, stream), []
            steps.append(self._step(x))
            pieces.append(step_piece(x, steps[-1]))
            fallbacks.append(x.result.tensor.name)
        self._flush(low, steps, pieces, spans)
        if self._packer.finish():
            for file in by_file(w for m in weights for w in windows(m)):
                drop_map(file[0])
        return CpuProgram(launches, tuple(steps), tuple(fallbacks), tuple(pieces))

    def _flush(
        self,
        low: Lowering,
        steps: list[Callable[[], None]],
        pieces: list[Piece],
        spans: Sequence[Span],
    ) -> None:
        """What was lowered so far becomes one flat program, which is judged."""
        if not low.asm.rows:
            return
        flat = low.asm.freeze()
        judge(flat.code, flat.names, (low.ground(*span) for span in spans))
        steps.append(lambda: self.pool.run(flat))
        if self.profile is not None:
            made = self._packer.made.items()
            held = {id(m): packed.data.nbytes for m, forms in made for packed in forms.values()}
            pieces += pieces_of(self.pool, flat, spans, held)

    def meanwhile(self, work: Callable[[], object]) -> None:
        """Have `work` done while the workers have begun with the next program."""
        self.pool.meanwhile(work)

    def submit(self, stream: int, program: CpuProgram) -> None:
        """Run the program; everything is complete on return."""
        if self.profile is not None and self.profile.on:
            self.profile.run(program.pieces)
            return
        for step in program.steps:
            step()

    def copy(
        self, stream: int, target: tuple[Memory, int], source: tuple[Memory, int], nbytes: int
    ) -> None:
        """Copy host bytes."""
        (to, at), (origin, start) = target, source
        to.handle[at : at + nbytes] = origin.handle[start : start + nbytes]

    def record(self, stream: int, event: str) -> None:
        """Nothing: all earlier work is complete."""

    def wait(self, stream: int, event: str) -> None:
        """Nothing: all earlier work is complete."""

    def synchronise(self, stream: int | None = None, event: str | None = None) -> None:
        """Nothing: all earlier work is complete."""

    def close(self) -> None:
        """Drop the decoded weights; nothing can be allocated any more."""
        self._decoded.clear()
        self._packer.close()
        if not self._closed:
            self.pool.close()
        self._closed = True

    def _step(self, launch: Launch) -> Callable[[], None]:
        """The launch in NumPy, with weights decoded once."""
        return numpy_step(launch, [self._fixed(r) for r in launch.sources])

    def _fixed(self, ref: Ref) -> Array | None:
        """The values of a weight, or of a view of one, that is not float32; None for everything
        else."""
        t = ref.tensor
        if not is_fixed(t):
            return None
        forms, form = self._decoded.setdefault(ref.memory, {}), form_of(ref, t.dtype)
        if form not in forms:
            forms[form] = logical(ref)
        return forms[form]


def _weights(launches: Sequence[Launch]) -> Iterator[Ref]:
    return (r for x in launches for r in x.sources if is_weight(r.tensor))
