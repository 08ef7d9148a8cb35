"""Answers that are kept: few of them, and right for every thread that asks."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from ggraph.backends.cpu.codegen.memo import Memo


@dataclass(frozen=True)
class Asked:
    """A question whose hash is Python's own code, within which threads may change."""

    thread: int
    i: int


def test_an_answer_is_found_once_and_kept():
    asked = []
    memo = Memo[int]()
    assert [memo.find("a", lambda: asked.append(1) or 7) for _ in range(3)] == [7, 7, 7]
    assert len(asked) == 1


def test_none_is_an_answer():
    memo, asked = Memo[None](), []
    for _ in range(2):
        assert memo.find(1, lambda: asked.append(1)) is None
    assert len(asked) == 1


def test_what_is_kept_is_bounded():
    memo = Memo[int](most=3)
    for i in range(100):
        assert memo.find(i, lambda i=i: i) == i
        assert len(memo._known) <= 3


def test_an_error_is_not_kept():
    memo = Memo[int]()
    with pytest.raises(ZeroDivisionError):
        memo.find("x", lambda: 1 // 0)
    assert memo.find("x", lambda: 5) == 5


def test_threads_that_forget_for_each_other_still_get_their_answers():
    """With room for one answer, each new one of a thread takes away what another just kept."""
    memo = Memo[int](most=1)

    def ask(thread: int) -> bool:
        return all(
            memo.find(Asked(thread, i), lambda i=i: 10 * i + thread) == 10 * i + thread
            for i in range(20000)
        )

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(ask, range(4)))
    finally:
        sys.setswitchinterval(usual)
