"""Launches by their NumPy meaning, on byte arrays in host memory.

The simulator runs everything this way; the CPU backend what it has no kernel for.
"""

from ggraph.backends.protocol import Launch, Ref
from ggraph.ops.evaluate import Bytes, compute


def run_reference(launch: Launch) -> None:
    """Compute one launch: read the sources, apply the op's reference, store the result.

    Every `Ref` must lie in a NumPy uint8 array. Raises GraphError when the reference breaks the
    promise of its shape rule.
    """
    compute(bytes_of(launch.result), [bytes_of(s) for s in launch.sources])


def bytes_of(ref: Ref) -> Bytes:
    """A `Ref` points at the tensor's first element, `Bytes` at its root's."""
    return Bytes(ref.tensor, ref.memory.handle, ref.offset - ref.tensor.offset)
