"""Random programs through IREE's compiler and `verify`: `python scripts/iree_programs.py 100`.

Needs `iree-compile` (pip install iree-base-compiler). Each program is a graph of matrix products,
sums and transposes over a few inputs. Each plan is judged as IREE made it (it must be proved), and
with one dispatch of a concurrent region writing where its neighbour writes (it must be refused).
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ggraph.errors import FormatError
from ggraph.plan import Certificate
from ggraph.record.iree import functions, plan_from_iree
from ggraph.verify import examine

TYPE = "tensor<{n}x{n}xf32>"
OPTIONS = [
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--compile-to=stream",
    "--mlir-print-ir-before=iree-stream-fuse-dispatch-bindings",
]


def program(rng: random.Random) -> str:
    """A function of 2 to 4 inputs and 3 to 14 steps, whose last values are returned."""
    t = TYPE.format(n=rng.choice([16, 32, 64]))
    values = [f"%i{k}" for k in range(rng.randint(2, 4))]
    head = ", ".join(f"{v}: {t}" for v in values)
    lines = ["%z = arith.constant 0.0 : f32", f"%e = tensor.empty() : {t}"]
    lines.append(f"%f = linalg.fill ins(%z : f32) outs(%e : {t}) -> {t}")
    for k in range(rng.randint(3, 14)):
        a, b = rng.choice(values), rng.choice(values[-4:])
        op = rng.choice(["matmul", "matmul", "add", "transpose"])
        form = {
            "matmul": f"linalg.matmul ins({a}, {b} : {t}, {t}) outs(%f : {t}) -> {t}",
            "add": f"linalg.map {{ arith.addf }} ins({a}, {b} : {t}, {t}) outs(%e : {t})",
            "transpose": f"linalg.transpose ins({a} : {t}) outs(%e : {t}) permutation = [1, 0]",
        }[op]
        lines.append(f"%v{k} = {form}")
        values.append(f"%v{k}")
    results = values[-rng.randint(1, 2) :]
    types = ", ".join([t] * len(results))
    body = "\n  ".join(lines)
    return (
        f"func.func @main({head}) -> ({types}) {{\n  {body}\n"
        f"  return {', '.join(results)} : {types}\n}}\n"
    )


def dump(compiler: str, text: str) -> str:
    """What the compiler prints of a program at the stage that is imported."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.mlir"
        path.write_text(text)
        command = [compiler, *OPTIONS, str(path), "-o", str(Path(folder) / "out.mlir")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{compiler} failed: {done.stderr.splitlines()[0]}")
    return done.stderr


def tampered(text: str) -> str | None:
    """Two members of a concurrent region write the same bytes; None where there are no two."""
    for region in re.finditer(r"stream\.cmd\.concurrent \{\n(.*?)\n      \}\n", text, re.S):
        writes = re.findall(r"wo (%\w+\[%\w+ for %\w+\])", region[1])
        if len(writes) > 1 and len(set(writes)) > 1:
            changed = region[1].replace(f"wo {writes[1]}", f"wo {writes[0]}")
            return text[: region.start(1)] + changed + text[region.end(1) :]
    return None


def main() -> None:
    """Counts of what was proved and refused; status 1 if a verdict is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiler", default=shutil.which("iree-compile") or "iree-compile")
    given = parser.parse_args()
    rng, said, dispatches = random.Random(given.seed), Counter[str](), 0
    while said.total() - said["tampered, refused"] - said["tampered, NOT refused"] < given.count:
        text = dump(given.compiler, program(rng))
        if not functions(text):
            continue  # it returns its inputs: nothing is left to execute
        try:
            verdict = examine(plan_from_iree(text))
        except FormatError as error:
            said[str(error)] += 1
            continue
        dispatches += text.count("stream.cmd.dispatch")
        said["proved" if isinstance(verdict, Certificate) else f"refused: {verdict.message}"] += 1
        if (bad := tampered(text)) is not None:
            refused = not isinstance(examine(plan_from_iree(bad)), Certificate)
            said["tampered, refused" if refused else "tampered, NOT refused"] += 1
    for what, count in said.most_common():
        print(f"{count:>5}  {what}")
    print(f"{dispatches:>5}  dispatches")
    sys.exit(said["proved"] != given.count or said["tampered, NOT refused"] > 0)


if __name__ == "__main__":
    main()
