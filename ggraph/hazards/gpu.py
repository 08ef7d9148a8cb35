"""Races on a real GPU: bad plans with the losing stream held back, fixed plans likewise.

A launch that overwrites what its own threads read races with itself. On a GPU the blocks of a small
one all read before any of them writes; so it is run in parts, one block ahead of the others.

Values are compared with NumPy's within `CLOSE`, since a GPU adds in another order; what a race
leaves behind is another value's bytes, or poison.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggraph.backends.cuda import Driver, Replayer, open_driver
from ggraph.errors import InputError
from ggraph.hazards.corpus import Hazard, plan_of
from ggraph.hazards.run import Data, data_of, labels
from ggraph.tensor import Array
from ggraph.verify import CounterExample, examine

__all__ = ["GpuReport", "open_driver", "run_on_gpu"]

CLOSE = 1e-3  # of the largest magnitude of an output
DELAY_S = 5e-3  # longer than the host takes to enqueue the rest of a run


@dataclass(frozen=True)
class GpuReport:
    """How often each plan gave a wrong output, of `times` runs; None where there is no bad plan."""

    hazard: str
    device: str
    late: str  # label of the command that was held back, but perhaps for its first block; "" where
    # the order does not matter
    times: int
    bad_wrong: int | None
    fixed_wrong: int

    @property
    def ok(self) -> bool:
        """Whether the bad plan always corrupts and the fixed one never does."""
        return self.fixed_wrong == 0 and self.bad_wrong in (None, self.times)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**vars(self), "ok": self.ok}


def run_on_gpu(hazard: Hazard, driver: Driver, times: int = 100, seed: int = 0) -> GpuReport:
    """Both plans of a hazard, `times` times each, on the GPU behind `driver`.

    What is held back is the first command of the verifier's counter-example: of two that race all
    of it, of one that overwrites what it reads all but its first block. Raises InputError for
    less than one run, BackendError where the GPU fails.
    """
    if times < 1:
        raise InputError(f"times = {times}: expected 1 or more")
    data = data_of(hazard, seed)
    late = parted = ""
    wrong: int | None = None
    if hazard.bad is not None:
        bad = plan_of(hazard, hazard.bad)
        verdict = examine(bad)
        if isinstance(verdict, CounterExample):
            first, _ = labels(verdict, bad)
            late = first if verdict.kind == "race" else ""
            parted = first if verdict.kind == "alias" else ""
        wrong = _count_wrong(Replayer(bad, data.weights, driver, parted), data, late, times)
    fixed = Replayer(plan_of(hazard, hazard.fixed), data.weights, driver, parted)
    right = _count_wrong(fixed, data, late, times)
    return GpuReport(hazard.id, driver.name, late or parted, times, wrong, right)


def _count_wrong(replayer: Replayer, data: Data, late: str, times: int) -> int:
    """Of `times` replays, those with a wrong output. One more goes before: it loads the kernels,
    which would otherwise wait for the delay."""
    try:
        replayer.run(data.feeds)
        found = [replayer.run(data.feeds, late, DELAY_S) for _ in range(times)]
    finally:
        replayer.close()
    return sum(not _agrees(outputs, data.expected) for outputs in found)


def _agrees(got: Sequence[Mapping[str, Array]], expected: Sequence[Mapping[str, Array]]) -> bool:
    return all(
        _close(outputs[name], right)
        for outputs, wanted in zip(got, expected, strict=True)
        for name, right in wanted.items()
    )


def _close(got: Array, wanted: Array) -> bool:
    if wanted.dtype.kind != "f":
        return np.array_equal(got, wanted)
    span = float(np.abs(wanted).max(initial=1e-30))
    with np.errstate(all="ignore"):
        return bool((np.abs(got - wanted) <= CLOSE * span).all())
