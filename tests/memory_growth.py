"""How much memory a model's plan takes, measured: a program of its own for `test_account.py`.

The model is opened and run twice, and the second time is measured: what a process needs once
(imports, kernels, LLVM where their cache is cold) was there before, and what the first session held
is given back. Before each look the allocator's free pages go back to the system too: growth that
is served from them would not show, 1 to 5 MB of it, which depends on what ran before.

Prints the growth of resident bytes until a step has run with all states written, and what the plan
accounts for.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import numpy as np

from ggraph.account import Account, accounts
from ggraph.backends.cpu.runtime.pages import drop_map
from ggraph.tensor import Kind
from models.run.load import Loaded, load


def resident() -> int:
    """Bytes of this process that are in memory and in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


def step(m: Loaded, rows: int) -> list[Account]:
    """A step of `rows` tokens, with every byte of the states written; what its plan takes."""
    plan = m.runner.plan(m.runner.shape(rows, 1, 256)).plan
    for t in plan.graph.leaves(Kind.STATE):
        m.session.write_state(t.name, np.zeros(plan.memory.buffers[t.name].nbytes, np.uint8))
    m.runner.text(m.prompt_ids("Tell me of the sea.")[:1] * rows)
    return list(accounts(plan))


def main(path: str, rows: int) -> None:
    """Measure one plan of the model at `path`."""
    # One thread: with more, memory for weights is found beside the load, before the first look.
    first, second = (load(Path(path), ctx_size=1024, threads=1) for _ in range(2))
    step(first, rows)
    first.close()
    del first
    parsed = second.model.build(second.runner.shape(rows, 1, 256)).leaves(Kind.WEIGHT)[0]
    drop_map(second.model.weight(parsed))  # pages of the file that its header brought along
    del parsed
    before = resident()
    taken = step(second, rows)
    found = {"grown": resident() - before, "accounts": [vars(a) for a in taken]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
