"""Mutation testing of the CUDA kernels on the stand-in: is every mistake in them seen?

    nice python scripts/mutate_kernels.py [--only tiles.cu] [--kind barrier] [--journal FILE]
                                          [--list] [--write]

Changes one thing in one kernel source at a time, in memory: drops a barrier, shifts an index,
narrows a mask or a shift, turns a bound, a step or a sign, takes another constant, skips lanes of a
reduction; and runs the tests of that source until one fails, each mutant in a fork of this process;
inside a block type those of that type. Prints each survivor with its line before and after;
EXPLAINED below says why some of them are no mistakes. Status 1 where one is left that is not. What
the journal knows of is not run again, so a run may be cut off; `--write` counts what it knows of
the sources as they are now into tests/golden/kernel_mutants.json.
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cuda_host import compiler

from ggraph.backends.cuda import kernels

TABLE = ROOT / "tests" / "golden" / "kernel_mutants.json"
LIMIT = 120  # seconds of a processor for a mutant's tests; one that never ends is caught
OPS, PRODUCTS = "tests/test_cuda_ops.py", "tests/test_cuda_matmul.py"
EDGES, GATED = "tests/test_cuda_edges.py", "tests/test_gated.py"
JOINED, CODES = "tests/test_joined.py", "tests/test_cuda_codes.py"
# Tests of each source: files and a `-k` expression.
TESTS: dict[str, tuple[str, str]] = {
    "tiles.cu": (
        f"{JOINED} {GATED} {PRODUCTS}",
        "its_own or (against or pair or experts or gpu_gives) and "
        "(q4_k or q6_k or bf16 or q4_0 or f16 or q5_0 or q3_k or iq4_nl or q8_0)",
    ),
    "codes.cuh": (
        f"{JOINED} {GATED} {PRODUCTS}",
        "(against or pair or experts or gpu_gives) and "
        "(q4_k or q6_k or q4_0 or q2_k or q5_1 or iq4_nl or q8_0)",
    ),
    "pieces.cuh": (f"{PRODUCTS} {OPS}", "against and (f16 or bf16) or any_size"),
    "parts.cuh": (f"{CODES} {PRODUCTS} {OPS}", "codes or against and bf16 or norm or swiglu"),
    "parts.cu": (f"{CODES} {PRODUCTS}", "codes or (against or begin) and bf16"),
    "lanes.cu": (PRODUCTS, "against and f32"),
    "lanes.cuh": (PRODUCTS, "against and f32 or not_exist"),
    "matmul.cu": (f"{PRODUCTS} {EDGES}", "decoded or not_exist or library or without_tensor"),
    "blocks.cuh": (f"{PRODUCTS} {EDGES}", "decoded or against or library or next_begins"),
    "iquants.cuh": (PRODUCTS, "(decoded or against) and iq"),
    "experts.cu": (f"tests/test_cuda_experts.py {PRODUCTS} {EDGES}", "pair or experts"),
    "attention.cu": (
        f"{OPS} {EDGES}",
        "attention and not many or flash or any_size or neighbour or far_below or list or zeros",
    ),
    "prompt.cu": (f"{OPS} {EDGES}", "attention_of_many or far_below or sink_of_zero"),
    "mixtures.cu": (f"{OPS} {EDGES}", "moe or add_id or swiglu or do_not_exist or just_behind"),
    "recurrent.cu": (OPS, "conv or delta or rule"),
    "norm.cu": (f"{OPS} {EDGES}", "norm or sum or mean or many_warps"),
    "products.cu": (OPS, "mul_mat"),
    "rope.cu": (OPS, "rope or outside_the_cache"),
    "rows.cu": (OPS, "rows or do_not_exist"),
    "softmax.cu": (f"{OPS} {EDGES}", "soft_max or far_below"),
    "draw.cu": (
        "tests/ops/test_draw.py",
        "not 40.0 and one_token and (0.3 or 0.0 or 64 or 100) or any_length and (33 or 5000)",
    ),
    "sort.cu": (f"{OPS} {EDGES}", "top_k or arg or ordered or no_number or long_row"),
    "elementwise.cu": (f"{OPS} {EDGES}", "agree or strided or digits or give"),
    "units.cuh": (f"{OPS} {GATED}", "agree or gpu_gives and q8_0"),
    "common.cuh": (
        f"{OPS} {EDGES} {PRODUCTS}",
        "norm or sum or cast or rows or soft_max or many_warps or any_warps or are_none "
        "or against and q4_0",
    ),
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
    ("bound", r"( < )blocks\b", " <= "),
    ("step", r"( -= )\w", " += "),
    ("step", r"( \+= )m \*", " -= "),
    ("step", r"(, \w+ = \w+\.\w+\[i\])", ""),
    ("lane", r"(offset >>= 1)", "offset >>= 2"),
    ("start", r"(= 16; offset)", "= 8; offset"),
    ("sign", r"(-INF)", "0.0f"),
    ("sign", r"( < )0\.0f", " > "),
    ("sign", r"( > )0\.0f", " < "),
    ("formula", r"(?:case \d+|default): return .*?( [+*/] )", " - "),
    ("constant", r"(\d+\.\d{3,})", "0.625"),
)
# Survivors that are no mistakes, by source and a part of the line.
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("norm.cu", "first + each < n ? first + each : n", "equal where they are equal"),
    ("tiles.cu", "first < end; first += ROWS", "a pass of no pairs stores nothing"),
    ("tiles.cu", "first + i < end ? first + i : end - 1", "sums of what is no pair are not stored"),
    ("tiles.cu", "if (expert < experts) {", "what no warp wrote is NaN in the stand-in, too"),
    ("tiles.cu", "g < last ? g : last", "equal where they are equal"),
    ("tiles.cu", "ROWS * j + g < rows.last", "equal where they are equal"),
    ("tiles.cu", "(int)(k / 32), segments", "segments behind the end have no groups"),
    ("tiles.cu", "% 16 == 0;  // where", "rows that may begin anywhere may begin there"),
    ("tiles.cu", "[ROWS][TILE + 1]", "padding, so that lanes meet different banks"),
    ("tiles.cu", "WIDE_TILES * TILE + 4]", "padding, so that lanes meet different banks"),
    ("tiles.cu", "row_of(i % 4)", "which takes i % 2 of it"),
    ("experts.cu", "id < experts ? id : (int)experts", "equal where they are equal"),
    ("experts.cu", "first < end; first += 32", "lanes that have no pair do nothing"),
    ("attention.cu", "DIMS / 8 + 4", "padding, so that lanes meet different banks"),
    ("attention.cu", "PART + 4", "padding, so that lanes meet different banks"),
    ("parts.cuh", "4 * warp_of(i) < k", "a warp that has nothing gives nothing"),
    ("attention.cu", "/ 32 * 32) continue;  // nobody", "zeros that nobody reads"),
    ("attention.cu", "u32 words[KEYS / 8][STORED]", "an array longer than what is used of it"),
    ("attention.cu", "u32 weights[KEYS / 16]", "an array longer than what is used of it"),
    ("sort.cu", "begin + each < n ? begin + each : n", "equal where they are equal"),
    ("prompt.cu", "32 * i < dim && row", "a chunk behind a row's end is zeros"),
    ("recurrent.cu", "certain[slot] < m ? certain[slot] : m - 1", "a step has no such row"),
    ("common.cuh", "readers of an earlier use", "of the kernels that there are none has one"),
    ("blocks.cuh", "if ((unsigned long long)p & 15) {", "values begin at whole sixteens"),
    ("blocks.cuh", "if (BYTES % 4 == 0) return word_at(p);", "the same word by narrower loads"),
    ("blocks.cuh", "if (BYTES % 2 == 0) return half_word", "the same word by narrower loads"),
    ("elementwise.cu", "if (i >= count) return;", "place_of: the first element once more"),
    ("lanes.cu", "if (n0 >= n) return;", "outputs behind the end are passed over one by one"),
    ("matmul.cu", "if (n0 >= n) return;", "outputs behind the end are passed over one by one"),
    ("lanes.cuh", "chunks = (k + 7) / 8", "chunks behind the end are zeros"),
    ("draw.cu", "for (int at = 0; at < k; ++at) {", "a chance nobody wrote is NaN in the stand-in"),
    ("draw.cu", "for (int i = 0; i < k; ++i) {", "a chance nobody wrote is NaN in the stand-in"),
    ("rope.cu", "first < HEADS ? (int)heads - first : HEADS", "equal where they are equal"),
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
    compiler.BUILT = Path(tempfile.mkdtemp(prefix="mutant-"))


def tests_of(mutant: Mutant) -> tuple[str, str]:
    """Files and a `-k` expression; inside a block type's struct the tests of that type alone."""
    files, chosen = TESTS[mutant.file]
    if mutant.file in ("blocks.cuh", "iquants.cuh"):
        above = kernels.text(mutant.file).split("\n")[: mutant.line + 1]
        heads = [line for line in above if re.match(r"(struct \w+ |DEV |template)", line)]
        if found := re.match(r"struct (\w+)", heads[-1]):
            return files, f"({chosen}) and {found[1]}"
    return files, chosen


def fate(mutant: Mutant) -> str:
    """What became of the mutant, in a fork: "caught" by a test that fails, "endless" where the
    tests did not end in LIMIT, or "survives". "untested" where no test was chosen."""
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            apply(mutant)
            files, chosen = tests_of(mutant)
            status = pytest.main(
                ["-x", "-q", "-p", "no:cacheprovider", *files.split(), "-k", chosen]
            )
            shutil.rmtree(compiler.BUILT)
            os._exit(int(status))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return "endless"
    ended = os.waitstatus_to_exitcode(status)
    if ended == pytest.ExitCode.NO_TESTS_COLLECTED:
        return "untested"
    return "caught" if ended else "survives"


def explanation(mutant: Mutant) -> str:
    """Why a survivor is no mistake; "" where nobody has said."""
    return next(
        (why for f, part, why in EXPLAINED if f == mutant.file and part in mutant.before), ""
    )


def known(journal: Path | None) -> dict[Mutant, str]:
    """Fates that a journal has, one JSON object a line."""
    if journal is None or not journal.is_file():
        return {}
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return {Mutant(**line["mutant"]): line["fate"] for line in lines}


def tell(m: Mutant, found: str) -> bool:
    """Print a mutant that no test caught; whether nobody has said why."""
    why = explanation(m) if found == "survives" else ""
    print(f"{m.file}:{m.line + 1} {m.kind} {found}{': ' + why if why else ''}\n"
          f"  - {m.before.strip()}\n  + {m.after.strip()}", flush=True)  # fmt: skip
    return found in ("survives", "untested") and not why


def write(places: list[Mutant], fates: dict[Mutant, str]) -> None:
    """The committed table: of each source its places, and what became of them. A source of which
    no place is known keeps its row."""
    rows = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for file in sorted({m.file for m in fates}, key=list(TESTS).index):
        own = [m for m in places if m.file == file]
        counts = Counter(fates.get(m, "not run") for m in own)
        explained = sum(fates.get(m) == "survives" and bool(explanation(m)) for m in own)
        counts["survives"] -= explained
        rows[file] = {"places": len(own), **dict(sorted(counts.items())), "explained": explained}
        rows[file] = {k: n for k, n in rows[file].items() if n}
    lines = ",\n".join(f"  {json.dumps(f)}: {json.dumps(row)}" for f, row in rows.items())
    TABLE.write_text(f"{{\n{lines}\n}}\n")


def main() -> int:
    """Run what the journal does not know, print, count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", help="sources, by comma")
    parser.add_argument("--kind", default="", help="barrier, index, mask, ..")
    parser.add_argument("--journal", type=Path, help="of what is known; added to")
    parser.add_argument("--list", action="store_true", help="count the places and end")
    parser.add_argument("--write", action="store_true", help="the journal into the table, and end")
    asked = parser.parse_args()
    os.chdir(ROOT)
    files = asked.only.split(",") if asked.only else list(TESTS)
    places = [m for f in files for m in mutants(f) if asked.kind in ("", m.kind)]
    fates = known(asked.journal)
    if asked.write:
        write(places, fates)
        return 0
    if asked.list:
        left = sum(m not in fates for m in places)
        print(f"{len(places)} places in {len(files)} sources, {left} not run")
        return 0
    unexplained = 0
    for m in places:
        if m not in fates:
            fates[m] = fate(m)
            if asked.journal:
                with asked.journal.open("a") as file:
                    file.write(json.dumps({"mutant": asdict(m), "fate": fates[m]}) + "\n")
        if fates[m] != "caught":
            unexplained += tell(m, fates[m])
    counts = Counter(fates[m] for m in places)
    text = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    print(f"{len(places)} of {asked.only or 'all'}: {text}; {unexplained} not explained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
