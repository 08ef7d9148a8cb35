"""A native build of llama.cpp or of its kin as a process of its own: `ggraph bench install`.

Started by `models.bench.peer` with the requests and answers of `peer_llama.py`, whose text is empty
here: what is compared is speed. Not for users.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from .peer_llama import quiet_output

FAILED = {1: "cannot open the model", 2: "has no memory for the context"}


class Library:
    """The functions of native/peer.cpp on one model."""

    def __init__(self, library: str, path: str, threads: int, context: int) -> None:
        self._c = ctypes.CDLL(library)
        status = self._c.peer_open(path.encode(), threads, context)
        if status:
            raise RuntimeError(FAILED[status])

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """One greedy request: its timings, and the processor time that it took."""
        ids, new = request["ids"], request["new"]
        given, out = (ctypes.c_int * len(ids))(*ids), (ctypes.c_int * new)()
        seconds = (ctypes.c_double * 2)()
        began, cpu = time.perf_counter(), time.process_time()
        read = self._c.peer_run(given, len(ids), new, int(request["keep"]), out, seconds)
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        if read < 0:
            return {"error": "llama_decode failed"}
        return {
            "text": "", "wall": wall, "cpu": used, "ids": list(out), "prompt_n": read,
            "prompt_ms": seconds[0] * 1e3, "predicted_n": new, "predicted_ms": seconds[1] * 1e3,
        }  # fmt: skip


def main() -> None:
    """`python -m models.bench.peer_library LIBRARY MODEL THREADS CONTEXT`."""
    out = quiet_output()

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    library, path, threads, context = sys.argv[1:]
    began = time.perf_counter()
    try:
        opened = Library(library, path, int(threads), int(context))
    except (RuntimeError, OSError) as error:
        say({"error": f"{Path(library).parent.name} with {path}: {error}"})
        return
    say({"ready": "native", "load_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        say(opened.serve(json.loads(line)))


if __name__ == "__main__":
    main()
