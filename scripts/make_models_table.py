"""Write docs/models.md from runs: python scripts/make_models_table.py [NAME ..]

Every cell is computed on the small golden checkpoints of tests/golden; a NAME prints the rows of
these alone. The column of llama.cpp needs the extra [bench]; without it the cells say so.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "scripts"),
]  # a clone need not be installed

import encoder_kit
import numpy as np
from embedding_kit import encoder_folder
from golden_kit import GOLDEN, NAMES, run_all, spread_error
from identity_kit import Outcome, outcomes
from model_speed import section
from small_model import small_model
from test_cuda_models import left_to_the_cpu, planned

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner
from models.bench.peer import LogprobPeer
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.load import open_session

PEER = importlib.util.find_spec("xllamacpp") is not None
if PEER:
    import xllamacpp
    from test_models_llama_cpp import NAMES as KNOWN_TO_LLAMA_CPP
    from test_models_llama_cpp import PLAIN, greedy, source
NOT_THERE = {"tiny/mistral_sliding": "its `llama` has no window"}
NEW = 24  # tokens of a text that is compared with llama.cpp's
INTRO = """# Models

This page is written by `scripts/make_models_table.py` from runs; do not edit it.

Each row is a random checkpoint of the family's shape (`tests/golden`), whose expected logits come
from transformers (the version is in its config.json) in float32. What it shows:

- *folder*, *GGUF*: the largest difference of 48 rows of logits, in units of the row's spread, read
  from the Hugging Face folder and from a GGUF file that ggraph wrote of it; 2e-4 is the bar.
- *llama.cpp*: how many of 24 greedy tokens are the same there, from that GGUF file, up to the first
  that differs; mixtures may part where two experts are as good.
- *NumPy*: ops of a step that have no compiled kernel on the CPU.
- *CUDA*: launches of a step of 5 and of one of 64 rows that a plan for a GPU leaves to the CPU.

Folders may hold weights in codes, by `quantization_config` or, if they are older, by a
`quantize_config.json` (GPTQ), `quant_config.json` (AWQ) or `hf_quant_config.json` (ModelOpt); any
family may, and `convert` writes GGUF files of them. Each becomes the smallest type that loses no
more than half precision does:

| by `quant_method` | what is read | held as |
|---|---|---|
| fp8, fbgemm_fp8 | E4M3 or E5M2 with a scale a tile, row or tensor | F16 |
| compressed-tensors | FP8 by tensor, channel, tile | F16 |
| | int8; packed int8 and int4 by channel or group | Q8_0; Q4_0, with zeros Q4_1 |
| | `nvfp4-pack-quantized`, `mxfp4-pack-quantized` | NVFP4, MXFP4 |
| modelopt | NVFP4; FP8 with a scale a tensor | NVFP4; F16 |
| awq | gemm's layout | Q4_1 |
| gptq | 4 and 8 bits, both versions of zeros; `desc_act` | Q4_0, Q4_1, Q8_0; F16 |
| bitsandbytes | nf4 and fp4, scales in codes or not; int8 | F16; Q8_0 |
| mxfp4 | gpt-oss's | MXFP4 |

F16 stands for what has groups that are no multiples of 32 columns, too, and for NVFP4 in rows that
are no multiples of 64. Activations are not rounded as a folder says, and nothing else of
`quantization_config` counts: a weight without codes is plain.

NVFP4 has a scale for each matrix beside its codes, by which a product's result is multiplied; in
GGUF files it stands under a name of its own (`blk.0.attn_q.scale`, of experts one each).
`convert --type nvfp4` keeps codes and scales; all other types have the scale in the matrix. Of the
families here llama.cpp (October 2026) multiplies by such scales in Llama, Mixtral, Ministral 3,
Qwen3, 3.5 and 3-Next, with experts or without, Command R7B, Gemma 4 and Nemotron-H. In others it
passes over them, or refuses the file, and `convert` says so.

Architectures of one's own: [architectures.md](architectures.md). Real checkpoints of most families
have not been run by us; speeds of one that has are in [performance.md](performance.md).
"""
DRAFTED = """## Drafts

How many texts, greedy and seeded, are the same with drafts and without, byte for byte, and how many
of their tokens were drafted and kept (`tests/identity_kit.py`):

- *guesses* know the text and hide it in chains, forks and trees, or are wrong at one place each;
- *suffix*: prompt lookup, then the suffix drafter;
- *itself, disturbed*: a draft model that is the target with noise on its weights, recurrent where
  the target is; *other model*: a recurrent one (Qwen3.5) for targets that are not, else a Llama;
- *eagle3*: a random head over the target's taps, behind guesses that are silent at times;
- *mtp*: the model's own draft layer, where such files have one, or Gemma 4's assistant (random, and
  helped as the heads are).
"""
ENCODING = """## Encoders

Models whose rows see all of their text, and which make a vector of it, or a score of two texts.
Their weights are a rule (`tests/ruled_weights.py`), so that only shapes and vectors are stored; the
latter are transformers', by `scripts/golden_vectors.py`.

- *folder*, *GGUF*: the largest difference of a number of a vector of length 1, by every pooling, or
  of a score, in units of the spread; 1e-4 is the bar.
- *llama.cpp*: the largest difference of such a number, or of a score, from its own, of that GGUF
  file; its GELU is the tanh form. Both of two texts are first ones here, as they always are there.
- *NumPy*, *CUDA*: as above, the latter of steps of 16 and of 512 rows.
"""
DRAFTERS = (
    "guesses", "suffix", "itself, disturbed", "other model", "eagle3 chain", "eagle3 tree",
    "mtp chain", "mtp tree",
)  # fmt: skip


def logits_error(path: Path, name: str) -> float:
    """Of all rows, in two steps."""
    expected = np.load(GOLDEN / name / "expected.npz")
    got = run_all(path, expected["ids"].tolist(), 20)
    return spread_error(got["logits"], expected["logits"])


def same_as_llama_cpp(name: str, folder: Path) -> str:
    """Greedy tokens before the first that llama.cpp says otherwise."""
    if not PEER:
        return "not asked"
    if name not in KNOWN_TO_LLAMA_CPP:
        return NOT_THERE[name]
    path = small_model(folder / "peer.gguf", PLAIN, source(name, folder / "hf"), "f32")
    ids = np.load(GOLDEN / name / "expected.npz")["ids"].tolist()[:20]
    ours, _ = greedy(path, ids)
    peer = LogprobPeer(path, 1, 256)
    theirs = peer.logprobs(ids, NEW).raw["ids"]
    peer.close()
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    return f"{same.index(False) if False in same else NEW} of {NEW}"


def identity(name: str, folder: Path) -> dict[str, Outcome]:
    """Texts with drafts that equal the text without, of how many, drafter by drafter."""
    return dict(outcomes(name, folder))


def without_kernel(name: str) -> str:
    """Ops of a step that NumPy computes."""
    session = open_session(threads=1, exact=True, profile=True)
    backend = session.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    Runner(open_model(GOLDEN / name), session, 64).text(range(1, 6))
    found = {op.split()[0] for op, _ in backend.profile.times if op.endswith("(NumPy)")}
    session.close()
    return ", ".join(sorted(found)) or "none"


def left_on_cuda(name: str) -> str:
    """Launches that a plan for a GPU leaves to the CPU."""
    model = open_model(GOLDEN / name)
    left = []
    for rows in (5, 64):
        shape = StepShape(rows, 256, 1 if rows > 8 else rows, 513, ())
        left += left_to_the_cpu(planned(model.build(shape), 1))
    return ", ".join(left) or "none"


def row(name: str) -> tuple[str, str]:
    """A line of each of the two tables."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model_to_gguf(open_model(GOLDEN / name), folder / "own.gguf", "f32")
        errors = [f"{logits_error(p, name):.0e}" for p in (GOLDEN / name, folder / "own.gguf")]
        cells = [
            f"`{open_model(GOLDEN / name).config.architecture}`", config["architectures"][0],
            *errors, same_as_llama_cpp(name, folder), without_kernel(name), left_on_cuda(name),
        ]  # fmt: skip
        found = identity(name, folder)
    return line(cells), line([*cells[:2], *(str(found.get(d, "-")) for d in DRAFTERS)])


def encoder_row(name: str) -> str:
    """A line of the table of encoders."""
    with tempfile.TemporaryDirectory() as made:
        folder, own = encoder_folder(name, Path(made) / "hf"), Path(made) / "own.gguf"
        model, config = open_model(folder), json.loads((folder / "config.json").read_text())
        model_to_gguf(model, own, "f32")
        errors = [f"{encoder_kit.largest_error(path, name):.0e}" for path in (folder, own)]
        peer = "not known there"
        if name in encoder_kit.TO_LLAMA_CPP:
            peer = f"{encoder_kit.apart(xllamacpp, own, name)[0]:.0e}" if PEER else "not asked"
        left = [encoder_kit.without_kernel(folder), encoder_kit.left_on_cuda(folder)]
    ends = [", ".join(ops) or "none" for ops in left]
    lead = f"`{model.config.architecture}`", config["architectures"][0]
    return line([*lead, *errors, peer, *ends])


def line(cells: Sequence[str]) -> str:
    """Cells as a line of a table."""
    return "| " + " | ".join(cells) + " |"


def titles(*names: str) -> list[str]:
    """The two lines that begin a table."""
    return [line(names), "|" + "---|" * len(names)]


def main() -> None:
    """Print the tables' lines as they come; write the page where all rows were asked for."""
    known = [*(n.partition("/")[2] for n in NAMES), *encoder_kit.ALL]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    asked = parser.parse_args().names
    if unknown := [n for n in asked if n not in known]:
        parser.error(f"no golden checkpoint is called {', '.join(unknown)}")
    models = titles("name", "class", "folder", "GGUF", "llama.cpp", "NumPy", "CUDA")
    encoders, drafts = [*models], titles("name", "class", *DRAFTERS)
    for name in NAMES:
        if not asked or name.partition("/")[2] in asked:
            for lines, text in zip((models, drafts), row(name), strict=True):
                print(text, flush=True)
                lines.append(text)
    for name in encoder_kit.ALL:
        if not asked or name in asked:
            encoders.append(encoder_row(name))
            print(encoders[-1], flush=True)
    if not asked:
        page = [INTRO, *models, "", ENCODING, *encoders, "", DRAFTED, *drafts, "", section()]
        (ROOT / "docs" / "models.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
