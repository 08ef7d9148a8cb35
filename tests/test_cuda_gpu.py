"""What only a GPU can show of the driver, the backend and captured graphs.

Without a GPU the tests run on the stand-in of `cuda_host`, which shows that they are right in
themselves; GGRAPH_TEST_DEVICE=cuda0 runs them on a GPU. NumPy and pytest are all they need, since
`scripts/gpu_check.py` runs them on machines that have little else.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_host import COMPILER, HostDriver
from cuda_kit import DEVICE
from cuda_plan import Recording, lost_orderings, nodes_by_command, waits_between

from ggraph import Options, Session, dtypes
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec, open_driver
from ggraph.backends.cuda.driver import Product
from ggraph.backends.cuda.kernels import Unit, packed
from ggraph.backends.cuda.matmul import WORK_SPACE
from ggraph.backends.host import HostMemory
from ggraph.decode.runner import Runner
from ggraph.device import HOST
from ggraph.errors import BackendError
from ggraph.plan import Buffer
from models.registry import open_model

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "golden" / "tiny"


def gpu() -> Any:
    """A driver of the GPU that the tests are told to use."""
    if not DEVICE:
        pytest.skip("needs a GPU, and GGRAPH_TEST_DEVICE that names it")
    return open_driver(DEVICE)


@pytest.fixture
def driver() -> Iterator[Any]:
    if not DEVICE and COMPILER is None:
        pytest.skip("g++ is not installed")
    made = gpu() if DEVICE else HostDriver()
    yield made
    made.close()


def opened(driver: Any, kind: type[CudaBackend] = CudaBackend) -> Any:
    return kind(cuda_spec("cuda0", driver), driver, True, Events())


def stored(driver: Any, values: np.ndarray[Any, Any], stream: int) -> int:
    """The values in memory of the device."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    address: int = driver.allocate(flat.nbytes)
    driver.copy(address, flat.ctypes.data, flat.nbytes, stream)
    driver.synchronise(stream=stream)
    return address


def fetched(driver: Any, address: int, count: int, stream: int) -> np.ndarray[Any, Any]:
    """`count` floats from the device."""
    found = np.empty(count, np.float32)
    driver.copy(found.ctypes.data, address, found.nbytes, stream)
    driver.synchronise(stream=stream)
    return found


def test_memory_is_counted_and_given_back(driver: Any) -> None:
    free, total = driver.memory()
    assert 0 < free <= total
    address = driver.allocate(1 << 26)
    assert address % 256 == 0 and driver.memory()[0] <= free - (1 << 25)
    driver.free(address)
    assert driver.memory()[0] >= free - (1 << 25)


def test_bytes_come_back_from_any_place(driver: Any) -> None:
    backend = opened(driver)
    memory = backend.allocate(Buffer("b", "cuda0", 100_003, 256))
    given = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    backend.write(memory, 3, given)
    assert np.array_equal(backend.read(memory, 3, 100_000), given)
    assert np.array_equal(backend.read(memory, 1003, 7), given[1000:1007])


def test_small_host_buffers_are_all_locked(driver: Any) -> None:
    """Captured copies need it; two buffers must not meet in one page."""
    host = HostMemory()
    buffers = [host.allocate(Buffer(f"h{i}", HOST, 100, 64)) for i in range(20)]
    assert all(driver.pin(int(m.handle.ctypes.data), 100) for m in buffers)
    assert not driver.pin(int(buffers[0].handle.ctypes.data), 100), "once is enough"
    for m in buffers:
        driver.unpin(int(m.handle.ctypes.data))


def test_a_kernel_with_every_kind_of_argument(driver: Any) -> None:
    stream = driver.stream()
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    w = np.linspace(1, 2, 40, dtype=np.float32)
    held = [stored(driver, v, stream) for v in (x, w, np.zeros_like(x))]
    args = packed(
        "rms_norm_odd",
        {
            "x": held[0], "w": held[1], "y": held[2], "parts": 0, "codes": 0, "n": 40,
            "shape": (1, 1, 1, 3), "strides": (0, 0, 0, 160), "eps": 1e-5, "type": 0,
        },
    )  # fmt: skip
    driver.launch(driver.function(Unit("norm"), "rms_norm_odd"), (3, 1, 1), 32, args, stream)
    got = fetched(driver, held[2], x.size, stream).reshape(x.shape)
    wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * w
    assert np.abs(got - wanted).max() < 1e-5


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("add", ["", "in place", "apart"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_product_of_the_library(driver: Any, kind: str, add: str, rank: int) -> None:
    """Rows of the result lie farther apart than they are long; what is added is the result's own
    memory, or other memory, which stays as it was."""
    n, m, k, row = 24, 40, 64, 32
    stream, rng = driver.stream(), np.random.default_rng(2)
    w, x = rng.integers(-4, 5, (n, k)), rng.integers(-4, 5, (m, k))  # exact in every type
    y = rng.integers(-4, 5, (m, row)).astype(np.float32)
    addresses = [stored(driver, _stored_as(v, kind), stream) for v in (w, x)]
    result, other = stored(driver, y, stream), stored(driver, 2 * y, stream)
    rest = {"": 0, "in place": result, "apart": other}[add]
    added = {"": 0 * y, "in place": y, "apart": 2 * y}[add]
    space = driver.allocate(WORK_SPACE)
    made = Product(*addresses, result, n, m, k, row, kind, rest, space, WORK_SPACE)
    try:
        step = driver.product(made, rank)
    except BackendError as error:
        if not rank:
            raise
        pytest.skip(str(error))
    step(stream)
    got = fetched(driver, result, y.size, stream).reshape(y.shape)
    assert np.array_equal(got[:, :n], x @ w.T + added[:, :n])
    assert np.array_equal(got[:, n:], y[:, n:])
    assert np.array_equal(fetched(driver, other, y.size, stream).reshape(y.shape), 2 * y)


def _stored_as(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    plain = values.astype(np.float32)
    if kind == "bf16":
        return (plain.view(np.uint32) >> 16).astype(np.uint16)
    return plain.astype(np.float16 if kind == "f16" else np.float32)


def delayed(driver: Any, stream: int, seconds: float) -> None:
    args = packed("delay", {"duration": int(seconds * 1e9)})
    driver.launch(driver.function(Unit("delay"), "delay"), (1, 1, 1), 32, args, stream)


def test_events_order_streams(driver: Any) -> None:
    first, second, event = driver.stream(), driver.stream(), driver.event()
    a = stored(driver, np.full(8, 1, np.float32), first)
    b = stored(driver, np.full(8, 2, np.float32), first)
    delayed(driver, first, 0.02)
    driver.copy(b, a, 32, first)
    driver.record(event, first)
    driver.wait(second, event)
    assert (fetched(driver, b, 8, second) == 1).all()


def test_streams_without_an_event_do_not_wait(driver: Any) -> None:
    """What every race on the device is built on: the delayed stream loses."""
    first, second = driver.stream(), driver.stream()
    a = stored(driver, np.full(8, 1, np.float32), first)
    b = stored(driver, np.full(8, 2, np.float32), first)
    delayed(driver, first, 0.0)  # loaded before it matters
    driver.synchronise()
    delayed(driver, first, 0.05)
    driver.copy(b, a, 32, first)
    assert (fetched(driver, b, 8, second) == 2).all()
    driver.synchronise()
    assert (fetched(driver, b, 8, second) == 1).all()


def test_the_delay_takes_its_time() -> None:
    driver = gpu()
    stream = driver.stream()
    delayed(driver, stream, 0.0)
    driver.synchronise()
    begun = time.perf_counter()
    delayed(driver, stream, 0.05)
    assert time.perf_counter() - begun < 0.04, "the host does not wait for it"
    driver.synchronise()
    assert 0.045 < time.perf_counter() - begun < 1.0
    driver.close()


def test_a_captured_graph_replays_and_describes_itself(driver: Any) -> None:
    """A fork and a join: two copies side by side, then one that needs both."""
    main, side = driver.stream(), driver.stream()
    fork, join = driver.event(), driver.event()
    a = stored(driver, np.arange(8, dtype=np.float32), main)
    b = stored(driver, np.zeros(8, np.float32), main)
    c = stored(driver, np.zeros(16, np.float32), main)
    driver.begin_capture(main)
    driver.copy(b, a, 32, main)
    driver.record(fork, main)
    driver.wait(side, fork)
    driver.copy(c, b, 32, side)
    driver.copy(c + 32, b, 32, main)
    driver.record(join, side)
    driver.wait(main, join)
    graph = driver.end_capture(main)
    assert sorted(driver.edges(graph)) == [(0, 1), (0, 2)]
    for start in (0.0, 5.0):
        values = np.arange(8, dtype=np.float32) + np.float32(start)
        driver.copy(a, values.ctypes.data, 32, main)
        driver.synchronise(stream=main)
        driver.launch_graph(graph, main)
        assert np.array_equal(fetched(driver, c, 16, main), np.concatenate([values, values]))


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_the_graph_of_a_step_keeps_what_the_verifier_relied_on(
    driver: Any, name: str, streams: int
) -> None:
    cuda = opened(driver, Recording)
    session = Session({"cuda0": cuda}, Options(streams=streams))
    runner = Runner(open_model(TINY / name), session, 64, cache_dtype=dtypes.F32)
    found = []
    for _ in range(3):
        runner.past = 0
        found.append(runner.text([7]).logits)
    assert all(np.array_equal(found[0], logits) for logits in found[1:])
    key = (runner.model.name, runner.shape(1, 1, 1))
    verified, executor = session.plan(key), session._executors[key]
    assert len(cuda.made) == 1 and not waits_between(verified)
    nodes = nodes_by_command(cuda, executor, verified)
    relied_on, lost = lost_orderings(verified, nodes, driver.edges(cuda.made[0]))
    assert relied_on > 100 and not lost
    session.close()


def test_products_of_the_library_are_captured(driver: Any) -> None:
    """A prompt of 70 rows: its products are cuBLASLt's, on two streams."""
    cuda = opened(driver, Recording)
    session = Session({"cuda0": cuda}, Options(streams=2))
    runner = Runner(open_model(TINY / "llama_tied"), session, 128, cache_dtype=dtypes.F32)
    ids = [(7 * i) % 100 for i in range(70)]
    found = []
    for _ in range(3):
        runner.past = 0
        found.append(runner.text(ids).logits)
    assert len(cuda.made) == 1, "it was captured, not refused"
    assert all(np.array_equal(found[0], logits) for logits in found[1:])
    session.close()


def test_too_much_memory_is_one_line_and_work_goes_on(driver: Any) -> None:
    backend = opened(driver)
    small = backend.allocate(Buffer("weights", "cuda0", 1000, 256))
    with pytest.raises(BackendError, match=r"buffer 'arena' of \d+ bytes does not fit") as caught:
        backend.allocate(Buffer("arena", "cuda0", 1 << 50, 256))
    assert "weights 1000" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(BackendError):  # the driver's own answer
        driver.allocate(1 << 50)
    backend.write(small, 0, np.full(1000, 5, np.uint8))
    assert (backend.read(small, 0, 1000) == 5).all()


FAULT = """
import sys
sys.path[:0] = ["tests", "."]
from test_cuda_gpu import gpu, opened
from ggraph.backends.cuda.kernels import Unit, packed
from ggraph.errors import BackendError
driver = gpu()
backend = opened(driver)
args = packed("unary_flat", {"x": 64, "y": 64, "count": 32, "op": 1, "a": 0.0, "b": 0.0})
function = driver.function(Unit("elementwise"), "unary_flat")
driver.launch(function, (1, 1, 1), 32, args, backend.stream(0))
try:
    backend.synchronise()
except BackendError as error:
    print(f"one line: {error}")
backend.close()
print("closed")
"""


def test_a_faulting_kernel_is_one_line_and_the_backend_closes() -> None:
    """In a process of its own: CUDA refuses that process everything from then on."""
    gpu().close()
    done = subprocess.run(
        [sys.executable, "-c", FAULT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "closed" and lines[0].startswith("one line: CUDA: "), done
