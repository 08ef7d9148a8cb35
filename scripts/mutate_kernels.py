"""Mutation testing of the CUDA kernels on the stand-in: is every mistake in them seen?

    nice python scripts/mutate_kernels.py [--only tiles.cu] [--kind barrier] [--count 60]
                                          [--part 2/8] [--list]

Changes one thing in one kernel source at a time, in memory: drops a barrier, shifts an index,
narrows a mask or a shift, turns a bound, skips lanes of a reduction; and runs the tests of that
source until one fails, each mutant in a fork of this process. Prints each survivor with its line
before and after; EXPLAINED below says why some of them are no mistakes. Status 1 where one is left
that is not. A mutant takes two to ten seconds; `--part 2/8` is the second eighth of all places.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cuda_host

from ggraph.backends.cuda import kernels

LIMIT = 120  # seconds of a mutant's tests; one that never ends is caught
OPS, PRODUCTS = "tests/test_cuda_ops.py", "tests/test_cuda_matmul.py"
# Tests of each source: files and a `-k` expression.
TESTS: dict[str, tuple[str, str]] = {
    "tiles.cu": (
        PRODUCTS,
        "(against or pair or experts) and (q4_k or q6_k or bf16 or q4_0 or f16)",
    ),
    "pieces.cuh": (PRODUCTS, "against and (f16 or bf16)"),
    "lanes.cu": (PRODUCTS, "against and f32"),
    "lanes.cuh": (PRODUCTS, "against and f32 or not_exist"),
    "matmul.cu": (PRODUCTS, "decoded or not_exist or library"),
    "blocks.cuh": (PRODUCTS, "decoded or against"),
    "experts.cu": (PRODUCTS, "pair or experts"),
    "attention.cu": (OPS, "attention and not many or flash or any_size or neighbour or far_below"),
    "prompt.cu": (OPS, "attention_of_many"),
    "mixtures.cu": (OPS, "moe or add_id or swiglu or do_not_exist"),
    "recurrent.cu": (OPS, "conv or delta or rule"),
    "norm.cu": (OPS, "norm or sum or mean"),
    "products.cu": (OPS, "mul_mat"),
    "rope.cu": (OPS, "rope or outside_the_cache"),
    "rows.cu": (OPS, "rows or do_not_exist"),
    "softmax.cu": (OPS, "soft_max or far_below"),
    "sort.cu": (OPS, "top_k or arg or ordered or no_number"),
    "elementwise.cu": (OPS, "agree or strided or digits"),
    "common.cuh": (OPS, "norm or sum or cast or rows or soft_max"),
}
# What is dropped or turned, by pattern; the pattern's first group is replaced.
CHANGES: tuple[tuple[str, str, str], ...] = (
    ("barrier", r"(__syncthreads\(\);)", ";"),
    ("index", r"\[[^\]\[]*?( \+ 1)\]", ""),
    ("index", r"( \+ [248])\b(?! \*)", " + 1"),
    ("index", r"(% (?:2|4|8|16|32)\b)", "% 64"),
    ("index", r"(/ (?:2|4|8|16|32)\b)", "/ 1"),
    ("mask", r"(& (?:15|3|63|48|255)\b)", "& 1"),
    ("mask", r"(0x[0-9a-f]*f[0-9a-f]*u)\b", "0x1u"),
    ("shift", r"(>> [1-8]\b)", ">> 0"),
    ("bound", r"( < )(?:n|k|m|rows|last|end|count|dim|v_dim|heads|experts|seen)\b", " <= "),
    ("bound", r"( >= )(?:n|k|m|rows|last|end|count|dim|heads|experts|seen)\b", " > "),
    ("lane", r"(offset >>= 1)", "offset >>= 2"),
    ("start", r"(= 16; offset)", "= 8; offset"),
    ("sign", r"(-INF)", "0.0f"),
)
# Survivors that are no mistakes, by source and a part of the line.
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("norm.cu", "first + each < n ? first + each : n", "equal where they are equal"),
    ("attention.cu", "DIMS / 8 + 4", "padding, so that lanes meet different banks"),
    ("attention.cu", "u32 weights[KEYS / 16]", "an array longer than what is used of it"),
    ("sort.cu", "Pick best = {-INF, -1}", "of no pick nobody looks at the value"),
    ("sort.cu", "begin + each < n ? begin + each : n", "equal where they are equal"),
    ("sort.cu", "best.value = -INF;", "of no pick nobody looks at the value"),
    ("attention.cu", "at < count && at < seen_from", "of rows that take no part"),
    ("rope.cu", "first + HEADS < heads ? first + HEADS : heads", "equal where they are equal"),
)


@dataclass(frozen=True)
class Mutant:
    """One change of one line; columns of the line."""

    file: str
    line: int
    kind: str
    before: str
    after: str


def mutants(file: str) -> Iterator[Mutant]:
    """Every place of a source that a change fits; comments stay."""
    for number, text in enumerate(kernels.text(file).split("\n")):
        code = text.split("//")[0]
        if code.lstrip().startswith("#") or code.strip().startswith("KERNEL"):
            continue
        for kind, pattern, replacement in CHANGES:
            for m in re.finditer(pattern, code):
                changed = text[: m.start(1)] + replacement + text[m.end(1) :]
                if changed != text:
                    yield Mutant(file, number, kind, text, changed)


def apply(mutant: Mutant) -> None:
    """Change what `kernels.text` gives in this process, and where its objects are kept."""
    whole = kernels.text(mutant.file).split("\n")
    whole[mutant.line] = mutant.after
    original, changed = kernels.text, "\n".join(whole)
    kernels.text = lambda file: changed if file == mutant.file else original(file)  # type: ignore[assignment]
    cuda_host.BUILT = Path(tempfile.mkdtemp(prefix="mutant-"))


def fate(mutant: Mutant) -> str:
    """What became of the mutant, in a fork: "caught" by a test that fails, "endless" where the
    tests did not end in LIMIT, or "survives"."""
    child = os.fork()
    if not child:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            apply(mutant)
            files, chosen = TESTS[mutant.file]
            status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", files, "-k", chosen])
            os.system(f"rm -rf {cuda_host.BUILT}")
            os._exit(int(status))
        finally:
            os._exit(1)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(LIMIT)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "endless"
    return "caught" if status else "survives"


def explanation(mutant: Mutant) -> str:
    """Why a survivor is no mistake; "" where nobody has said."""
    return next(
        (why for f, part, why in EXPLAINED if f == mutant.file and part in mutant.before), ""
    )


def main() -> int:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", help="sources, by comma")
    parser.add_argument("--kind", default="", help="barrier, index, mask, ..")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", help="of the places, in order")
    parser.add_argument("--list", action="store_true", help="count the places and end")
    asked = parser.parse_args()
    os.chdir(ROOT)
    files = asked.only.split(",") if asked.only else list(TESTS)
    places = [m for f in files for m in mutants(f) if asked.kind in ("", m.kind)]
    if asked.list:
        print(f"{len(places)} places in {len(files)} sources")
        return 0
    part, parts = (int(n) for n in asked.part.split("/"))
    places = places[part - 1 :: parts]
    drawn = random.Random(asked.seed).sample(places, min(asked.count, len(places)))
    fates: Counter[str] = Counter()
    left = 0
    for m in drawn:
        fates[found := fate(m)] += 1
        if found == "caught":
            continue
        why = explanation(m) if found == "survives" else found
        left += not why
        print(f"{m.file}:{m.line + 1} {m.kind} {found}{': ' + why if why else ''}\n"
              f"  - {m.before.strip()}\n  + {m.after.strip()}", flush=True)  # fmt: skip
    counts = ", ".join(f"{n} {what}" for what, n in sorted(fates.items()))
    print(f"{len(drawn)} of {asked.only or 'all'} {asked.part}: {counts}; {left} not explained")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
