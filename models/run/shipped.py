"""Draft heads that come with ggraph, and the models they belong to."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ggraph.formats import open_checkpoint

from ..registry import architecture_of

DATA = Path(__file__).parent.parent / "data"
FINAL_NORM = {"gguf": "output_norm.weight", "hf": "model.norm.weight"}


@dataclass(frozen=True)
class Shipped:
    """A head's file, and the SHA-256 of its target's final norm as float32.

    Quantising a model leaves its norms alone, so that every file of the model is recognised.
    """

    file: str
    final_norm: str


HEADS = (
    Shipped(
        "smollm2-135m-instruct-eagle3.gguf",
        "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559",
    ),
)


OWN = ("mtp.fc.weight", ".eh_proj.weight")  # what layers end in that only draft


def head_for(model: Path) -> Path | None:
    """The head that comes with ggraph for a model's file or folder, or that path itself where the
    model has layers that draft, and such of its family are known; None where there is neither.

    Raises FormatError where the model cannot be read, ModelError for an unknown family.
    """
    checkpoint = open_checkpoint(model)
    own = any(name.endswith(OWN) for name in checkpoint.tensors)
    if own and architecture_of(model, checkpoint).layer is not None:
        return model
    norm = checkpoint.tensors.get(FINAL_NORM[checkpoint.format])
    if norm is None:
        return None
    found = hashlib.sha256(norm.float32().tobytes()).hexdigest()
    return next((DATA / h.file for h in HEADS if h.final_norm == found), None)
