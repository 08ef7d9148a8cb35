"""What a device can do, as data. Planning asks this record and never a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from ggraph.door import fit
from ggraph.errors import InputError, PlaceError, shown
from ggraph.strides import MAX_BYTES
from ggraph.tensor import Tensor

HOST = "host"
RESULT = -1  # in a need's `of`: the launch's own result


@dataclass(frozen=True)
class Need:
    """Bytes that a launch needs beside its operands while it runs, at the device's alignment.

    With `of` (positions of sources) the kernel fills them with what it makes of those sources
    alone: launches of one stream that need the same of the same sources share the bytes, which the
    first of them fills. Without, they are the launch's own. Of its RESULT a launch offers bytes: it
    gets them where a later launch of its stream needs them of that source. What is `flat` is made
    of a source's elements in order, whatever its shape, so that views of all of a tensor share it.
    What beside the sources decides what is in them, such as other operands' shapes, stands in
    `how`: only those who say the same there share.
    """

    name: str
    nbytes: int
    of: tuple[int, ...] = ()
    flat: bool = False
    how: str = ""

    @property
    def is_offered(self) -> bool:
        """Whether the launch can do without."""
        return RESULT in self.of

    @property
    def key(self) -> str:
        """What the launch calls the bytes: it may take what it offers of one of its sources too."""
        return f"{self.name} of the result" if self.is_offered else self.name


def _nothing(t: Tensor) -> tuple[Need, ...]:
    return ()


def _exactly(t: Tensor) -> str:
    return ""


def _always(t: Tensor) -> bool:
    return True


def _none(t: Tensor) -> int:
    return 0


def _as_it_is(t: Tensor, users: tuple[Tensor, ...]) -> int:
    return t.nbytes


@dataclass(frozen=True)
class DeviceSpec:
    """Capabilities and rough speeds of one device.

    Bandwidths are bytes per second, `flops_per_s` is for float32 products, `launch_s` the fixed
    cost of one command. `ops` lists what its kernels can run (None: everything); `weight_dtypes`
    the types it can read weights in (None: all). A device with `host_visible` memory needs no
    staging copies: the host writes inputs and reads outputs in place. `needs(t)` says what a launch
    of `t` takes beside its operands, of which planning makes values; `held_bytes(weight, users)`
    what the device keeps of a weight for the tensors that read it, packed copies included.
    `rounds(t)` names what its kernel rounds beyond the op's meaning, such as "rows to 8 bits";
    `compiled(t)` says whether it has a kernel for `t` at all, or computes it in NumPy, slowly;
    `constant_bytes(t)` is how large the tables are that its program brings along.
    """

    name: str  # "cpu", "cuda0", "sim1"
    kind: str  # "cpu", "cuda" or "sim"
    memory_bytes: int = 1 << 40
    max_buffer_bytes: int = 1 << 40
    alignment: int = 64
    streams: int = 1  # compute streams that the order pass may use
    copy_streams: int = 0  # further streams for transfers; 0: copies go on compute stream 0
    host_visible: bool = False
    ops: frozenset[str] | None = None
    weight_dtypes: frozenset[str] | None = None
    fused: frozenset[str] = frozenset()  # fused ops that `rewrite` may make for this device
    flops_per_s: float = 1e11
    bytes_per_s: float = 2e10
    link_bytes_per_s: float = 1e10  # to and from the host
    peer_bytes_per_s: float = 0.0  # to other devices of its kind; 0: through the host
    launch_s: float = 2e-6
    offload_rows: int = 0  # take work on host weights from this many rows on; 0: never
    needs: Callable[[Tensor], tuple[Need, ...]] = field(default=_nothing, repr=False, compare=False)
    held_bytes: Callable[[Tensor, tuple[Tensor, ...]], int] = field(
        default=_as_it_is, repr=False, compare=False
    )
    rounds: Callable[[Tensor], str] = field(default=_exactly, repr=False, compare=False)
    compiled: Callable[[Tensor], bool] = field(default=_always, repr=False, compare=False)
    constant_bytes: Callable[[Tensor], int] = field(default=_none, repr=False, compare=False)

    def __post_init__(self) -> None:
        fit(self, PlaceError)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise PlaceError(f"{self.name}: alignment {self.alignment} is not a power of two")
        sizes = (self.memory_bytes, self.max_buffer_bytes, self.alignment)
        if min(sizes) < 0 or max(sizes) > MAX_BYTES:
            told = "memory_bytes {}, max_buffer_bytes {}, alignment {}".format(*sizes)
            raise PlaceError(f"{self.name}: {told}: expected 0 or more, at most {MAX_BYTES}")
        if self.name == HOST or not self.name:
            raise PlaceError(f"a device cannot be called {self.name!r}")
        if self.streams < 1 or self.copy_streams < 0:
            raise PlaceError(
                f"{self.name}: {self.streams} streams, {self.copy_streams} copy streams"
            )
        rates = (self.flops_per_s, self.bytes_per_s, self.link_bytes_per_s)
        costs = (self.peer_bytes_per_s, self.launch_s, self.offload_rows)  # of which 0 has a sense
        if not (all(0 < x < inf for x in rates) and all(0 <= x < inf for x in costs)):
            raise PlaceError(
                f"{self.name}: flops, bytes and link bytes per second {rates}: expected more than "
                f"0; peer bytes per second, launch_s and offload_rows {costs}: 0 or more"
            )

    def supports(self, t: Tensor) -> bool:
        """Whether this device can compute `t` (leaves and views: always)."""
        if not isinstance(t, Tensor):
            raise PlaceError(f"{self.name}: expected a tensor, got {shown(t)}")
        if t.is_leaf or t.is_view:
            return True
        if self.ops is not None and t.op not in self.ops:
            return False
        if self.weight_dtypes is None:
            return True
        return all(s.dtype.name in self.weight_dtypes for s in t.sources)


def check_backends(backends: object) -> None:
    """InputError unless this maps the names of devices to their backends."""
    if not isinstance(backends, Mapping):
        raise InputError(f"expected device names with backends, got {shown(backends)}")
    if not any(name != HOST for name in backends):
        raise InputError("a session needs at least one device")
    for name, backend in backends.items():
        spec = getattr(backend, "spec", None)
        if name != HOST and (spec is None or spec.name != name):
            what = f"the backend of {spec.name!r}" if spec is not None else f"{shown(backend)}"
            raise InputError(f"device {name!r}: expected its backend, got {what}")
