"""Weights by a rule, in place of files of them: a golden model is then a config, the shapes of its
tensors, and what an implementation that shares nothing with ours made of the same weights.

A tensor's numbers follow from its name and their places alone, by integers whose bits no library
decides, and each is one that half precision holds. Needs nothing of ggraph:
`scripts/golden_vectors.py` has the same folder read by transformers.
"""

import json
import math
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHAPES, EXPECTED = "shapes.json", "expected.npz"
WEIGHTS = "model.safetensors"


def bits(name: str, count: int) -> np.ndarray:
    """u64 [count]: SplitMix64 from the name's CRC-32 (Steele et al. 2014, `Fast Splittable
    Pseudorandom Number Generators`)."""
    first = np.uint64(zlib.crc32(name.encode()) << 32)
    with np.errstate(over="ignore"):
        z = first + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """f16 of that shape: of a matrix multiples of 1 / 1024 within -1 and 1, times a power of two by
    which rows keep their size; of a vector within 1 / 4 of 0, where it is added, or of 1."""
    whole = (bits(name, math.prod(shape)) >> np.uint64(53)).astype(np.int64) - 1024
    values = (whole.astype(np.float64) / 1024).reshape(shape)
    if len(shape) == 1:
        return (values / 4 + (not name.endswith("bias"))).astype(np.float16)
    return (values * 2.0 ** round(math.log2(2 * math.sqrt(3 / shape[-1])))).astype(np.float16)


def write(golden: Path, out: Path) -> Path:
    """The folder with its weights, as `shapes.json` names them: file by file, tensor by tensor."""
    shutil.copytree(golden, out, ignore=shutil.ignore_patterns(SHAPES, EXPECTED))
    files: Mapping[str, Mapping[str, list[int]]] = json.loads((golden / SHAPES).read_text())
    for file, shapes in files.items():
        lead = file.removesuffix(WEIGHTS)  # two files may have a tensor of the same name
        tensors = {n: weight(lead + n, tuple(s)) for n, s in shapes.items()}
        save_file(tensors, out / file, metadata={"format": "pt"})
    return out
