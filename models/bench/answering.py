"""What the processes that are measured beside us have in common: on standard input and output, a
line of JSON for each request and answer.

Started by `models.bench.peer`, so that their threads and their memory are never mixed with ours.

Requests: {"ids": [...], "new": N, "keep": bool}. `keep` lets a peer use the cache of the last
request, so that a long prompt is read only once.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Serve = Callable[[dict[str, Any]], dict[str, Any]]


def answer(opened: Callable[[], tuple[str, Serve]], refused: str) -> None:
    """Serve until standard input ends. `opened` gives a version and what answers a request; where
    it raises, `refused` and what it said go out instead."""
    out = _quiet_output()

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    began = time.perf_counter()
    try:
        version, serve = opened()
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        say({"error": f"{refused}: {str(error).strip().rpartition(chr(10))[2]}"})
        return
    say({"ready": version, "load_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        found = serve(json.loads(line))
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        say({"wall": wall, "cpu": used, **found})


def _quiet_output() -> TextIO:
    """The real standard output; what a peer prints goes nowhere from now on."""
    mine = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return mine
