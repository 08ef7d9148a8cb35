"""What NVIDIA's compiler made of the kernels: registers, memory of a thread's own, loads, loops.

    python scripts/machine_code.py            # against tests/golden/machine_code.json
    python scripts/machine_code.py --write    # after a change that is meant

The table says which sources it is of: only what has changed since is compiled, for every
architecture. Needs NVRTC and nvdisasm (both of the dev extras), no GPU. With another version of the
compiler the table says nothing, and everything is compiled. Status 1 where something got worse.
"""

import argparse
import hashlib
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
MOST_REGISTERS = 255  # of a thread, by the architecture
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


def digest(unit: Unit) -> str:
    """Of what a unit's machine code is made from, for all architectures."""
    whole = "\0".join(kernels.identity(unit, arch) for arch in ARCHES)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def stale() -> list[Unit]:
    """What the table has not seen compiled as it stands."""
    known = table()["compiled"]
    return [u for u in kernels.units() if known.get(str(u)) != digest(u)]


def checked(unit: Unit, arch: str) -> bytes:
    """The unit's machine code, with all its kernels, none of which wants too many registers."""
    code = kernels.code(unit, arch)
    found = {name: held["registers"] for name, held in resources(code).items()}
    wrong = {name: n for name, n in found.items() if n > MOST_REGISTERS}
    if found.keys() != kernels.signatures(unit.source).keys() or wrong:
        raise AssertionError(f"{unit} {arch}: kernels {sorted(found)}; too many registers: {wrong}")
    return code


def main() -> int:
    """Compile what has changed for every architecture; compare, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if disassembler() is None:
        print("nvdisasm is not installed: `pip install nvidia-cuda-nvdisasm`", file=sys.stderr)
        return 2
    changed = stale()
    jobs = [(u, a) for u in changed for a in ARCHES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = zip(jobs, pool.map(lambda j: checked(*j), jobs), strict=True)
        made = {(str(u), a): figures(code) for (u, a), code in codes if u in GATED}
    old = table()
    if asked.write:
        of = {f"{u} {a}": made.get((str(u), a)) for u in GATED for a in ARCHES}
        new = {
            "nvrtc": version(),
            "units": {n: old["units"][n] if f is None else f for n, f in of.items()},
            "compiled": {str(u): digest(u) for u in kernels.units()},
        }
        TABLE.write_text(_written(new))
        return 0
    if old["nvrtc"] != version():
        print(f"the table is of NVRTC {old['nvrtc']}, this is {version()}", file=sys.stderr)
        return 2
    grown = [w for (u, a), f in made.items() for w in worse(u, a, f)]
    print("\n".join(grown) or f"{len(changed)} units have changed, and nothing is worse")
    return 1 if grown else 0


def _written(new: dict[str, Any]) -> str:
    """The table as JSON with one unit a line."""
    parts = [f' "nvrtc": {json.dumps(new["nvrtc"])}']
    for key in ("units", "compiled"):
        lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in new[key].items())
        parts.append(f' "{key}": {{\n{lines}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
