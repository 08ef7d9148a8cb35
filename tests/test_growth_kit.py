"""The counter of work: it finds the one line that grows with the square."""

from collections.abc import Callable

import numpy as np
import pytest
from growth_kit import ROOT, Work, work

Run = Callable[[int, Callable[[int], object]], object]
LINEAR = """\
def run(n, zeros):
    total = 0
    for i in range(n):
        total += i
    return total, zeros(100 * n)
"""
RUNS = """\
def run(n, zeros):
    pairs = 0
    for i in range(n):
        for j in range(i):
            pairs += 1
    return pairs
"""
BYTES = """\
def run(n, zeros):
    rows = zeros(n)
    alike = rows[:, None] == zeros(n)
    return int(alike.sum())
"""
HIDDEN = """\
def both(n, zeros):
    for i in range(100 * n):
        n = n
    return run(n, zeros)
"""


def made(source: str, name: str = "grown.py") -> Run:
    """A function as of a file of ggraph."""
    names: dict[str, Run] = {}
    exec(compile(source, str(ROOT / name), "exec"), names)
    return names["both"] if "both" in names else names["run"]


def took(source: str, n: int) -> Work:
    run = made(source)
    return work(lambda: run(n, np.zeros))[1]


def test_what_grows_with_its_input_is_not_steep() -> None:
    small, large = took(LINEAR, 500), took(LINEAR, 2000)
    assert not large.steeper(small, 4 * 1.5)
    assert large.lines < 4 * 1.1 * small.lines


@pytest.mark.parametrize("within", ["", HIDDEN], ids=["alone", "behind lines that do not"])
def test_a_line_that_runs_with_the_square_is_found(within: str) -> None:
    small, large = (took(RUNS + within, n) for n in (100, 400))
    assert large.steeper(small, 4 * 1.5)[:2] == [
        "grown.py:4: 5050 runs, then 80200",
        "grown.py:5: 4950 runs, then 79800",
    ]


@pytest.mark.parametrize("within", ["", HIDDEN], ids=["alone", "behind lines that do not"])
def test_a_line_whose_arrays_grow_with_the_square_is_found(within: str) -> None:
    small, large = (took(BYTES + within, n) for n in (500, 2000))
    (line,) = large.steeper(small, 4 * 1.5)
    assert line.startswith("grown.py:3: ") and " bytes, then " in line
    assert 2000**2 < large.nbytes[str(ROOT / "grown.py"), 3] < 1.05 * 2000**2


def test_the_same_lines_in_two_files_are_counted_each() -> None:
    """Python holds their codes for equal."""
    one, two = made(LINEAR, "one.py"), made(LINEAR, "two.py")
    assert one.__code__ == two.__code__
    found = work(lambda: (one(3, np.zeros), two(5, np.zeros)))[1]
    assert [found.runs[str(ROOT / f), 4] for f in ("one.py", "two.py")] == [3, 5]


def test_lines_are_the_same_where_bytes_are_not_asked_for() -> None:
    run = made(RUNS + HIDDEN)
    (_, every), (_, runs) = (work(lambda: run(9, np.zeros), nbytes=b) for b in (True, False))
    assert every.runs == runs.runs and every.lines == runs.lines
    assert every.nbytes and not runs.nbytes


def test_what_lies_elsewhere_is_not_counted() -> None:
    run = made(LINEAR)
    assert work(lambda: run(3, np.zeros), "verify")[1].lines == 0
