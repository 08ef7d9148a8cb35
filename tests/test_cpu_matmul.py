"""Packed weights and their products: exact unpacking, float64 oracles, batch invariance."""

import importlib
import re
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from cpu_calls import activations, call, call_with, makers, packed_weight, product, variants
from guard_pages import guarded
from hypothesis import given
from hypothesis import strategies as st
from stored_weights import raw_weight

from ggraph import Graph, Session, input, open_backend, ops, weight
from ggraph import dtype as dt
from ggraph.backends.cpu import ceilings  # noqa: F401  (registers "stream_read")
from ggraph.backends.cpu.codegen.compiler import assembly, build_ir
from ggraph.backends.cpu.codegen.isa import Isa, dot_variant, host, limited
from ggraph.backends.cpu.codegen.jit import Jit, host_jit
from ggraph.backends.cpu.codegen.simd import KERNELS
from ggraph.backends.cpu.kernels import amx, matmul
from ggraph.backends.cpu.kernels.blocks import NEAREST, ONCE, SECOND
from ggraph.backends.cpu.kernels.tiles import LAYOUTS, FloatLayout, layout_of, packed_bytes
from ggraph.backends.cpu.runtime.pages import GUARD
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.dtype import A8, DType
from ggraph.env import vector_limit
from ggraph.errors import BackendError, InputError
from ggraph.formats.quants import dequantize

TYPES = list(LAYOUTS)


def dequantised(dtype: DType, raw: np.ndarray, k: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(dtype.gguf)
    if dtype is dt.F32:
        return raw.view(np.float32).reshape(-1, k)
    if dtype is dt.Q1_0:  # the package does not read it
        return dequantize(raw, dtype)
    return gguf.dequantize(raw, kind).reshape(-1, k)


def columns(dtype: DType, blocks: int) -> int:
    return blocks * max(dtype.block, 32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [1, 16, 35])
def test_rows_come_back_exactly(dtype: DType, n: int) -> None:
    k = columns(dtype, 2)
    raw = raw_weight(dtype, n, k)
    tiles = packed_weight(dtype, raw, n, k)
    ids = np.array([n - 1, 0, n // 2, n, -1], np.int32)
    y = np.zeros((5, k), np.float32)
    name = "rows_" + layout_of(dtype).name
    call(name, w=tiles, ids=ids, y=y, n=n, k=k, m=5, ys=y.strides[0])
    assert np.array_equal(y[:3], dequantised(dtype, raw, k)[ids[:3]])
    assert np.isnan(y[3:]).all(), "a row that does not exist must be visible"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(n=st.integers(1, 70), blocks=st.integers(1, 3), m=st.integers(0, 27), seed=st.integers(0, 9))
def test_product_against_float64(dtype: DType, n: int, blocks: int, m: int, seed: int) -> None:
    k = columns(dtype, blocks)
    rng = np.random.default_rng(seed)
    raw = raw_weight(dtype, n, k, seed)
    x, meaning = activations(dtype, rng.normal(size=(m, k)).astype(np.float32))
    add = rng.normal(size=(m, n)).astype(np.float32)
    got = product(dtype, packed_weight(dtype, raw, n, k), x, n, k, threads=2, add=add)
    weights = dequantised(dtype, raw, k).astype(np.float64)
    want = meaning @ weights.T + add
    bound = np.abs(meaning) @ np.abs(weights).T + np.abs(add)
    assert (np.abs(got - want) <= 4e-6 * bound + 1e-30).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_rows_bits_do_not_depend_on_its_batch(dtype: DType) -> None:
    n, k, most = 83, columns(dtype, 3), 150
    x = np.random.default_rng(3).normal(size=(most, k)).astype(np.float32)
    x, _ = activations(dtype, x)
    tiles = packed_weight(dtype, raw_weight(dtype, n, k), n, k)
    whole = product(dtype, tiles, x, n, k, threads=1)
    for m in (*range(1, 50), 64, 65, 90, 112, 127, 128, 129, 144, 149):
        first = (m * 7) % (most - m + 1)
        part = product(dtype, tiles, x[first : first + m], n, k, threads=(1, 2, 4)[m % 3])
        assert np.array_equal(part, whole[first : first + m]), f"{dtype}: m={m} from {first}"


@pytest.mark.parametrize("dtype", [dt.Q4_K, dt.Q6_K, dt.Q8_0, dt.F16, dt.F32], ids=str)
def test_few_rows_have_the_bits_of_many_for_any_number_of_tiles(dtype: DType) -> None:
    """They are read at several places at once, of which the last may have few tiles, or none."""
    most = 11 * layout_of(dtype).tile
    k = 37 if isinstance(layout_of(dtype), FloatLayout) else columns(dtype, 2)
    x, _ = activations(dtype, np.random.default_rng(6).normal(size=(64, k)).astype(np.float32))
    tiles = packed_weight(dtype, raw_weight(dtype, most, k), most, k)
    whole = product(dtype, tiles, x, most, k, threads=1)
    for n in range(1, most + 1, 5):
        for m, threads in ((1, 1), (1, 3), (2, 3), (5, 1), (9, 1)):
            few = product(dtype, tiles, x[:m], n, k, threads)
            assert np.array_equal(few, whole[:m, :n]), f"{dtype}: {m}, {n} outputs, {threads}"


@pytest.mark.parametrize("name", ["stream_read", "matmul_n4k", "matmul_f16", "attend_chunks_f16"])
def test_what_is_read_once_is_asked_for_so_on_amds_alone(name: str) -> None:
    """Intel's then have a third of the lines on their way: a ceiling that asked for them so told
    two thirds of what products read."""
    for cpu, allowed in (("znver3", {ONCE, NEAREST}), ("haswell", {SECOND, NEAREST})):
        isa = Isa("x86_64-unknown-linux-gnu", cpu, "+avx2,+fma,+f16c", "avx2")
        text = str(build_ir(KERNELS[name], isa))
        asked = set(map(int, re.findall(r"@.llvm.prefetch.p0.\(.*i32 0, i32 (\d), i32 1", text)))
        assert asked
        assert asked <= allowed, f"{name} on {cpu}"


@pytest.mark.parametrize("dtype", [dt.Q4_K, dt.Q6_K, dt.Q8_0, dt.Q5_0], ids=str)
def test_more_outputs_than_a_pass_takes_have_the_same_bits(dtype: DType) -> None:
    n, k, m = amx.TILES * 16 + 21, columns(dtype, 1), amx.MOST + 17
    rng = np.random.default_rng(4)
    x, _ = activations(dtype, rng.normal(size=(m, k)).astype(np.float32))
    add = rng.normal(size=(m, n)).astype(np.float32)
    tiles = packed_weight(dtype, raw_weight(dtype, n, k), n, k)
    whole = product(dtype, tiles, x, n, k, threads=3, add=add)
    for first in (0, 16, amx.MOST - 1, m - 2):
        own = slice(first, first + 2)
        part = product(dtype, tiles, x[own], n, k, threads=1, add=add[own])
        assert np.array_equal(part, whole[first : first + 2]), f"{dtype}: from row {first}"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_greatest_sums_have_the_same_bits_in_any_batch(dtype: DType) -> None:
    """Codes and activations at the ends of their ranges: sums of a block as large as they get."""
    n, k, rows = 32, columns(dtype, 2), np.array([1.0, -1.0, 0.0, 1.0], np.float32)
    x, meaning = activations(dtype, np.repeat(rows, 12)[:, None] * np.ones(k, np.float32))
    for ends in ([0], [0xFF], [0x80], [0x7F], [0, 0xFF], [0x7F, 0x80]):
        raw = raw_weight(dtype, n, k, among=ends)
        tiles = packed_weight(dtype, raw, n, k)
        whole = product(dtype, tiles, x, n, k, threads=1)
        want = meaning @ dequantised(dtype, raw, k).astype(np.float64).T
        assert np.allclose(whole, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
        for r in range(0, len(x), 12):
            one = product(dtype, tiles, x[r : r + 1], n, k, threads=1)
            assert np.array_equal(one[0], whole[r]), f"{dtype}: row {r}"


@pytest.mark.parametrize("blocks", [1, 2, 3, 9])
@pytest.mark.parametrize("m", [5, 16, 70])
def test_rows_of_x_end_where_nothing_may_be_read(blocks: int, m: int) -> None:
    """A kernel that takes more of x at once than a block takes no more of the last row than it has:
    two blocks at once crossed its end where their number is odd."""
    dtype, n, k = dt.Q4_1, 20, 32 * blocks
    raw = raw_weight(dtype, n, k)
    tiles = packed_weight(dtype, raw, n, k)
    x, meaning = activations(dtype, np.random.default_rng(m).normal(size=(m, k)).astype(np.float32))
    last = guarded(x.nbytes, 4, at_end=True).reshape(x.shape)
    last[:] = x
    got = product(dtype, tiles, last, n, k, threads=1)
    want = meaning @ dequantised(dtype, raw, k).astype(np.float64).T
    assert np.allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.array_equal(got[-1:], product(dtype, tiles, last[-1:], n, k, threads=1))


@given(seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_quantised_activations(seed: int, scale: float) -> None:
    x = (np.random.default_rng(seed).normal(size=(3, 96)) * scale).astype(np.float32)
    raw, meaning = activations(dt.Q4_1, x)
    blocks = raw.reshape(3, 3, A8.block_bytes)
    stored = np.ascontiguousarray(blocks[..., 40:48]).view(np.int16)
    codes = blocks[..., :32].view(np.int8).astype(np.int16)
    pairs = [codes[..., h + at : h + 16 : 4] for h in (0, 16) for at in (0, 2)]
    others = [codes[..., h + at : h + 16 : 4] for h in (0, 16) for at in (1, 3)]
    for i, (a, b) in enumerate(zip(pairs, others, strict=True)):
        assert np.array_equal(stored[..., i], (a + b).sum(-1))
    scales = np.ascontiguousarray(blocks[..., 32:36]).view(np.float32)[..., 0]
    sums = np.ascontiguousarray(blocks[..., 36:40]).view(np.float32)[..., 0]
    assert np.abs(blocks[..., :32].view(np.int8)).max() <= 127
    assert (np.abs(meaning - x).reshape(3, 3, 32).max(-1) <= scales * 0.5001).all()
    assert np.allclose(sums, meaning.reshape(3, 3, 32).sum(-1), rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("variant", makers())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_variant_gives_the_same_bits(dtype: DType, variant: str) -> None:
    # beyond what shares unpacked codes, or a batch of x, and beyond a batch
    n, k, m = 150, columns(dtype, 19 if dtype.block < 256 else 3), 83
    x, _ = activations(dtype, np.random.default_rng(1).normal(size=(m, k)).astype(np.float32))
    tiles = packed_weight(dtype, raw_weight(dtype, n, k), n, k)
    want = product(dtype, tiles, x, n, k, threads=1)
    y = np.zeros((m, n), np.float32)
    name, jit = "matmul_" + layout_of(dtype).name, Jit(makers()[variant])
    strides = {"xs": x.strides[0], "ys": y.strides[0]}
    call_with(jit, name, w=tiles, x=x, y=y, n=n, k=k, m=m, add=0, adds=0, unit=1, **strides)
    assert np.array_equal(y, want)


@pytest.mark.parametrize("variant", variants())
def test_a_kernel_is_compiled_once(variant: str, tmp_path: Path) -> None:
    isa, name = variants()[variant], "matmul_b8"
    jit = Jit(isa, tmp_path)
    assert jit.address(name) and jit.compiled == [name]
    again = Jit(isa, tmp_path)
    assert again.address(name) and again.compiled == [], "the second load comes from the cache"


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", [t for t in TYPES if t.is_block], ids=str)
@pytest.mark.parametrize("byte", [0, 255])
def test_the_largest_sums_there_can_be(dtype: DType, variant: str, byte: int) -> None:
    """Codes that are all the same, the smallest or the largest, with activations that are all
    largest: what sums of 16 bits have to hold."""
    n, k = 16, columns(dtype, 2)
    raw = raw_weight(dtype, n, k, among=(byte,))
    at = {dt.Q6_K: slice(192, 208), dt.Q3_K: slice(96, 108)}.get(dtype)
    if at is not None:
        raw.reshape(-1, dtype.block_bytes)[:, at] = 0x5A  # scales, which 0 would hide the codes by
    weights = dequantised(dtype, raw, k).astype(np.float64)
    tiles, jit = packed_weight(dtype, raw, n, k), Jit(variants()[variant])
    name = "matmul_" + layout_of(dtype).name
    for m in (1, 3, 20, 40):
        for sign in (3.0, -3.0):
            x, meaning = activations(dtype, np.full((m, k), sign, np.float32))
            y, steps = np.zeros((m, n), np.float32), {"xs": x.strides[0], "ys": 4 * n}
            call_with(jit, name, w=tiles, x=x, y=y, n=n, k=k, m=m, add=0, adds=0, unit=1, **steps)
            bound = np.abs(meaning) @ np.abs(weights).T
            assert (np.abs(y - meaning @ weights.T) <= 4e-6 * bound).all()


@pytest.mark.skipif(not host().is_x86, reason="needs LLVM's x86 target")
def test_vnni_is_chosen_and_selected() -> None:
    assert dot_variant("x86_64-linux", frozenset({"avx2", "avxvnni"})) == "vnni"
    assert dot_variant("x86_64-linux", frozenset({"avx2"})) == "avx2"
    assert dot_variant("aarch64-apple", frozenset({"dotprod"})) == "sdot"
    assert dot_variant("riscv64", frozenset()) == "plain"
    here = host()
    lake = Isa(here.triple, "alderlake", "+avx2,+fma,+f16c,+avxvnni", "vnni")
    text = assembly("matmul_n4m", lake)
    assert "vpdpbusd" in text and "vpmaddubsw" not in text and "zmm" not in text
    wide = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512vnni"
    for name in ("matmul_n4m", "matmul_b8", "matmul_n6k", "matmul_f16"):
        text = assembly(name, Isa(here.triple, "icelake-server", wide, "vnni"))
        assert "zmm" in text and ("vpdpbusd" in text) == (name != "matmul_f16")
        assert "tdpbssd" not in text
        assert "prefetcht1" in text and "vgf2p8affineqb" not in text
    tiles = ",+gfni,+avx512vbmi,+amx-tile,+amx-int8,+amx-bf16"
    rapids = Isa(here.triple, "sapphirerapids", wide + tiles, "vnni")
    assert "vgf2p8affineqb" in assembly("matmul_n4m", rapids)
    zen = assembly("matmul_n4m", Isa(here.triple, "znver5", wide, "vnni"))
    assert "prefetchnta" in zen and "prefetcht1" not in zen
    for name in ("matmul_n4k", "matmul_n6k", "matmul_b8"):
        text = assembly(name, rapids)
        own, other = ("tdpbssd", "tdpbf16ps")[:: 1 if name == "matmul_b8" else -1]
        assert text.count("tilerelease") == 1 and own in text and other not in text


def test_units_that_the_user_withholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """GGRAPH_VECTORS: what is left of a processor with AMX is what lesser ones have."""
    all_of_them = (
        "+avx2,+fma,+avxvnni,+gfni,-avx512fp16,+avx512bw,+avx512vl,+avx512vnni,+avx512vbmi,"
        "+amx-tile,+amx-int8,+amx-bf16"
    )
    rapids = Isa("x86_64-linux", "sapphirerapids", all_of_them, "vnni")
    wide, narrow = limited(rapids, "avx512"), limited(rapids, "avx2")
    assert (rapids.tiles, wide.tiles, narrow.tiles) == (True, False, False)
    assert (wide.dot, wide.lanes, wide.moves_bits) == ("vnni", 16, True)
    assert (narrow.dot, narrow.lanes, narrow.moves_bits) == ("avx2", 8, False)
    assert "+avx2,+fma" in narrow.features and "+avx512" not in narrow.features
    assert limited(rapids, "") == rapids
    grace = Isa("aarch64-linux", "neoverse-v2", "+dotprod", "sdot")
    assert limited(grace, "avx2") == grace
    if "+avx2" in host().features:
        text = assembly("matmul_n4m", limited(host(), "avx2"))
        assert "vpmaddubsw" in text and "vpdpbusd" not in text and "zmm" not in text
    monkeypatch.setenv("GGRAPH_VECTORS", "sse")
    with pytest.raises(InputError, match="avx2 or avx512, got 'sse'"):
        vector_limit()


def test_bad_requests() -> None:
    with pytest.raises(BackendError, match="no packed layout for f64"):
        packed_bytes(dt.F64, 16, 256)
    with pytest.raises(BackendError, match="rows of 100 columns"):
        packed_bytes(dt.Q4_1, 16, 100)
    with pytest.raises(BackendError, match="no CPU kernel"):
        Jit().address("no_such_kernel")


def test_weights_of_more_than_the_last_cache_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are asked for otherwise, in a branch that no small model takes."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((80, 512), np.float32)
    raw = gguf.quants.quantize(wide, gguf.GGMLQuantizationType.Q4_0)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    found = []
    for nbytes in (0, 1 << 40):
        monkeypatch.setattr("ggraph.backends.cpu.backend.last_cache", lambda n=nbytes: n)
        graph = Graph.of({"y": ops.mul_mat(weight("w", wide.shape, dt.Q4_0), input("x", x.shape))})
        with closing(Session({"cpu": open_backend("cpu", threads=2)})) as session:
            session.prepare("y", lambda g=graph: g, lambda t: raw)
            found.append(session.run("y", {"x": x})["y"])
    assert found[0].tobytes() == found[1].tobytes()


def test_prefetches_name_no_memory_behind_the_guard() -> None:
    """What lies behind a weight's last tile is asked for, too."""
    lines = [
        a.tile * a.element_bytes if isinstance(a, FloatLayout) else a.run_bytes
        for a in LAYOUTS.values()
    ]
    assert max(matmul.AHEAD, matmul.FLOAT_AHEAD, matmul.FAR_AHEAD) + max(lines) <= GUARD


@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0, 0)])
def test_products_of_empty_weights(shape: tuple[int, int]) -> None:
    """No inner elements make zeros; found by the examples of ops with weights for inputs."""
    n, k = shape
    graph = Graph.of({"y": ops.mul_mat(weight("w", shape), input("x", (4, k)))})
    with closing(Session({"cpu": open_backend("cpu", threads=1)})) as session:
        session.prepare("y", lambda: graph, lambda t: np.zeros(t.shape, np.float32))
        y = session.run("y", {"x": np.zeros((4, k), np.float32)})["y"]
    assert y.shape == (4, n)
    assert not y.any()


def test_the_bench_of_products_runs_every_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "bench"))
    bench = importlib.import_module("cpu_kernels")
    types = ["q4_1", "q4_k", "q6_k", "f16"]
    bench.bench_kernels(Pool(1, host_jit()), types, n=32)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["type", *types]
    assert all(line.count("GMAC") == 6 for line in lines[1:])
