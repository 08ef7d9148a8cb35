"""llama.cpp as a process of its own, measured through `xllamacpp` (extra [bench]).

Requests may also ask for {"probs": N} and say {"ignore_eos": false}. Not for users.
"""

import sys
from pathlib import Path
from typing import Any

from ggraph.formats import open_checkpoint

from .answering import Serve, answer

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
    """One greedy request: its timings and its text."""
    reply = server.handle_completions(
        {
            "prompt": request["ids"], "max_tokens": request["new"], "temperature": 0,
            "samplers": ["top_k"], "top_k": 1, "cache_prompt": request["keep"],
            "ignore_eos": request.get("ignore_eos", True),
            **({"n_probs": request["probs"]} if request.get("probs") else {}),
        }
    )  # fmt: skip
    if "timings" not in reply:
        return {"error": str(reply)[:300]}
    choice = reply["choices"][0]
    found = {"text": choice["text"], **reply["timings"]}
    if request.get("probs"):
        said = choice["logprobs"]["content"]
        found["probs"] = [[p["id"], p["logprob"]] for p in said[0]["top_logprobs"]]
        found["ids"] = [c["id"] for c in said]
    return found


def main() -> None:
    """`python -m models.bench.peer_llama MODEL THREADS CONTEXT [HEAD CHAIN]`."""
    path, threads, context, *rest = sys.argv[1:]

    def opened() -> tuple[str, Serve]:
        if xllamacpp is None:
            raise RuntimeError("xllamacpp is not installed")
        server = open_server(path, int(threads), int(context), *rest)
        version = str(getattr(xllamacpp, "__version__", "unknown"))
        return version, lambda request: serve(server, request)

    answer(opened, f"llama.cpp cannot open {path}")


if __name__ == "__main__":
    main()
