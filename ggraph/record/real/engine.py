"""A llama.cpp of our own to play with: fetched through pip, built once, changed one statement at a
time and built again.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ggraph import kept
from ggraph.env import cache_dir, usable_cores
from ggraph.errors import InputError
from ggraph.record.plugin import fetch_sources
from ggraph.record.real.mutants import MUTANTS, NEW, Mutant

# Small code is compiled in two thirds of the time, and what is played here waits for nobody.
OPTIONS = (
    "CMAKE_BUILD_TYPE=MinSizeRel LLAMA_CURL=OFF LLAMA_OPENSSL=OFF LLAMA_BUILD_TESTS=OFF "
    "LLAMA_BUILD_WEBUI=OFF LLAMA_BUILD_UI=OFF LLAMA_BUILD_COMMIT=unknown LLAMA_BUILD_NUMBER=1"
)


@dataclass(frozen=True)
class Build:
    """A build of one version: `whole` are its sources, `sources` a copy that may be changed,
    `folder` what comes out."""

    version: str
    whole: Path
    sources: Path
    folder: Path

    def program(self, name: str) -> Path:
        """The path of a program, which may not have been built yet."""
        return self.folder / "bin" / name

    def make(self, *targets: str) -> None:
        """Build these. InputError with the compiler's first complaint."""
        jobs = ["--parallel", str(usable_cores()), "--target", *targets]
        _run(["cmake", "--build", str(self.folder), *jobs])

    @contextmanager
    def changed(self, mutant: Mutant, *targets: str) -> Iterator[None]:
        """The build with a fault in it; afterwards the sources are whole again (not built)."""
        text = (self.whole / mutant.file).read_text()
        (self.sources / mutant.file).write_text(mutant.applied(text, self.version))
        try:
            self.make(*targets)
            yield
        finally:
            self.mend()

    def mend(self) -> None:
        """Make the sources whole: a process that was killed leaves its fault behind."""
        for name in {m.file for m in MUTANTS if self.version in m.which}:
            text = (self.whole / name).read_bytes()
            if (self.sources / name).read_bytes() != text:
                (self.sources / name).write_bytes(text)


def build(version: str, *targets: str) -> Build:
    """The build of a version, made or brought up to date. It takes minutes the first time."""
    if shutil.which("cmake") is None:
        raise InputError("no cmake here: it is needed to build llama.cpp")
    home = cache_dir() / "record" / f"build-{version}"
    made = Build(version, fetch_sources(version), home / "source", home / "build")
    if not kept.ours(made.sources):
        partly = home / "partly"
        kept.make_folder(home)
        shutil.rmtree(partly, ignore_errors=True)
        shutil.copytree(made.whole, partly)
        partly.rename(made.sources)
    made.mend()
    if not (made.folder / "CMakeCache.txt").is_file():
        options = [f"-D{o}" for o in OPTIONS.split()]
        _run(["cmake", "-S", str(made.sources), "-B", str(made.folder), *options])
    made.make(*targets)
    return made


def completion(version: str) -> str:
    """The program that completes a prompt, as each version calls it."""
    return "llama-completion" if version == NEW else "llama-cli"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        first = next((x for x in lines if "error" in x.lower()), lines[-1] if lines else "")
        raise InputError(f"{' '.join(command[:3])} failed: {first}")
