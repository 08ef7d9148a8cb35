"""Files to named arrays: GGUF, safetensors, torch archives, Hugging Face folders."""

from pathlib import Path

from ggraph.door import checked
from ggraph.errors import FormatError
from ggraph.formats.checkpoint import Checkpoint
from ggraph.formats.gguf import read_gguf
from ggraph.formats.hf import read_folder

__all__ = ["open_checkpoint"]


@checked
def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a folder with config.json, or a GGUF file. Raises FormatError."""
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise FormatError(f"no model at {path}")
    return read_gguf(path)
