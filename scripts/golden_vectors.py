"""Have transformers say what encoders give: scripts/golden_vectors.py [--of MODEL] FOLDER ..

Needs torch and transformers (5.24 made what is stored) in an environment of their own, and nothing
of ggraph. Of each folder of tests/golden/encoders it takes the config and, where there are such,
texts.json with the tokenizer and modules.json, and writes beside them

- shapes.json: the tensors of each file of weights, which `tests/ruled_weights.py` makes;
- expected.npz: `ids` i32 [N, L], -1 behind a text's end; where a class gives scores `types` i32
  [N, L] and `scores` f32 [N]; else `cls`, `mean` and `last`, f32 [N, V]: that pooling of the last
  hidden states, through the modules behind it, of length 1.

With `--of` it is a released model's folder that gives them, of FOLDER's texts.json, and only
expected.npz is written.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import torch
import transformers
from ruled_weights import EXPECTED, SHAPES, WEIGHTS, bits, weight, write
from torch.nn import functional as F

LENGTHS = (1, 2, 9, 31, 64)  # of texts of token ids, where a folder has no texts


def model_class(folder: Path) -> Any:
    """The class that the config names."""
    return getattr(
        transformers, json.loads((folder / "config.json").read_text())["architectures"][0]
    )


def dense_shapes(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Weights of the products behind the pooling."""
    found = {}
    for config in sorted(folder.glob("*_Dense/config.json")):
        told = json.loads(config.read_text())
        shape = [told["out_features"], told["in_features"]]
        found[f"{config.parent.name}/{WEIGHTS}"] = {"linear.weight": shape}
    return found


def shapes_of(folder: Path) -> dict[str, dict[str, list[int]]]:
    """All of a folder's tensors, file by file."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        made = model_class(folder)(config)
    return {
        WEIGHTS: {n: list(t.shape) for n, t in made.state_dict().items()},
        **dense_shapes(folder),
    }


def inputs_of(folder: Path, texts: Path, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """What is read: texts, of which some may be pairs, or where there are none ids by the rule."""
    if not texts.is_file():
        drawn = [bits(f"ids.{n}", n) % np.uint64(vocabulary) for n in LENGTHS]
        return [{"input_ids": torch.tensor(d.astype(np.int64))[None]} for d in drawn]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = [t if isinstance(t, list) else [t] for t in json.loads(texts.read_text())]
    return [dict(tokenizer(*t, return_tensors="pt", return_token_type_ids=True)) for t in given]


def padded(rows: list[torch.Tensor]) -> np.ndarray:
    """i32 [N, L] of rows [1, n]."""
    out = np.full((len(rows), max(r.shape[1] for r in rows)), -1, np.int32)
    for line, row in zip(out, rows, strict=True):
        line[: row.shape[1]] = row[0].numpy()
    return out


def vectors(folder: Path, states: torch.Tensor) -> dict[str, np.ndarray]:
    """States [n, E] by each pooling, through what is behind it: [V] of length 1."""
    pooled = {"cls": states[0], "mean": states.mean(0), "last": states[-1]}
    for file, tensors in dense_shapes(folder).items():
        lead = file.removesuffix(WEIGHTS)
        for name, shape in tensors.items():
            matrix = torch.tensor(weight(lead + name, tuple(shape)).astype(np.float32))
            pooled = {kind: matrix @ v for kind, v in pooled.items()}
    return {kind: F.normalize(v, dim=0).numpy() for kind, v in pooled.items()}


def expected(folder: Path, texts: Path) -> dict[str, np.ndarray]:
    """What the model in `folder` makes of its inputs."""
    model = model_class(folder).from_pretrained(folder, dtype=torch.float32).eval()
    inputs = inputs_of(folder, texts, model.config.vocab_size)
    found = {"ids": padded([i["input_ids"] for i in inputs])}
    with torch.no_grad():
        given = [model(**i) for i in inputs]
    if hasattr(given[0], "logits"):
        found["types"] = padded([i["token_type_ids"] for i in inputs])
        return {**found, "scores": np.array([g.logits[0, 0] for g in given], np.float32)}
    made = [vectors(folder, g.last_hidden_state[0]) for g in given]
    return {**found, **{kind: np.stack([m[kind] for m in made]) for kind in made[0]}}


def main() -> None:
    """Each folder that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--of", type=Path, metavar="MODEL", help="folder of a released model")
    asked = parser.parse_args()
    if asked.of and dense_shapes(asked.of):
        parser.error(f"{asked.of} has modules behind its pooling, which are not read here")
    for golden in asked.folders:
        if asked.of is None:
            (golden / SHAPES).write_text(json.dumps(shapes_of(golden), indent=1) + "\n")
        with tempfile.TemporaryDirectory() as made:
            folder = asked.of or write(golden, Path(made) / "hf")
            found = expected(folder, golden / "texts.json")
        np.savez(golden / EXPECTED, allow_pickle=False, **found)
        print(golden, {k: v.shape for k, v in found.items()})


if __name__ == "__main__":
    main()
