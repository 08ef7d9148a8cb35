"""Every error that ggraph raises on purpose. Imports nothing of ggraph.

A message says what went wrong, where, what was expected and what came instead; the runner prints
it as one line and exits with a non-zero status. Anything else that escapes is a bug of ours.
"""

import numpy as np


class GgraphError(Exception):
    """Root of all errors that a user's input or machine can cause."""


class GraphError(GgraphError):
    """A graph is not well formed: a cycle, a duplicate name, an unknown op or source."""


class ShapeError(GraphError):
    """An op was given shapes, dtypes or attributes that its rule refuses."""


class FormatError(GgraphError):
    """A file is not what its format demands (GGUF, safetensors, config, tokenizer, plan JSON)."""


class ModelError(GgraphError):
    """A checkpoint cannot be built: unknown architecture, missing tensor, wrong width."""


class PlanError(GgraphError):
    """No plan can be made, or a plan was refused by the verifier."""


class PlaceError(PlanError):
    """A tensor cannot be placed: unknown device, unsupported op, contradictory pins."""


class AllocError(PlanError):
    """Memory cannot be laid out: capacity, alignment or size out of range."""


class BackendError(GgraphError):
    """A device is absent, out of memory or lost, or a kernel does not compile."""


class InputError(GgraphError):
    """A request cannot be served: bad option, empty or too long prompt, wrong feed."""


class CacheWarning(UserWarning):
    """What an earlier run kept cannot be trusted, or nothing can be kept; the run goes on."""


class FormatWarning(UserWarning):
    """A file was written that others read otherwise: it says what their readers pass over."""


class DraftWarning(UserWarning):
    """A drafter raised an error, and is asked no more; the text goes on and stays what it was."""


def shown(value: object, most: int = 60) -> str:
    """A value as messages name it, on one line: arrays by type and shape, the rest by `repr`, of at
    most so many letters."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= most else f"{text[: most - 2]}.."


def printable(text: str) -> str:
    """The text with every character that a terminal might obey, or hide, written as an escape:
    what another program named can then not pretend to be a line of ours."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)
