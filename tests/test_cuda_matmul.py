"""Stored weights on CUDA: every type, 1 to 65 rows. On the stand-in from the kernels' own source.

The reference is NumPy's decoder, which `test_formats_quants.py` holds to the `gguf` package.
"""

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler
from cuda_kit import bytes_of, need_driver, opened, over, place, room, run
from stored_weights import raw_weight

from ggraph import Graph, Session, ops
from ggraph import dtype as dt
from ggraph.backends.cuda import kernels, matmul
from ggraph.backends.cuda.lower import accepts
from ggraph.backends.protocol import Launch, Ref
from ggraph.dtype import I32, DType
from ggraph.formats.quants import dequantize
from ggraph.plan import Actor, Command, Do
from ggraph.tensor import Array, input, weight

pytestmark = need_driver
TYPES = [dt.dtype(name) for name in kernels.WEIGHTS]


def decoded(dtype: DType, raw: Array, k: int) -> Array:
    return dequantize(raw, dtype).reshape(-1, k)


def columns(dtype: DType) -> int:
    return 2 * max(dtype.block, 32) if dtype.is_block else 77


def product(dtype: DType, raw: Array, x: Array, rest: Array | None = None) -> Array:
    """x . W^T (+ rest) through the backend."""
    n, k = len(raw), x.shape[1]
    w, a = weight("w", (n, k), dtype), input("x", x.shape)
    stored = {"w": raw.reshape(-1), "x": x.reshape(-1).view(np.uint8)}
    if rest is None:
        return run(ops.mul_mat(w, a, name="y"), stored)
    stored["r"] = rest.reshape(-1).view(np.uint8)
    return run(ops.mul_mat_add(w, a, input("r", rest.shape), name="y"), stored)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_decoded_bit_for_bit(dtype: DType) -> None:
    """Any bytes: infinite and NaN scales too. Both kernels that decode."""
    n, k = 9, columns(dtype)
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (n, dtype.row_bytes(k)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = decoded(dtype, raw, k)
    table = weight("w", (n, k), dtype)
    ids = np.array([8, 0, 3, 8, -1, n], np.int32)
    stored = {"w": raw.reshape(-1), "i": ids.view(np.uint8)}
    got = run(ops.get_rows(table, input("i", (6,), I32), name="y"), stored)
    assert np.array_equal(_bits(got[:4]), _bits(wanted[ids[:4]]))
    assert np.isnan(got[4:]).all(), "a row that does not exist must be visible"
    whole = run(ops.cast(table, dt.F32, name="y"), stored)
    assert np.array_equal(_bits(whole), _bits(wanted))


def _bits(x: Array) -> Array:
    return np.where(np.isnan(x), np.uint32(0x7FC00000), np.ascontiguousarray(x).view(np.uint32))


def widths(dtype: DType) -> list[int]:
    """Columns for the tensor cores (a multiple of 32), and for plain types others too; of some more
    than the strands of src/tiles.cu take in one turn, and no whole segment at the end."""
    long = {"q8_0": [4448], "q4_k": [4608], "q6_k": [4608], "bf16": [4448], "iq2_xs": [4608],
            "nvfp4": [192, 4416], "q1_0": [384, 4480]}  # fmt: skip
    return ([columns(dtype)] if dtype.is_block else [96, 77]) + long.get(dtype.name, [])


@pytest.mark.parametrize(("dtype", "k"), [(t, k) for t in TYPES for k in widths(t)], ids=str)
def test_products_against_float64_and_batch_invariance(dtype: DType, k: int) -> None:
    """1 to 64 rows, by 8 and by 64: the same bits whatever the number of rows, as many as a tree of
    64 nodes has."""
    n = 21
    rng = np.random.default_rng(2)
    raw = raw_weight(dtype, n, k)
    x = rng.normal(size=(64, k)).astype(np.float32)
    rest = rng.normal(size=(64, n)).astype(np.float32)
    whole = product(dtype, raw, x)
    weights = decoded(dtype, raw, k).astype(np.float64)
    bound = np.abs(x) @ np.abs(weights).T
    assert (np.abs(whole - x @ weights.T) <= 1e-5 * bound).all()
    for m in (*range(1, 10), 31, 33):
        assert np.array_equal(product(dtype, raw, x[3 : 3 + m]), whole[3 : 3 + m]), f"{m} rows"
    assert np.array_equal(product(dtype, raw, x, rest), whole + rest)
    assert np.array_equal(product(dtype, raw, x[:5], rest[:5]), (whole + rest)[:5])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_rows_go_to_the_library_in_slices(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k, m = 21, columns(dtype), matmul.FEW_ROWS + 1
    monkeypatch.setattr(matmul, "SLICE_BYTES", 8 * k * 4)
    rng = np.random.default_rng(3)
    raw = raw_weight(dtype, n, k)
    x = rng.normal(size=(m, k)).astype(np.float32)
    rest = rng.normal(size=(m, n)).astype(np.float32)
    weights = decoded(dtype, raw, k).astype(np.float64)
    bound = np.abs(x) @ np.abs(weights).T
    coarse = 4e-6 if dtype is dt.F32 else 1e-3 if dtype is dt.F16 else 8e-3
    for add in (None, rest):
        got = product(dtype, raw, x, add)
        wanted = x @ weights.T + (0 if add is None else add)
        assert (np.abs(got - wanted) <= coarse * bound + 1e-6).all(), f"{dtype} {add is None}"


@need_compiler
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_added_is_read_where_it_lies(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows in slices: no copy, and nothing but the result is written."""
    n, k, m = 21, 64, matmul.FEW_ROWS + 1
    monkeypatch.setattr(matmul, "SLICE_BYTES", 8 * k * 2)
    driver = HostDriver()
    backend, rng = over(driver), np.random.default_rng(5)
    raw = raw_weight(dt.Q8_0, n, k)
    x, rest = (rng.normal(size=(m, size)).astype(np.float32) for size in (k, n))
    w, a, r = weight("w", (n, k), dt.Q8_0), input("x", x.shape), input("r", rest.shape)
    y = ops.mul_mat_add(w, a, r, name="y")
    held = [place(backend, t, v) for t, v in ((w, raw.reshape(-1)), (a, bytes_of(a, x)))]
    other = place(backend, r, bytes_of(r, rest))
    target = other if in_place else place(backend, y)
    sources = tuple(Ref(t, h, 0) for t, h in zip((w, a, r), (*held, other), strict=True))
    command = Command(Do.LAUNCH, Actor("cuda0", 0), "y", "y")
    beside = {need.key: room(backend, need) for need in backend.spec.needs(y)}
    program = backend.lower([Launch(command, Ref(y, target, 0), sources, beside)])
    marks = len(driver.calls)
    backend.submit(0, program)
    backend.synchronise()
    done = driver.calls[marks:]
    assert done == ["convert", *["dequantise", "product bf16"] * 3]
    got = backend.read(target, 0, y.nbytes).view(np.float32).reshape(m, n)
    wanted = x @ decoded(dt.Q8_0, raw, k).T + rest
    assert np.abs(got - wanted).max() < 8e-3 * np.abs(wanted).max()
    if not in_place:
        assert backend.read(other, 0, r.nbytes).tobytes() == rest.tobytes()


@pytest.mark.parametrize("dtype", [dt.F16, dt.Q4_K, dt.Q8_0, dt.IQ1_M], ids=str)
def test_experts(dtype: DType) -> None:
    n, k, t, u, e = 10, 768, 3, 2, 4  # columns of several warps
    rng = np.random.default_rng(4)
    raw = raw_weight(dtype, e * n, k)
    ids = np.array([[3, 0], [1, 1], [2, 3]], np.int32)
    weights = decoded(dtype, raw, k).reshape(e, n, k)
    for given in (u, 1):
        x = rng.normal(size=(t, given, k)).astype(np.float32)
        y = ops.mul_mat_id(
            weight("w", (e, n, k), dtype), input("x", x.shape), input("i", (t, u), I32), name="y"
        )
        stored = {"w": raw.reshape(-1), "x": x.reshape(-1).view(np.uint8), "i": ids.view(np.uint8)}
        wanted = np.einsum("tuk,tunk->tun", np.broadcast_to(x, (t, u, k)), weights[ids])
        assert np.abs(run(y, stored.copy()) - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", [dt.BF16, dt.F16, dt.Q4_K, dt.Q8_0], ids=str)
def test_rows_that_begin_anywhere_give_the_same_bits(dtype: DType) -> None:
    """A view of x, or of a plain w, whose first byte is no multiple of 16."""
    n, k = 17, 256
    rng = np.random.default_rng(8)
    raw = raw_weight(dtype, n, k)
    x = rng.normal(size=(3, k)).astype(np.float32)
    flat = np.concatenate([np.zeros(3, np.float32), x.reshape(-1)])
    held = input("x", flat.shape)
    view = ops.narrow(held, 0, 3, 3 * k).reshape(3, k)
    stored = {"w": raw.reshape(-1), "x": flat.view(np.uint8)}
    y = ops.mul_mat(weight("w", (n, k), dtype), view, name="y")
    assert np.array_equal(run(y, stored), product(dtype, raw, x))
    if dtype.is_block:
        return
    wide = weight("w", (n * k + 1,), dtype)
    w = ops.narrow(wide, 0, 1, n * k).reshape(n, k)
    stored = {"w": np.concatenate([raw.reshape(-1)[:2], raw.reshape(-1)]),
              "x": x.reshape(-1).view(np.uint8)}  # fmt: skip
    got = run(ops.mul_mat(w, input("x", x.shape), name="y"), stored)
    assert np.abs(got - product(dtype, raw, x)).max() < 1e-4 * np.abs(got).max()


@pytest.mark.parametrize("dtype", [dt.BF16, dt.F32, dt.Q4_K, dt.Q6_K, dt.IQ3_S, dt.NVFP4], ids=str)
def test_a_pair_of_token_and_expert_has_the_same_bits_in_any_company(dtype: DType) -> None:
    """More pairs than one pass takes, experts without any, and an id that does not exist."""
    n, k, t, u, e = 21, 768, 13, 2, 5
    rng = np.random.default_rng(6)
    raw = raw_weight(dtype, e * n, k)
    x = rng.normal(size=(t, 1, k)).astype(np.float32)
    ids = rng.choice([0, 2, 2, 2, 4], (t, u)).astype(np.int32)
    ids[3, 1] = e
    whole = _chosen(dtype, raw, (e, n, k), x, ids)
    assert np.isnan(whole[3, 1]).all() and not np.isnan(np.delete(whole, 7, 0)[:3]).any()
    for i in range(t):
        one = _chosen(dtype, raw, (e, n, k), x[i : i + 1], ids[i : i + 1])
        assert np.array_equal(one[0], whole[i], equal_nan=True), f"token {i}"
    weights = decoded(dtype, raw, k).reshape(e, n, k).astype(np.float64)
    for i, j in ((0, 0), (12, 1)):
        wanted = weights[ids[i, j]] @ x[i, 0]
        bound = np.abs(weights[ids[i, j]]) @ np.abs(x[i, 0])
        assert (np.abs(whole[i, j] - wanted) <= 1e-5 * bound).all()


@need_compiler
def test_pairs_are_grouped_once_for_all_that_read_them() -> None:
    """Groups hang on the ids and the number of experts, and on nothing else."""
    driver = HostDriver()
    n, k, t, u = 16, 32, 3, 2
    x, ids = input("x", (t, u, k)), input("i", (t, u), I32)
    shapes = {"gate": (5, n, k), "up": (5, n, k), "down": (5, k, k), "few": (4, n, k)}
    made = {name: ops.mul_mat_id(weight(f"w.{name}", s, dt.BF16), x, ids, name=name)
            for name, s in shapes.items()}  # fmt: skip
    raw = {f"w.{name}": raw_weight(dt.BF16, s[0] * s[1], k) for name, s in shapes.items()}
    session = Session({"cuda0": over(driver)})
    session.prepare("k", Graph.of(made), lambda w: raw[w.name].view(np.uint16).reshape(w.shape))
    feeds = {"x": np.random.default_rng(2).normal(size=x.shape).astype(np.float32),
             "i": np.array([[3, 0], [1, 1], [2, 3]], np.int32)}  # fmt: skip
    found = session.run("k", feeds)
    assert driver.calls.count("group_pairs") == 2 and driver.calls.count("mul_mat_id_tile") == 4
    for name, (_, rows, _) in shapes.items():
        weights = decoded(dt.BF16, raw[f"w.{name}"], k).reshape(-1, rows, k)
        wanted = np.einsum("tuk,tunk->tun", feeds["x"], weights[feeds["i"]])
        assert np.abs(found[name] - wanted).max() < 1e-4 * np.abs(wanted).max(), name
    session.close()


def _chosen(dtype: DType, raw: Array, shape: tuple[int, int, int], x: Array, ids: Array) -> Array:
    y = ops.mul_mat_id(
        weight("w", shape, dtype), input("x", x.shape), input("i", ids.shape, I32), name="y"
    )
    stored = {"w": raw.reshape(-1), "x": x.reshape(-1).view(np.uint8), "i": ids.view(np.uint8)}
    return run(y, {name: b.reshape(-1) for name, b in stored.items()})


def test_an_expert_that_does_not_exist_is_visible() -> None:
    y = ops.mul_mat_id(weight("w", (2, 3, 8)), input("x", (1, 1, 8)), input("i", (1, 2), I32))
    ones = np.ones(48, np.float32).view(np.uint8)
    stored = {"w": ones, "x": ones[:32], "i": np.array([1, 2], np.int32).view(np.uint8)}
    got = run(y.named("y"), stored)
    assert np.array_equal(got[0, 0], [8.0] * 3) and np.isnan(got[0, 1]).all()


def test_what_is_refused_goes_elsewhere() -> None:
    half = input("x", (2, 64), dt.F16)
    assert not accepts(ops.mul_mat(weight("w", (3, 64), dt.Q8_0), half))
    assert accepts(ops.mul_mat(weight("w", (3, 64), dt.F16), half))
    batched = ops.mul_mat(weight("w", (2, 3, 64), dt.Q8_0), input("y", (2, 5, 64)))
    assert not accepts(batched)
    assert not opened().spec.supports(batched)


def test_more_outputs_than_a_grid_has_blocks_take_another_kernel() -> None:
    """16 outputs a block, 65,535 blocks beside one another."""
    most, x = 16 * 65535, input("x", (3, 32))
    w, over = weight("w", (most, 32), dt.BF16), weight("v", (most + 1, 32), dt.BF16)
    known = opened().spec
    assert known.needs(ops.mul_mat(w, x)) and not known.needs(ops.mul_mat(over, x))
    half = weight("h", (16 * 32767, 32), dt.BF16)
    assert accepts(ops.mul_mats(half, x, half)) and not accepts(ops.mul_mats(half, x, w))
