"""Arrays whose rows are made when they are read, held against NumPy's own; what nobody keeps."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from coded_kit import TILES, W4, four_bits, tiles, write_stored
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Graph, Session, input, open_backend, ops, weight
from ggraph.backends.cpu.lowering.packing import LazyMemory
from ggraph.formats import open_checkpoint
from ggraph.formats.lazy_array import (
    LazyArray,
    Storage,
    columns_taken,
    row_numbers,
    rows_of,
    stacked,
    taken,
    windows_of,
)
from ggraph.tensor import Array
from models.registry import open_model


def lazy(of: Array) -> LazyArray:
    """The array as one whose rows are copied when they are read."""
    flat = of.reshape(-1, of.shape[-1])
    return LazyArray(of.shape, of.dtype, lambda i, j: flat[i:j].copy(), (of,))


@pytest.mark.parametrize("made", [lazy, lambda a: a])
@given(st.data())
def test_changes_of_rows_are_numpys(made: object, data: st.DataObject) -> None:
    assert callable(made)
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    whole = np.arange(np.prod(shape)).reshape(shape).astype(np.float32)
    of: Storage = made(whole)
    flat = whole.reshape(-1, shape[-1])
    own = data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=9))
    order = data.draw(st.permutations(range(shape[-1])))
    both = stacked([of, of])
    changes: list[tuple[Storage, Array]] = [
        (taken(of, np.array(own, int)), flat[own]),
        (taken(of, row_numbers(of)[..., 1:]), whole[..., 1:, :]),
        (taken(of, row_numbers(of)[::-1]), whole[::-1]),
        (columns_taken(of, np.array(order)), whole[..., order]),
        (stacked([of, of, of]), np.stack([whole] * 3)),
        (
            taken(both, row_numbers(both)[:, ::2]),
            np.stack([whole] * 2)[:, ::2],
        ),
    ]
    for got, expected in changes:
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert np.array_equal(np.asarray(got), expected)
        count = int(np.prod(expected.shape[:-1]))
        i = data.draw(st.integers(0, count))
        j = data.draw(st.integers(i, count))
        if i < j:
            assert np.array_equal(rows_of(got)(i, j), expected.reshape(count, -1)[i:j])


def test_a_part_that_lies_together_says_of_what_it_is() -> None:
    of = lazy(np.arange(24.0).reshape(6, 4))
    part = taken(of, np.arange(2, 5))
    assert isinstance(part, LazyArray) and part.whole is of
    again = taken(part, np.arange(1, 3))
    assert isinstance(again, LazyArray) and again.whole is of
    assert np.array_equal(np.asarray(again), np.asarray(of)[3:5])
    turned = taken(of, np.array([1, 0]))
    assert isinstance(turned, LazyArray) and turned.whole is None
    with pytest.raises(ValueError, match="made when it is read is a copy"):
        np.array(of, copy=False)


N, K = 2048, 1024


def coded_folder(tmp_path: Path, kind: str) -> Path:
    """One matrix in codes."""
    values = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    stored, _ = four_bits("x.weight", values) if kind == "four" else tiles_of(values)
    told = W4 if kind == "four" else {**TILES, "weight_block_size": [128, 128]}
    return write_stored(tmp_path / kind, {"quantization_config": told}, stored)


def tiles_of(values: Array) -> tuple[dict[str, tuple[str, Array]], Array]:
    """The same as `tiles` makes of a part, repeated: that takes long."""
    stored, expected = tiles("x.weight", values[:128, :128], 128, 128)
    times = N // 128, K // 128
    whole = {n: (kind, np.tile(a, times)) for n, (kind, a) in stored.items()}
    return whole, np.tile(expected, times)


@pytest.mark.parametrize("kind", ["four", "tiles"])
def test_nobody_keeps_a_decoded_weight(kind: str, tmp_path: Path) -> None:
    """Neither who opens the folder nor the CPU, which packs it a piece at a time. Twice, since what
    is imported and compiled first is kept."""
    folder, x = coded_folder(tmp_path, kind), input("x", (1, K))
    rows = np.random.default_rng(1).standard_normal((1, K)).astype(np.float32)
    for _ in range(2):
        with Session({"cpu": open_backend("cpu", threads=2)}) as session:
            session.prepare("warm", Graph.of({"y": x + x}))
            tracemalloc.start()
            t = open_checkpoint(folder).tensors["x.weight"]
            graph = Graph.of({"y": ops.mul_mat(weight("x.weight", (N, K), t.dtype), x)})
            session.prepare("step", graph, {"x.weight": t})
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            got = session.run("step", {"x": rows})["y"]
    assert kept < t.nbytes // 2, (kept, t.nbytes)
    with Session({"cpu": open_backend("cpu", threads=2)}) as session:
        session.prepare("step", graph, {"x.weight": t.data})
        assert np.array_equal(session.run("step", {"x": rows})["y"], got)


def test_experts_of_a_folder_are_windows_on_its_file() -> None:
    """Stacked ones are packed from where they lie; nothing of them is copied before."""
    golden = Path(__file__).parent / "golden" / "tiny2" / "mixtral"
    model = open_model(golden)
    held = model.catalogue["blk.0.ffn_up_exps.weight"]
    assert isinstance(held.storage, LazyArray)
    count = json.loads((golden / "config.json").read_text())["num_local_experts"]
    assert len(windows_of(held.storage)) == count
    n = held.shape[1]
    for e, window in enumerate(windows_of(held.storage)):
        assert np.shares_memory(held.storage.read(e * n, (e + 1) * n), window)


def test_what_is_not_packed_reads_the_whole_weight() -> None:
    """A sum takes its bytes, a product the rows of a part that begins behind the first."""
    values = np.random.default_rng(0).standard_normal((300, 256)).astype(np.float32)
    w, x = weight("w", values.shape), input("x", (1, 256))
    part = ops.view(w, (200, 256), start=64 * 256)
    graphs = {"sum": ops.add(w, x), "part": ops.mul_mat(part, x)}
    rows = np.random.default_rng(1).standard_normal((1, 256)).astype(np.float32)
    found = []
    for stored in (values, lazy(values)):
        for key, y in graphs.items():
            with Session({"cpu": open_backend("cpu", threads=2)}) as session:
                session.prepare(key, Graph.of({"y": y}), lambda t, stored=stored: stored)
                found.append(session.run(key, {"x": rows})["y"])
                memory = session._external["w"]
                if isinstance(memory, LazyMemory):
                    assert memory.made == (key == "sum")
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])
    assert np.array_equal(found[0], values + rows)
