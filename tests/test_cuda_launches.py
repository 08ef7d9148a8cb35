"""How many kernels a layer of a decoder takes: each is a node of a captured graph."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
from cuda_host import HostDriver, need_compiler

from ggraph import dtypes
from ggraph.backends.cuda.lowering import Lowering
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.ops.fused import FEW_ROWS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_models
from gpu_speed import random_session


def launches(layers: int, rows: int, seen: Counter[str], driver: HostDriver | None = None) -> None:
    """Count the kernels of a step of a decoder of so many layers."""
    config = replace(gpu_models.TINY, num_hidden_layers=layers)
    model = gpu_models.model("tiny", config, dtypes.BF16)
    with pytest.MonkeyPatch.context() as patch:
        real = Lowering.call

        def counted(low: Lowering, kernel: str, *given: Any, **named: Any) -> None:
            seen[kernel] += 1
            real(low, kernel, *given, **named)

        patch.setattr(Lowering, "call", counted)
        runner = Runner(model, random_session(driver or HostDriver(1 << 32)), 64)
        runner.step(Rows(range(rows), range(rows), range(rows)), range(rows))


@need_compiler
@pytest.mark.parametrize(("rows", "end"), [(1, "tile"), (60, "wide")])
def test_kernels_of_a_layer(rows: int, end: str) -> None:
    """What makes rows gives their parts: no launch splits them."""
    two, three = Counter[str](), Counter[str]()
    launches(2, rows, two)
    launches(3, rows, three)
    assert three - two == Counter(
        {f"mul_mats_{end}": 1, f"mul_mat_{end}": 2, f"mul_mat_gated_{end}": 1, "rms_norm": 2,
         "rope": 1, "rope_set_rows": 1, "set_rows": 1, "attend": 1, "merge": 1}
    )  # fmt: skip
    assert not three["split_rows"]


@need_compiler
def test_a_step_is_a_graph_of_kernels_alone() -> None:
    """What goes to the device and comes back is copied by kernels, too."""
    driver = HostDriver(1 << 32)
    launches(2, 1, Counter[str](), driver)
    copies = [call for call in driver.calls if call.startswith("copy")]
    first = copies.index("copy_small")
    assert {call.split()[0] for call in copies[:first]} == {"copy"}, "weights, before the step"
    assert set(copies[first:]) == {"copy_small"}, copies[first:]


@need_compiler
def test_commands_of_a_prompt_s_layer() -> None:
    """Q, K and V read the same rows, gate and up read the same: four conversions for seven
    products. What is added to two of them is not copied before."""
    two, three = asked(2), asked(3)
    assert three - two == Counter(
        {"product bf16": 7, "convert": 4, "rms_norm": 2, "rope": 1, "rope_set_rows": 1,
         "set_rows": 1, "attend_rows": 1, "binary_flat": 1}
    )  # fmt: skip


def asked(layers: int) -> Counter[str]:
    """What the driver is asked to enqueue for a prompt, behind weights and inputs."""
    driver = HostDriver(1 << 32)
    launches(layers, FEW_ROWS + 1, Counter[str](), driver)
    return Counter(dropwhile(lambda call: call.startswith("copy"), driver.calls))
