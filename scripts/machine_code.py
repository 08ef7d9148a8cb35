"""What NVIDIA's compiler made of the kernels: registers, memory of a thread's own, loads, loops.

    python scripts/machine_code.py            # against tests/golden/machine_code.json
    python scripts/machine_code.py --all      # and compile every other instance, for all of them
    python scripts/machine_code.py --write    # after a change that is meant

Needs NVRTC and nvdisasm (both of the dev extras), no GPU. Figures of one compiler's version; with
another the table says nothing. Status 1 where something got worse.
"""

import argparse
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone need not be installed

from ggraph.backends.cuda import kernels, nvrtc
from ggraph.backends.cuda.kernels import Unit

TABLE = ROOT / "tests" / "golden" / "machine_code.json"
ARCHES = ("sm_80", "sm_90", "sm_100")
GATED = [Unit(s, t) for s, t in (
    ("tiles", "bf16"), ("tiles", "q4_k"), ("tiles", "q6_k"), ("tiles", "q8_0"),
    ("tiles", "iq2_xxs"),
    ("attention", "f16"), ("prompt", "f16"), ("draw", ""), ("sort", ""),
)]  # fmt: skip
REGISTERS, FRAME = 0x2F, 0x11  # attributes of .nv.info
SYMBOL_BYTES = 24
# Figures that must not grow, and those that must not shrink.
COSTS = ("registers", "frame", "local", "loop", "narrow")
GAINS = ("wide",)


def sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every section of an ELF file that has bytes."""
    start = struct.unpack_from("<Q", code, 40)[0]
    size, count, names = struct.unpack_from("<HHH", code, 58)
    heads = [struct.unpack_from("<IIQQQQ", code, start + i * size) for i in range(count)]
    base = heads[names][4]
    for name, kind, _, _, offset, length in heads:
        if kind != 8:  # no bytes: shared memory
            end = code.index(b"\0", base + name)
            yield code[base + name : end].decode(), code[offset : offset + length]


def resources(code: bytes) -> dict[str, dict[str, int]]:
    """Registers and bytes of the frame of each kernel, from the ELF's own notes."""
    held = dict(sections(code))
    strings = held[".strtab"]
    found: dict[str, dict[str, int]] = {}
    at, info = 0, held[".nv.info"]
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == 4 and attribute in (REGISTERS, FRAME):
            symbol, value = struct.unpack_from("<II", info, at + 4)
            name = struct.unpack_from("<I", held[".symtab"], symbol * SYMBOL_BYTES)[0]
            kernel = strings[name : strings.index(b"\0", name)].decode()
            key = "registers" if attribute == REGISTERS else "frame"
            if "$" not in kernel:  # the compiler's own helpers have such names
                found.setdefault(kernel, {})[key] = value
        at += 4 + (size if form == 4 else 0)
    return found


def disassembler() -> str | None:
    """nvdisasm of an installed wheel."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = [p for r in roots for p in r.glob("*/bin/nvdisasm")]
    for path in found:
        if not os.access(path, os.X_OK):
            path.chmod(0o755)
    return str(found[0]) if found else None


def instructions(code: bytes) -> dict[str, list[str]]:
    """The lines of each kernel: instructions, and labels that end in a colon."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(code)
        command = [str(disassembler()), "-c", "-ndf", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"\.text\.(\w+):", line):
            lines = found.setdefault(head[1], [])
        elif label := re.match(r"(\.L_x_\d+):", line):
            lines.append(f"{label[1]}:")
        elif step := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*);", line):
            lines.append(step[1].strip())
    return found


def loop(lines: list[str]) -> list[str]:
    """The innermost loop with the most products of fragments, of equals the longest: from a label
    to the branch back to it."""
    at = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    spans = []
    for i, line in enumerate(lines):
        target = re.search(r"\bBRA.*`\((\.L_x_\d+)\)", line)
        if target and at.get(target[1], i) < i:
            spans.append((at[target[1]], i + 1))
    inner = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    bodies = [[line for line in lines[a:b] if not line.endswith(":")] for a, b in inner]
    return max(bodies, key=lambda body: (sum("MMA" in x for x in body), len(body)), default=[])


def figures(code: bytes) -> dict[str, dict[str, int]]:
    """Of each kernel: registers, frame (bytes of local memory), local accesses, and of its inner
    loop instructions, products of fragments, 16-byte and narrower loads."""
    found = resources(code)
    for kernel, lines in instructions(code).items():
        inner = loop(lines)
        loads = [line for line in inner if "LDG" in line]
        wide = sum(".128" in line for line in loads)
        found[kernel] |= {
            "local": sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines),
            "loop": len(inner), "mma": sum("MMA" in line for line in inner), "wide": wide,
            "narrow": len(loads) - wide,
        }  # fmt: skip
    return found


def table() -> dict[str, Any]:
    """What is committed."""
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def version() -> str:
    """The compiler's."""
    return ".".join(map(str, nvrtc.version()))


def worse(unit: str, arch: str, found: dict[str, dict[str, int]]) -> list[str]:
    """What is worse than in the table, one line each; `found` may lack figures."""
    known = table()["units"][f"{unit} {arch}"]
    lines = [f"{unit} {arch}: kernels {sorted(known)}"] if set(known) != set(found) else []
    for kernel, now in found.items():
        for key in (*COSTS, *GAINS):
            before, here = known.get(kernel, {}).get(key), now.get(key)
            if before is not None and here is not None:
                grown = here < before if key in GAINS else here > before
                lines += [f"{unit} {arch} {kernel}: {key} {before} -> {here}"] if grown else []
    return lines


def main() -> int:
    """Compile the gated units for every architecture; compare, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all", action="store_true", help="compile every other instance as well")
    asked = parser.parse_args()
    if disassembler() is None:
        print("nvdisasm is not installed: `pip install nvidia-cuda-nvdisasm`", file=sys.stderr)
        return 2
    jobs = [(u, a) for u in GATED for a in ARCHES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda j: figures(kernels.code(*j)), jobs))
        others = [(u, a) for u in kernels.units() for a in ARCHES if asked.all and u not in GATED]
        for (unit, arch), code in zip(
            others, pool.map(lambda j: kernels.code(*j), others), strict=True
        ):
            most = max(held["registers"] for held in resources(code).values())
            print(f"{unit} {arch}: up to {most} registers")
    if asked.write:
        units = {f"{u} {a}": f for (u, a), f in zip(jobs, made, strict=True)}
        lines = ",\n".join(f'  "{n}": {json.dumps(f)}' for n, f in units.items())
        TABLE.write_text(f'{{\n "nvrtc": "{version()}",\n "units": {{\n{lines}\n }}\n}}\n')
        return 0
    if table()["nvrtc"] != version():
        print(f"the table is of NVRTC {table()['nvrtc']}, this is {version()}", file=sys.stderr)
        return 2
    grown = [w for (u, a), f in zip(jobs, made, strict=True) for w in worse(str(u), a, f)]
    print("\n".join(grown) or f"{len(jobs)} units: nothing is worse")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
