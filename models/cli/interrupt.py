"""Ctrl-C while an answer is being printed: the answer ends, what is said after it does not."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, before)
