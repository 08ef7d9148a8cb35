"""The driver over CuPy without a GPU: each of its calls binds to CuPy's own functions, which then
find no driver. What the calls do is for `tests/test_cuda_gpu.py`, on a GPU.
"""

import ctypes
from collections.abc import Callable
from ctypes import memmove
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ggraph.backends.cuda.driver import Product
from ggraph.backends.cuda.kernels import Unit
from ggraph.errors import BackendError

pytest.importorskip("cupy", reason="CuPy is not installed")
from cupy.cuda import runtime

from ggraph.backends.cuda import cupy_driver, early, nvrtc

CALLS: dict[str, Callable[[Any], Any]] = {
    "memory": lambda d: d.memory(),
    "allocate": lambda d: d.allocate(10),
    "stream": lambda d: d.stream(),
    "event": lambda d: d.event(),
    "record": lambda d: d.record(1, 2),
    "wait": lambda d: d.wait(1, 2),
    "synchronise": lambda d: d.synchronise(),
    "synchronise a stream": lambda d: d.synchronise(stream=3),
    "synchronise with an event": lambda d: d.synchronise(event=3),
    "copy": lambda d: d.copy(1, 2, 3, 4),
    "begin_capture": lambda d: d.begin_capture(1),
    "end_capture": lambda d: d.end_capture(1),
    "launch_graph": lambda d: d.launch_graph(cupy_driver._Graph(1, 2), 3),
    "edges": lambda d: d.edges(cupy_driver._Graph(1, 2)),
    "launch": lambda d: d.launch(KERNEL, (1, 2, 3), 32, [b"12345678"], 4),
}
KERNEL = cupy_driver._Kernel(SimpleNamespace(ptr=1), 65536)


PRODUCT = Product(1, 2, 3, 4, 5, 6, 7, "bf16", 0, 8, 9)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> cupy_driver.CupyDriver:
    """A driver that claims a GPU; `setDevice`, which each call begins with, is let through."""
    if _has_gpu():
        pytest.skip("this machine has a GPU: tests/test_cuda_gpu.py says more")
    monkeypatch.setattr(runtime, "setDevice", lambda index: None)
    return cupy_driver.CupyDriver(0, "a GPU", "sm_90")


def _has_gpu() -> bool:
    try:
        return bool(runtime.getDeviceCount() > 0)
    except RuntimeError:
        return False


@pytest.mark.parametrize("name", CALLS)
def test_a_call_reaches_cuda(name: str, driver: cupy_driver.CupyDriver) -> None:
    """A wrong name or argument would be an AttributeError or a TypeError."""
    with pytest.raises(BackendError, match=r"^CUDA: .* on a GPU failed: .*(driver|libcuda)"):
        CALLS[name](driver)


def test_what_may_fail_quietly_does(driver: cupy_driver.CupyDriver) -> None:
    raw = np.zeros(8192, np.uint8)
    assert not driver.pin(raw.ctypes.data, 4096)
    driver.unpin(raw.ctypes.data)
    driver.free(1)
    for name in ("streamDestroy", "eventDestroy", "graphDestroy", "graphExecDestroy"):
        driver._undo.append(lambda name=name: getattr(runtime, name)(1))  # type: ignore[misc]
    for call in (runtime.deviceCanAccessPeer, runtime.deviceEnablePeerAccess):
        assert callable(call)
    driver.close()
    assert not driver._undo


def test_loading_a_kernel_reaches_cuda(
    driver: cupy_driver.CupyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "build", lambda *given: b"\x7fELF")
    with pytest.raises(BackendError, match=r"^CUDA: loading rms_norm of norm\.cu on a GPU failed"):
        driver.function(Unit("norm"), "rms_norm")


def test_a_kernel_s_shared_memory_is_asked_for(
    driver: cupy_driver.CupyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is read off the loaded module, and CUDA told of it."""
    unit, asked = Unit("tiles", "q4_k"), []
    driver._modules[unit] = SimpleNamespace(ptr=1, get_function=lambda n: SimpleNamespace(ptr=2))
    driver._modules[Unit("norm")] = driver._modules[unit]
    assert driver.function(Unit("norm"), "rms_norm").shared == 0
    with pytest.raises(BackendError, match=r"^CUDA: loading mul_mat_tile of tiles\.cu"):
        driver.function(unit, "mul_mat_tile")  # by CuPy's own functions

    def memcpy(target: int, source: int, nbytes: int, kind: int) -> None:
        assert (source, nbytes, kind) == (3, 4, 2)  # cudaMemcpyDeviceToHost
        memmove(target, np.uint32(71680).tobytes(), 4)

    monkeypatch.setattr(runtime, "memcpy", memcpy)
    calls = SimpleNamespace(
        moduleGetGlobal=lambda *given: asked.append(given) or 3,
        funcSetAttribute=lambda *given: asked.append(given),
    )
    monkeypatch.setattr(cupy_driver, "driver", calls)
    assert driver.function(unit, "mul_mat_tile").shared == 71680
    assert asked == [(1, "mul_mat_tile_shared"), (2, 8, 71680)]


def test_a_product_reaches_cublas(driver: cupy_driver.CupyDriver) -> None:
    try:
        cupy_driver.Blas().product(PRODUCT)
    except BackendError as error:
        if "was not found" in str(error):
            pytest.skip(f"cuBLASLt is not installed: {error}")
    with pytest.raises(BackendError, match=r"^CUDA: cublasLtCreate failed: .*NOT_INITIALIZED$"):
        driver.product(PRODUCT)


def test_no_gpu_is_one_line() -> None:
    if _has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackendError, match=r"^cuda0: no usable NVIDIA driver or GPU here"):
        cupy_driver.open_driver(0)


def test_opening_asks_whether_kernels_find_the_host_s_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if _has_gpu():
        pytest.skip("this machine has a GPU")
    about = {"name": b"a GPU", "major": 9, "minor": 0, "multiProcessorCount": 132}
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 1)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: about)
    with pytest.raises(BackendError, match=r"^CUDA: asking whether kernels find"):
        cupy_driver.open_driver(0)
    for answer in (0, 1):
        monkeypatch.setattr(runtime, "deviceGetAttribute", lambda *asked, a=answer: a)
        opened = cupy_driver.open_driver(0)
        assert opened.reaches_host is bool(answer) and opened.processors == 132
    for major, version in ((9, 12030), (12, 13000), (9, 12020), (8, 13000)):
        monkeypatch.setitem(about, "major", major)
        monkeypatch.setattr(runtime, "driverGetVersion", lambda v=version: v)
        assert cupy_driver.open_driver(0).begins_early is (major >= 9 and version >= 12030)


def test_a_launch_begins_early_behind_a_kernel_of_its_stream_alone(
    driver: cupy_driver.CupyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind copies, waits, products of the library and graphs it does not, nor first in a capture;
    its grid, shared memory and stream are what the record of CUDA says."""
    said: list[str] = []
    for name in ("streamWaitEvent", "memcpyAsync", "streamBeginCapture", "graphLaunch"):
        monkeypatch.setattr(runtime, name, lambda *given: None)
    monkeypatch.setattr(
        cupy_driver, "driver", SimpleNamespace(launchKernel=lambda *given: said.append("plain"))
    )
    monkeypatch.setattr(driver._blas, "product", lambda p, rank: lambda stream: None)

    def ex(config: Any, function: int, pointers: Any, extra: None) -> int:
        c = config._obj
        (allowed,) = c.attributes[: c.count]
        assert (function, extra, allowed.id, allowed.value) == (1, None, 6, 1)
        assert (*c.grid, *c.block, c.shared) == (1, 2, 3, 32, 1, 1, 65536) and c.stream in (4, 5)
        said.append("early")
        return failing

    failing = 0
    monkeypatch.setattr(early, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=ex))

    def launches(*streams: int) -> list[str]:
        said.clear()
        for stream in streams:
            driver.launch(KERNEL, (1, 2, 3), 32, [b"12345678"], stream)
        return list(said)

    assert launches(4, 4) == ["plain", "plain"]  # a GPU or a driver that cannot
    driver.begins_early = True
    assert launches(4, 5, 5, 4) == ["early", "plain", "early", "early"]
    between: tuple[Callable[[], Any], ...] = (
        lambda: driver.wait(4, 1),
        lambda: driver.copy(1, 2, 3, 4),
        lambda: driver.product(PRODUCT)(4),
        lambda: driver.launch_graph(cupy_driver._Graph(1, 2), 4),
        lambda: driver.begin_capture(4),
    )
    for other in between:
        launches(4)
        other()
        assert launches(4, 4) == ["plain", "early"]
    failing = 719
    with pytest.raises(BackendError, match=r"^CUDA: launching a kernel on a GPU failed: .* 719$"):
        launches(4)


def test_records_of_a_launch_are_laid_out_as_cuda_s() -> None:
    """cuda.h: an attribute is a number, padding to 8 and 64 bytes; a launch 7 numbers, and from 32
    on a stream, the attributes and their count."""
    assert ctypes.sizeof(early._Attribute) == 72 and early._Attribute.value.offset == 8
    offsets = [
        getattr(early._Config, n).offset for n in ("shared", "stream", "attributes", "count")
    ]
    assert offsets == [24, 32, 40, 48] and ctypes.sizeof(early._Config) == 56


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("streamNonBlocking", 1),
        ("memcpyDefault", 4),
        ("streamCaptureModeRelaxed", 2),
        ("cudaDevAttrCanUseHostPointerForRegisteredMem", 91),
    ],
)
def test_constants(name: str, value: int) -> None:
    assert getattr(runtime, name) == value
