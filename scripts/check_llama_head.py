"""A head written by ggraph must load and run in llama.cpp: a random EAGLE-3 head for SmolLM2.

    python scripts/check_llama_head.py [--out FOLDER]

Needs `pip install xllamacpp`; fetches the default model when it is not in the cache. Prints the
draft statistics of llama.cpp's reply; a random head is accepted by chance only.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import xllamacpp
from random_heads import eagle3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from models.eagle3 import Head
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.convert import head_to_gguf
from models.run.fetch import fetch_default


def run(model: Path, head: Path) -> dict[str, Any]:
    """One request through llama.cpp with the head as drafter."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(model), 1024, False
    params.cpuparams.n_threads = 1
    params.speculative.types = [
        xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
    ]
    params.speculative.draft.mparams.path = str(head)
    params.speculative.draft.n_max = 4
    server = xllamacpp.Server(params)
    reply: dict[str, Any] = server.handle_chat_completions(
        {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 32,
         "temperature": 0}
    )  # fmt: skip
    return reply


def main() -> None:
    """Make the head, write it, run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp())
    model = fetch_default()
    target = open_model(model)
    out = folder / "head.gguf"
    head = open_head(eagle3(folder / "head"), target)
    assert isinstance(head, Head), head.name
    head_to_gguf(head, target, out, "f16")
    print("wrote", out, out.stat().st_size, "bytes")
    reply = run(model, out)
    print(reply["choices"][0]["message"]["content"])
    print(json.dumps(reply["timings"], indent=1))


if __name__ == "__main__":
    main()
