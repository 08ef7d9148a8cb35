"""The CUDA backend's memory, streams, events, capture and errors, over the stand-in driver."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler
from cuda_kit import bytes_on, host_bytes, opened

from ggraph import Graph, Session, input, ops, weight
from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec, libraries, nvrtc, open_driver
from ggraph.backends.cuda.backend import SMALL_COPY
from ggraph.backends.cuda.driver import Driver
from ggraph.backends.host import HostMemory
from ggraph.backends.protocol import Memory
from ggraph.device import HOST
from ggraph.dtype import Q8_0
from ggraph.errors import BackendError, InputError
from ggraph.formats.quantise import quantize
from ggraph.pipeline import Options
from ggraph.plan import Buffer, Do
from ggraph.tensor import Tensor, apply


def test_bytes_come_back() -> None:
    backend = opened()
    memory = bytes_on(backend, 100)
    assert memory.handle.address % 256 == 0
    backend.write(memory, 10, np.arange(20, dtype=np.int16))
    assert np.array_equal(backend.read(memory, 10, 40).view(np.int16), np.arange(20))
    assert backend.read(memory, 50, 0).size == 0
    backend.free(memory)
    with pytest.raises(BackendError, match="'b' is freed twice"):
        backend.free(memory)


@need_compiler
def test_a_copy_is_enqueued_and_host_memory_pinned_once() -> None:
    backend = opened()
    device, host = bytes_on(backend, 64), host_bytes(64)
    backend.write(device, 0, np.full(64, 7, np.uint8))
    backend.copy(0, (host, 0), (device, 0), 64)
    assert not host.handle.any(), "nothing runs before the host waits"
    backend.synchronise(0)
    assert (host.handle == 7).all()
    backend.copy(0, (device, 0), (host, 0), 8)
    assert len(backend.driver.pinned) == 1  # type: ignore[attr-defined]
    backend.close()
    assert not backend.driver.pinned and backend.driver.used == 0  # type: ignore[attr-defined]


@need_compiler
def test_events_order_streams_and_the_host() -> None:
    backend = opened()
    a, b, host = bytes_on(backend, 8), bytes_on(backend, 8), host_bytes(8)
    backend.write(a, 0, np.full(8, 1, np.uint8))
    backend.wait(1, "never recorded")
    backend.copy(0, (b, 0), (a, 0), 8)
    backend.record(0, "made")
    backend.wait(1, "made")
    backend.copy(1, (host, 0), (b, 0), 8)
    backend.record(1, "home")
    backend.synchronise(event="home")
    assert (host.handle == 1).all()
    backend.synchronise(event="never recorded")


def test_two_backends_share_events() -> None:
    driver, events = HostDriver(), Events()
    one = CudaBackend(cuda_spec("cuda0", driver), driver, True, events)
    two = CudaBackend(cuda_spec("cuda1", driver), driver, True, events)
    a, b = bytes_on(one, 8), bytes_on(two, 8)
    one.write(a, 0, np.full(8, 5, np.uint8))
    one.record(0, "done")
    two.wait(0, "done")
    two.copy(0, (b, 0), (a, 0), 8)
    two.synchronise()
    assert (two.read(b, 0, 8) == 5).all()


def test_events_of_a_closed_device_are_forgotten() -> None:
    """Another backend that shares the events must not wait for them."""
    driver, other, events = HostDriver(), HostDriver(), Events()
    one = CudaBackend(cuda_spec("cuda0", driver), driver, True, events)
    two = CudaBackend(cuda_spec("cuda1", other), other, True, events)
    for _ in range(3):
        one.record(0, "done")
        two.record(0, "done")
    assert len(events.made) == 2, "one event per name and device"
    known, made = events.known, events.made
    two.close()
    assert events.known is known and events.made is made, "others may be adding theirs"
    assert events.known == {} and list(events.made) == [("done", driver)]
    one.wait(0, "done")
    one.close()
    assert not events.made


@need_compiler
def test_sessions_share_no_event() -> None:
    """Though their backends know one another's: the names of each are its own."""
    events, names = Events(), []
    h = ops.mul_mat(weight("w8", (8, 8)), input("x", (3, 8)))
    graph = Graph.of({"y": ops.neg(ops.roll(h, (0, 1)))})  # there, here and there
    for name in ("cuda0", "cuda1"):
        driver = HostDriver()
        backend = CudaBackend(cuda_spec(name, driver), driver, True, events)
        session = Session({name: backend, "cpu": open_backend("cpu", threads=1)})
        session.prepare("k", graph, eye)
        session.run("k", {"x": np.ones((3, 8), np.float32)})
        names.append({event for event, owner in events.made if owner is driver})
        session.close()
    assert all(names) and not names[0] & names[1]


def graph_of(n: int = 8) -> Graph:
    x = input("x", (3, n))
    h = ops.mul_mat(weight(f"w{n}", (n, n)), x, name="h")
    return Graph.of({"y": ops.add(h, x)})


def eye(t: Tensor) -> np.ndarray:
    return np.eye(t.shape[0], dtype=np.float32)


@need_compiler
def test_a_session_replays_one_graph_and_a_new_plan_captures_another() -> None:
    backend = opened()
    session = Session({"cuda0": backend, "cpu": open_backend("cpu", threads=1)})
    calls = backend.driver.calls  # type: ignore[attr-defined]
    for n in (8, 16):
        x = np.ones((3, n), np.float32)
        session.prepare(n, lambda n=n: graph_of(n), eye)  # type: ignore[misc]
        first = session.run(n, {"x": x})["y"]  # enqueued one by one
        second = session.run(n, {"x": 3 * x})["y"]  # captured
        assert calls[-1] == "graph of 3" and np.array_equal(second, 3 * first)
        marks = len(calls)
        again = session.run(n, {"x": 2 * x})["y"]
        assert calls[marks:] == ["graph of 3"], "one call, and nothing else"
        assert np.array_equal(first, 2 * x) and np.array_equal(again, 4 * x)
    assert np.array_equal(session.run(8, {"x": np.ones((3, 8), np.float32)})["y"], first[:, :8])
    session.close()
    assert backend.driver.used == 0  # type: ignore[attr-defined]


@need_compiler
def test_a_plan_that_cannot_be_captured_runs_all_the_same() -> None:
    backend = opened()
    session = Session({"cuda0": backend, "cpu": open_backend("cpu", threads=1)})
    session.prepare("k", graph_of, eye)
    feeds = {"x": np.ones((3, 8), np.float32)}
    first = session.run("k", feeds)["y"]
    backend.driver.refuses_capture = True  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="cuda0: plans run without graphs from now on: capture"):
        assert np.array_equal(session.run("k", feeds)["y"], first)
    assert np.array_equal(session.run("k", feeds)["y"], first)
    assert not any("graph" in c for c in backend.driver.calls)  # type: ignore[attr-defined]


@need_compiler
def test_what_is_done_meanwhile_comes_between_enqueueing_and_waiting() -> None:
    """Once, by the thread that asked; work that fails fails the run and leaves the session open."""
    backend = opened()
    driver = backend.driver
    x = input("x", (4,))
    session = Session({"cuda0": backend})
    session.prepare("k", Graph.of({"y": ops.add(x, x)}))
    given = {"x": np.arange(4, dtype=np.float32)}
    seen: list[tuple[int, bool]] = []
    asked: list[str] = driver.calls  # type: ignore[attr-defined]

    def work() -> None:
        pending = any(driver._queues.values())  # type: ignore[attr-defined]
        seen.append((len(asked), pending))

    for _ in range(4):  # enqueued, captured, replayed
        session.meanwhile(work)
        other = threading.Thread(target=session.run, args=("k", given))
        before = len(seen)
        other.start()
        other.join()
        assert len(seen) == before, "the work of another thread"
        session.run("k", given)
        assert len(seen) == before + 1 and seen[-1] == (len(asked), True)
        assert (session.run("k", given)["y"] == 2 * given["x"]).all() and len(seen) == before + 1

    def fails() -> None:
        raise ValueError("no")

    session.meanwhile(fails)
    with pytest.raises(ValueError, match="no"):
        session.run("k", given)
    assert (session.run("k", given)["y"] == 2 * given["x"]).all()
    session.close()


@need_compiler
def test_small_copies_of_what_is_captured_are_kernels() -> None:
    """To and from the device, whatever the sizes and places; and nothing else is."""
    backend = opened()
    driver, n = backend.driver, SMALL_COPY
    device, own = bytes_on(backend, 2 * n), HostMemory()
    host, back = (own.allocate(Buffer("h", HOST, 2 * n, 64)) for _ in range(2))
    host.handle[:] = np.random.default_rng(1).integers(0, 256, 2 * n)
    asked: list[str] = driver.calls  # type: ignore[attr-defined]
    places = [(0, 0, 4), (4, 8, 1000), (1, 4, 100), (4, 3, 7), (3, 3, 1025), (0, 0, n)]
    for into, out, nbytes in places:
        back.handle[:] = 0
        before = driver.sent, driver.brought  # type: ignore[attr-defined]
        backend.copy(0, (device, into), (host, out), nbytes)
        backend.copy(0, (back, out), (device, into), nbytes)
        assert asked[-2:] == ["copy_small"] * 2
        backend.synchronise(0)
        given = host.handle.copy()
        given[:out], given[out + nbytes :] = 0, 0
        assert (back.handle == given).all(), "these bytes, and no byte more"
        counted = driver.sent, driver.brought  # type: ignore[attr-defined]
        assert [b - a for a, b in zip(before, counted, strict=True)] == [nbytes, nbytes]
    other = bytes_on(backend, 64, "other")
    pageable = Memory(Buffer("p", HOST, 64, 64), host.handle[64:128])  # in a page that is locked
    for target, source, nbytes in (
        ((device, 0), (host, 0), n + 1), ((other, 0), (device, 0), 64), ((device, 0), (host, 0), 0),
        ((device, 0), (pageable, 0), 64), ((back, 0), (host, 0), 64),
    ):  # fmt: skip
        backend.copy(0, target, source, nbytes)
        assert asked[-1] == f"copy {nbytes}", (target, source)
    driver.reaches_host = False
    backend.copy(0, (device, 0), (host, 0), 64)
    driver.reaches_host = True
    backend.graphs = False
    backend.copy(0, (device, 0), (host, 0), 64)
    assert asked[-2:] == ["copy 64", "copy 64"]
    backend.close()


def test_a_machine_has_queues_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with contextlib.suppress(BackendError):
        open_driver("cuda0")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_libraries_are_of_the_cuda_that_cupy_was_made_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("libx.so.9", "libx.so.13", "libx.so.13.4", "libx.so.12.9"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(libraries, "TOOLKITS", (str(tmp_path),))
    found = [Path(p).name for p in libraries._candidates("x")]
    assert found == ["libx.so.13.4", "libx.so.13", "libx.so.12.9", "libx.so.9"]
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    with pytest.raises(BackendError, match=r"x of CUDA 12, as CuPy is, was not found") as caught:
        libraries.shared("x", "some-package")
    assert "libx.so.12.9" in str(caught.value) and "so.13" not in str(caught.value)


@need_compiler
def test_an_op_without_a_kernel_goes_to_the_cpu_and_the_plan_says_so() -> None:
    x = input("x", (3, 8))
    h = ops.roll(ops.mul_mat(weight("w", (8, 8)), x, name="h"), (0, 1), name="rolled")
    graph = Graph.of({"y": ops.neg(h)})
    backend = opened()
    session = Session({"cuda0": backend, "cpu": open_backend("cpu", threads=1)}, Options(streams=2))
    verified = session.prepare("k", lambda: graph, eye)
    where = {c.node: c.actor.device for c in verified.plan.schedule if c.node}
    assert where["rolled"] == "cpu" and where["h"] == "cuda0"
    data = np.arange(24, dtype=np.float32).reshape(3, 8)
    got = session.run("k", {"x": data})["y"]
    assert np.array_equal(got, -np.roll(data, 1, -1))
    assert not any("graph" in c for c in backend.driver.calls)  # type: ignore[attr-defined]


@need_compiler
def test_rows_in_8_bits_are_the_cpus_alone() -> None:
    """A graph that asks for them is split; beside a GPU the rewrite makes none of its own."""
    w, x = weight("w", (8, 64), Q8_0), input("x", (3, 64))  # a weight lies on one device
    h = ops.mul_mat(w, apply("quantise", x, name="x.a8"), name="h")
    graph = Graph.of({"h": h, "plain": ops.mul_mat(weight("v", (8, 64), Q8_0), x)})
    session = Session({"cuda0": opened(), "cpu": open_backend("cpu", threads=1)})
    rng = np.random.default_rng(0)
    values = rng.standard_normal((8, 64)).astype(np.float32)
    verified = session.prepare("k", lambda: graph, lambda t: quantize(values, Q8_0))
    where = {c.node: c.actor.device for c in verified.plan.schedule if c.do is Do.LAUNCH}
    assert where == {"x.a8": "cpu", "h": "cpu", "plain": "cuda0"}
    data = rng.standard_normal((3, 64)).astype(np.float32)
    found, wanted = session.run("k", {"x": data}), data @ values.T
    for name in ("h", "plain"):
        assert np.abs(found[name] - wanted).max() < 0.02 * np.abs(wanted).max(), name


def test_out_of_memory_names_what_is_held() -> None:
    driver = HostDriver(1000)
    backend = CudaBackend(cuda_spec("cuda0", driver), driver, True, Events())
    bytes_on(backend, 700, "weights")
    with pytest.raises(BackendError) as caught:
        bytes_on(backend, 400, "arena@cuda0")
    text = str(caught.value)
    assert "\n" not in text
    for part in ("buffer 'arena@cuda0' of 400 bytes", "300 of 1000", "weights 700", "a CPU split"):
        assert part in text
    bytes_on(backend, 100, "blk.0.attn_q.weight")
    bytes_on(backend, 100, "blk.1.attn_q.weight")
    with pytest.raises(BackendError, match=r"Options\(layers=\{'cuda0': 1\}\)"):
        bytes_on(backend, 400)


def test_a_closed_or_lost_device_says_so_and_still_closes() -> None:
    backend = opened()
    memory = bytes_on(backend, 8)
    backend.driver.lost = True  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="lost"):
        backend.synchronise()
    with pytest.raises(BackendError, match="lost"):
        backend.read(memory, 0, 8)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="cuda0 is closed"):
        bytes_on(backend, 8)
    backend.synchronise()


@need_compiler
def test_host_memory_stays_locked_while_copies_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = opened()
    device, host = bytes_on(backend, 64), host_bytes(64)
    backend.write(device, 0, np.full(64, 7, np.uint8))
    backend.copy(1, (host, 0), (device, 0), 64)
    done: list[bool] = []
    monkeypatch.setattr(backend.driver, "unpin", lambda a: done.append(bool(host.handle.all())))
    backend.close()
    assert done == [True]


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(BackendError, match=r"%w: 8 bytes, expected 256"):
        opened().load(Buffer("w", "cuda0", 256, 256), weight("w", (8, 8)), np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: open_driver("cudax"), InputError, "is no CUDA device"),
        (lambda: open_driver("gpu0"), InputError, "is no CUDA device"),
    ],
)
def test_names(make: Callable[[], Driver], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_without_cupy_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.delitem(sys.modules, "ggraph.backends.cuda.cupy_driver", raising=False)
    with pytest.raises(BackendError, match=r"CuPy is not installed.*\[cuda\]"):
        open_backend("cuda0")


def test_without_a_gpu_there_is_a_reason() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        open_backend("cuda9999")
    except BackendError as error:
        assert str(error).startswith("cuda9999: ") and "\n" not in str(error)


def test_compiled_code_is_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    made: list[str] = []

    def compiler(name: str, *_: object) -> bytes:
        made.append(name)
        return b"code"

    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", compiler)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    for arch in ("sm_90", "sm_90", "sm_80"):
        assert nvrtc.build("norm.cu", "text", {}, arch, "") == b"code"
    assert made == ["norm.cu"] * 2
    monkeypatch.setenv("GGRAPH_CACHE", "/proc/nowhere")
    assert nvrtc.build("norm.cu", "text", {}, "sm_90", "") == b"code", "no cache is no error"
