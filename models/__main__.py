"""`python -m models`, and `ggraph`: the runner.

Ctrl-C ends it without a word while its packages are still being imported.
"""

import gc
import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
    signal.signal(signal.SIGINT, _leave)

gc.disable()  # of what is imported nothing goes: searching it was a tenth of the time it takes

try:
    from .cli.app import main as run
except ModuleNotFoundError as error:
    if (error.name or "").startswith(("ggraph", "models")):
        raise
    sys.exit(
        f"ggraph: {error.name} is not installed here: `python3 scripts/dev.py run ..` makes an "
        "environment and runs in it, `pip install .` installs what is needed"
    )

gc.freeze()
gc.enable()


def main() -> None:
    """Entry point: from here on Ctrl-C is an exception like others."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
