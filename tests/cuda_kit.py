"""Helpers of the CUDA tests: one op through the backend, on the host stand-in or on a GPU.

GGRAPH_TEST_DEVICE=cuda0 puts a real driver in the place of the stand-in; tests and references stay.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
from cuda_host import COMPILER, HostDriver

from ggraph import Options
from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec, open_driver
from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.device import HOST, Need
from ggraph.dtype import BF16
from ggraph.formats.quantise import quantize
from ggraph.ops.evaluate import read, reference, to_logical, to_storage
from ggraph.plan import Actor, Buffer, Command, Do, Plan
from ggraph.session import Session
from ggraph.tensor import Array, Tensor

DEVICE = os.environ.get("GGRAPH_TEST_DEVICE", "")
need_driver = pytest.mark.skipif(not DEVICE and COMPILER is None, reason="g++ is not installed")


@cache
def _gpu() -> Any:
    return open_driver(DEVICE)


def driver_of(alignment: int = 256, order: int | None = None) -> Any:
    """A fresh stand-in, or the one driver of the GPU that the tests are told to use."""
    return _gpu() if DEVICE else HostDriver(alignment=alignment, order=order)


def opened(alignment: int = 256, order: int | None = None) -> CudaBackend:
    """A backend of its own over such a driver."""
    return over(driver_of(alignment, order))


def over(driver: Any) -> CudaBackend:
    """A backend of its own over this driver."""
    return CudaBackend(cuda_spec("cuda0", driver), driver, True, Events())


@contextmanager
def session_on(device: str) -> Iterator[Session]:
    """A session on the stand-in ("cuda"), on `sim`, or on one thread of the CPU; closed behind."""
    if device == "cuda":
        session = Session({"cuda0": over(HostDriver())})
    elif device == "sim":
        session = Session({"sim0": open_backend("sim0")}, Options(streams=2))
    else:
        # Here, since `gpu_check.py` runs where the CPU backend's compiler may be missing.
        from models.run.load import open_session

        session = open_session(threads=1, exact=True)
    yield session
    session.close()


def one_replay(session: Session, driver: HostDriver, ask: Callable[[], object], name: str) -> Plan:
    """The plan whose key says `name`: `ask`, which it is captured for, is one graph of the driver's
    and nothing else, all of it on the device."""
    marks = len(driver.calls)
    ask()
    asked = driver.calls[marks:]
    assert len(asked) == 1 and asked[0].startswith("graph of"), asked
    key = next(k for k in session._executors if name in k)  # type: ignore[operator]
    plan = session.plan(key).plan
    assert {c.actor.device for c in plan.schedule if c.do is Do.LAUNCH} == {"cuda0"}
    return plan


def place(backend: CudaBackend, t: Tensor, raw: Array | None = None) -> Memory:
    """Memory for all bytes of a root, filled with `raw` where given."""
    memory = backend.allocate(Buffer(t.name, "cuda0", t.nbytes, 256))
    if raw is not None and t.nbytes:
        backend.write(memory, 0, raw)
    return memory


def bytes_on(backend: CudaBackend, nbytes: int, name: str = "b") -> Memory:
    """Bytes of the device."""
    return backend.allocate(Buffer(name, "cuda0", nbytes, 256))


def host_bytes(nbytes: int) -> Memory:
    """Bytes of the host, all 0."""
    return Memory(Buffer("h", HOST, nbytes, 64), np.zeros(nbytes, np.uint8))


def room(backend: CudaBackend, need: Need) -> Scratch:
    """Bytes that a launch has beside its operands."""
    memory = backend.allocate(Buffer(need.name, "cuda0", need.nbytes, 256))
    return Scratch(need.name, memory, 0, need.nbytes)


def run(y: Tensor, stored: Mapping[str, Array]) -> Array:
    """The logical value of `y` over roots with these bytes. On the stand-in threads and blocks take
    turns in ascending and in descending order, which must not change a bit: a missing barrier
    passes in one of them."""
    found, *others = (_ran(y, stored, order) for order in ((None,) if DEVICE else (0, 1)))
    for other in others:
        assert found.tobytes() == other.tobytes(), f"{y.op}: the order of threads changes the value"
    return found


def _ran(y: Tensor, stored: Mapping[str, Array], order: int | None) -> Array:
    # No kernel loads more than 16 bytes at once, and ends lie closer to a guard page.
    backend = opened(16, order)
    roots = {s.root.name: s.root for s in y.sources}
    held = {name: place(backend, t, stored[name]) for name, t in roots.items()}
    old = y.overwritten
    target = held[old.root.name] if old is not None else place(backend, y)
    sources = tuple(Ref(s, held[s.root.name], s.offset) for s in y.sources)
    command = Command(Do.LAUNCH, Actor("cuda0", 0), "y", "y")
    beside = {n.key: room(backend, n) for n in backend.spec.needs(y)}
    backend.submit(0, backend.lower([Launch(command, Ref(y, target, 0), sources, beside)]))
    backend.synchronise()
    found = read(y, backend.read(target, 0, y.nbytes)).copy()
    for need in (n for n in backend.spec.needs(y) if n.is_offered):
        made = backend.read(beside[need.key].memory, 0, need.nbytes).view(np.uint16)
        if need.name == "codes":
            k = prod(y.shape[1:]) if y.op == "flash_attn" else y.shape[-1]
            assert_codes(made.view(np.uint32), found.reshape(-1, k), y.op)
            continue
        whole = np.isfinite(found).reshape(-1, 4).repeat(2, axis=1)  # a NaN has many forms
        same = (made.reshape(-1, 8) == parts(found)) | ~whole
        assert same.all(), f"{y.op}: its parts are not its value's"
    backend.close()
    return found


def parts(values: Array) -> Array:
    """Floats in parts: of each four the first bf16 numbers, then what those leave out."""
    flat = values.reshape(-1)
    first = quantize(flat, BF16).view(np.uint16)
    with np.errstate(invalid="ignore"):
        rest = flat - (first.astype(np.uint32) << 16).view(np.float32)
    low = quantize(rest, BF16).view(np.uint16)
    return np.concatenate((first.reshape(-1, 4), low.reshape(-1, 4)), axis=1)


def codes(rows: Array) -> tuple[Array, Array]:
    """Rows of floats in codes: for each row, group, half and t the four words of a quad; and for
    each row and group two pairs of words, {unit, sum} and {sum of the first, of the last 16}."""
    groups = rows.reshape(len(rows), -1, 32)
    most = np.abs(groups).max(axis=2, keepdims=True)
    most = np.where(most < np.float32(1e-30), np.float32(1e-30), most)
    unit = most / np.float32(524287)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = groups * (np.float32(524287) / most)
        code = np.rint(np.where(np.isnan(scaled), 0, scaled)).astype(np.int32)
        total, first, last = (
            part.sum(axis=2, keepdims=True).astype(np.float32) * unit
            for part in (code, code[..., :16], code[..., 16:])
        )
    made = np.empty((*groups.shape[:2], 2, 4, 4), np.uint32)
    for half, at, byte in ((0, 0, code >> 16), (0, 2, code >> 8), (1, 0, code)):
        words = np.ascontiguousarray(byte & 255, np.uint8).view("<u4")  # of four columns each
        made[:, :, half, :, at] = words[..., :4]
        made[:, :, half, :, at + 1] = words[..., 4:]
    made[:, :, 1, :, 2] = unit.view(np.uint32)
    made[:, :, 1, :, 3] = total.view(np.uint32)
    pairs = np.concatenate([unit, total, first, last], axis=2).view(np.uint32)
    return made, pairs.reshape(*groups.shape[:2], 2, 2)


def code_places(rows: int, groups: int) -> tuple[Array, Array]:
    """The number of each quad in the buffer, by row, group, half and t; and of each pair."""
    row, group, half, t = np.ogrid[:rows, :groups, :2, :4]
    begin = (row // 8 * groups + group) * 72
    pairs = 2 * (begin + 64 + 4 * half) + row % 8
    return begin + half * 32 + row % 8 * 4 + t, pairs[..., 0]


def coded(made: Array, rows: int, groups: int) -> tuple[Array, Array]:
    """Quads and pairs of a buffer, as `codes` has them."""
    quads, pairs = code_places(rows, groups)
    return made.reshape(-1, 4)[quads], made.reshape(-1, 2)[pairs]


def assert_codes(made: Array, rows: Array, what: str) -> None:
    """That words of a buffer of codes are those of these rows; a NaN has many forms."""
    wanted = codes(rows)
    found = coded(made, *wanted[0].shape[:2])
    places: tuple[Any, Any] = (np.s_[:, :, 1, :, 2:], np.s_[:])  # of floats, in quads and in pairs
    for floats, a, b in zip(places, found, wanted, strict=True):
        same = a == b
        none = [np.isnan(np.ascontiguousarray(v[floats]).view(np.float32)) for v in (a, b)]
        same[floats] |= none[0] & none[1]
        assert same.all(), f"{what}: codes {np.argwhere(~same)[:4].tolist()} are not the values'"


def meaning(y: Tensor, stored: Mapping[str, Array]) -> Array:
    """The same by the op's NumPy reference; sources may be views."""
    given = [read(s, stored[s.root.name].copy()).copy() for s in y.sources]
    return to_logical(to_storage(reference(y, given), y), y)


def bytes_of(t: Tensor, values: Array) -> Array:
    """Storage of logical values, as bytes."""
    return np.frombuffer(to_storage(values, t).tobytes(), np.uint8).copy()


def assert_near(got: Array, wanted: Array, tolerance: float, what: str) -> None:
    """Equal integers and infinities; floats within `tolerance` of the largest."""
    assert got.shape == wanted.shape, f"{what}: {got.shape}, expected {wanted.shape}"
    if wanted.dtype.kind == "i":
        assert np.array_equal(got, wanted), f"{what}: {got} != {wanted}"
        return
    finite = np.isfinite(wanted)
    assert np.array_equal(got[~finite], wanted[~finite], equal_nan=True), f"{what}: infinities"
    span = float(np.abs(wanted[finite]).max(initial=1e-30))
    error = float(np.abs(got[finite] - wanted[finite]).max(initial=0))
    assert error <= tolerance * span, f"{what}: off by {error} where the largest is {span}"
