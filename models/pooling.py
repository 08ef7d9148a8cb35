"""Which of a text's states its vector is made of, and how much of it is read, as the files of an
embedding model say it.

Sources: llama.cpp (`enum llama_pooling_type`), and sentence-transformers, whose folders list in
modules.json what a text goes through.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ggraph import ModelError
from ggraph.errors import shown
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.hf import read_weights

from .config import Keys
from .vectors import DENSE, SCORE

Pooling = Literal["mean", "cls", "last"]
"""The mean of all states, the first one, or the last one."""

KINDS = ("none", "mean", "cls", "last", "rank")
"""As GGUF numbers them: `none` keeps a vector for each token, `rank` gives a score."""

_TYPE = "pooling_type"
# By what modules.json's files say. The mean times the root of the count has the mean's direction.
_MODES: dict[str, Pooling] = {
    "mean": "mean", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean", "cls": "cls",
    "cls_token": "cls", "lasttoken": "last",
}  # fmt: skip
_MODE = "pooling_mode"
_LONGEST = "max_seq_length"
# As its files are called, the newest first: older ones say what they were made from.
_CONFIGS = "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"
_DENSE = "Dense"
_KEPT = ("Transformer", "Pooling", "Normalize")  # a vector's direction is that of the states


def pooling_of(checkpoint: Checkpoint, *, causal: bool = True) -> Pooling | None:
    """How a model's vectors are made; None where its files do not say. ModelError for a kind that
    is none of `Pooling`, and for what comes behind it and would change the vector: only encoders,
    which are not `causal`, know `Dense`."""
    if checkpoint.format == "gguf":
        return _of_gguf(checkpoint)
    folder = Path(checkpoint.path)
    if not (folder / "modules.json").is_file():
        return None
    modules, known = _modules(folder), _KEPT if causal else (*_KEPT, _DENSE)
    kinds = [kind for kind, _ in modules]
    if any(k not in known for k in kinds) or kinds.count("Pooling") != 1:
        raise ModelError(
            f"{folder / 'modules.json'}: a text goes through {', '.join(kinds) or 'nothing'}; "
            f"known: {', '.join(known)}"
        )
    return _of_config(folder / modules[kinds.index("Pooling")][1] / "config.json")


def longest_of(checkpoint: Checkpoint) -> int | None:
    """Tokens of a text or pair behind which sentence-transformers cuts it, those around it counted;
    None where no file of a folder says, as in GGUF. ModelError for what is no such number."""
    if checkpoint.format == "gguf":
        return None
    paths = (Path(checkpoint.path) / f"sentence_{kind}_config.json" for kind in _CONFIGS)
    path = next((p for p in paths if p.is_file()), None)
    keys = Keys(_read(path, dict) if path else {}, str(path))
    if not keys.has(_LONGEST):
        return None
    found = keys.integer(_LONGEST)
    if found < 1:
        raise ModelError(f"{path}: {_LONGEST} = {found}: expected 1 or more")
    return found


def dense_of(checkpoint: Checkpoint) -> dict[str, RawTensor]:
    """The matrices of a folder's products behind the pooling, under the names of GGUF. ModelError
    for more of them than there are such names, and for one that is more than a product."""
    folder = Path(checkpoint.path)
    modules = _modules(folder) if (folder / "modules.json").is_file() else []
    paths = [folder / path for kind, path in modules if kind == _DENSE]
    if len(paths) > len(DENSE):
        raise ModelError(f"{folder / 'modules.json'}: {len(paths)} {_DENSE}; known: {len(DENSE)}")
    found = {}
    for name, path in zip(DENSE, paths, strict=False):
        config, held = _read(path / "config.json", dict), read_weights(path)
        unit = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
        if unit != "Identity" or list(held) != ["linear.weight"]:
            raise ModelError(
                f"{path}: {', '.join(held) or 'nothing'} and {shown(unit)}; known: linear.weight "
                "and Identity"
            )
        title = f"{name}.weight"
        found[title] = replace(held["linear.weight"], name=title)
    return found


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and path of what a text goes through."""
    listed = _read(folder / "modules.json", list)
    own = [m for m in listed if isinstance(m, dict)]
    return [(str(m.get("type")).rpartition(".")[2], str(m.get("path", ""))) for m in own]


def gguf_pooling(
    checkpoint: Checkpoint, tensors: Mapping[str, RawTensor], architecture: str, *, causal: bool
) -> dict[str, Any]:
    """The keys that say so in a GGUF file of `architecture`, and of what comes behind: a GGUF
    file's own whatever it says. An encoder's says it in any case. ModelError as `pooling_of` for a
    folder."""
    if checkpoint.format == "gguf":
        number = checkpoint.metadata.get(f"{checkpoint.architecture}.{_TYPE}")
    elif f"{SCORE}.weight" in tensors:
        number = KINDS.index("rank")
    else:
        kind = pooling_of(checkpoint, causal=causal) or (None if causal else "mean")
        number = None if kind is None else KINDS.index(kind)
    found = {} if number is None else {f"{architecture}.{_TYPE}": number}
    for name in DENSE:
        if f"{name}.weight" in tensors:
            sizes = zip(("out", "in"), tensors[f"{name}.weight"].shape, strict=True)
            found |= {f"{architecture}.{name}_feat_{end}": size for end, size in sizes}
    return found


def _of_gguf(checkpoint: Checkpoint) -> Pooling | None:
    keys = Keys(checkpoint.metadata, "GGUF metadata", f"{checkpoint.architecture}.")
    if not keys.has(_TYPE):
        return None
    number = keys.integer(_TYPE)
    kind = KINDS[number] if 0 <= number < len(KINDS) else None
    if kind not in get_args(Pooling):
        said = f"{number} ({kind})" if kind else str(number)
        raise ModelError(
            f"GGUF metadata: {_TYPE} {said} gives no vector of a text; expected 1 (mean), 2 (cls) "
            "or 3 (last)"
        )
    return cast(Pooling, kind)


def _of_config(path: Path) -> Pooling:
    """The one mode that is on: older files have a flag for each, of which none means the mean."""
    config = _read(path, dict)
    flags = [k.removeprefix(f"{_MODE}_") for k, v in config.items() if k.startswith(_MODE) and v]
    told = config.get(_MODE, flags or ["mean"])
    modes = told if isinstance(told, list) else [told]
    if len(modes) != 1 or str(modes[0]) not in _MODES:
        raise ModelError(f"{path}: pooling by {shown(modes)}; expected one of {', '.join(_MODES)}")
    return _MODES[modes[0]]


def _read(path: Path, kind: type) -> Any:
    """A file's JSON. ModelError where it is not there, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path}: expected a {kind.__name__}, got {shown(value)}")
    return value
