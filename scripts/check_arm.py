"""The CPU's kernels on a 64-bit Arm that QEMU plays: tests, and a model's bits beside the host's.

    python scripts/check_arm.py FOLDER [TEST ...]

FOLDER is made once: Debian's Python and packages for aarch64, 600 MB. Needs a network, and on
Debian `apt install qemu-user-static debootstrap proot`. Without tests, those of `TESTS` are run
(half an hour), and the logits of a prompt and of some tokens behind it are computed here and there:
status 1 where a bit differs. How fast an Arm would be nobody learns from this.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
from dev import requirements

from models.run.fetch import fetch_default
from models.run.load import load

TESTS = (
    "tests/test_cpu_examples.py", "tests/test_cpu_matmul.py", "tests/test_cpu_gated.py",
    "tests/test_cpu_attention.py", "tests/test_cpu_nests.py", "tests/test_cpu_experts.py",
    "tests/test_cpu_elementwise.py", "tests/test_cpu_pool.py", "tests/test_cpu_delta_net.py",
    "tests/test_cpu_chains.py", "tests/test_row_bits.py", "tests/test_models_golden.py",
    "tests/test_cpu_judge.py::test_no_kernel_touches_a_byte_outside_its_buffers",
)  # fmt: skip
PACKAGES = "usr/local/lib/python3.11/dist-packages"  # where Debian's Python looks for them
BESIDE = ("hypothesis", "pytest", "gguf")  # of the extra for developers, what these tests import
PLATFORMS = [f"manylinux_2_{n}_aarch64" for n in (17, 27, 28)] + ["manylinux2014_aarch64"]
# As Linux tells of a Neoverse N1: LLVM finds the processor's name by it.
CPUINFO = """processor\t: 0
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
# QEMU keeps a record of every page that is promised: gigabytes for what is promised usually.
PLUGIN = "from ggraph.backends.cpu.runtime import arrays\n\narrays.VAST = (1 << 28,)\n"


def python(folder: Path) -> list[str]:
    """The command that runs Python for Arm, on this file system but for the system's own files."""
    seen = ("/proc", "/dev", f"{folder}/cpuinfo:/proc/cpuinfo", str(ROOT), str(folder))
    shown = [f"--bind={place}" for place in seen]
    play = ["proot", "--qemu=qemu-aarch64-static", f"--rootfs={folder}/root", *shown]
    return [*play, f"--cwd={ROOT}", "/usr/bin/python3.11"]


def make(folder: Path) -> None:
    """What `python` needs."""
    root = folder / "root"
    for tool in ("qemu-aarch64-static", "debootstrap", "proot"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not here: apt install qemu-user-static debootstrap proot")
    base = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase"]
    run([*base, "--include=python3,libstdc++6", "bookworm", str(root)])
    for package in root.glob("var/cache/apt/archives/*.deb"):
        run(["dpkg", "-x", str(package), str(root)])
    (folder / "cpuinfo").write_text(CPUINFO)
    packages = root / PACKAGES
    wanted = [r for r in requirements("dev") if r.startswith(BESIDE) or r in requirements(None)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages)]
    only = [f"--platform={p}" for p in PLATFORMS]
    run([*pip, *only, "--python-version=3.11", "--only-binary=:all:", *wanted])
    (packages / "emulated.py").write_text(PLUGIN)


def run(command: Sequence[str]) -> None:
    """Ends this program where the command fails."""
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(f"{command[0]} ended with status {status}")


def bits(model: Path) -> Iterator[str]:
    """A line for the logits of a prompt's rows and one for each of some greedy tokens."""
    with closing(load(model, threads=1)) as m:
        ids = m.prompt_ids("Write one sentence about the sea.")
        logits = m.runner.text(ids, every=True).logits
        for _ in range(8):
            token = int(logits[-1].argmax())
            yield f"{token} {hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()}"
            logits = m.runner.follow(token).logits


def main() -> int:
    """Tests, then bits; 1 where either fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--bits", type=Path, help=argparse.SUPPRESS)  # what is run over there
    given = parser.parse_args()
    if given.bits is not None:
        print("\n".join(bits(given.bits)))
        return 0
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "root" / PACKAGES / "emulated.py").exists():
        shutil.rmtree(folder / "root", ignore_errors=True)
        make(folder)
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    there = {**os.environ, "PYTHONPATH": paths, "GGRAPH_CACHE": str(folder / "cache")}
    options = ["-q", "-p", "emulated", "-p", "no:cacheprovider"]
    tests = [*python(folder), "-m", "pytest", *options, *(given.tests or TESTS)]
    status = subprocess.run(tests, cwd=ROOT, env=there, check=False).returncode
    if given.tests:
        return status
    model = folder / "model.gguf"
    shutil.copy(fetch_default(), model)
    ask = [*python(folder), __file__, str(folder), f"--bits={model}"]
    heard = subprocess.run(ask, env=there, capture_output=True, text=True, check=True).stdout
    same = heard.splitlines() == list(bits(model))
    print(f"logits of {model.name} are {'the same bits' if same else 'others'} on both")
    return status or int(not same)


if __name__ == "__main__":
    sys.exit(main())
