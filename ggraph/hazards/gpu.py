"""Races on a real GPU: bad plans with the losing stream held back, fixed plans likewise.

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
from ggraph.hazards.run import data_of, labels
from ggraph.plan import Plan
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
    late: str  # label of the command that was held back; "" where the order does not matter
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

    What is held back is the first command of the verifier's counter-example. Raises InputError for
    less than one run, BackendError where the GPU fails.
    """
    if times < 1:
        raise InputError(f"times = {times}: expected 1 or more")
    data = data_of(hazard, seed)
    late = ""
    wrong: int | None = None
    if hazard.bad is not None:
        bad = plan_of(hazard, hazard.bad)
        verdict = examine(bad)
        if isinstance(verdict, CounterExample) and verdict.kind == "race":
            late = labels(verdict, bad)[0]
        wrong = _count_wrong(bad, data.weights, data.feeds, data.expected, driver, late, times)
    fixed = plan_of(hazard, hazard.fixed)
    right = _count_wrong(fixed, data.weights, data.feeds, data.expected, driver, late, times)
    return GpuReport(hazard.id, driver.name, late, times, wrong, right)


def _count_wrong(
    plan: Plan,
    weights: Mapping[str, Array],
    feeds: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
    driver: Driver,
    late: str,
    times: int,
) -> int:
    """Of `times` replays, those with a wrong output. One more goes before: it loads the kernels,
    which would otherwise wait for the delay."""
    replayer = Replayer(plan, weights, driver)
    try:
        replayer.run(feeds)
        found = [replayer.run(feeds, late, DELAY_S) for _ in range(times)]
    finally:
        replayer.close()
    return sum(not _agrees(outputs, expected) for outputs in found)


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
