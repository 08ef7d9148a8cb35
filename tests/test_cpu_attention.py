"""Attention over a cache: float64 oracle, and bits that depend on the row alone."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_calls import call, call_with, variants
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Graph, Options, Session, input, open_backend, ops
from ggraph.backends.cpu.codegen.isa import host
from ggraph.backends.cpu.codegen.jit import Jit, host_jit
from ggraph.backends.cpu.codegen.simd import I32X8, I64, KERNELS, Kernel, KernelSpec, Val
from ggraph.backends.cpu.kernels import attention, chunks
from ggraph.backends.cpu.kernels.slots import SPARE, list_bytes
from ggraph.backends.cpu.kernels.sweeps import MAX_KEY
from ggraph.backends.cpu.runtime.pages import LINE
from ggraph.dtype import Q8_0
from ggraph.formats.quants import dequantize, quantize
from ggraph.ops.evaluate import evaluate

SPOILT = 1 << 20  # bytes
TYPES = {"f32": np.float32, "f16": np.float16, "q8_0": np.float32}


def stored(kind: str, x: np.ndarray) -> np.ndarray:
    """A cache [n, heads, hd] as it lies in memory."""
    return quantize(x.astype(np.float32), Q8_0) if kind == "q8_0" else x.astype(TYPES[kind])


def numbers(cache: np.ndarray) -> np.ndarray:
    """What a stored cache stands for, float64."""
    plain = dequantize(cache, Q8_0) if cache.dtype == np.uint8 else cache
    return plain.astype(np.float64)


def arguments(kind: str, m: int, heads: int, kv: int, hd: int, n: int, seed: int) -> dict[str, Any]:
    """Random queries, cache and causal mask with a hole; outputs are zeros."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(m, heads, hd)).astype(np.float32)
    k, v = (stored(kind, rng.normal(size=(n, kv, hd))) for _ in range(2))
    shown = np.sort(rng.integers(1, n + 1, m))
    mask = np.where(np.arange(n) < shown[:, None], 0, -np.inf).astype(np.float32)
    if m > 1:
        mask[-1, : shown[-1] // 2] = -np.inf
    return {
        "q": q, "k": k, "v": v, "mask": mask, "y": np.zeros_like(q), "m": m, "heads": heads,
        "kv_heads": kv, "hd": hd, "vd": hd, "n": n, "c": n, "qs": q.strides[0],
        "ks": k.strides[0],
        "kh": k.strides[1], "vs": v.strides[0], "vh": v.strides[1], **listed(mask),
        "ys": q.strides[0], "scale": hd**-0.5,
        "sinks": 0, "softcap": 0.0,
        "part": np.full(attention.scratch_bytes(m, heads, hd, n), 0xFF, np.uint8),
    }  # fmt: skip


def listed(mask: np.ndarray) -> dict[str, Any]:
    """The lists of what a mask shows, with anything behind their ends."""
    m, n = mask.shape
    lists = np.full((m, list_bytes(n)), 0x55, np.uint8)
    call("shown_slots", 3, mask=mask, list=lists, length=0, m=m, n=n, ms=n * 4)
    return {"list": lists}


def attend(name: str, threads: int, a: dict[str, Any]) -> None:
    """Run a kernel of attention; the mask itself serves the oracle alone."""
    call(name, threads, **{key: value for key, value in a.items() if key != "mask"})


def oracle(a: dict[str, Any]) -> np.ndarray:
    m, heads, kv, hd = a["m"], a["heads"], a["kv_heads"], a["hd"]
    q = a["q"].astype(np.float64).reshape(m, kv, heads // kv, hd)
    scores = np.einsum("mkgd,nkd->mkgn", q, numbers(a["k"])) * a["scale"]
    mask = a["mask"][:, None, None]
    scores = np.where(np.isneginf(mask), -np.inf, scores + mask)
    sinks = np.full(heads, -np.inf) if isinstance(a["sinks"], int) else a["sinks"].astype(float)
    scores = np.concatenate([scores, np.tile(sinks.reshape(kv, -1, 1), (m, 1, 1, 1))], -1)
    p = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -3e38))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    return np.einsum("mkgn,nkd->mkgd", p[..., :-1], numbers(a["v"])).reshape(m, heads, -1)


SHAPES = [(9, 3, 64), (4, 4, 80), (7, 1, 128), (2, 1, 8), (10, 2, 40), (6, 1, 256), (2, 1, 96)]


@pytest.mark.parametrize("kind", TYPES)
@given(
    shape=st.sampled_from(SHAPES),
    n=st.sampled_from([1, 2, 7, 64, 127, 128, 129, 300, 640]),
    m=st.integers(1, 7),
    seed=st.integers(0, 9),
)
def test_against_float64(kind: str, shape: tuple[int, int, int], n: int, m: int, seed: int) -> None:
    heads, kv, hd = shape
    a = arguments(kind, m, heads, kv, -(-hd // 32) * 32 if kind == "q8_0" else hd, n, seed)
    attend("attention_" + kind, 3, a)
    assert np.abs(a["y"] - oracle(a)).max() < 5e-6
    chunked = dict(a, y=np.zeros_like(a["y"]))
    attend("attend_chunks_" + kind, 2, chunked)
    attend("merge_chunks", 4, chunked)
    assert np.array_equal(chunked["y"], a["y"]), "single chunks merge to the same bits"


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("kind", TYPES)
def test_every_variant_gives_the_same_bits(kind: str, variant: str, tmp_path: Path) -> None:
    jit = Jit(variants()[variant], tmp_path)
    for shape in SHAPES:
        if kind == "q8_0" and shape[2] % 32:
            continue
        a = arguments(kind, 3, *shape, 143, 5)
        attend("attention_" + kind, 2, a)
        want, a["y"] = a["y"], np.zeros_like(a["y"])
        call_with(jit, "attention_" + kind, **{k: v for k, v in a.items() if k != "mask"})
        assert np.array_equal(a["y"], want), shape


@pytest.mark.parametrize("kind", TYPES)
def test_bits_depend_on_neither_batch_nor_bucket(kind: str) -> None:
    a = arguments(kind, 12, 9, 3, 64, 300, 4)
    attend("attention_" + kind, 1, a)
    for row in range(12):
        alone = dict(a, q=a["q"][row:], list=a["list"][row:], m=1, y=np.zeros((1, 9, 64), "f4"))
        attend("attention_" + kind, 2, alone)
        assert np.array_equal(alone["y"][0], a["y"][row])
    wide = np.full((12, 512), -np.inf, np.float32)
    wide[:, :300] = a["mask"]
    cache = {x: np.concatenate([a[x], a[x][:212]]) for x in "kv"}
    part = np.zeros(attention.scratch_bytes(12, 9, 64, 512), np.uint8)
    bucket = dict(a, **cache, **listed(wide), n=512, c=512, part=part, y=a["y"] * 0)
    attend("attention_" + kind, 2, bucket)
    assert np.array_equal(bucket["y"], a["y"]), "a longer bucket changes nothing"


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_chunks_are_shared_whole_among_threads(m: int, threads: int) -> None:
    """Each chunk of each row is done by one thread, whatever the lengths: bits and oracle agree."""
    for n in (1, 65, 128, 257, 700):
        a = arguments("f16", m, 9, 3, 64, n, m + n)
        attend("attention_f16", 1, a)
        shared = dict(a, y=np.full_like(a["y"], np.nan))
        attend("attend_chunks_f16", threads, shared)
        attend("merge_chunks", threads, shared)
        assert np.array_equal(shared["y"], a["y"]), f"{m} rows of {n} slots on {threads} threads"
        assert np.abs(a["y"] - oracle(a)).max() < 5e-6


def spoil(k: Kernel) -> None:
    """Leave what is neither a number nor an address where the next kernel has its scratch."""
    room = k.opaque(k.scratch(SPOILT))
    for at in k.loop(0, SPOILT, 32):
        k.store(room + at, k.const(-1, I32X8))


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("kind", TYPES)
def test_rows_that_share_keys_get_the_bits_of_rows_alone(
    kind: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, texts behind others, windows, and rows of which some see something else: by tiles of
    queries, and by chunks of a row, whatever the tile's shape, and whatever the stack had."""
    jit = Jit(variants()[variant], tmp_path)
    monkeypatch.setitem(KERNELS, "spoil", KernelSpec("spoil", (), spoil))
    for heads, kv, hd, m, past in (
        (3, 3, 32, 13, 100), (3, 3, 32, 40, 0), (8, 2, 64, 37, 100), (7, 1, 32, 9, 120),
        (4, 4, 96, 130, 64), (100, 1, 32, 9, 250),
    ):  # fmt: skip
        n = past + m
        a = arguments(kind, m, heads, kv, hd, n, 1)
        last = past + np.arange(m)[:, None]
        text = np.arange(n) <= last
        window = text & (np.arange(n) > last - 50)
        odd = text & (np.arange(n) != 30) | (np.arange(m)[:, None] % 5 != 0) & text
        for shown in (text, window, odd):
            a["mask"] = np.where(shown, 0, -np.inf).astype(np.float32)
            a |= listed(a["mask"])
            values = {k: v for k, v in a.items() if k != "mask"}
            got, want = np.zeros_like(a["y"]), np.zeros_like(a["y"])
            call_with(jit, "spoil")
            call_with(jit, "attention_" + kind, **dict(values, y=got))
            attend("attend_chunks_" + kind, 2, dict(a, y=want))
            attend("merge_chunks", 2, dict(a, y=want))
            assert np.array_equal(got, want), (heads, kv, hd, m)
            assert np.abs(got - oracle(a)).max() < 5e-6


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", TYPES)
def test_a_prompt_beside_other_texts_gets_the_bits_of_rows_alone(kind: str, threads: int) -> None:
    """A server's step: rows of a prompt in two pieces, texts of any length between and behind them,
    of which some share their beginning, and rows that only fill the step up."""
    rng = np.random.default_rng(threads)
    spans = [(0, i) for i in range(1, 11)]  # first slot and end of what a row sees
    spans += [(100 + 7 * i, 101 + 7 * i + 40 * (i % 5)) for i in range(9)]
    spans += [(0, i) for i in range(11, 14)] + [(40, 470 - i) for i in range(6)] + [(0, 0)] * 5
    a = arguments(kind, len(spans), 9, 3, 64, 512, threads)
    at = np.arange(512)
    a["mask"] = np.where([(first <= at) & (at < end) for first, end in spans], 0, -np.inf)
    a["mask"] = a["mask"].astype(np.float32)
    a["mask"][-8:, 300:] += np.where(rng.random((8, 212)) < 0.5, 0, -np.inf).astype(np.float32)
    a |= listed(a["mask"])
    got, want = np.full_like(a["y"], np.nan), np.zeros_like(a["y"])
    attend("attention_" + kind, threads, dict(a, y=got))
    attend("attend_chunks_" + kind, 2, dict(a, y=want))
    attend("merge_chunks", 2, dict(a, y=want))
    assert np.array_equal(got, want)
    assert not got[-5:].any(), "rows that see nothing"
    seeing = dict(a, q=a["q"][:-5], mask=a["mask"][:-5], m=len(spans) - 5)
    assert np.abs(got[:-5] - oracle(seeing)).max() < 5e-6


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("m", [3, 30])
def test_the_widest_keys_may_have_narrow_values(m: int, kind: str) -> None:
    """As those of encoders that carry what a position adds behind their own numbers."""
    a = arguments(kind, m, 4, 4, MAX_KEY, 150, m)
    v = stored(kind, np.random.default_rng(1).normal(size=(150, 4, 64)))
    a |= {"v": v, "vd": 64, "vs": v.strides[0], "vh": v.strides[1], "ys": 4 * 64 * 4}
    got, want = (np.zeros((m, 4, 64), np.float32) for _ in range(2))
    attend("attention_" + kind, 3, dict(a, y=got))
    attend("attend_chunks_" + kind, 2, dict(a, y=want))
    attend("merge_chunks", 2, dict(a, y=want))
    assert np.array_equal(got, want) and np.abs(got - oracle(a)).max() < 5e-6


def test_what_a_row_does_not_see_may_be_no_number() -> None:
    """Keys and values of later rows of the same tile: infinite, or not a number."""
    a = arguments("f16", 30, 4, 2, 64, 150, 3)
    a["mask"] = np.where(np.arange(150) <= 120 + np.arange(30)[:, None], 0, -np.inf).astype("f4")
    a |= listed(a["mask"])
    attend("attention_f16", 2, a)
    spoilt = dict(a, k=a["k"].copy(), v=a["v"].copy(), y=np.zeros_like(a["y"]))
    spoilt["k"][135:], spoilt["v"][135:] = np.nan, np.inf
    attend("attention_f16", 2, spoilt)
    assert np.array_equal(spoilt["y"][:15], a["y"][:15])
    assert np.isnan(spoilt["y"][15:]).all()


ODD = (np.inf, -np.inf, np.nan)


@pytest.mark.parametrize("variant", ["host", *variants()])
@pytest.mark.parametrize("kind", TYPES)
def test_what_a_row_sees_that_is_no_number_shows(kind: str, variant: str, tmp_path: Path) -> None:
    """Odd keys, queries, masks and sinks: a result is a number where it is one by the oracle, and
    then that. An f16 cache holds a key above 65504 as infinity."""
    jit = host_jit() if variant == "host" else Jit(variants()[variant], tmp_path)
    rng = np.random.default_rng(0)
    for (m, heads, n), odd, where in product(
        ((1, 4, 9), (3, 4, 150), (20, 8, 150)), ODD, ("k", "q", "mask", "sinks")
    ):
        a = arguments(kind, m, heads, 2, 32, n, 1)
        if where == "k":
            at = rng.integers(0, n, 2), rng.integers(0, 2, 2)
            if kind == "q8_0":
                a["k"][*at, :2] = np.frombuffer(np.float16(odd).tobytes(), np.uint8)
            else:
                a["k"][*at, 5] = odd
        elif where == "q":
            a["q"][m // 2, 1, 7] = odd
        elif where == "mask":
            a["mask"][m // 2, n // 2] = odd
            a |= listed(a["mask"])
        else:
            a["sinks"] = np.array([1, odd] * (heads // 2), np.float32)
        with np.errstate(all="ignore"):
            want = oracle(a)
        for names in (("attention_" + kind,), ("attend_chunks_" + kind, "merge_chunks")):
            a["y"] = np.full_like(a["q"], 7)
            for name in names:
                call_with(jit, name, **{k: v for k, v in a.items() if k != "mask"})
            assert np.array_equal(np.isnan(a["y"]), np.isnan(want)), (m, odd, where)
            known = ~np.isnan(want)
            assert np.abs(a["y"] - want)[known].max(initial=0) < 5e-6, (m, odd, where)


@pytest.mark.parametrize("kind", TYPES)
@given(n=st.sampled_from([16, 129, 300, 640]), seed=st.integers(0, 99))
def test_bits_depend_on_what_is_seen_not_on_where_it_lies(kind: str, n: int, seed: int) -> None:
    """Keys and values spread over a longer cache, in their order, between slots that are hidden."""
    a = arguments(kind, 3, 9, 3, 64, n, seed)
    rng = np.random.default_rng(seed)
    wide = n + 1 + seed * 3
    slots = np.sort(rng.choice(wide, n, replace=False))
    mask = np.full((3, wide), -np.inf, np.float32)
    mask[:, slots] = a["mask"]
    caches = {x: stored(kind, rng.normal(size=(wide, 3, 64))) for x in "kv"}
    for x in "kv":
        caches[x][slots] = a[x]
    part = np.full(attention.scratch_bytes(3, 9, 64, wide), 0xFF, np.uint8)
    spread = dict(a, **caches, **listed(mask), n=wide, c=wide, part=part, y=a["y"] * 0)
    attend("attention_" + kind, 2, a)
    attend("attention_" + kind, 2, spread)
    assert np.array_equal(spread["y"], a["y"])
    attend("attend_chunks_" + kind, 2, dict(spread, y=(again := a["y"] * 0)))
    attend("merge_chunks", 2, dict(spread, y=again))
    assert np.array_equal(again, a["y"])


def test_what_a_mask_shows() -> None:
    rng = np.random.default_rng(3)
    for n in (1, 7, 8, 9, 64, 131):
        mask = np.where(rng.random((5, n)) < (0.3, 1, 0, 0.9, 0.5)[n % 5], -np.inf, 0.0)
        mask = (mask + rng.normal(size=(5, n))).astype(np.float32)
        lists = listed(mask)["list"].view(np.int32)
        for row, own in zip(mask, lists, strict=True):
            shown = np.flatnonzero(np.isfinite(row))
            assert own[0] == len(shown)
            assert np.array_equal(own[8 : 8 + len(shown)], shown)
            biases = own[8 + n + SPARE :].view(np.float32)
            assert np.array_equal(biases[: len(shown)], row[shown])


def test_a_finite_mask_is_added_to_the_scores() -> None:
    a = arguments("f32", 3, 4, 2, 32, 70, 5)
    a["mask"] += np.random.default_rng(1).normal(size=a["mask"].shape).astype(np.float32)
    a |= listed(a["mask"])
    attend("attention_f32", 2, a)
    assert np.abs(a["y"] - oracle(a)).max() < 5e-6


@pytest.mark.parametrize(("heads", "hd"), [((4, 2), 64), ((3, 1), 5)])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_mask_of_the_least_number_is_added_like_any_other(
    rows: int, heads: tuple[int, int], hd: int
) -> None:
    """Other frameworks mask by it: a row that it covers whole weighs all alike, as soft_max's."""
    n, rng = 300, np.random.default_rng(rows)
    mask = np.zeros((rows, n), np.float32)
    mask[0], mask[1:, ::3] = np.finfo(np.float32).min, np.finfo(np.float32).min
    shapes = {"q": (rows, heads[0], hd), "k": (n, heads[1], hd), "v": (n, heads[1], hd)}
    feeds = {x: rng.standard_normal(shape).astype(np.float32) for x, shape in shapes.items()}
    feeds |= {"mask": mask, "x": rng.standard_normal(mask.shape).astype(np.float32)}
    t = {x: input(x, a.shape) for x, a in feeds.items()}
    graph = Graph.of({
        "mixed": ops.flash_attn(t["q"], t["k"], t["v"], t["mask"], scale=hd**-0.5),
        "chances": ops.soft_max(t["x"], t["mask"]),
    })  # fmt: skip
    meant = evaluate(graph, feeds)
    with Session({"cpu": open_backend("cpu", threads=2)}, Options(strict=True)) as session:
        session.prepare("k", graph)
        found = session.run("k", feeds)
    for x, want in meant.items():
        assert np.abs(found[x] - want).max() < 1e-6, x
    assert np.abs(found["chances"][0] - 1 / n).max() < 1e-6


def test_rows_that_show_nothing() -> None:
    a = arguments("f32", 2, 2, 1, 16, 40, 0)
    a["mask"][0] = -np.inf
    attend("attention_f32", 2, a | listed(a["mask"]))
    assert (a["y"][0] == 0).all() and np.isfinite(a["y"][1]).all()


def test_lists_give_the_bits_of_a_mask_wherever_slots_lie() -> None:
    """The same keys in another order of slots, by a list that names them in the order of before;
    behind its end, and beyond the cache, nothing is read."""
    n, m = 150, 3
    a = arguments("f16", m, 4, 2, 64, n, 1)
    attend("attention_f16", 2, a)
    order = np.random.default_rng(2).permutation(n)
    given = np.full((m, n + 9), -1, np.int32)
    for row, mask in enumerate(a["mask"]):
        shown = np.flatnonzero(mask == 0)
        given[row, : len(shown)] = order[shown]
        given[row, len(shown) + 1 :] = 7
    given[0] = np.concatenate([[n + 3], given[0, :-1]])
    moved = {name: np.empty_like(a[name]) for name in "kv"}
    for name, cache in moved.items():
        cache[order] = a[name]
    capacity = given.shape[1]
    lists = np.full((m, list_bytes(capacity)), 0x55, np.uint8)
    call("listed_slots", 3, given=given, list=lists, length=0, m=m, n=capacity, c=n)
    part = np.zeros(attention.scratch_bytes(m, 4, 64, capacity), np.uint8)
    spread = dict(a, **moved, list=lists, n=capacity, c=n, part=part, y=a["y"] * 0)
    attend("attention_f16", 2, spread)
    assert np.array_equal(spread["y"], a["y"])
    chunked = dict(spread, y=a["y"] * 0)
    attend("attend_chunks_f16", 3, chunked)
    attend("merge_chunks", 1, chunked)
    assert np.array_equal(chunked["y"], a["y"])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(9, 3, 64), (7, 1, 128), (4, 2, 64), (40, 8, 64)])
def test_what_is_read_later_is_asked_for_in_the_order_in_which_it_lies(
    kind: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = np.zeros(1 << 16, np.int64)  # the first: how many follow

    def noted(k: Kernel, address: Val, keep: int = 0) -> None:
        at = k.const(log.ctypes.data, I64)
        count = k.load(at, I64) + 1
        k.store(at, count)
        k.store(at + count * 8, address)

    monkeypatch.setattr(chunks, "ask", noted)
    spec = KERNELS["attend_chunks_" + kind]
    monkeypatch.setitem(KERNELS, "noted", KernelSpec("noted", spec.args, spec.build))
    a = arguments(kind, 1, *shape, 2 * chunks.CHUNK, 1)
    a |= listed(np.zeros_like(a.pop("mask")))
    call_with(Jit(host(), tmp_path), "noted", **a)
    asked = log[1 : log[0] + 1]
    for cache, first in ((a["k"], chunks.AHEAD), (a["v"], 0)):
        begin, end, row = cache.ctypes.data, cache.ctypes.data + cache.nbytes, cache.strides[0]
        own = asked[(asked >= begin + first * row) & (asked < end)]
        lines = set(own // LINE)
        wanted = set(range((begin + first * row) // LINE + 1, end // LINE))
        assert len(wanted - lines) <= len(wanted) // 50, "nearly all lines"
        _, at = np.unique(own, return_index=True)
        assert np.mean(np.diff(own[np.sort(at)]) > 0) > 0.99, "as they lie"
