"""Safetensors, torch archives and folders: equal to the references, strict on damage."""

import json
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from ggraph.dtype import BF16, F16, F32, I64
from ggraph.errors import FormatError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.safetensors import parse_safetensors, read_safetensors
from ggraph.formats.torch_bin import read_torch

TINY = Path(__file__).parent / "golden" / "tiny"


def test_equal_to_the_safetensors_library() -> None:
    path = TINY / "qwen2_bias" / "model.safetensors"
    expected, got = load_file(path), read_safetensors(path)
    assert set(expected) == set(got)
    for name, value in expected.items():
        assert got[name].dtype is F16
        assert np.array_equal(got[name].data, value)


def container(entry: dict[str, object], data: bytes = b"") -> bytes:
    raw = json.dumps(entry).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def test_bfloat16_reads_as_float32() -> None:
    values = np.array([1.0, -2.5, 0.0], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    entry = {"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}
    t = parse_safetensors(container(entry, bits.tobytes()), "mem")["x"]
    assert t.dtype is BF16
    assert np.array_equal(t.float32(), values)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"x": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "not counts"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes"),
        ({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, "but the file"),
        ({"x": {"dtype": "F32", "shape": [1]}}, "no dtype, shape"),
        ({"x": 3}, "no dtype, shape"),
    ],
)
def test_bad_entries_are_named(entry: dict[str, object], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        parse_safetensors(container(entry, bytes(4)), "mem")


@given(st.data())
def test_mutated_safetensors_raise_only_our_errors(data: st.DataObject) -> None:
    raw = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.int64)}))
    digits = [at for at in range(8, raw.index(b"}}")) if chr(raw[at]).isdigit()]
    number = st.tuples(st.sampled_from(digits), st.sampled_from(b"0123456789"))
    anything = st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255))
    some = st.lists(number, min_size=1, max_size=2) | st.lists(anything, min_size=1, max_size=5)
    for at, byte in data.draw(some):
        raw[at] = byte
    cut = data.draw(st.just(len(raw)) | st.integers(8, len(raw)))
    try:
        found = parse_safetensors(bytes(raw[:cut]), "mutant")
    except FormatError:
        return
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for name, t in found.items():  # as large as the file says, and within it
        begin, end = header[name]["data_offsets"]
        assert t.data.nbytes == end - begin <= len(raw)


def archive(
    path: Path, body: bytes, storages: dict[str, bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as z:
        z.writestr("m/data.pkl", body)
        for key, raw in storages.items():
            z.writestr(f"m/data/{key}", raw)
    return path


def protocol2(
    shape: tuple[int, ...], strides: tuple[int, ...], kind: str, count: int, names: str = "w"
) -> bytes:
    """The opcodes of {"w": tensor}, written by hand; or of as many alike as there are names."""

    def integer(n: int) -> bytes:
        return b"J" + struct.pack("<i", n)

    def string(s: str) -> bytes:
        return b"X" + struct.pack("<I", len(s.encode())) + s.encode()

    pid = b"(" + string("storage") + f"ctorch\n{kind}\n".encode() + string("0") + string("cpu")
    pid += integer(count) + b"tQ"
    numbers = b"(" + b"".join(map(integer, shape)) + b"t(" + b"".join(map(integer, strides)) + b"t"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + integer(0) + numbers
    call += b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}(" + b"".join(string(n) + call for n in names) + b"u."


def test_torch_archives_read_without_torch(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    body = protocol2((2, 3), (3, 1), "FloatStorage", 6)
    t = read_torch(archive(tmp_path / "a.bin", body, {"0": values.tobytes()}))["w"]
    assert (t.dtype, t.shape) == (F32, (2, 3))
    assert np.array_equal(t.data, values.reshape(2, 3))
    body = protocol2((3, 2), (1, 3), "LongStorage", 6)
    t = read_torch(archive(tmp_path / "b.bin", body, {"0": np.arange(6).tobytes()}))["w"]
    assert t.dtype is I64
    assert np.array_equal(t.data, np.arange(6).reshape(2, 3).T)


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    evil = b"cos\nsystem\n(X\x04\x00\x00\x00true\x85R."
    with pytest.raises(FormatError, match=r"asks for os\.system"):
        read_torch(archive(tmp_path / "evil.bin", b"\x80\x02" + evil, {}))
    for body in (pickle.dumps(OrderedDict), pickle.dumps([1, 2]), b"garbage", b""):
        with pytest.raises(FormatError):
            read_torch(archive(tmp_path / "x.bin", body, {}))


def test_storages_are_bounded_by_the_file(tmp_path: Path) -> None:
    body = protocol2((1 << 20, 1 << 20), (1 << 20, 1), "FloatStorage", 6)
    with pytest.raises(FormatError, match="past its storage"):
        read_torch(archive(tmp_path / "x.bin", body, {"0": bytes(24)}))
    body = protocol2((1 << 30,), (0,), "FloatStorage", 6)
    with pytest.raises(FormatError, match="past its storage"):
        read_torch(archive(tmp_path / "y.bin", body, {"0": bytes(24)}))
    with pytest.raises(FormatError, match="missing"):
        read_torch(archive(tmp_path / "z.bin", protocol2((2,), (1,), "HalfStorage", 2), {}))


def test_a_storage_is_read_once_however_many_tensors_share_it(tmp_path: Path) -> None:
    """What is read takes no more than the file, twice where all of it lies the other way round."""
    side, names = 512, "".join(map(chr, range(0x4E00, 0x4E00 + 200)))
    raw = np.arange(side * side, dtype=np.float32).tobytes()
    for shape, strides in (((1,), (1,)), ((side, side), (side, 1)), ((side, side), (1, side))):
        one = protocol2(shape, strides, "FloatStorage", side * side)
        many = protocol2(shape, strides, "FloatStorage", side * side, names)
        [alone] = read_torch(archive(tmp_path / "one.bin", one, {"0": raw})).values()
        path, found = archive(tmp_path / "many.bin", many, {"0": raw}), dict[str, RawTensor]()
        tracemalloc.start()
        try:
            found = read_torch(path)
        except FormatError as error:
            assert strides == (1, side) and "hold more than the file" in str(error)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * len(raw)
        assert all(np.array_equal(t.data, alone.data) for t in found.values())
        assert len(found) == (0 if strides == (1, side) else len(names))


def test_what_is_compressed_is_refused(tmp_path: Path) -> None:
    """torch compresses nothing; a file of a few bytes could hold any number of zeros."""
    body, raw = protocol2((1,), (1,), "FloatStorage", 1 << 20), bytes(4 << 20)
    path = archive(tmp_path / "x.bin", body, {"0": raw}, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match=r"'m/data\.pkl' is compressed"):
        read_torch(path)
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("m/data.pkl", body)
        z.writestr("m/data/0", raw, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="'m/data/0' is compressed"):
        read_torch(path)


def test_folders_need_their_parts(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"no .*safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(FormatError, match="not JSON"):
        open_checkpoint(tmp_path)


def test_sharded_folders_are_joined(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for i in (1, 2):
        part = {f"t{i}": np.full(2, i, np.float32)}
        (tmp_path / f"model-{i}.safetensors").write_bytes(save(part))
    index = {"weight_map": {"t1": "model-1.safetensors", "t2": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(open_checkpoint(tmp_path).tensors) == {"t1", "t2"}
    index["weight_map"]["t3"] = "../outside.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="outside the folder"):
        open_checkpoint(tmp_path)
