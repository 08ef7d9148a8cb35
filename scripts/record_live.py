"""`ggraph record` on a live ggml: `python scripts/record_live.py [VERSION]`.

From nothing it takes 50 s of processor time, most of it for ggml's build, which is kept.

Fetches llama.cpp through pip (llama-cpp-python VERSION), builds its ggml and nothing else,
compiles tests/record/touch.cpp and reach.cpp against it, and runs them under `record`, touch under
`torture` too: each case must get the verdict that it was written for. Without cmake, a compiler or
the network it says so and ends with 0.
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ggraph.errors import InputError
from ggraph.record import Stage, ggml, judge, program, read_log, torture
from ggraph.record.real.engine import Build, build
from ggraph.record.real.mutants import NEW

# case of touch.cpp, contract -> is it refused?
CASES = {
    ("clean", "cuda"): False,
    ("write", "cuda"): True,
    ("read", "cuda"): True,
    ("neighbour", "cuda"): False,
    ("get", "cuda"): True,
    ("get", "vulkan"): True,
    ("get", "sycl"): False,  # buffers are read on the stream itself
    ("get", "rpc"): False,  # one queue of messages
    ("pageable", "cuda"): False,  # complete before the call returns
    ("pageable", "metal"): True,
    ("pageable", "rpc"): True,
}

# The same of reach.cpp, on two devices, as late as the host lets them.
REACH = {
    ("larger", "cuda"): False,  # complete before the call returns
    ("larger", "metal"): True,
    ("moved", "cuda"): False,
    ("moved", "metal"): True,
    ("other", "cuda"): True,
    ("other", "sycl"): False,  # buffers are read on the stream itself
    ("own", "cuda"): False,  # cudaFree waits for its device
    ("own", "vulkan"): True,
    ("own", "metal"): True,
    ("own", "rpc"): False,
    ("wide", "cuda"): True,
    ("below", "cuda"): False,
    ("given-back", "cuda"): False,
    ("given-back", "metal"): True,
    ("given-back", "sycl"): True,
    ("in-place", "cuda"): False,
    ("adam", "cuda"): True,
}


def compiled(made: Build, source: str, target: Path, *how: str) -> Path:
    """One of tests/record, as a program or as what `how` makes of it."""
    libraries = made.folder / "bin"
    include, file = f"-I{made.sources / 'ggml/include'}", str(ROOT / "tests/record" / source)
    link = [f"-L{libraries}", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    command = ["c++", "-O1", "-g", *how, include, file, "-o", str(target), *link]
    subprocess.run(command, check=True)
    return target


def wrong_verdicts(
    made: Build, tool: Path, stage: Stage, cases: Mapping[tuple[str, str], bool]
) -> int:
    """How many cases of a program do not get their verdict."""
    wrong, log = 0, tool.parent / "log.jsonl"
    for (case, contract), expected in cases.items():
        given = program([str(tool), case], made.sources)
        ended = given.run(replace(stage, contract=contract), log, timeout=60)
        refused = any(v.refused for v in judge(read_log(log)))
        wrong += refused != expected or ended.status != 0
        print(f"{'refused' if refused else 'proved ':<8} {case} under {contract}")
    return wrong


def main() -> None:
    """One line a case; status 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", default=NEW, help="of llama-cpp-python")
    try:
        made = build(parser.parse_args().version, "ggml")
    except InputError as error:
        print(f"skipped: {error}")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        touch = compiled(made, "touch.cpp", folder / "touch", "-rdynamic")
        library = compiled(made, "touch.cpp", folder / "touch.so", "-fPIC", "-shared")
        reach = compiled(made, "reach.cpp", folder / "reach", "-rdynamic")
        wrong = wrong_verdicts(made, touch, Stage(), CASES)
        wrong += wrong_verdicts(made, reach, Stage(2, order="lazy"), REACH)
        for case in ("clean", "read", "get"):
            outcome = torture(program([str(touch), case], made.sources), Stage(), timeout=60)
            same = all(t.same_bytes for t in outcome.trials)
            wrong += same != (case == "clean")
            print(f"{'same' if same else 'differs':<8} {case} in {len(outcome.trials)} orders")
        with ggml(made.folder / "bin" / "libggml.so", sources=made.sources) as session:
            arguments = (ctypes.c_char_p * 2)(b"touch", b"get")
            ctypes.CDLL(str(library)).main(2, arguments)
        refused = any(v.refused for v in session.verdicts)
        wrong += not refused
        print(f"{'refused' if refused else 'proved ':<8} get, from Python")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
