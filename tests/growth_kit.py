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
from types import CodeType, FrameType
from typing import Any, TypeVar

import ggraph

ROOT = Path(ggraph.__file__).parent
MIN_RUNS, MIN_BYTES = 400, 100_000  # what a line may take beside its share of the growth
Result = TypeVar("Result")


Place = tuple[str, int]  # file and line
Lines = dict[int, int]  # what is counted, by line of one code
Trace = Callable[[FrameType, str, Any], Any]


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


def work(run: Callable[[], Result], room: str = "", nbytes: bool = True) -> tuple[Result, Work]:
    """What `run` returns, and the work that it took in files of `ggraph` below `room`.

    Of `nbytes` only who reads them asks: they are three quarters of the time that counting takes.
    """
    folder = str(ROOT / room)
    # By id: codes of two files may be equal.
    codes: dict[int, tuple[Trace, CodeType, Lines, Lines]] = {}
    held, at, allocated = 0, 0, {0: 0}  # before the line that runs, that line, and its code's bytes

    def traced(code: CodeType) -> Trace:
        """Counts a code's lines: each code has numbers of its own, found without a file's name."""
        runs: Lines = {}
        own: Lines = {}

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                line = frame.f_lineno
                runs[line] = runs.get(line, 0) + 1
            return step

        def weigh(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal held, at, allocated
            if event == "line":
                now, peak = tracemalloc.get_traced_memory()
                if peak > held:
                    allocated[at] += peak - held
                held, at, allocated = now, frame.f_lineno, own
                if at in runs:
                    runs[at] += 1
                else:
                    runs[at], own[at] = 1, 0
                    held = tracemalloc.get_traced_memory()[0]  # counters that grew are no line's
                tracemalloc.reset_peak()
            return weigh

        counts = weigh if nbytes else step
        codes[id(code)] = counts, code, runs, own
        return counts

    def call(frame: FrameType, event: str, _: Any) -> Trace | None:
        code = frame.f_code
        if (known := codes.get(id(code))) is not None:
            return known[0]
        return traced(code) if code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    if nbytes:
        tracemalloc.start()
        held = tracemalloc.get_traced_memory()[0]
    sys.settrace(call)
    try:
        result = run()
    finally:
        sys.settrace(before)
        if nbytes:
            tracemalloc.stop()
    found = Work()
    for _, code, *counted in codes.values():
        for total, lines in zip((found.runs, found.nbytes), counted, strict=True):
            for number, n in lines.items():
                total[code.co_filename, number] += n
    return result, found
