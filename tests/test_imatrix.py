"""Importance of columns: what it changes in a matrix, how it is kept, and how it is seen."""

import struct
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import gguf
import numpy as np
import pytest
from golden_kit import GOLDEN, NAMES
from hypothesis import given
from hypothesis import strategies as st

from ggraph import Graph, ops
from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner
from ggraph.dtype import (
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    DType,
)  # fmt: skip
from ggraph.errors import FormatError
from ggraph.formats.imatrix import Importance, read_importance, write_importance
from ggraph.formats.quants import dequantize, quantize
from ggraph.tensor import Kind
from models.registry import ARCHITECTURES, Model, open_model
from models.run.convert import model_to_gguf, tensor_types
from models.run.importance import ROWS, SUMS, part_of, seen, watching
from models.run.load import open_session

FITTED = [Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K]
OWN = [IQ4_NL, IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K]  # fitted without importance, too


def error(x: np.ndarray, dtype: DType, importance: np.ndarray | None, counts: np.ndarray) -> float:
    """The sum of squares that `counts` asks for, of what comes back."""
    back = dequantize(quantize(x, dtype, importance), dtype)
    return float((counts * (back - x).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("dtype", FITTED, ids=repr)
@given(seed=st.integers(0, 2**32 - 1), shift=st.sampled_from([0.0, 0.5]))
def test_what_counts_comes_back_better(dtype: DType, seed: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16, 512)).astype(np.float32) + shift
    counts = np.exp(2 * rng.standard_normal(512)).astype(np.float32)
    assert error(x, dtype, counts, counts) < error(x, dtype, None, counts)


@pytest.mark.parametrize("dtype", OWN, ids=repr)
@pytest.mark.parametrize("alike", [1.0, 0.25, 0.0])
def test_columns_that_count_alike_change_no_bit(dtype: DType, alike: float) -> None:
    x = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32)
    plain = quantize(x, dtype)
    assert np.array_equal(quantize(x, dtype, np.full((1, 512), alike, np.float32)), plain)


@pytest.mark.parametrize("dtype", FITTED, ids=repr)
def test_each_row_may_have_its_own(dtype: DType) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    counts = rng.random((2, 256)).astype(np.float32)
    both = quantize(x, dtype, counts)
    for i in range(2):
        assert np.array_equal(both[i : i + 1], quantize(x[i : i + 1], dtype, counts[i]))


def test_types_that_are_not_fitted_pass_over_it() -> None:
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    assert np.array_equal(quantize(x, Q8_0, np.arange(256, dtype=np.float32)), quantize(x, Q8_0))


@pytest.mark.parametrize(
    ("importance", "said"),
    [
        (np.ones(255, np.float32), "importance of"),
        (np.full(256, -1, np.float32), "none below 0"),
        (np.full(256, np.nan, np.float32), "finite"),
    ],
)
def test_importance_that_is_none_is_refused(importance: np.ndarray, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        quantize(np.ones((2, 256), np.float32), Q4_K, importance)


def test_a_file_says_what_was_written_and_gguf_reads_it(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(4), tmp_path / "i.gguf"
    plain, experts = rng.random((1, 64), np.float32), rng.random((3, 64), np.float32)
    found = {
        "a.weight": Importance(plain, np.float32([7])),
        "b.weight": Importance(experts, np.float32([2, 0, 5])),
    }
    write_importance(path, found, "text.txt", 2, 512)
    read = gguf.GGUFReader(path)
    assert read.fields["general.type"].contents() == "imatrix"
    assert read.fields["imatrix.datasets"].contents() == ["text.txt"]
    assert read.fields["imatrix.chunk_count"].contents() == 2
    assert read.fields["imatrix.chunk_size"].contents() == 512
    told = {t.name: t.data for t in read.tensors}
    assert np.array_equal(told["b.weight.in_sum2"], experts)
    assert np.array_equal(told["b.weight.counts"], [[2], [0], [5]])
    again = read_importance(path)
    assert again.keys() == found.keys()
    assert np.array_equal(again["a.weight"].columns("a", (32, 64)), plain / np.float32(7))
    means = again["b.weight"].columns("b", (3, 32, 64))
    assert np.array_equal(means[::2], experts[::2] / np.float32([[2], [5]]))
    assert (means[1] == 1).all()  # which saw no row


def binary(*entries: tuple[str, int, np.ndarray]) -> bytes:
    """The older form of a file."""
    parts = [struct.pack("<i", len(entries))]
    for name, calls, values in entries:
        parts += [
            struct.pack("<i", len(name)),
            name.encode(),
            struct.pack("<ii", calls, values.size),
        ]
        parts.append(values.astype("<f4").tobytes())
    return b"".join([*parts, struct.pack("<ii", 3, 4), b"text"])


def test_the_older_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    means = np.random.default_rng(5).random(192).astype(np.float32)
    path.write_bytes(binary(("a.weight", 4, means[:64] * 4), ("b.weight", 2, means * 2)))
    found = read_importance(path)
    assert np.array_equal(found["a.weight"].columns("a", (32, 64)), means[None, :64])
    assert np.array_equal(found["b.weight"].columns("b", (3, 32, 64)), means.reshape(3, 64))
    with pytest.raises(FormatError, match="192 columns and 1 counts"):
        found["b.weight"].columns("b", (2, 32, 64))


@given(data=st.data())
def test_a_damaged_file_is_an_error_and_no_traceback(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = binary(("a.weight", 4, np.ones(64)), ("b", 1, np.ones(32)))
    at = data.draw(st.integers(0, len(raw) - 13))  # what is behind says nothing of a tensor
    damaged = data.draw(
        st.sampled_from([raw[:at], raw[:at] + bytes([raw[at] ^ 0x80]) + raw[at + 1 :]])
    )
    path = tmp_path_factory.mktemp("imatrix") / "damaged"
    path.write_bytes(damaged)
    try:
        found = read_importance(path)
    except FormatError as error:
        assert str(path) in str(error)
    else:
        assert all(np.isfinite(i.squares).all() for i in found.values())


def test_another_file_is_no_importance(tmp_path: Path) -> None:
    model_to_gguf(open_model(GOLDEN / "tiny/llama_tied"), tmp_path / "m.gguf", "f16")
    with pytest.raises(FormatError, match="no importance matrix"):
        read_importance(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match="No such file"):
        read_importance(tmp_path / "none")


# Tables, and what no product has as it lies in a file
UNSEEN = {"per_layer_token_embd", "attn_k_b", "altup_proj", "altup_unembd_proj"}


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_every_family_is_seen(name: str) -> None:
    model = open_model(GOLDEN / name)
    graph = watching(model.build(StepShape(32, 256, 32, 300)))
    states = {t.name: t.shape for t in graph.leaves(Kind.STATE)}
    sums = {n.removeprefix(SUMS): s for n, s in states.items() if n.startswith(SUMS)}
    held = ARCHITECTURES[model.config.architecture].stored(dict(model.catalogue), model.config)
    types = tensor_types({n: t.shape for n, t in held.items()}, "q8_0")
    matrices = {n for n, dtype in types.items() if dtype.is_block}
    matrices -= {"output.weight", "token_embd.weight"}
    for title in sorted(matrices):
        own = title.removesuffix(".weight").rpartition(".")[2]
        part = title if title in sums else part_of(title)
        if part not in sums:
            assert own in UNSEEN or is_shared(name, own)
        else:
            assert sums[part][-1] == held[title].shape[-1]
            assert states[f"{ROWS}{part}"] == sums[part][:1]


def is_shared(name: str, own: str) -> bool:
    """Whether it may be of a layer of Gemma 3n that reads an earlier one's keys and values."""
    return "gemma3n" in name and own in ("attn_k", "attn_v")


@pytest.mark.parametrize(
    "name",
    ["tiny/llama_tied", "tiny/qwen3_moe", "tiny2/deepseek_v2", "tiny2/gpt_oss", "tiny2/falcon_h1",
     "tiny2/gemma4_moe", "tiny2/phi3"],
)  # fmt: skip
def test_sums_are_those_of_what_products_read(name: str) -> None:
    """The steps' own numbers, brought out as outputs and added up by NumPy, expert by expert."""
    chunks = [[int(i) for i in np.random.default_rng(n).integers(3, 90, 32)] for n in range(2)]
    model = open_model(GOLDEN / name)
    with open_session(threads=1, exact=True) as session:
        found = seen(model, session, chunks)
    expected = added_up(model, chunks)
    assert found
    for title, own in found.items():
        squares, counts = expected[title if title in expected else part_of(title)]
        assert np.array_equal(own.counts.ravel(), counts)
        np.testing.assert_allclose(own.squares, squares, rtol=2e-4, atol=1e-6 * squares.max())


class Open(Model):
    """A model whose products' sources are outputs of its steps."""

    def build(self, shape: StepShape) -> Graph:
        step = super().build(shape)
        outputs = {t.name: t for t in step.outputs}
        for t in step.nodes:
            if t.op in ("mul_mat", "mul_mat_id") and t.sources[0].root.kind is Kind.WEIGHT:
                for i, source in enumerate(t.sources[1:]):
                    outputs[f"{t.sources[0].root.name} {i}"] = ops.cont(source)
        also = [t for t in step.updates.values() if not t.is_leaf]
        return Graph.of(outputs, also=also, name=step.name)


class Telling(Runner):
    """A runner that keeps all that its latest step brought back."""

    def _said(self, out: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        self.out = dict(out)
        return super()._said(out, count)


def added_up(model: Model, chunks: list[list[int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums of squares [X or 1, K] and counts [X or 1] of each matrix."""
    open_model = Open(**{f.name: getattr(model, f.name) for f in fields(model)})
    totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with open_session(threads=1, exact=True) as session:
        runner = Telling(open_model, session, 32)
        for ids in chunks:
            runner.past = 0
            runner.text(ids, every=True)
            for name, shape in ((n, t.shape) for n, t in model.catalogue.items()):
                if f"{name} 0" in runner.out:
                    x, chosen = runner.out[f"{name} 0"], runner.out.get(f"{name} 1")
                    new = by_matrix(x.astype(np.float64), chosen, shape)
                    old = totals.get(name, (0.0, 0))
                    totals[name] = (old[0] + new[0], old[1] + new[1])
    return totals


def by_matrix(
    x: np.ndarray, chosen: np.ndarray | None, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """What one product adds."""
    k = shape[-1]
    if chosen is None:
        heads = shape[0] if len(shape) > 2 else 1
        rows = x.reshape(heads, -1, k)
        return (rows**2).sum(1), np.full(1, rows.shape[1])
    sums, counts = np.zeros((shape[0], k)), np.zeros(shape[0])
    for (t, u), expert in np.ndenumerate(chosen):
        sums[expert] += x[t, min(u, x.shape[1] - 1)] ** 2
        counts[expert] += 1
    return sums, counts
