"""Small models with layers that draft: a golden checkpoint and one layer more.

The layers' own parts are held small, so that the next token is mostly a matter of the last one,
which the draft layer knows too: it is then right now and again, as a trained one is.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from ggraph.tensor import Array

TINY2 = Path(__file__).parent / "golden" / "tiny2"
QWEN, GLM = "qwen3_5", "glm4_moe_lite"
EXPERTS, LARGE, NEXT = "qwen3_5_moe", "glm4_moe", "qwen3_next"
IN_LINE = (GLM, LARGE)  # whose draft layers have the numbers behind the others
CALM = 0.01  # of what a layer adds
ADDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def with_draft_layer(name: str, folder: Path, seed: int = 0, calm: float = CALM) -> Path:
    """The golden checkpoint `name` with one layer that drafts, in a folder of its own."""
    shutil.copytree(TINY2 / name, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    if name != NEXT:  # whose config says nothing of it
        config["num_nextn_predict_layers" if name in IN_LINE else "mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    held = {n: v.astype(np.float32) for n, v in load_file(folder / "model.safetensors").items()}
    held = {n: v * calm if n.endswith(ADDS) else v for n, v in held.items()}
    rng = np.random.default_rng(seed)
    like = f"model.layers.{5 if name in IN_LINE else 3}."  # one with attention, and with experts
    own = {n.removeprefix(like): _anew(v, rng) for n, v in held.items() if n.startswith(like)}
    last = held["model.norm.weight"]
    added = _glm(own, layers, rng, last) if name in IN_LINE else _qwen(own, rng, last)
    save_file({**held, **added}, folder / "model.safetensors")
    return folder


def _anew(like: Array, rng: np.random.Generator) -> Array:
    """Other numbers of the same spread."""
    noise = np.asarray(rng.standard_normal(like.shape))
    values: Array = (like.mean() + like.std() * noise).astype(np.float32)
    return values


def _parts(rng: np.random.Generator, around: float, last: Array) -> tuple[Array, ...]:
    """eh_proj, which passes the embedding on and some of the feature; enorm, hnorm, and a last norm
    that is near the model's."""
    both = np.concatenate([np.eye(64), 0.1 * np.eye(64)], axis=1)
    eh = both + 0.01 * rng.standard_normal(both.shape)
    norms = [around + 0.1 * rng.standard_normal(64), around + 0.3 * rng.standard_normal(64),
             last + 0.05 * rng.standard_normal(64)]  # fmt: skip
    return tuple(v.astype(np.float32) for v in (eh, *norms))


def _qwen(own: dict[str, Array], rng: np.random.Generator, norm: Array) -> dict[str, Array]:
    eh, enorm, hnorm, last = _parts(rng, 0.0, norm)  # grown by 1 when read
    return {
        **{f"mtp.layers.0.{n}": v for n, v in own.items()}, "mtp.fc.weight": eh,
        "mtp.pre_fc_norm_embedding.weight": enorm, "mtp.pre_fc_norm_hidden.weight": hnorm,
        "mtp.norm.weight": last,
    }  # fmt: skip


def _glm(
    own: dict[str, Array], layers: int, rng: np.random.Generator, norm: Array
) -> dict[str, Array]:
    eh, enorm, hnorm, last = _parts(rng, 1.0, norm)
    own = {
        **own, "eh_proj.weight": eh, "enorm.weight": enorm, "hnorm.weight": hnorm,
        "shared_head.norm.weight": last,
    }  # fmt: skip
    return {f"model.layers.{layers}.{n}": v for n, v in own.items()}
