"""Other engines, recorded and judged: what a ggml program really enqueues, as plans.

    program -run-> log -read_log-> Recording -steps-> Step -convert-> Plan -verify-> verdict

A plugin (native/) plays 1 to 8 devices for an unmodified program: it logs every buffer, copy,
kernel, event, wait and host access with its bytes, and computes late, in an order of choice. The
log is cut where nothing is in flight, each piece becomes a plan, and `ggraph.verify` judges it.
`torture` then runs the program in the orders that hurt. docs/other_engines.md is the manual.

    with ggraph.record.ggml("llama_cpp/lib/libggml.so") as session:
        ...                                    # load a model, generate, close it
    for v in session.verdicts:
        print(v.kind, "proved" if v.refused is None else v.refused)
"""

from ggraph.record.causes import Cause, Diagnosis, Repair, Wait, diagnose, longest_chain, with_waits
from ggraph.record.convert import Converted, convert
from ggraph.record.judge import Verdict, judge, missing
from ggraph.record.log import Recording, read_log
from ggraph.record.plugin import Engine, engine_of, fetch_sources, plugin
from ggraph.record.run import CONTRACTS, Program, Session, Stage, ggml, program
from ggraph.record.steps import Step, steps
from ggraph.record.torture import Trial, torture

__all__ = [
    "CONTRACTS",
    "Cause",
    "Converted",
    "Diagnosis",
    "Engine",
    "Program",
    "Recording",
    "Repair",
    "Session",
    "Stage",
    "Step",
    "Trial",
    "Verdict",
    "Wait",
    "convert",
    "diagnose",
    "engine_of",
    "fetch_sources",
    "ggml",
    "judge",
    "longest_chain",
    "missing",
    "plugin",
    "program",
    "read_log",
    "steps",
    "torture",
    "with_waits",
]
