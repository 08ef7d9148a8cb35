"""Golden models that see: their folders and files, and what transformers made of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from embedding_kit import GOLDEN
from ruled_weights import write
from starlette.testclient import TestClient

from models.registry import open_model
from models.run.convert import model_to_gguf, tower_to_gguf
from models.run.drafting import smaller_model
from models.run.load import Loaded, load
from models.serve.app import make_app
from models.serve.engine import service_of
from models.serve.settings import Settings
from models.tower_files import tower_of

TILED = ("smolvlm", "gemma3")  # whose images become tiles of one size
QWEN = (
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
)  # whose images keep their shape
NAMES = TILED + QWEN
EXACT: dict[str, Any] = {"threads": 1, "exact": True, "cache_type": "f32"}


def said(name: str) -> dict[str, np.ndarray]:
    """What transformers gave."""
    with np.load(GOLDEN / "images" / name / "expected.npz") as held:
        return dict(held)


def talk_of(name: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The conversation that it was given, and the images' files in it."""
    folder = GOLDEN / "images" / name
    talk = json.loads((folder / "talk.json").read_text())
    files = [p["image"] for m in talk for p in m["content"] if p["type"] == "image"]
    return talk, [(folder / f).read_bytes() for f in files]


def tiles_of(name: str) -> list[np.ndarray]:
    """The tiles that it made of the images, u8 [H, W, 3] each."""
    held = said(name)
    if name in TILED:
        return list(held["tiles"])
    size = json.loads((GOLDEN / "images" / name / "config.json").read_text())
    sides = held["grid"] * size["vision_config"]["patch_size"]
    cut = np.split(held["tiles"], np.cumsum(sides.prod(1))[:-1])
    return [flat.reshape(*side, 3) for flat, side in zip(cut, sides, strict=True)]


def made(root: Path, kind: str = "f32") -> Path:
    """Folders, and beside each the two GGUF files of it."""
    for name in NAMES:
        folder = write(GOLDEN / "images" / name, root / name)
        model = open_model(folder)
        model_to_gguf(model, root / f"{name}.gguf", kind)
        tower = tower_of(model.checkpoint)
        assert tower is not None
        tower_to_gguf(tower, root / f"{name}-mmproj.gguf", kind)
    return root


def ways(root: Path, name: str) -> list[dict[str, Any]]:
    """How the model is opened, from either form."""
    pair = {"path": root / f"{name}.gguf", "mmproj": root / f"{name}-mmproj.gguf"}
    return [{"path": root / name}, pair]


@contextmanager
def seeing(how: dict[str, Any], **more: Any) -> Iterator[Loaded]:
    """A model that computes in float32, unless told otherwise."""
    m = load(**{**how, **EXACT, **more})
    yield m
    m.close()


@contextmanager
def client(
    how: dict[str, Any], smaller: Path | None = None, **more: Any
) -> Iterator[tuple[TestClient, Any]]:
    """A server on the model, and its service; perhaps with a smaller model that drafts."""
    with seeing(how) as m:
        other = None if smaller is None else smaller_model(m, smaller)
        settings = Settings(**{"parallel": 4, "draft": 0, **more})
        service = service_of(m, settings, smaller=other)
        with TestClient(make_app(service)) as asked:
            yield asked, service


def spread_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the smallest spread of a row."""
    return float((np.abs(got - expected) / np.ptp(expected, axis=-1, keepdims=True)).max())
