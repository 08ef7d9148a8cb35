"""Files to named arrays: GGUF, safetensors, torch archives, Hugging Face folders."""

from pathlib import Path

from ggraph.door import checked
from ggraph.errors import FormatError, printable
from ggraph.formats.checkpoint import Checkpoint, RawTensor
from ggraph.formats.gguf import read_gguf
from ggraph.formats.hf import read_folder
from ggraph.formats.quantise import quantize
from ggraph.formats.quants import dequantize

__all__ = ["Checkpoint", "RawTensor", "dequantize", "open_checkpoint", "quantize"]


@checked
def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a folder with config.json, or a GGUF file. FormatError for anything
    else, InputError for what is no path."""
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise FormatError(f"no model at {printable(str(path))}")
    return read_gguf(path)
