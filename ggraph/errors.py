"""Every error that ggraph raises on purpose. Imports nothing of ggraph.

A message says what went wrong, where, what was expected and what came instead; the runner prints
it as one line and exits with a non-zero status. Anything else that escapes is a bug of ours.
"""


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
