"""Ctrl-C while an answer is being printed: the answer ends, what is said after it does not. And
other signals that end a process: nothing that is half written stays."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STATUS = 130  # of a command that Ctrl-C ended


class Answering:
    """Whether Ctrl-C still has something to end. It ends that once."""

    def __init__(self) -> None:
        self.open = True

    def done(self) -> None:
        """From here on Ctrl-C is ignored."""
        self.open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        if self.open:
            self.open = False
            raise KeyboardInterrupt


@contextmanager
def answering() -> Iterator[Answering]:
    """While the body runs, KeyboardInterrupt comes at most once, and never after `done`."""
    state, before = Answering(), signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody else's
        yield state
        return
    signal.signal(signal.SIGINT, state)
    try:
        yield state
        if sys.stdout is not None:  # it was not closed
            sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ending() -> Iterator[None]:
    """While the body runs, SIGTERM and SIGHUP are SystemExit, as Ctrl-C is KeyboardInterrupt: who
    writes takes away what is not whole. What is ignored (`nohup`), or somebody else's, stays so."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    ours = [s for s, handler in before.items() if handler is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, _exit)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
