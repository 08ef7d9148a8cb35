"""`python -m models`, and `ggraph`: the runner.

Ctrl-C ends it without a word while its packages are still being imported.
"""

import os
import signal
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
    signal.signal(signal.SIGINT, _leave)

from .cli.app import main as run  # noqa: E402


def main() -> None:
    """Entry point: from here on Ctrl-C is an exception like others."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
