"""Peers that are built for this very processor: fetched, compiled and kept under the cache folder.
With `GGRAPH_VECTORS=avx2` they have no more than that, and a folder of their own.

A wheel is compiled for all processors, and what it leaves out (512 bits, tiles of AMX) would
flatter us. llama.cpp comes as the source distribution of its Python binding, ik_llama.cpp by git.
OpenVINO makes its code as it runs: its wheel is installed in an environment of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ggraph import InputError, cache_dir, kept
from ggraph.env import vector_limit
from ggraph.record.plugin import COMPILERS, fetch_sources

NATIVE = Path(__file__).parent / "native" / "peer.cpp"
MENDED = NATIVE.with_name("ldtilecfg.h")  # what gcc 12 makes of AMX ends in a fault
FLAGS = ("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=ON",
         "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_CURL=OFF")  # fmt: skip
PARTS = ("LLAMA_BUILD_SERVER", "LLAMA_BUILD_TOOLS")  # that the server is one of
SERVER = "llama-server"
Report = Callable[[str], None]


@dataclass(frozen=True)
class Origin:
    """Where a peer comes from; `version` is of the source distribution, a commit, or of `wheel`."""

    version: str
    wheel: str = ""
    git: str = ""
    defines: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


ORIGINS = {
    "llama.cpp": Origin("0.3.36", flags=(f"CMAKE_CXX_FLAGS=-include {MENDED}",)),
    "ik_llama.cpp": Origin(
        "8337e4cd3861406fc04e0854b1409cd1b027fbc9",
        git="https://github.com/ikawrakow/ik_llama.cpp.git",
        defines=("-DIK",),
        flags=("GGML_IQK_FA_ALL_QUANTS=OFF",),  # caches of F16 and Q8_0; ten others compile long
    ),
    "openvino": Origin("2026.4.1.0", wheel="openvino-genai"),
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A peer that can be started: the command that a model's path follows, what it was made of,
    its server where that was asked for."""

    command: tuple[str, ...]
    version: str
    server: str | None = None


def home_of(name: str) -> Path:
    """Where a peer is kept."""
    limit = vector_limit()
    return cache_dir() / "bench" / "peers" / (f"{name}-{limit}" if limit else name)


def built(name: str) -> Built | None:
    """The peer as it was installed, None where it was not. InputError where another user may have
    done that."""
    home = home_of(name)
    note, library, python = home / "built.json", home / "peer.so", home / "venv" / "bin" / "python"
    if not kept.ours(note) or not (kept.ours(library) or kept.ours(python)):
        return None
    said = json.loads(note.read_text())
    started = (
        (str(python), "-m", f"{__package__}.peer_openvino")
        if python.is_file()
        else (sys.executable, "-m", f"{__package__}.peer_library", str(library))
    )
    return Built(started, str(said["version"]), said.get("server"))


def install(
    name: str, source: Path | None, build: Path | None, report: Report, *, server: bool = False
) -> Built:
    """Fetch, compile and keep a peer. `source`: a checkout that is there already; `build`: its
    folder for cmake; `server`: its server, too. InputError for an unknown name, and with the last
    line of what failed."""
    origin = ORIGINS.get(name)
    if origin is None:
        raise InputError(f"peer {name!r} is not one that is built; known: {', '.join(ORIGINS)}")
    limit = vector_limit()
    if limit == "avx512":
        raise InputError("a peer is built for all units of a processor, or for avx2")
    home, version = home_of(name), origin.version
    if origin.wheel:
        if source or build or server or limit:
            raise InputError(
                f"{name} is a wheel: it has no --source, --build or --server, and takes whatever "
                "units the processor has"
            )
        _environment(f"{origin.wheel}=={version}", home / "venv", report)
        return _noted(name, {"version": version})
    kept.make_folder(home)
    if source is None:
        report(f"fetching {name} {version[:8]}")
        source = fetched(origin, home / "source")
    folder = build or source / f"build{limit}"
    wanted = ("llama", SERVER) if server else ("llama",)
    files = ("libllama.so", SERVER) if server else ("libllama.so",)
    # Of another version, maybe, where the sources have gone on: cmake knows what is to do.
    if build is None or not all(list(folder.rglob(file)) for file in files):
        report(f"compiling {name} with {os.cpu_count()} processes: some minutes")
        native = f"GGML_NATIVE={'OFF' if limit else 'ON'}"  # which is AVX2, where it is off
        flags = [*FLAGS, native, *(f"{part}={'ON' if server else 'OFF'}" for part in PARTS)]
        given = [f"-D{f}" for f in (*flags, *origin.flags)]
        _run("cmake", "-S", str(source), "-B", str(folder), *given)
        jobs = str(os.cpu_count() or 1)
        _run("cmake", "--build", str(folder), "--target", *wanted, "-j", jobs)
    _compile(origin, source, folder, home / "peer.so")
    told = f"{version[:8]}, {limit or 'native'} build"
    made: dict[str, str | None] = {"version": told, "source": str(source)}
    made["server"] = next((str(p) for p in folder.rglob(SERVER) if p.is_file()), None)
    return _noted(name, made)


def _noted(name: str, made: dict[str, str | None]) -> Built:
    (home_of(name) / "built.json").write_text(json.dumps(made) + "\n")
    found = built(name)
    assert found is not None, f"{home_of(name)} has nothing that starts"
    return found


def _environment(wheel: str, folder: Path, report: Report) -> None:
    """A new environment with a wheel in it."""
    report(f"installing {wheel} in an environment of its own")
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", wheel)


def fetched(origin: Origin, home: Path) -> Path:
    """The sources; those of a commit in a checkout at `home`, without their history."""
    if not origin.git:
        return fetch_sources(origin.version)
    git = ("git", "-C", str(home))
    _run("git", "init", "--quiet", str(home))
    _run(*git, "fetch", "--quiet", "--depth", "1", origin.git, origin.version)
    _run(*git, "checkout", "--quiet", "--force", "FETCH_HEAD")
    return home


def _compile(origin: Origin, source: Path, build: Path, target: Path) -> None:
    """The four functions against the headers of this very version."""
    compiler = next((c for c in COMPILERS if shutil.which(c)), None)
    if compiler is None:
        raise InputError(f"no C++ compiler here: one of {', '.join(COMPILERS)} is needed")
    libraries = [next(iter(sorted(build.rglob(f"lib{n}.so"))), None) for n in ("llama", "ggml")]
    given = [str(found) for found in libraries if found is not None]
    paths = [f"-Wl,-rpath,{Path(found).parent}" for found in given]
    includes = [f"-I{source / part}" for part in ("include", "ggml/include")]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        flags = ["-O2", "-std=c++17", "-fPIC", "-shared", *origin.defines, *includes]
        _run(compiler, *flags, str(NATIVE), "-o", str(made), *given, *paths)
        made.rename(target)


def _run(*command: str) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise InputError(f"{command[0]}: {error.strerror}") from None
    if run.returncode:
        raise InputError(f"{' '.join(command[:3])}: {_last(run.stderr.splitlines())}")


def _last(lines: Sequence[str]) -> str:
    told = [x for x in lines if "error" in x.lower()] or [x for x in lines if x.strip()]
    return told[-1][:300] if told else "failed without a word"
