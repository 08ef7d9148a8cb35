"""Hugging Face folders: config.json, safetensors (one file or sharded) or torch files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggraph.errors import FormatError, shown
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.coded import CODES, codes_of, decoded
from ggraph.formats.safetensors import json_object, read_safetensors
from ggraph.lazy import lazy

if TYPE_CHECKING:
    from ggraph.formats import torch_bin
else:
    torch_bin = lazy("ggraph.formats.torch_bin")

MAX_JSON = 64 << 20
OLD_CODES = (
    ("quantize_config.json", "gptq"), ("quant_config.json", "awq"),
    ("hf_quant_config.json", "modelopt"),
)  # fmt: skip


def read_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises FormatError when a part is missing or damaged."""
    if not (folder / "config.json").exists():
        raise FormatError(f"{folder}: no model of Hugging Face, for it holds no config.json")
    config = read_json(folder / "config.json")
    architectures = config.get("architectures") or [config.get("model_type", "")]
    if not isinstance(architectures, list) or not architectures:
        raise FormatError(f"{folder / 'config.json'}: architectures is {shown(architectures)}")
    tensors = decoded(_with_codes(folder, config), read_weights(folder), str(folder))
    return Checkpoint(str(folder), "hf", str(architectures[0]), config, tensors)


def _with_codes(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says, and of codes, if it says nothing, a file that the quantiser wrote."""
    for name, method in OLD_CODES:
        if not codes_of(config) and (folder / name).exists():
            return {**config, CODES: {"quant_method": method, **read_json(folder / name)}}
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises FormatError."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise FormatError(f"{path}: {path.stat().st_size} bytes, at most {MAX_JSON} are read")
        return json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def read_weights(folder: Path) -> dict[str, RawTensor]:
    """All tensors of the folder, from safetensors if there are any, else from torch files."""
    for pattern, read in (("*.safetensors", read_safetensors), ("*.bin", torch_bin.read_torch)):
        files = _listed(folder, pattern)
        if files:
            found: dict[str, RawTensor] = {}
            for path in files:
                for name, t in read(path).items():
                    if name in found:
                        raise FormatError(f"{path}: tensor {name!r} stands in two files")
                    found[name] = t
            return found
    raise FormatError(f"{folder}: no *.safetensors and no *.bin file")


def _listed(folder: Path, pattern: str) -> list[Path]:
    """The shards that the index names, or all files of the pattern."""
    suffix = pattern.removeprefix("*")
    for index in sorted(folder.glob(f"*{suffix}.index.json")):
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
            raise FormatError(f"{index}: weight_map is no map of names to files")
        shards = sorted(set(mapping.values()))
        if any(Path(s).name != s for s in shards):
            raise FormatError(f"{index}: a shard lies outside the folder: {shards}")
        return [folder / s for s in shards]
    return sorted(folder.glob(pattern))
