"""Counts work instead of timing it: how often each line runs, and bytes allocated while it does.

A line of NumPy does as much work as its arrays are long; those that it allocates are counted, so
that a line which compares one thing with all others shows as many bytes. Each line by itself, since
one that grows with the square hides behind thousands that do not.
"""

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import ggraph

ROOT = Path(ggraph.__file__).parent
MIN_RUNS, MIN_BYTES = 400, 100_000  # what a line may take beside its share of the growth
Result = TypeVar("Result")


Place = tuple[str, int]  # file and line


@dataclass
class Work:
    """What running something took, by line: how often it ran, and bytes that were allocated."""

    runs: Counter[Place] = field(default_factory=Counter)
    nbytes: Counter[Place] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        """Lines run in all."""
        return self.runs.total()

    def steeper(self, small: "Work", factor: float) -> list[str]:
        """Lines that took more than `factor` times what they took in `small`, where it matters."""
        sides = (
            ("runs", self.runs, small.runs, MIN_RUNS),
            ("bytes", self.nbytes, small.nbytes, MIN_BYTES),
        )
        return [
            f"{Path(at[0]).relative_to(ROOT)}:{at[1]}: {before[at]} {what}, then {n}"
            for what, now, before, least in sides
            for at, n in now.items()
            if n > least + factor * before[at]
        ]


def work(run: Callable[[], Result], room: str = "") -> tuple[Result, Work]:
    """What `run` returns, and the work that it took in files of `ggraph` below `room`."""
    found, folder, held, at = Work(), str(ROOT / room), 0, ("", 0)

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal held, at
        if event == "line":
            found.nbytes[at] += max(tracemalloc.get_traced_memory()[1] - held, 0)
            at = frame.f_code.co_filename, frame.f_lineno
            found.runs[at] += 1
            tracemalloc.reset_peak()  # behind the counters' own growth, which is no line's work
            held = tracemalloc.get_traced_memory()[0]
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    tracemalloc.start()
    held = tracemalloc.get_traced_memory()[0]
    sys.settrace(call)
    try:
        result = run()
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    del found.nbytes["", 0]
    return result, found
