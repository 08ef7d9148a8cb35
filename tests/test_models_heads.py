"""One random head in every checkpoint layout gives the same logits; damaged ones give one line."""

import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.rows import Rows
from ggraph.dtype import F32, I64
from ggraph.errors import FormatError, ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import write_gguf
from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.convert import head_to_gguf, model_to_gguf
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
HEAD = TINY / "eagle3_for_llama_tied"
EXPECTED = np.load(HEAD / "expected.npz")
CONFIG = json.loads((HEAD / "config.json").read_text())
Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def target() -> Model:
    return open_model(TINY / "llama_tied")


def tensors() -> Tensors:
    return dict(load_file(HEAD / "model.safetensors"))


def folder(path: Path, config: Mapping[str, Any], weights: Tensors) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, path / "model.safetensors")
    return path


def renamed(weights: Tensors, old: str, new: str) -> Tensors:
    return {k.replace(old, new, 1) if k.startswith(old) else k: v for k, v in weights.items()}


def specforge(path: Path) -> Path:
    """midlayer.*, nested OUTPUT indices."""
    config = {
        **CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]},
    }
    return folder(path, config, tensors())


def nvidia(path: Path) -> Path:
    """No t2d, flags in eagle_config."""
    config = {
        **CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 2, 2],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }
    return folder(path, config, {k: v for k, v in tensors().items() if k != "t2d"})


def redhat(path: Path) -> Path:
    """layers.0.*, nested layer config, INPUT indices at the top, embedding included."""
    weights = renamed(tensors(), "midlayer.", "layers.0.")
    target = load_file(TINY / "llama_tied" / "model.safetensors")
    weights["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 128,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 3],
        "speculators_config": {"verifier": {"name_or_path": "x"}},
        "transformer_layer_config": {**CONFIG, "head_dim": 16},
    }
    return folder(path, config, weights)


def angelslim(path: Path) -> Path:
    """A tie flag that the tensors contradict; the map under its other name, as int32."""
    weights = renamed(tensors(), "midlayer.", "model.layers.0.")
    weights["draft_id_to_target_id"] = weights.pop("d2t").astype(np.int32)
    del weights["t2d"]
    config = {**CONFIG, "architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True}
    return folder(path, config, weights)


def absolute(path: Path) -> Path:
    """The map as absolute ids, without t2d to settle it."""
    weights = {k: v for k, v in tensors().items() if k != "t2d"}
    weights["d2t"] = weights["d2t"] + np.arange(128)
    return folder(path, CONFIG, weights)


def torch_file(path: Path) -> Path:
    """pytorch_model.bin instead of safetensors."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    write_torch(path / "pytorch_model.bin", tensors())
    return path


def write_torch(path: Path, weights: Tensors) -> None:
    """What torch.save writes for a dictionary of tensors, opcode by opcode."""
    kinds = {"float16": "HalfStorage", "int64": "LongStorage", "bool": "BoolStorage"}

    def integer(n: int) -> bytes:
        return b"J" + struct.pack("<i", n)

    def string(s: str) -> bytes:
        return b"X" + struct.pack("<I", len(s)) + s.encode()

    body = b"\x80\x02}("
    with zipfile.ZipFile(path, "w") as archive:
        for i, (name, value) in enumerate(weights.items()):
            archive.writestr(f"m/data/{i}", value.tobytes())
            kind = f"ctorch\n{kinds[value.dtype.name]}\n".encode()
            pid = b"(" + string("storage") + kind + string(str(i)) + string("cpu")
            pid += integer(value.size) + b"tQ"
            strides = [s // value.itemsize for s in value.strides]
            shape = b"(" + b"".join(map(integer, value.shape)) + b"t"
            shape += b"(" + b"".join(map(integer, strides)) + b"t"
            body += string(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + integer(0)
            body += shape + b"\x89ccollections\nOrderedDict\n)RtR"
        archive.writestr("m/data.pkl", body + b"u.")


LAYOUTS: list[Callable[[Path], Path]] = [
    specforge, nvidia, redhat, angelslim, absolute, torch_file,
]  # fmt: skip


def logits(head: Head) -> np.ndarray[Any, Any]:
    session = open_session(threads=1, exact=True)
    count = len(EXPECTED["ids"]) - 1
    runner = DraftRunner(head, session, 64, cache_dtype=F32)
    rows = Rows(EXPECTED["ids"][1:].tolist(), range(count), range(count))
    out = runner.step(rows, range(count), EXPECTED["features"][:count], fed_back=False)
    session.close()
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_every_layout_gives_the_same_logits(
    layout: Callable[[Path], Path], target: Model, tmp_path: Path
) -> None:
    head = open_head(layout(tmp_path / "head"), target)
    assert head.taps == (2, 3, 3)
    original = open_head(HEAD, target)
    assert np.array_equal(head.target_ids, original.target_ids)
    assert np.abs(logits(head) - EXPECTED["draft_logits"]).max() < 1e-4 * 5


def test_gguf_in_both_forms(target: Model, tmp_path: Path) -> None:
    head = open_head(HEAD, target)
    new = tmp_path / "new.gguf"
    head_to_gguf(head, target, new, "f16")
    checkpoint = open_checkpoint(new)
    assert checkpoint.architecture == "eagle3"
    assert checkpoint.metadata["eagle3.target_layers"].tolist() == [2, 3, 3]
    assert np.array_equal(checkpoint.tensors["d2t"].data, head.target_ids)
    assert checkpoint.tensors["fc.weight"].shape == (64, 192)
    assert "t2d" not in checkpoint.tensors
    again = open_head(new, target)
    assert np.abs(logits(again) - EXPECTED["draft_logits"]).max() < 1e-4 * 5
    old = tmp_path / "old.gguf"
    metadata = dict(checkpoint.metadata)
    metadata["eagle3.extract_layers"] = metadata.pop("eagle3.target_layers")
    parts = []
    for name, t in checkpoint.tensors.items():
        title = name.replace("attn_norm_2", "hidden_norm")
        if name == "d2t":  # the first files held offsets
            offsets = np.asarray(t.data) - np.arange(t.shape[0])
            parts.append(RawTensor(name, I64, t.shape, offsets))
        else:
            parts.append(RawTensor(title, t.dtype, t.shape, t.data))
    write_gguf(old, metadata, parts)
    assert np.array_equal(logits(open_head(old, target)), logits(again))


def test_five_taps_are_read_from_the_config(target: Model, tmp_path: Path) -> None:
    weights = tensors()
    weights["fc.weight"] = np.zeros((64, 5 * 64), np.float16)
    config = {**CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}
    head = open_head(folder(tmp_path / "five", config, weights), target)
    assert head.taps == (1, 2, 3, 4, 5)
    with pytest.raises(ModelError, match="reads 5 layers, but the config does not say which"):
        open_head(folder(tmp_path / "silent", CONFIG, weights), target)


def broken(change: Callable[[Tensors, dict[str, Any]], None]) -> tuple[dict[str, Any], Tensors]:
    weights, config = tensors(), dict(CONFIG)
    change(weights, config)
    return config, weights


def _set(name: str, value: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(weights: Tensors, config: dict[str, Any]) -> None:
        weights[name] = value(weights[name]) if callable(value) else value

    return change


def _flag(name: str, value: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(weights: Tensors, config: dict[str, Any]) -> None:
        config[name] = value

    return change


def _without(name: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(weights: Tensors, config: dict[str, Any]) -> None:
        del weights[name]

    return change


def _nan(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    bad = value.copy()
    bad.flat[3] = np.nan
    return bad


DAMAGE = [
    (_without("fc.weight"), "no tensor 'fc.weight'"),
    (_without("midlayer.self_attn.q_proj.weight"), "no tensor 'blk.0.attn_q.weight'"),
    (_set("fc.weight", np.zeros((64, 190), np.float16)), "belongs to another target"),
    (_set("fc.weight", _nan), "not finite"),
    (_set("surprise.weight", np.zeros(3, np.float16)), "unknown tensor 'surprise.weight'"),
    (_set("d2t", lambda d: d[:100]), "100 entries for 128"),
    (_flag("use_last_layernorm", False), "use_last_layernorm = False is a variant"),
    (_flag("use_mtp_layernorm", True), "use_mtp_layernorm = True is a variant"),
    (_flag("eagle_aux_hidden_state_layer_ids", [2, 3, 99]), "tapped layers"),
    (_flag("eagle_aux_hidden_state_layer_ids", ["2", 3, 3]), "no list of integers"),
    (_flag("eagle_config", [1]), "eagle_config = .* is no mapping"),
    (_flag("rope_scaling", "yarn"), "is no mapping"),
    (_flag("rope_scaling", {"type": "longrope"}), "heads with LongRoPE are not built here"),
    (_flag("norm_output", "yes"), "norm_output = 'yes' is neither true nor false"),
    (_flag("fc_norm", True), "no tensor 'fc_norm.0.weight'"),
    (_flag("norm_before_fc", True), "no tensor 'enc.output_norm.weight'"),
    (_without("midlayer.mlp.up_proj.weight"), "no tensor 'blk.0.ffn_up.weight'"),
    (_without("norm.weight"), "no tensor 'output_norm.weight'"),
    (_set("norm.weight", np.ones(63, np.float16)), "expected .64., got .63."),
    (_set("midlayer.self_attn.o_proj.weight", np.ones((64, 63), np.float16)), "got .64, 63."),
    (_set("lm_head.weight", np.ones((128, 65), np.float16)), "expected .128, 64., got .128, 65."),
    (_set("fc_norm.1.weight", np.ones(64, np.float16)), "no place for tensor 'fc_norm.1.weight'"),
    (_flag("hidden_size", 32), "hidden_size 32, but fc gives 64"),
    (_flag("num_attention_heads", "four"), "is not an integer"),
]


@pytest.mark.parametrize(("change", "says"), DAMAGE, ids=[s for _, s in DAMAGE])
def test_malformed_heads_are_one_clear_line(
    change: Callable[[Tensors, dict[str, Any]], None], says: str, target: Model, tmp_path: Path
) -> None:
    config, weights = broken(change)
    with pytest.raises((ModelError, FormatError), match=says) as caught:
        open_head(folder(tmp_path / "x", config, weights), target)
    assert "\n" not in str(caught.value)


def test_a_head_whose_pickle_wants_to_run_code_is_refused(target: Model, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    body = b"cos\nsystem\n(X" + struct.pack("<I", len(f"touch {ran}")) + f"touch {ran}".encode()
    path = torch_file(tmp_path / "head")
    with zipfile.ZipFile(path / "pytorch_model.bin", "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + body + b"tR.")
    with pytest.raises(FormatError) as caught:
        open_head(path, target)
    assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_bad_vocabulary_maps(target: Model, tmp_path: Path) -> None:
    for title, ids, says in (
        ("high", np.arange(128) + 300, "points to"),
        ("twice", np.full(128, 5) - np.arange(128), "tokens twice"),
    ):
        weights = {k: v for k, v in tensors().items() if k != "t2d"}
        weights["d2t"] = ids.astype(np.int64)
        with pytest.raises(ModelError, match=says):
            open_head(folder(tmp_path / title, CONFIG, weights), target)


def test_speculators_norm_before_the_residual_unless_they_say_otherwise(
    target: Model, tmp_path: Path
) -> None:
    config = {**CONFIG, "speculators_model_type": "eagle3"}
    for i, (said, expected) in enumerate(((None, True), (False, False), (True, True))):
        head = open_head(
            folder(tmp_path / str(i), {**config, "norm_before_residual": said}, tensors()), target
        )
        assert isinstance(head, Head)
        assert head.config.norm_before_residual is expected
    head = open_head(HEAD, target)
    assert isinstance(head, Head) and head.config.norm_before_residual is False


def test_a_head_for_another_width_is_refused(tmp_path: Path) -> None:
    wide = open_model(TINY / "qwen3_moe")
    head = open_head(HEAD, wide)  # same width: only a run can tell
    assert head.taps == (2, 3, 3)
    weights = tensors()
    weights["fc.weight"] = np.zeros((64, 3 * 96), np.float16)
    with pytest.raises(ModelError, match="another target"):
        open_head(folder(tmp_path / "x", CONFIG, weights), wide)


def test_a_target_gguf_works_as_well(target: Model, tmp_path: Path) -> None:
    path = tmp_path / "target.gguf"
    model_to_gguf(target, path, "f16")
    head = open_head(HEAD, open_model(path))
    assert np.abs(logits(head) - EXPECTED["draft_logits"]).max() < 1e-4 * 5
