"""The GGUF reader believes nothing, and what we write the `gguf` package reads alike."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.dtype import F16, F32, I64, NVFP4, Q4_0, Q8_0
from ggraph.errors import FormatError, GgraphError
from ggraph.formats import lazy_array, open_checkpoint
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.gguf import write_gguf
from ggraph.formats.lazy_array import LazyArray
from ggraph.formats.quants import dequantize, quantize

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.negative": -5,
    "llama.large": 1 << 40,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "ß", "\n", ""],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.types": [1, 2, 3],
    "llama.flag": True,
    "llama.layers": np.array([2, 15, 27], np.int32),
}


def parsed(raw: bytes, path: Path) -> Checkpoint:
    """What a file of these bytes holds. Another file than the last one: that may be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    return open_checkpoint(path)


def tensors() -> list[RawTensor]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    return [
        RawTensor("a", F32, (3, 64), x),
        RawTensor("b.weight", Q4_0, (3, 64), quantize(x, Q4_0)),
        RawTensor("c", F16, (2, 2, 5), rng.standard_normal((2, 2, 5)).astype(np.float16)),
        RawTensor("d", I64, (4,), np.arange(4)),
        RawTensor("empty", F32, (0, 7), np.zeros((0, 7), np.float32)),
        RawTensor("no rows", Q4_0, (0, 32), np.zeros((0, 18), np.uint8)),
        RawTensor("e", Q8_0, (1, 32), quantize(x[:1, :32], Q8_0)),
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write_gguf(path, METADATA, tensors())
    return path


def test_round_trip(written: Path) -> None:
    c = open_checkpoint(written)
    assert (c.format, c.architecture) == ("gguf", "llama")
    for key, value in METADATA.items():
        assert np.array_equal(np.asarray(c.metadata[key]), np.asarray(value)), key
    for t in tensors():
        got = c.tensors[t.name]
        assert (got.shape, got.dtype) == (t.shape, t.dtype)
        assert np.array_equal(got.data, t.data)
        assert t.dtype is I64 or got.float32().shape == t.shape
        assert not got.data.flags.writeable or got.data.size == 0


@pytest.mark.parametrize("end", [".scale", ".weight.scale"])
def test_a_matrix_has_the_scale_beside_it(end: str, tmp_path: Path) -> None:
    """Of experts one each; scales of activations are no part of a model here."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 120, (3, 2, 36), np.uint8)
    one, each = (np.array(v, np.float32) for v in ([0.37], [2.0, 0.5, 3.1]))
    write_gguf(
        tmp_path / "x.gguf", METADATA,
        [
            RawTensor("a.weight", NVFP4, (2, 64), raw[0]),
            RawTensor(f"a{end}", F32, (1,), one),
            RawTensor("a.input_scale", F32, (1,), one),
            RawTensor("b.weight", NVFP4, (3, 2, 64), raw),
            RawTensor(f"b{end}", F32, (3,), each),
            RawTensor("c.weight", F32, (4, 5), np.ones((4, 5), np.float32)),
            RawTensor("c.scale", F32, (5,), np.ones(5, np.float32)),  # of a model's own
        ],
    )  # fmt: skip
    found = open_checkpoint(tmp_path / "x.gguf").tensors
    assert list(found) == ["a.weight", "b.weight", "c.weight", "c.scale"]
    assert np.array_equal(found["a.weight"].float32(), dequantize(raw[0], NVFP4) * one)
    assert np.array_equal(found["b.weight"].float32(), dequantize(raw, NVFP4) * each[:, None, None])
    assert found["c.weight"].scale is None
    write_gguf(tmp_path / "y.gguf", METADATA, found.values())
    names = [t.name for t in gguf.GGUFReader(tmp_path / "y.gguf").tensors]
    assert names == [*found, "a.scale", "b.scale"]
    again = open_checkpoint(tmp_path / "y.gguf").tensors
    for name, t in found.items():
        assert np.array_equal(again[name].float32(), t.float32())


def test_the_gguf_package_reads_the_same(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    mine = open_checkpoint(written)
    assert {t.name for t in reader.tensors} == set(mine.tensors)
    for t in reader.tensors:
        held = mine.tensors[t.name]
        assert t.tensor_type.value == held.dtype.gguf
        assert tuple(reversed(t.shape.tolist())) == held.shape
        assert t.data.tobytes() == held.data.tobytes()
    assert reader.fields["llama.large"].contents() == 1 << 40
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "ß", "\n", ""]


@pytest.mark.parametrize(
    "value",
    [[1 << 40], [1, -(1 << 31) - 1], [1 << 65], (1 << 31, 0.5, 1e39), 1e40, -3.5e38, [0.0, 1e40],
     [0.5, 10**400], 1 << 64, -(1 << 63) - 1, 10**5000, [10**5000], "\ud800", ["a", "b\udfff"],
     None, [None], 1j,
     np.array([1 << 70]), np.array(["a"])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_no_file_can_hold_is_refused_and_leaves_none(value: object, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        write_gguf(tmp_path / "x.gguf", {"a": value}, [])
    assert not list(tmp_path.iterdir())


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    one = RawTensor("\ud800", F32, (1,), np.ones(1, np.float32))
    for metadata, held in (({"\ud800": 1}, []), ({}, [one])):
        with pytest.raises(FormatError, match=r"'\\ud800' is no UTF-8 text"):
            write_gguf(tmp_path / "x.gguf", metadata, held)
    assert not list(tmp_path.iterdir())


def test_the_largest_numbers_are_written(tmp_path: Path) -> None:
    given = {
        "general.architecture": "x", "ints": [-(1 << 31), (1 << 31) - 1],
        "wide": np.array([1 << 40]), "float": -3.4e38,
        "floats": [3.4e38, float("inf"), 1], "whole": (1 << 64) - 1, "low": -(1 << 63),
    }  # fmt: skip
    write_gguf(tmp_path / "x.gguf", given, [])
    found = open_checkpoint(tmp_path / "x.gguf").metadata
    for key, value in given.items():
        want = np.asarray(value, np.float32) if key.startswith("float") else np.asarray(value)
        assert np.array_equal(np.asarray(found[key]), want), key


def test_every_truncation_is_refused(written: Path) -> None:
    raw = written.read_bytes()
    assert open_checkpoint(written).tensors
    path = written.with_name("cut.gguf")
    last = len(raw.rstrip(b"\0"))
    for size in range(last - 1):
        with pytest.raises(FormatError):
            parsed(raw[:size], path)


@given(st.data())
def test_mutations_raise_only_our_errors(written: Path, data: st.DataObject) -> None:
    raw = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 9))
        kind = data.draw(st.sampled_from(["byte", "length", "huge", "cut", "zero"]))
        if kind == "byte":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "huge":
            raw[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from(HUGE)))
        elif kind == "length":
            raw[at : at + 8] = struct.pack("<Q", data.draw(st.integers(0, len(raw))))
        elif kind == "zero":
            raw[at : at + 8] = bytes(8)
        else:
            del raw[at : at + data.draw(st.integers(1, 40))]
        if len(raw) < 24:
            break
    try:
        c = parsed(bytes(raw), written.with_name("mutant.gguf"))
    except GgraphError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    for t in c.tensors.values():  # what is accepted can be used
        assert t.data.nbytes <= len(raw)
        if t.dtype is not I64:
            t.float32()


HUGE = [1 << 63, (1 << 64) - 1, 1 << 32, 1 << 40, 1 << 20]


def header(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCH = text("general.architecture") + struct.pack("<I", 8) + text("llama")
ONE = header(tensors=1, pairs=1) + ARCH + text("t")  # up to the first tensor's dimensions
SOME, REST = bytes(40), bytes(99)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"GGML" + SOME, "begins with b'GGML'"),
        (header(1) + SOME, "version 1; known: 2, 3"),
        (b"GGUF" + struct.pack(">I", 3) + SOME, "big-endian"),
        (header(tensors=1 << 60) + SOME, "number of tensors"),
        (header(pairs=1 << 60) + SOME, "number of metadata pairs"),
        (header(pairs=1) + struct.pack("<Q", 1 << 50) + SOME, "bytes wanted"),
        (header(pairs=2) + ARCH + ARCH, "stands twice"),
        (header(pairs=1) + text("k") + struct.pack("<I", 99) + SOME, "unknown value type 99"),
        (header(pairs=1) + text("k") + b"\x08\0\0\0" + struct.pack("<Q", 2) + b"\xff\xff" + SOME,
         "not UTF-8"),
        (header(pairs=0) + SOME, "general.architecture is None"),
        (ONE + struct.pack("<IQIQ", 1, 4, 77, 0) + REST,
         "unknown type 77"),
        (ONE + struct.pack("<I", 9) + REST,
         "9 dimensions"),
        (ONE + struct.pack("<IQIQ", 1, 1 << 50, 0, 0)
         + REST, "larger than the file"),
        (ONE + struct.pack("<IQIQ", 1, 33, 2, 0) + REST,
         "not whole blocks"),
        (ONE + struct.pack("<IQIQ", 1, 4, 0, 7) + REST,
         "no multiple"),
        (ONE + struct.pack("<IQIQ", 1, 4, 0, 1 << 40)
         + REST, "past the end"),
    ],
)  # fmt: skip
def test_refusals_name_the_culprit(
    raw: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=says):
        parsed(raw, Path("x.gguf"))
    for name in ("t", "k", "general.architecture"):  # nor do they grow with its name
        raw = raw.replace(text(name), text(name * 3000))
    with pytest.raises(FormatError, match=says) as found:
        parsed(raw, Path("x.gguf"))
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("name", ["x-00001-of-00003.gguf", "x-00003-of-00003.gguf"])
def test_a_split_file_is_what_it_was_whole(name: str, written: Path, tmp_path: Path) -> None:
    """Whichever of its parts is named."""
    assert len(split(written, tmp_path, 3)) == 3
    whole, joined = open_checkpoint(written), open_checkpoint(tmp_path / name)
    assert joined.architecture == whole.architecture
    assert joined.metadata.keys() == whole.metadata.keys() == METADATA.keys()
    assert list(joined.tensors) == list(whole.tensors)
    for n, t in whole.tensors.items():
        found = joined.tensors[n]
        assert (found.dtype, found.shape) == (t.dtype, t.shape), n
        assert np.array_equal(found.data, t.data), n


def test_parts_that_do_not_fit_are_refused(written: Path, tmp_path: Path) -> None:
    first, second, third = parts = split(written, tmp_path, 3)
    own = [p.read_bytes() for p in parts]

    def refused(path: Path, says: str) -> None:
        with pytest.raises(FormatError, match=says):
            open_checkpoint(path)
        for p, raw in zip(parts, own, strict=True):
            p.write_bytes(raw)

    second.unlink()
    refused(first, "x-00002-of-00003.gguf: No such file")
    second.write_bytes(own[2])
    refused(first, "x-00002-of-00003.gguf: it does not say that it is part 2 of 3")
    second.write_bytes(written.read_bytes())
    refused(first, "x-00002-of-00003.gguf: it does not say that it is part 2 of 3")
    held = list(open_checkpoint(first).tensors.values())
    write_gguf(second, cut(1, 3), held)
    refused(third, "x-00002-of-00003.gguf: tensor 'a' stands in an earlier part, too")
    write_gguf(second, cut(1, 3), [])
    refused(first, "tensors in all parts, expected 7")
    for odd in ("part.gguf", "x-00001-of-00004.gguf", "x-00002-of-00003"):
        (tmp_path / odd).write_bytes(own[0])
        refused(tmp_path / odd, "part 1 of 3, whose name would end in -00001-of-00003.gguf")
    write_gguf(beyond := tmp_path / "x-00004-of-00003.gguf", cut(3, 3), [])
    refused(beyond, "part 4 of 3")


def cut(number: int, count: int) -> dict[str, int]:
    """The keys of a part, and of later ones all keys."""
    return {"split.no": number, "split.count": count, "split.tensors.count": len(tensors())}


def split(path: Path, folder: Path, most: int) -> list[Path]:
    """A file in parts of at most so many tensors, as the `gguf` package cuts it."""
    held = gguf.GGUFReader(path)
    architecture = held.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(folder / path.name, architecture, split_max_tensors=most)
    for key, f in held.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            w.add_key_value(key, f.contents(), f.types[0], f.types[-1] if f.types[1:] else None)
    for t in held.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return sorted(folder.glob(f"{path.stem}-*-of-*.gguf"))


def test_missing_and_empty_files_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no model at"):
        open_checkpoint(tmp_path / "nothing.gguf")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(FormatError, match="0 bytes"):
        open_checkpoint(empty)


def test_values_without_a_gguf_type_are_refused(tmp_path: Path) -> None:
    for value in ({"a": 1}, None, [1, "x"], 1 << 70, np.zeros(2, np.complex64)):
        with pytest.raises(FormatError):
            write_gguf(tmp_path / "x.gguf", {"key": value}, [])
    assert list(tmp_path.iterdir()) == []


def test_what_is_made_when_it_is_written_is_written_in_order_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MB, of which threads make 1 MB at a time, later ones sooner."""
    monkeypatch.setattr(lazy_array, "PIECE", 1 << 18)
    monkeypatch.setattr("ggraph.formats.gguf.usable_cores", lambda: 3)
    n, k = 1 << 14, 1 << 10

    def made(i: int, j: int) -> np.ndarray:
        time.sleep(0.002 * (i // (j - i) % 3 == 0))
        return np.repeat(np.arange(i, j, dtype=np.float32)[:, None], k, 1)

    said: list[tuple[str, int, int]] = []
    whole = RawTensor("w", F32, (n, k), LazyArray((n, k), np.dtype(np.float32), made))
    path = tmp_path / "large.gguf"
    tracemalloc.start()
    write_gguf(path, METADATA, [*tensors(), whole], lambda *told: said.append(told))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    every = [*tensors(), whole]
    assert said == [(t.name, i, len(every)) for i, t in enumerate(every)]
    back = open_checkpoint(path).tensors["w"].data
    assert np.array_equal(back, np.repeat(np.arange(n, dtype=np.float32)[:, None], k, 1))


def test_an_error_where_a_tensor_is_made_leaves_no_file(tmp_path: Path) -> None:
    def made(i: int, j: int) -> np.ndarray:
        raise FormatError("damaged")

    whole = RawTensor("w", F32, (4, 8), LazyArray((4, 8), np.dtype(np.float32), made))
    with pytest.raises(FormatError, match="damaged"):
        write_gguf(tmp_path / "none.gguf", METADATA, [whole])
    assert not list(tmp_path.iterdir())
