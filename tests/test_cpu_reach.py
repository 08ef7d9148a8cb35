"""Every kernel has a user: what no launch, pool or measurement calls by its name is dead."""

import re
from pathlib import Path

import ggraph.backends.cpu as cpu
from ggraph.backends.cpu import ceilings, lower, pool  # noqa: F401  (register kernels)
from ggraph.backends.cpu.simd import KERNELS

USERS = (
    "ahead",
    "arrays",
    "backend",
    "carried",
    "ceilings",
    "enlarge",
    "lower",
    "lowering",
    "mixtures",
    "native",
    "nest",
    "nest_form",
    "packing",
    "pool",
    "products",
    "solve",
)


def test_every_kernel_is_called_somewhere() -> None:
    """By its whole name, or by what stands before the type or layout at its end."""
    folder = Path(str(cpu.__file__)).parent
    text = "\n".join((folder / f"{name}.py").read_text("utf-8") for name in USERS)
    called = set(re.findall(r'"([a-z_0-9]+)"', text)) | set(re.findall(r'"([a-z_]+_)\{', text))
    assert len(KERNELS) > 50
    begun = tuple(name for name in called if name.endswith("_"))
    dead = [n for n in KERNELS if n not in called and not n.startswith(begun)]
    assert not dead
