"""Folders whose weights are codes, against the libraries that made them.

`golden/coded` holds a Qwen3 of one layer in 22 forms. Codes, scales and the weights that they
stand for are the libraries' own, on a processor: transformers 5.24 (fp8), compressed-tensors 0.20,
AutoAWQ 0.2.9, GPTQModel 7.7, bitsandbytes 0.50; the logits are transformers' with those weights, in
float32. GPTQModel multiplies in halves, so that of its values the nearest products were taken.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_kit import (
    FP4,
    TILES,
    W4,
    eight,
    four_bits,
    is_linear,
    nvfp4,
    plain,
    read_stored,
    tiles,
    write_stored,
)
from golden_kit import GOLDEN, NAMES, TOLERANCE, spread_error
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ggraph.decode.runner import Runner
from ggraph.dtype import BF16, E4M3, E5M2, E8M0, F16, F32, MXFP4, NVFP4, Q4_0, Q4_1, Q8_0, DType
from ggraph.errors import FormatError, FormatWarning, GgraphError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import scale_name
from ggraph.formats.coded import decoded
from ggraph.formats.quants import dequantize
from ggraph.formats.safetensors import read_safetensors
from ggraph.tensor import Array
from models.lora import adapted
from models.registry import ARCHITECTURES, Model, open_model
from models.run.convert import SCALED, model_to_gguf
from models.run.load import open_session

CODED = GOLDEN / "coded"
KINDS: dict[str, DType] = {
    "awq": Q4_1, "bnb_fp4": F16, "bnb_int8": Q8_0, "bnb_nf4": F16, "ct_fp8_block": F16,
    "ct_fp8_channel": F16, "ct_fp8_tensor": F16, "ct_mxfp4": MXFP4, "ct_nvfp4": NVFP4,
    "ct_w4a16": Q4_0, "ct_w4a16_zeros": Q4_1,
    "ct_w8a16": Q8_0, "ct_w8a8": Q8_0, "fp8_e5m2": F16, "fp8_tensor": F16, "fp8_tiles": F16,
    "gptq_4": Q4_0, "gptq_4_order": F16, "gptq_4_v2": Q4_1, "gptq_4_zeros": Q4_1, "gptq_8": Q8_0,
    "gptq_8_zeros": F16,
}  # fmt: skip
EXACT = ("ct_mxfp4", "ct_nvfp4", "ct_w4a16", "ct_w8a16", "ct_w8a8", "gptq_4", "gptq_8")
# What rounding to halves may move logits by: values by themselves, or the least of a group's all.
ROUNDED, LEAST = 1e-3, 2e-3
DOWN = "model.layers.0.mlp.down_proj"


def logits(path: Path, ids: list[int]) -> Array:
    """Of every position, activations in float32."""
    return logits_of(open_model(path), ids)


def logits_of(model: Model, ids: list[int]) -> Array:
    """The same of an opened model."""
    session = open_session(threads=1, exact=True)
    runner = Runner(model, session, 64, cache_dtype=F32)
    found: Array = runner.text(ids, every=True).logits.copy()
    session.close()
    return found


OLD = {  # the file that said it before config.json did, and its words
    "awq": ("quant_config.json", {"bits": "w_bit", "group_size": "q_group_size"}),
    "gptq_4": ("quantize_config.json", {}), "gptq_4_order": ("quantize_config.json", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_codes_are_told_of_in_a_file_of_their_own(name: str, tmp_path: Path) -> None:
    """As AutoAWQ and AutoGPTQ wrote it; what config.json says goes before."""
    shutil.copytree(CODED / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    told = config.pop("quantization_config")
    assert told.pop("quant_method")
    file, words = OLD[name]
    old = {words.get(key, key): value for key, value in told.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(json.dumps(old))
    found, expected = (open_checkpoint(p).tensors for p in (tmp_path, CODED / name))
    assert found.keys() == expected.keys()
    for key, t in expected.items():
        assert found[key].dtype is t.dtype and np.array_equal(found[key].data, t.data)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": "odd"}))
    with pytest.raises(FormatError, match="quantised by"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_is_the_librarys_own(name: str) -> None:
    """To the bit where the type holds it, else to a rounding of halves: 2^-11 of a value or, where
    a group's least value is rounded, of the group's greatest."""
    expected = np.load(CODED / name / "expected.npz")["down"]
    t = open_checkpoint(CODED / name).tensors[f"{DOWN}.weight"]
    assert t.dtype is KINDS[name]
    most = np.abs(expected)
    if t.dtype is Q4_1:
        most = np.abs(expected.reshape(len(expected), -1, 32)).max(2, keepdims=True)
        most = np.broadcast_to(2 * most, (*most.shape[:2], 32)).reshape(expected.shape)
    allowed = most * (2.0**-22 if t.dtype is NVFP4 else 0.0)  # two factors, or their product
    if name not in EXACT:
        allowed = most * 2.0**-11 + 2.0**-25
    assert (np.abs(t.float32() - expected) <= allowed).all()


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_weights_that_the_library_unpacked(
    name: str, tmp_path: Path
) -> None:
    expected = np.load(CODED / name / "expected.npz")
    ids, bar = expected["ids"].tolist(), LEAST if KINDS[name] is Q4_1 else ROUNDED
    bar = TOLERANCE if name in EXACT else bar
    got = logits(CODED / name, ids)
    assert spread_error(got, expected["logits"]) < bar
    written = tmp_path / "model.gguf"
    model_to_gguf(open_model(CODED / name), written, "f32")
    if KINDS[name] is NVFP4:  # matrices by their scales are rounded, as results by them are not
        assert spread_error(logits(written, ids), got) < TOLERANCE
        model_to_gguf(open_model(CODED / name), written, "nvfp4")
    assert np.array_equal(logits(written, ids), got)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_k_m"])
def test_gguf_files_hold_what_was_coded(kind: str, tmp_path: Path) -> None:
    """By the usual types; codes that are a type's own are not touched."""
    for name in ("fp8_tiles", "awq", "ct_w8a8"):
        written = tmp_path / f"{name}.gguf"
        model_to_gguf(open_model(CODED / name), written, kind)
        own = open_checkpoint(CODED / name).tensors[f"{DOWN}.weight"]
        got = open_checkpoint(written).tensors["blk.0.ffn_down.weight"]
        error = np.abs(got.float32() - own.float32()).max() / np.abs(own.float32()).max()
        assert error < {"bf16": 2.0**-8, "q8_0": 1 / 200, "q4_k_m": 1 / 16}[kind]
        if got.dtype is own.dtype:
            assert np.array_equal(got.data, own.data)


FAMILIES = [n for n in NAMES if n != "tiny2/gpt2"]  # whose matrices no library packs the same way


METHODS: dict[str, dict[str, Any]] = {"tiles": TILES, "four bits": W4, "nvfp4": FP4}


def coded_and_dense(name: str, method: str, out: Path) -> tuple[Model, Model]:
    """A golden model in codes, and of the values that these stand for."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    coded, dense = {}, {}
    for title, t in load_file(GOLDEN / name / "model.safetensors").items():
        coded[title] = dense[title] = plain(t)
        experts = t.ndim == 3 and "experts" in title and method == "tiles"
        if is_linear(title, t) or experts:
            packed = nvfp4 if method == "nvfp4" else four_bits
            made = tiles(title, t, 16, 32) if method == "tiles" else packed(title, t)
            del coded[title]
            coded |= made[0]
            dense[title] = "F32", made[1]
    assert len(coded) > len(dense)
    told = {**config, "quantization_config": METHODS[method]}
    return (
        open_model(write_stored(out / "coded", told, coded)),
        open_model(write_stored(out / "dense", config, dense)),
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_moves_its_coded_rows_as_plain_ones(
    name: str, method: str, tmp_path: Path
) -> None:
    """Rows, experts and heads are parted, stacked and put in turn by families: codes go along."""
    got, expected = coded_and_dense(name, method, tmp_path)
    scales = {scale_name(n) for n, t in got.catalogue.items() if t.scale is not None}
    assert got.catalogue.keys() == expected.catalogue.keys() | scales
    for title, t in expected.catalogue.items():
        held = got.catalogue[title]
        assert held.shape == t.shape
        assert np.array_equal(held.float32(), t.float32()), title
    written = []
    for model in (got, expected):
        path = tmp_path / f"{len(written)}.gguf"
        model_to_gguf(model, path, "q8_0")
        written.append(open_checkpoint(path).tensors)
    assert written[0].keys() == written[1].keys()
    same = (np.array_equal(t.data, written[1][n].data) for n, t in written[0].items())
    assert all(same)


FOLDED = ("tiny2/falcon_h1", "tiny2/gemma2")  # whose GGUF files have numbers in some matrices


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_with_nvfp4_and_keeps_it(name: str, tmp_path: Path) -> None:
    """Products of its graph are multiplied by scales, and a GGUF file has the codes as they were,
    with a word where llama.cpp will not do so."""
    got, expected = coded_and_dense(name, "nvfp4", tmp_path)
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()[:16]
    assert spread_error(logits_of(got, ids), logits_of(expected, ids)) < TOLERANCE
    knows = ARCHITECTURES[got.config.architecture].gguf in SCALED
    says = pytest.warns(FormatWarning, match="llama.cpp passes over scales of matrices")
    with nullcontext() if knows else says:
        model_to_gguf(got, tmp_path / "coded.gguf", "nvfp4")
    model_to_gguf(expected, tmp_path / "dense.gguf", "f32")
    held, dense = (open_model(tmp_path / f"{n}.gguf").catalogue for n in ("coded", "dense"))
    for title, t in got.catalogue.items():
        if t.dtype is NVFP4:
            error = np.abs(held[title].float32() - dense[title].float32())
            folded = name in FOLDED and held[title].dtype is F16
            bar = np.abs(dense[title].float32()) * 2.0**-10 + 2.0**-24 if folded else 0.0
            assert (error <= bar).all(), title
            assert folded or held[title].dtype in (NVFP4, F32), title  # the latter of routers


@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (50, 95), (3, 20, 40)])
def test_tiles_at_the_edges_are_cut(shape: tuple[int, ...], tmp_path: Path) -> None:
    """As DeepSeek's own kernel masks them: a tile is where its scale's place says."""
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stored, expected = tiles("x.weight", values, 16, 32)
    folder = write_stored(tmp_path / "hf", {"quantization_config": TILES}, stored)
    assert np.array_equal(open_checkpoint(folder).tensors["x.weight"].float32(), expected)


def test_codes_of_eight_bits_are_the_specifications_numbers() -> None:
    codes = np.arange(256, dtype=np.uint8)
    e4m3, e5m2, e8m0 = (dequantize(codes, d) for d in (E4M3, E5M2, E8M0))
    assert np.isnan(e4m3[[0x7F, 0xFF]]).all()
    assert np.isinf(e5m2[[0x7C, 0xFC]]).all()
    assert np.isnan(e5m2[0x7D:0x80]).all() and np.isnan(e5m2[0xFD:]).all()
    assert np.isnan(e8m0[255])
    for code in range(256):
        if code & 0x7F != 0x7F:
            assert e4m3[code] == eight(code, 4, 3)
        if code & 0x7C != 0x7C:
            assert e5m2[code] == eight(code, 5, 2)
        if code != 255:
            assert e8m0[code] == 2.0 ** (code - 127)


def test_scales_may_be_powers_of_two_by_themselves(tmp_path: Path) -> None:
    """Of type E8M0, as DeepSeek's later folders may have them."""
    values = np.random.default_rng(0).standard_normal((40, 70)).astype(np.float32)
    stored, expected = tiles("x.weight", values, 16, 32)
    scale = stored["x.weight_scale_inv"][1]
    stored["x.weight_scale_inv"] = "F8_E8M0", (np.log2(scale) + 127).astype(np.uint8)
    folder = write_stored(tmp_path / "hf", {"quantization_config": TILES}, stored)
    assert np.array_equal(open_checkpoint(folder).tensors["x.weight"].float32(), expected)


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, F16), (1e6, BF16), (1e-9, BF16), (0.0, F16)])
def test_what_halves_cannot_hold_is_held_otherwise(
    scale: float, dtype: DType, tmp_path: Path
) -> None:
    stored, _ = tiles("x.weight", np.eye(16, 32, dtype=np.float32), 16, 32)
    stored["x.weight_scale_inv"][1][:] = scale
    codes = stored["x.weight"][1]
    folder = write_stored(tmp_path / "hf", {"quantization_config": TILES}, stored)
    t = open_checkpoint(folder).tensors["x.weight"]
    assert t.dtype is dtype
    exact = dequantize(codes, E4M3) * np.float32(scale)
    assert np.abs(t.float32() - exact).max() <= np.abs(exact).max() * 2.0**-8


def test_fp8_without_a_method_is_what_it_says(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    folder = write_stored(tmp_path / "hf", {}, {"x.weight": ("F8_E4M3", codes)})
    t = open_checkpoint(folder).tensors["x.weight"]
    assert t.dtype is F16
    assert np.array_equal(t.float32(), dequantize(codes, E4M3), equal_nan=True)


Change = Callable[[dict[str, Any], dict[str, tuple[str, Array]]], None]


def config_of(**changes: object) -> Change:
    """Another quantization_config."""
    return lambda config, _: config["quantization_config"].update(changes)


def without(end: str) -> Change:
    """A part left out."""
    return lambda _, tensors: tensors.pop(DOWN + end) and None


def other(end: str, make: Callable[[Array], Array], kind: str | None = None) -> Change:
    """A part changed."""

    def change(_: object, tensors: dict[str, tuple[str, Array]]) -> None:
        old, data = tensors[DOWN + end]
        tensors[DOWN + end] = kind or old, make(data)

    return change


def nan(x: Array) -> Array:
    """With a number that is none."""
    out = x.copy()
    out.flat[0] = np.nan if x.dtype.kind == "f" else 0x7FC0  # of bfloat16
    return out


def group(**changes: object) -> Change:
    """Another group of compressed-tensors' config."""

    def change(config: dict[str, Any], _: object) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)

    return change


REFUSALS: list[tuple[str, Change, str]] = [
    ("fp8_tiles", config_of(quant_method="hqq"), "quantised by 'hqq' are not read; known: mxfp4"),
    ("fp8_tiles", config_of(weight_block_size=[128]), "weight_block_size is .*expected two counts"),
    ("fp8_tiles", config_of(weight_block_size=[0, 128]), "expected two counts"),
    ("fp8_tiles", config_of(weight_block_size=[64, 128]), r"expected shape \[2, 2\], got f32"),
    ("fp8_tiles", without(".weight_scale_inv"), "down_proj.weight': codes of type f8_e4m3 without"),
    ("fp8_tiles", without(".weight"), "down_proj.weight' is missing beside"),
    ("fp8_tiles", other(".weight_scale_inv", nan), "weight_scale_inv': a scale is not a finite"),
    ("fp8_tiles", other(".weight_scale_inv", lambda x: x[:, :1]), r"expected shape \[1, 2\]"),
    ("fp8_tiles", other(".weight_scale_inv", lambda x: x.view("i4"), "I32"), "expected scales"),
    ("fp8_tiles", other(".weight", lambda x: x, "U8"), "expected a matrix of FP8, got i8"),
    ("fp8_tensor", other(".weight_scale_inv", lambda x: x.reshape(1).repeat(2)), "expected shape"),
    ("ct_fp8_channel", group(num_bits=4), "codes are 'float' of 4 bits: expected float of 8 bits"),
    ("ct_fp8_channel", config_of(config_groups={}), "expected groups of weights"),
    ("ct_fp8_channel", config_of(transform_config={"R1": 1}), "transform_config is .*: not read"),
    ("ct_fp8_channel", config_of(sparsity_config={"format": "2:4"}), "sparsity_config is"),
    ("ct_fp8_channel", group(strategy="token"), "strategy is 'token'"),
    ("ct_fp8_channel", other(".weight_scale", lambda x: x[1:]), r"or \[128\], got bf16\[127, 1\]"),
    ("ct_fp8_channel", other(".weight_scale", nan), "a scale is not a finite number"),
    ("ct_w8a8", other(".weight", lambda x: x[:, :0]), r"i8\[128, 0\] holds no numbers"),
    ("ct_fp8_block", group(block_structure=[128, 0]), "expected two counts"),
    ("ct_w8a8", without(".weight_scale"), "down_proj.weight': codes of type i8 without a scale"),
    ("ct_w4a16", without(".weight_shape"), "weight_shape' is missing beside"),
    ("ct_w4a16", group(group_size=96), r"expected shape \[128, 3\]"),
    ("ct_w4a16", group(group_size=0), "expected a count, or -1"),
    ("ct_w4a16", group(symmetric=False), "weight_zero_point' is missing"),
    ("ct_w4a16", other(".weight_shape", lambda x: x * 2), r"expected shape \[256, 64\]"),
    ("ct_w4a16", group(actorder="group"), "weight_g_idx' is missing beside"),
    ("ct_w4a16_zeros", other(".weight_zero_point", lambda x: x[1:]), "expected shape"),
    ("awq", config_of(version="gemv"), "version is 'gemv': expected 'gemm'"),
    ("awq", config_of(bits=3), "bits is 3: expected 4"),
    ("awq", without(".qzeros"), "qzeros' is missing beside"),
    ("awq", other(".scales", lambda x: x[:1]), r"expected shape \[2, 128\]"),
    ("awq", other(".scales", nan), "a scale is not a finite number"),
    ("awq", other(".qzeros", lambda x: x[:, 1:]), r"expected zeros for \[128, 2\]"),
    ("gptq_4", config_of(bits=3), "bits is 3: expected 4 or 8"),
    ("gptq_4", config_of(checkpoint_format="marlin"), "expected 'gptq' or 'gptq_v2'"),
    ("gptq_4", config_of(dynamic={"+:.*": {"bits": 8}}), "modules with bits of their own"),
    ("gptq_4", other(".qweight", lambda x: x.reshape(-1)), "expected a matrix of i32"),
    ("gptq_4_order", without(".g_idx"), "g_idx' is missing beside"),
    ("gptq_4_order", other(".g_idx", lambda x: x + 8), "expected numbers of 8 groups"),
    ("gptq_4_order", other(".g_idx", lambda x: x - 1), "expected numbers of 8 groups"),
    ("bnb_nf4", without(".weight.absmax"), "absmax' is missing"),
    ("bnb_nf4", without(".weight.quant_state.bitsandbytes__nf4"), "expected one state"),
    ("bnb_nf4", other(".weight.quant_map", lambda x: x[:8]), r"expected shape \[16\]"),
    ("bnb_nf4", other(".weight", lambda x: x[1:]), r"16383 bytes for \[128, 256\] of 4 bits"),
    ("bnb_nf4", other(".weight.nested_absmax", nan), "a scale is not a finite number"),
    ("bnb_int8", other(".SCB", lambda x: x[1:]), r"expected shape \[128\]"),
    ("bnb_int8", other(".weight_format", lambda x: x + 1), "weights in tiles"),
    ("ct_nvfp4", group(group_size=64), "of 4 bits: expected float of 8 bits, or of 4 in groups"),
    ("ct_nvfp4", without(".weight_global_scale"), "weight_global_scale' is missing beside"),
    ("ct_nvfp4", other(".weight_global_scale", nan), "a scale is not a finite number"),
    ("ct_nvfp4", other(".weight_global_scale", lambda x: -x), "expected a number above 0"),
    ("ct_nvfp4", other(".weight_global_scale", lambda x: x.repeat(2)), r"expected shape \[1\]"),
    ("ct_nvfp4", other(".weight_scale", lambda x: x[:, 1:]), r"expected shape \[64, 8\]"),
    ("ct_nvfp4", other(".weight_scale", lambda x: x | 0x80), "not a finite number from 0 on"),
    ("ct_nvfp4", other(".weight_scale", lambda x: x | 0x7F), "not a finite number from 0 on"),
    ("ct_nvfp4", other(".weight_scale", lambda x: x, "F8_E5M2"), "expected f8_e4m3, got f8_e5m2"),
    ("ct_nvfp4", other(".weight_packed", lambda x: x[0]), "expected a matrix of bytes"),
    ("ct_nvfp4", other(".weight_packed", lambda x: x[:, :-4]), "120 columns are not whole groups"),
    ("ct_mxfp4", without(".weight_scale"), "weight_scale' is missing beside"),
    ("ct_mxfp4", other(".weight_scale", lambda x: x | 0xFF), "not a finite number from 0 on"),
    ("ct_mxfp4", other(".weight_scale", lambda x: x[1:]), r"expected shape \[64, 4\]"),
]


@pytest.mark.parametrize(("name", "change", "says"), REFUSALS)
def test_what_is_not_as_expected_is_named(
    name: str, change: Change, says: str, tmp_path: Path
) -> None:
    config = json.loads((CODED / name / "config.json").read_text())
    tensors = read_stored(CODED / name / "model.safetensors")
    change(config, tensors)
    with pytest.raises(FormatError, match=says):
        open_checkpoint(write_stored(tmp_path / "hf", config, tensors))


ZEROS = f"{DOWN}.weight_zero_point"


def test_zeros_of_fp4_are_refused(tmp_path: Path) -> None:
    config = json.loads((CODED / "ct_mxfp4" / "config.json").read_text())
    tensors = read_stored(CODED / "ct_mxfp4" / "model.safetensors")
    tensors[ZEROS] = "I8", np.zeros((64, 4), np.int8)
    with pytest.raises(FormatError, match="weight_zero_point': zeros of FP4"):
        open_checkpoint(write_stored(tmp_path / "hf", config, tensors))


def as_modelopt(tensors: dict[str, tuple[str, Array]]) -> dict[str, tuple[str, Array]]:
    """The golden NVFP4 by ModelOpt's names: its scale of a tensor multiplies, as 0-d."""
    found = {}
    for title, (kind, data) in tensors.items():
        if title.endswith("_global_scale"):
            title = title.replace("_global_scale", "_scale_2")
            data = (1 / data).astype(np.float32).reshape(())
        found[title.replace("weight_packed", "weight")] = kind, data
    for what in ("q_proj.input", "k_proj.k", "v_proj.v"):
        found[f"model.layers.0.self_attn.{what}_scale"] = "F32", np.ones((), np.float32)
    return found


TOLD_BY = {
    "config.json": ("config.json", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "a file of its own": (
        "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"],
        }},
    ),
    "layers": ("config.json", {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            DOWN: {"quant_algo": "NVFP4"}, "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        },
    }),
}  # fmt: skip


@pytest.mark.parametrize("told_by", TOLD_BY)
def test_modelopt_says_the_same_by_other_names(told_by: str, tmp_path: Path) -> None:
    file, told = TOLD_BY[told_by]
    config = json.loads((CODED / "ct_nvfp4" / "config.json").read_text())
    del config["quantization_config"]
    tensors = as_modelopt(read_stored(CODED / "ct_nvfp4" / "model.safetensors"))
    own = {**config, "quantization_config": told} if file == "config.json" else config
    hf = write_stored(tmp_path / "hf", own, tensors)
    if file != "config.json":
        (hf / file).write_text(json.dumps(told))
    found = open_checkpoint(hf).tensors
    expected = open_checkpoint(CODED / "ct_nvfp4").tensors
    assert found.keys() == expected.keys()
    for title, t in expected.items():
        assert found[title].dtype is t.dtype and np.array_equal(found[title].float32(), t.float32())


def test_modelopts_fp8_has_one_scale(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 0x7F, (16, 32), np.uint8), np.float32(0.0123).reshape(())
    stored = {
        "x.weight": ("F8_E4M3", codes), "x.weight_scale": ("F32", scale),
        "x.input_scale": ("F32", scale), "y.weight": plain(np.ones((2, 3), np.float16)),
    }  # fmt: skip
    told = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    found = open_checkpoint(write_stored(tmp_path / "hf", told, stored)).tensors
    assert list(found) == ["x.weight", "y.weight"] and found["x.weight"].dtype is F16
    exact = dequantize(codes, E4M3) * scale
    assert (np.abs(found["x.weight"].float32() - exact) <= exact * 2.0**-11 + 2.0**-25).all()


@pytest.mark.parametrize(
    ("told", "end", "says"),
    [
        ({"quant_algo": "INT4_AWQ"}, "", "quant_algo is 'INT4_AWQ': expected NVFP4 or FP8"),
        ({"quantization": 3}, "", "quant_algo is 3: expected"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "W4A8"}}},
            "", "quant_algo is 'W4A8': expected",
        ),
        ({"quant_algo": "NVFP4"}, ".weight_scale_2", "weight_scale_2' is missing beside"),
        ({"quant_algo": "NVFP4"}, ".weight_scale", "weight_scale' is missing beside"),
        ({"quant_algo": "NVFP4"}, ".weight", "weight' is missing beside"),
    ],
)  # fmt: skip
def test_what_modelopt_has_otherwise_is_named(
    told: dict[str, Any], end: str, says: str, tmp_path: Path
) -> None:
    config = json.loads((CODED / "ct_nvfp4" / "config.json").read_text())
    tensors = as_modelopt(read_stored(CODED / "ct_nvfp4" / "model.safetensors"))
    tensors.pop(DOWN + end, None)
    config["quantization_config"] = {"quant_method": "modelopt", **told}
    with pytest.raises(FormatError, match=says):
        open_checkpoint(write_stored(tmp_path / "hf", config, tensors))


@pytest.mark.parametrize("scale", [0.25, 1e-7, 1e4])
def test_rows_that_are_not_whole_blocks_are_halves(scale: float, tmp_path: Path) -> None:
    """And bfloat16 beyond these; of 48 columns, each of which is where it was."""
    values = np.random.default_rng(0).standard_normal((5, 48)).astype(np.float32)
    stored, expected = nvfp4("x.weight", values)
    stored["x.weight_scale_2"] = "F32", stored["x.weight_scale_2"][1] * np.float32(scale)
    hf = write_stored(tmp_path / "hf", {"quantization_config": FP4}, stored)
    t = open_checkpoint(hf).tensors["x.weight"]
    bits = {F16: 11, BF16: 8}[t.dtype]
    assert (t.dtype is F16) == (scale != 1e-7)
    exact = expected * np.float32(scale)
    assert (np.abs(t.float32() - exact) <= np.abs(exact) * 2.0 ** (1 - bits) + 2.0**-25).all()


def test_a_weight_in_codes_and_without_is_refused(tmp_path: Path) -> None:
    config = json.loads((CODED / "awq" / "config.json").read_text())
    tensors = read_stored(CODED / "awq" / "model.safetensors")
    tensors[f"{DOWN}.weight"] = "F16", np.zeros((128, 256), np.float16)
    with pytest.raises(FormatError, match="stands there twice, in codes and without"):
        open_checkpoint(write_stored(tmp_path / "hf", config, tensors))


def test_metas_releases_are_channels_under_another_name(tmp_path: Path) -> None:
    """fbgemm_fp8: the same tensors, and a bound of activations beside them."""
    name = "ct_fp8_channel"
    config = json.loads((CODED / name / "config.json").read_text())
    tensors = read_stored(CODED / name / "model.safetensors")
    tensors[f"{DOWN}.input_scale_ub"] = "F32", np.array([1200.0], np.float32)
    told = {**config, "quantization_config": {"quant_method": "fbgemm_fp8"}}
    found = open_checkpoint(write_stored(tmp_path / "hf", told, tensors)).tensors
    for title, t in open_checkpoint(CODED / name).tensors.items():
        assert np.array_equal(found[title].float32(), t.float32()), title
    tensors[f"{DOWN}.weight_scale"] = "F32", np.ones((64, 1), np.float32)
    with pytest.raises(FormatError, match=r"expected shape \[128, 1\] or \[128\]"):
        open_checkpoint(write_stored(tmp_path / "hf", told, tensors))


def test_auto_fp8_has_a_tensors_scale_under_another_name(tmp_path: Path) -> None:
    """With those of activations and caches, which are passed over."""
    config = json.loads((CODED / "fp8_tensor" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    names = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
    tensors = {}
    for title, t in read_stored(CODED / "fp8_tensor" / "model.safetensors").items():
        lead, _, last = title.rpartition(".")
        tensors[f"{lead}.{names.get(last, last)}"] = t
    for what in ("k_proj.output", "attn.k", "attn.v", "attn.kv"):
        tensors[f"model.layers.0.self_attn.{what}_scale"] = "F32", np.ones((), np.float32)
    hf = write_stored(tmp_path / "hf", config, tensors)
    expected = np.load(CODED / "fp8_tensor" / "expected.npz")
    assert spread_error(logits(hf, expected["ids"].tolist()), expected["logits"]) < ROUNDED
    tensors[f"{DOWN}.weight_scale_inv"] = tensors[f"{DOWN}.weight_scale"]
    with pytest.raises(FormatError, match=r"down_proj\.weight': two scales"):
        open_checkpoint(write_stored(tmp_path / "hf", config, tensors))


def test_integers_may_have_zeros_and_groups_in_any_order(tmp_path: Path) -> None:
    """Of 8 bits by channel; and columns that say which group is theirs, -1 where none does."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (8, 64)).astype(np.int8)
    zero = rng.integers(-128, 128, (8, 1)).astype(np.int8)
    of = rng.permutation(np.arange(64) // 32).astype(np.int32)
    scale, by_group = np.exp2(rng.integers(-9, -5, (2, 8, 2))).astype(np.float32)
    stored, _ = four_bits("y.weight", rng.standard_normal((8, 64)))
    words = stored["y.weight_packed"][1].view(np.uint32)
    four = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(8, 64) - 8.0
    stored |= {
        "x.weight": plain(codes), "x.weight_zero_point": plain(zero),
        "x.weight_scale": plain(scale[:, :1]), "y.weight_scale": plain(by_group),
    }  # fmt: skip
    eights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    told = {"quant_method": "compressed-tensors", "config_groups": {
        **W4["config_groups"], "group_1": {"targets": ["x"], "weights": eights},
    }}  # fmt: skip
    for each in (of, np.full(64, -1, np.int32)):
        stored["y.weight_g_idx"] = plain(each)
        hf = write_stored(tmp_path / "hf", {"quantization_config": told}, stored)
        found = open_checkpoint(hf).tensors
        places = of if each is of else np.arange(64) // 32
        assert np.array_equal(found["y.weight"].float32(), (four * by_group[:, places]))
        expected = (codes.astype(np.float32) - zero) * scale[:, :1]
        assert np.array_equal(found["x.weight"].float32(), expected)


@pytest.mark.parametrize("method", ["four bits", "nvfp4"])
@pytest.mark.parametrize("name", ["tiny/llama_tied", "tiny2/phi3"])
def test_adapters_fit_folders_in_codes(name: str, method: str, tmp_path: Path) -> None:
    """As people train them; Phi-3's matrices are several of ours each."""
    adapter = GOLDEN / "lora" / name.partition("/")[2]
    ids = np.load(adapter / "expected.npz")["ids"].tolist()
    found = [
        logits_of(adapted(model, [(adapter / "whole", 1.0)]), ids)
        for model in coded_and_dense(name, method, tmp_path)
    ]
    assert spread_error(found[0], found[1]) < TOLERANCE
    bare = logits_of(open_model(tmp_path / "coded"), ids)
    assert spread_error(found[0], bare) > 100 * TOLERANCE


def test_groups_name_modules_before_classes(tmp_path: Path) -> None:
    """The first that names a module counts, then the one for its class."""
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    packed, four = four_bits("a.x.weight", values)
    eights = np.clip(np.round(values * 32), -128, 127).astype(np.int8)
    stored = {
        **packed, "a.y.weight": ("I8", eights), "a.y.weight_scale": plain(np.ones((1,), "<f4")),
    }  # fmt: skip
    told = {"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}},
        "group_1": {"targets": ["re:.*x$"], **{
            k: v for k, v in W4["config_groups"]["group_0"].items() if k == "weights"}},
    }}  # fmt: skip
    found = open_checkpoint(
        write_stored(tmp_path / "hf", {"compression_config": told}, stored)
    ).tensors
    assert np.array_equal(found["a.x.weight"].float32(), four)
    assert np.array_equal(found["a.y.weight"].float32(), eights)


ODD = [None, -1, 0, 1, 1 << 40, [], {}, "x", [1, 2], True]


def parts_of(name: str) -> Iterator[tuple[str, Any]]:
    """A golden folder's tensors."""
    yield from read_safetensors(CODED / name / "model.safetensors").items()


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_damaged_parts_raise_only_our_errors(name: str, data: st.DataObject) -> None:
    """Parts left out, of other sizes or none, of other types, and other numbers in the config."""
    config = json.loads((CODED / name / "config.json").read_text())
    told, tensors = config["quantization_config"], dict(parts_of(name))
    for _ in range(data.draw(st.integers(1, 3))):
        title = data.draw(st.sampled_from(sorted(n for n in tensors if "down_proj" in n) or [""]))
        what = data.draw(st.sampled_from(["drop", "shape", "type", "config"]))
        if what == "config":
            key = data.draw(st.sampled_from(sorted(told)))
            told[key] = data.draw(st.sampled_from(ODD))
        elif what == "drop":
            tensors.pop(title, None)
        elif title:
            t = tensors[title]
            size = data.draw(st.sampled_from([(0,), (1,), (0, 1 << 40), (1 << 40, 0), (2, 2), ()]))
            shape = size if what == "shape" else t.shape
            kind = t.dtype if what == "shape" else data.draw(st.sampled_from([F32, E4M3, BF16]))
            count = int(np.prod(shape, dtype=object))
            values = np.resize(np.zeros(max(count, 1), kind.np), count).reshape(shape)
            tensors[title] = type(t)(title, kind, tuple(shape), values)
    try:
        found = decoded(config, tensors, "mutant")
    except GgraphError:
        return
    assert all(t.nbytes <= 1 << 22 for t in found.values())
