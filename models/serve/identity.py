"""What the rows of a cache depend on beside the tokens: the model, the options, and this code."""

import hashlib
from pathlib import Path

import ggraph

from ..run.load import Loaded

CODE = (Path(ggraph.__file__).parent, Path(__file__).parent.parent)


def of(m: Loaded) -> bytes:
    """SHA-256 of every tensor of the model, its configuration, how it is computed, and of ggraph's
    own sources: what another version computed is not taken over."""
    h = hashlib.sha256()
    for name, t in sorted(m.model.catalogue.items()):
        h.update(f"{name} {t.dtype.name} {list(t.shape)}\0".encode())
        h.update(t.data.tobytes())
    options = m.session.options.exact, m.runner.cache_dtype.name, sorted(m.session.backends)
    c = m.model.config
    h.update(repr((c, c.rope, c.window_rope, options)).encode())
    for folder in CODE:
        for path in sorted(folder.rglob("*.py")):
            h.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return h.digest()
