"""`ggraph record` on a live ggml: `python scripts/record_live.py [VERSION]`.

From nothing it takes 90 s of processor time, most of it for ggml's build, which is kept.

Fetches llama.cpp through pip (llama-cpp-python VERSION), builds its ggml and nothing else,
compiles tests/record/touch.cpp against it, and runs that under `record` and `torture`: each case
must get the verdict that it was written for. Without cmake, a compiler or the network it says so
and ends with 0.
"""

import ctypes
import subprocess
import sys
import tempfile
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


def compiled(made: Build, folder: Path) -> tuple[Path, Path]:
    """The program, and the same as a shared library whose `main` a Python process can call."""
    libraries = made.folder / "bin"
    source, include = str(ROOT / "tests/record/touch.cpp"), f"-I{made.sources / 'ggml/include'}"
    link = [f"-L{libraries}", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    found = (folder / "touch", folder / "touch.so")
    for target, how in zip(found, (["-rdynamic"], ["-fPIC", "-shared"]), strict=True):
        command = ["c++", "-O1", "-g", *how, include, source, "-o", str(target), *link]
        subprocess.run(command, check=True)
    return found


def main() -> None:
    """One line a case; status 1 if one is not as it should be."""
    try:
        made = build(sys.argv[1] if len(sys.argv) > 1 else NEW, "ggml")
    except InputError as error:
        print(f"skipped: {error}")
        return
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        touch, library = compiled(made, folder)
        for (case, contract), expected in CASES.items():
            log = folder / "log.jsonl"
            program([str(touch), case], made.sources).run(Stage(contract=contract), log, timeout=60)
            refused = any(v.refused for v in judge(read_log(log)))
            wrong += refused != expected
            print(f"{'refused' if refused else 'proved ':<8} {case} under {contract}")
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
