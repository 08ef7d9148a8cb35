"""llama.cpp as a process of its own, measured through `xllamacpp` (extra [bench]).

Started by `models.bench.peer`: one JSON object per line comes in on standard input, one goes out on
standard output. Its threads and its memory are thus never mixed with ours. Not for users.

Requests: {"ids": [...], "new": N, "keep": bool, "probs": N}. `keep` lets it use the cache of the
last request, so that a long prompt is read only once.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from ggraph.formats import open_checkpoint

try:
    import xllamacpp
except ImportError:  # the extra is not installed; the first line out says so
    xllamacpp = None


_KINDS = {"gemma4-assistant": "MTP", "dflash": "DFLASH"}  # by architecture; else EAGLE-3


def open_server(path: str, threads: int, context: int, head: str = "", chain: str = "4") -> Any:
    """llama.cpp on one GGUF file, with one slot.

    `head` is an EAGLE-3 head that drafts chains of `chain` tokens, an assistant of Gemma 4, a
    DFlash drafter, or the same file, whose own layers then do.
    """
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = True
    if head:
        draft = params.speculative.draft
        kinds = xllamacpp.common_speculative_type
        own = head == path
        kind = "MTP" if own else _KINDS.get(_architecture(head), "EAGLE3")
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}")]
        draft.mparams.path = "" if own else head
        draft.n_max, draft.p_min = int(chain), 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def _architecture(path: str) -> str:
    """What a GGUF file says that it is."""
    return open_checkpoint(Path(path)).architecture


def serve(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One greedy request: its timings, text, and the share of `threads` cores that it got."""
    began, cpu = time.perf_counter(), time.process_time()
    reply = server.handle_completions(
        {
            "prompt": request["ids"], "max_tokens": request["new"], "temperature": 0,
            "samplers": ["top_k"], "top_k": 1, "cache_prompt": request["keep"],
            "ignore_eos": request.get("ignore_eos", True),
            **({"n_probs": request["probs"]} if request.get("probs") else {}),
        }
    )  # fmt: skip
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    if "timings" not in reply:
        return {"error": str(reply)[:300]}
    choice = reply["choices"][0]
    found = {"text": choice["text"], "wall": wall, "cpu": used, **reply["timings"]}
    if request.get("probs"):
        said = choice["logprobs"]["content"]
        found["probs"] = [[p["id"], p["logprob"]] for p in said[0]["top_logprobs"]]
        found["ids"] = [c["id"] for c in said]
    return found


def quiet_output() -> TextIO:
    """The real standard output; what llama.cpp prints goes nowhere from now on."""
    mine = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return mine


def main() -> None:
    """`python -m models.bench.peer_llama MODEL THREADS CONTEXT [HEAD CHAIN]`."""
    out = quiet_output()

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    if xllamacpp is None:
        say({"error": "xllamacpp is not installed"})
        return
    path, threads, context, *rest = sys.argv[1:]
    began = time.perf_counter()
    try:
        server = open_server(path, int(threads), int(context), *rest)
    except (RuntimeError, ValueError) as error:
        say({"error": f"llama.cpp cannot open {path}: {error}"})
        return
    version = getattr(xllamacpp, "__version__", "unknown")
    say({"ready": version, "load_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        say(serve(server, json.loads(line)))


if __name__ == "__main__":
    main()
