"""A native build of llama.cpp or of its kin as a process of its own: `ggraph bench install`.

Answers have no text: what is compared is speed. Not for users.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

from .answering import Serve, answer

FAILED = {1: "no model that it knows", 2: "no memory for the context"}


class Library:
    """The functions of native/peer.cpp on one model."""

    def __init__(self, library: str, path: str, threads: int, context: int) -> None:
        self._c = ctypes.CDLL(library)
        status = self._c.peer_open(path.encode(), threads, context)
        if status:
            raise RuntimeError(FAILED[status])

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """One greedy request and its timings."""
        ids, new = request["ids"], request["new"]
        given, out = (ctypes.c_int * len(ids))(*ids), (ctypes.c_int * new)()
        seconds = (ctypes.c_double * 2)()
        read = self._c.peer_run(given, len(ids), new, int(request["keep"]), out, seconds)
        if read < 0:
            return {"error": "llama_decode failed"}
        return {
            "text": "", "ids": list(out), "prompt_n": read, "prompt_ms": seconds[0] * 1e3,
            "predicted_n": new, "predicted_ms": seconds[1] * 1e3,
        }  # fmt: skip


def main() -> None:
    """`python -m models.bench.peer_library LIBRARY MODEL THREADS CONTEXT`."""
    library, path, threads, context = sys.argv[1:]

    def opened() -> tuple[str, Serve]:
        return "native", Library(library, path, int(threads), int(context)).serve

    answer(opened, f"{Path(library).parent.name} cannot open {path}")


if __name__ == "__main__":
    main()
