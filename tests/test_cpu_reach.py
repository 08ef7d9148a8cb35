"""Every kernel has a user, and a name of its own."""

import re
from pathlib import Path

import pytest

import ggraph.backends.cpu as cpu
from ggraph.backends.cpu import ceilings  # noqa: F401  (registers kernels)
from ggraph.backends.cpu.codegen.simd import KERNELS, Kernel, kernel
from ggraph.backends.cpu.lowering import lower  # noqa: F401  (registers kernels)
from ggraph.backends.cpu.runtime import pool  # noqa: F401  (registers kernels)
from ggraph.ops.glu import UNITS

USERS = (
    "backend",
    "ceilings",
    "kernels/nest",
    "kernels/nest_form",
    "lowering/carried",
    "lowering/context",
    "lowering/images",
    "lowering/lower",
    "lowering/mixtures",
    "lowering/native",
    "lowering/packing",
    "lowering/products",
    "lowering/systems",
    "runtime/ahead",
    "runtime/arrays",
    "runtime/pool",
)


def test_every_kernel_is_called_somewhere() -> None:
    """What no launch, pool or measurement calls is dead: by its whole name, or by what stands
    before the type or layout at its end."""
    folder = Path(str(cpu.__file__)).parent
    text = "\n".join((folder / f"{name}.py").read_text("utf-8") for name in USERS)
    called = set(re.findall(r'"([a-z_0-9]+)"', text)) | set(re.findall(r'"([a-z_]+_)\{', text))
    # A gated product names its unit's kernel by the unit that its graph does.
    called |= {unit + end for unit in UNITS for end in ("", "_quantise")}
    assert len(KERNELS) > 50
    begun = tuple(name for name in called if name.endswith("_"))
    dead = [n for n in KERNELS if n not in called and not n.startswith(begun)]
    assert not dead


def test_no_kernel_takes_another_ones_name() -> None:
    """Which of the two ran would depend on what was imported last."""
    known = dict(KERNELS)

    def soft_max(k: Kernel) -> None:
        k.words("x")

    with pytest.raises(ValueError, match="second CPU kernel 'soft_max'"):
        kernel("x")(soft_max)
    with pytest.raises(ValueError, match="second CPU kernel 'rope_f32'"):
        kernel("x", name="rope_f32")(soft_max)
    assert known == KERNELS
