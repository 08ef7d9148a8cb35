"""The door for architectures of one's own: a call, a file, or an installed package.

An architecture is one record (`architecture.Architecture`): names, keys, and a graph builder over
`blocks`. What is registered here is opened by everything that opens a model.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ggraph import ModelError
from ggraph.door import checked
from ggraph.errors import printable, shown
from ggraph.lazy import lazy

from .architecture import Architecture

if TYPE_CHECKING:
    import difflib
    from importlib import metadata
else:
    difflib = lazy("difflib")
    metadata = lazy("importlib.metadata")

__all__ = ["load_installed", "open_arch_file", "register_architecture"]
GROUP = "ggraph.architectures"  # of entry points: each names a record, or a sequence of them
FOUND: dict[str, Architecture] = {}


@checked
def register_architecture(a: Architecture) -> Architecture:
    """Make a family known by its GGUF name and its class names. ModelError for a name taken."""
    for known in FOUND.values():
        taken = {known.name, *known.hf} & {a.name, *a.hf}
        if taken:
            raise ModelError(f"architecture {a.name!r}: {', '.join(sorted(taken))} is taken")
    FOUND[a.name] = a
    return a


@checked
def open_arch_file(path: str | Path) -> list[Architecture]:
    """Register what a file calls `ARCHITECTURE` (a record) or `ARCHITECTURES` (several).

    ModelError when there is no such file, when it fails, or when it holds neither.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"no architecture file at {printable(str(path))}")
    spec = importlib.util.spec_from_file_location(f"architecture_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's code, and may fail in any way
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from error
    own = getattr(module, "ARCHITECTURES", None) or [getattr(module, "ARCHITECTURE", None)]
    return _registered(own, str(path))


def _registered(own: object, where: str) -> list[Architecture]:
    listed = own if isinstance(own, (list, tuple)) else [own]
    records = [a for a in listed if isinstance(a, Architecture)]
    if not records or len(records) < len(listed):
        raise ModelError(f"{where}: expected ARCHITECTURE, a record of architecture.Architecture")
    return [a if FOUND.get(a.name) is a else register_architecture(a) for a in records]


def load_installed() -> None:
    """Register what installed packages bring in the group `ggraph.architectures`, once each: an
    entry names a record, or a sequence of them."""
    for point in metadata.entry_points(group=GROUP):
        _registered(point.load(), f"package {point.dist.name if point.dist else point.value}")


def unknown(where: object, asked: str, names: list[str]) -> ModelError:
    """What to say of an architecture that nobody registered: the nearest name, and the door."""
    near = difflib.get_close_matches(asked, names, 1, 0.4)
    hint = f"; the nearest known is {near[0]!r}" if near else ""
    return ModelError(
        f"{where}: architecture {shown(asked)} is not known{hint}; known are {len(names)} "
        f"(docs/models.md); bring your own with --arch-file FILE.py (docs/architectures.md)"
    )
