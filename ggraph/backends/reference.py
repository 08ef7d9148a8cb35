"""Launches by their NumPy meaning, on byte arrays in host memory. Floor 6.

The simulator runs everything this way; the CPU backend what it has no kernel for.
"""

from ggraph.backends.protocol import Launch, Ref
from ggraph.errors import BackendError
from ggraph.ops.evaluate import read, write
from ggraph.tensor import Array


def run_reference(launch: Launch) -> None:
    """Compute one launch: read the sources, apply the op's reference, write the result.

    Every `Ref` must lie in a NumPy uint8 array. Raises BackendError when the result has another
    shape than the op's rule promised.
    """
    t = launch.result.tensor
    if t.spec is None:
        raise BackendError(f"%{t.name} is a leaf and cannot be launched")
    arrays = [_logical(r) for r in launch.sources]
    value = t.spec.reference(*arrays, **t.attrs)
    if tuple(value.shape) != t.shape:
        raise BackendError(f"%{t.name}: the reference made {list(value.shape)}, not {t.shape}")
    write(t, launch.result.memory.handle, _root(launch.result), value)


def _root(ref: Ref) -> int:
    """Offset of the first byte of the tensor that `ref` looks at."""
    return ref.offset - ref.tensor.offset


def _logical(ref: Ref) -> Array:
    return read(ref.tensor, ref.memory.handle, _root(ref))
