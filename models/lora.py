"""LoRA adapters: low-rank matrices that add to what a model's own matrices give.

y = W x + B (A x), with A [R, n], B [m, R] and R small; an adapter's B is scaled once, by
alpha / R and by what the user asks. Several adapters of one matrix are one of a larger R.
Sources: Hu et al. 2021 (arXiv 2106.09685); PEFT's and llama.cpp's files.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import Array, InputError, ModelError, dtypes
from ggraph.errors import FormatError
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.gguf import read_gguf
from ggraph.formats.hf import read_json, read_weights
from ggraph.formats.lazy_array import LazyArray

from .architecture import Architecture, by_pairs
from .blocks import DOWN, UP
from .config import DecoderConfig
from .registry import ARCHITECTURES, Model, applied, sanitize, text_part

_PEFT = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_GGUF = re.compile(r"(.+)\.lora_([ab])")
# Keys of PEFT's that must not be set: such an adapter is more than A and B.
PLAIN = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "fan_in_fan_out",
    "layer_replication", "lora_bias", "modules_to_save", "target_parameters",
    "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
MEANINGS = {  # what others may say; some ways to begin change the model's own matrices
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """What a file holds: A and B by the name that the model's file has for their matrix, and what
    is known to scale them, alpha by the rank."""

    path: Path
    format: str  # of the models that it is for: "gguf" or "hf"
    architecture: str  # of a GGUF file
    pairs: Mapping[str, tuple[Array, Array]] = field(repr=False)
    alpha: float
    by_root: bool = False  # of the rank (rsLoRA)

    def scale(self, rank: int) -> float:
        """What B is scaled by."""
        return self.alpha / (math.sqrt(rank) if self.by_root else rank)


def open_adapter(path: Path) -> Adapter:
    """The adapter in a GGUF file, or in a folder of PEFT's. FormatError for what is none,
    ModelError for one that is more than A and B."""
    return _folder(path) if path.is_dir() else _file(path)


def _file(path: Path) -> Adapter:
    if not path.exists():
        raise FormatError(f"no adapter at {path}")
    c = read_gguf(path)
    kind = c.metadata.get("general.type"), c.metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise FormatError(f"{path}: no LoRA adapter, for general.type is {kind[0]!r}")
    if c.metadata.get("adapter.alora.invocation_tokens") is not None:
        raise ModelError(f"{path}: an adapter that begins behind certain tokens is not read")
    alpha = _alpha(path, c.metadata.get("adapter.lora.alpha"))
    return Adapter(path, "gguf", c.architecture, _pairs(path, c.tensors, _GGUF), alpha)


def _folder(path: Path) -> Adapter:
    told = path / "adapter_config.json"
    if not told.exists():
        raise FormatError(f"{path}: no adapter of PEFT's, for it holds no adapter_config.json")
    config = read_json(told)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{told}: peft_type {kind!r} is not read, 'LORA' is")
    odd = [k for k in PLAIN if config.get(k)]
    odd += [k for k, known in MEANINGS.items() if config.get(k) not in known]
    if odd:
        raise ModelError(f"{told}: {odd[0]} {config[odd[0]]!r}: only an A and a B are read")
    pairs = _pairs(path, read_weights(path), _PEFT)
    alpha, by_root = _alpha(told, config.get("lora_alpha")), bool(config.get("use_rslora"))
    return Adapter(path, "hf", "", pairs, alpha, by_root)


def _alpha(path: Path, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError(f"{path}: alpha is {value!r}, expected a number")
    return float(value)


def _pairs(
    path: Path, tensors: Mapping[str, RawTensor], form: re.Pattern[str]
) -> dict[str, tuple[Array, Array]]:
    halves: dict[str, dict[str, RawTensor]] = {}
    for name, t in tensors.items():
        match = form.fullmatch(name)
        if match is None:
            raise ModelError(f"{path}: tensor {name!r} is no A or B of an adapter")
        halves.setdefault(match[1], {})[match[2].lower()] = t
    found = {}
    for name, both in halves.items():
        if set(both) != {"a", "b"}:
            raise FormatError(f"{path}: {name} has no {'A' if 'b' in both else 'B'}")
        a, b = both["a"], both["b"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise FormatError(f"{path}: {name}: A {list(a.shape)} and B {list(b.shape)} do not fit")
        found[name] = a.float32(), b.float32()
    if not found:
        raise FormatError(f"{path}: an adapter without matrices")
    return found


def adapted(model: Model, asked: Sequence[tuple[Path, float]]) -> Model:
    """The model with these adapters, each times a factor.

    InputError for a factor that is no finite number, FormatError for damaged files. ModelError
    where an adapter is not for this model, or adapts what is not a plain matrix there: the
    embedding, experts, and matrices that ggraph keeps otherwise than the file does, those of delta
    nets in folders among them.
    """
    down: dict[str, list[Array]] = {}
    up: dict[str, list[Array]] = {}
    for path, factor in asked:
        if not math.isfinite(factor):
            raise InputError(f"{path}: an adapter times {factor}, expected a finite number")
        for name, a, b in _on(model, open_adapter(path), factor):
            down.setdefault(name, []).append(a)
            up.setdefault(name, []).append(b)
    found = dict(model.catalogue)
    for name in down:
        found[name + DOWN] = _plain(name + DOWN, np.concatenate(down[name]))
        found[name + UP] = _plain(name + UP, np.concatenate(up[name], axis=1))
    return replace(model, catalogue=found)


def _plain(name: str, data: Array) -> RawTensor:
    return RawTensor(name, dtypes.F32, data.shape, data)


def _on(model: Model, adapter: Adapter, factor: float) -> Iterator[tuple[str, Array, Array]]:
    """Names of the model's matrices, and A and B of each."""
    own, path = model.checkpoint, adapter.path
    if adapter.format == "gguf" != own.format:
        raise ModelError(f"{path}: it adapts models in GGUF files, not Hugging Face folders")
    if adapter.format == "gguf" and adapter.architecture != own.architecture:
        raise ModelError(f"{path}: it adapts {adapter.architecture!r}, not {own.architecture!r}")
    stored, architecture = _matrices(model, adapter), ARCHITECTURES[model.config.architecture]
    turned = adapter.format != own.format and _by_pairs_alone(architecture, model.config)
    for given, (a, b) in adapter.pairs.items():
        if given in stored and stored[given][0].endswith("_embd.weight"):
            raise ModelError(f"{path}: an adapter of an embedding is not read")
        if given not in stored:
            raise ModelError(f"{path}: the model has no matrix {given!r}")
        name, base = stored[given]
        ordered = by_pairs(name, b, model.config) if turned else b
        grown = _plain(name, ordered * np.float32(adapter.scale(len(a)) * factor))
        for part, rows in architecture.parted({name: grown}, model.config).items():
            held, shape = model.catalogue.get(part), (rows.shape[0], a.shape[1])
            if held is None or not _as_stored(held, base):
                raise ModelError(
                    f"{path}: {given!r} cannot be adapted: ggraph keeps this matrix in another "
                    "form than its file"
                )
            if held.shape != shape:
                raise ModelError(f"{path}: {given!r} is {list(held.shape)}, not {list(shape)}")
            yield part, a, rows.data


def _as_stored(t: RawTensor, base: RawTensor) -> bool:
    """Whether rows of a file's tensor are those of one of ours, in their order."""
    held, whole = t.storage, base.storage
    if isinstance(held, LazyArray):
        return held is whole or (held.whole is not None and held.whole is whole)
    return not isinstance(whole, LazyArray) and np.may_share_memory(held, whole)


def _by_pairs_alone(a: Architecture, c: DecoderConfig) -> bool:
    """Whether heads of this model are turned by pairs in its GGUF file, and in folders are not."""
    folder = a.complete(replace(c, rope=replace(c.rope, mode="neox")))
    return c.rope.mode == "normal" != folder.rope.mode


def _matrices(model: Model, adapter: Adapter) -> dict[str, tuple[str, RawTensor]]:
    """By an adapter's name of a matrix: its name in GGUF files, and the file's own tensor. Of a
    GGUF file those alone that are a folder's, but for the order of rows that a rotation asks."""
    own = model.checkpoint
    if adapter.format == "gguf":
        return {n: (n, own.tensors[n]) for n in adapter.pairs if n in own.tensors}
    # PEFT names the modules of transformers, as folders do. What becomes of a name is seen by the
    # values that it stands for. Of a class without an output matrix they lack the first part.
    values = {
        f"{'model.' * n.startswith('layers.')}{n}.weight": _plain(n, a)
        for n, (a, _) in adapter.pairs.items()
    }
    named = text_part(replace(own, tensors=values))[1]
    a = ARCHITECTURES[model.config.architecture]
    renamed = sanitize(named, model.config, a)
    if own.format == "gguf":
        same = applied(a, a.sanitize, renamed, model.config)
        titles = {id(t.storage): title for title, t in same.items() if title in own.tensors}
        kept = {t.name: titles[id(t.storage)] for t in named.values() if id(t.storage) in titles}
        return {given: (title, own.tensors[title]) for given, title in kept.items()}
    titles = {id(t.storage): title for title, t in renamed.items()}
    held = text_part(own)[1]
    return {
        t.name: (titles[id(t.storage)], held[n])
        for n, t in named.items()
        if n in held and id(t.storage) in titles
    }
