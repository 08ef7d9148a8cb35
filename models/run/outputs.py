"""Files that are whole or not there."""

import os
from pathlib import Path

from ggraph import InputError


def write_whole(path: Path, data: bytes) -> None:
    """The bytes as a file, whole or not at all: what was there stays until then, and after a
    failure nothing is left. InputError where it cannot be written. A pipe or a device gets them as
    they are."""
    special = path.exists() and not path.is_file()
    part = path if special else path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        try:
            part.write_bytes(data)
            if not special:
                os.replace(part, path)
        finally:
            if not special:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
