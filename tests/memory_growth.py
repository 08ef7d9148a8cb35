"""How much memory a model's plan takes, measured: a program of its own for `test_account.py`.

Everything that a process needs once (imports, kernels, planning) is done before. Prints the growth
of resident bytes until a step has run with all states written, and what the plan accounts for.
"""

import gc
import json
import sys
from pathlib import Path

import numpy as np

from ggraph.account import accounts
from ggraph.decode.runner import Runner
from ggraph.device import HOST
from ggraph.pipeline import make_plan
from ggraph.tensor import Kind
from models.run.load import load


def resident() -> int:
    """Bytes of this process that are in memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


def main(path: str, rows: int) -> None:
    """Measure one plan of the model at `path`."""
    m = load(Path(path), ctx_size=1024, threads=2)
    runner = Runner(m.model, m.session, 1024)
    shape = runner.shape(rows, 1, 256)
    make_plan(m.model.build(shape), [b.spec for n, b in m.session.backends.items() if n != HOST])
    ids, zeros = m.prompt_ids("Tell me of the sea.")[:1] * rows, np.zeros(1 << 22, np.uint8)
    gc.collect()
    before = resident()
    plan = runner.plan(shape).plan
    for t in plan.graph.leaves(Kind.STATE):
        m.session.write_state(t.name, zeros[: plan.memory.buffers[t.name].nbytes])
    runner.text(ids)
    gc.collect()
    found = {"grown": resident() - before, "accounts": [vars(a) for a in accounts(plan)]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
