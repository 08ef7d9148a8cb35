"""The plugin that plays the devices, compiled against the very ggml that a program uses.

ggml's backend interface changes from version to version, so the plugin (native/) is compiled with
the user's compiler against the headers of that version, once, and kept in the cache.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ggraph import kept
from ggraph.env import cache_dir
from ggraph.errors import InputError

NATIVE = Path(__file__).parent / "native"
IMPL = "ggml/src/ggml-backend-impl.h"
COMPILERS = ("c++", "g++", "clang++")
REGISTER = b"ggml_backend_register"
SDIST = "llama-cpp-python"  # its source distribution holds llama.cpp whole


@dataclass(frozen=True)
class Engine:
    """A ggml that a program uses: the shared libraries that define it, and its sources."""

    libraries: tuple[Path, ...]
    sources: Path  # the folder that has ggml/


def engine_of(program: Path, sources: Path | None = None) -> Engine:
    """The ggml that an executable or a shared library loads. InputError where there is none.

    `sources`: where its headers are; otherwise the folders above it and the build's own record of
    its sources are tried.
    """
    libraries = _libraries(program)
    found = sources if sources is not None else _sources(libraries[0].parent)
    if found is None or not (found / IMPL).is_file():
        raise InputError(
            f"{program}: no {IMPL} in {found or 'the folders above'}; name the sources that it was "
            f"built from with --source, or the version of {SDIST} that has them"
        )
    return Engine(libraries, found)


def _libraries(program: Path) -> tuple[Path, ...]:
    if program.name.startswith("libggml"):
        return libraries_in(program.resolve().parent)
    try:
        with program.open("rb") as file:
            is_script = file.read(2) == b"#!"
    except OSError as error:
        raise InputError(f"{program}: {error.strerror}") from None
    run = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    found = re.search(r"libggml-base\.so\S* => (\S+)", run.stdout)
    if found is not None:
        return libraries_in(Path(found[1]).resolve().parent)
    if (
        ".so" in program.name and REGISTER in program.read_bytes()
    ):  # a Python module with ggml in it
        return (program.resolve(),)
    if is_script:
        raise InputError(
            f"{program}: a script is no program that loads ggml; name the program that it starts, "
            "or of Python's see ggraph.record.ggml"
        )
    raise InputError(
        f"{program}: it does not load libggml-base.so (built with BUILD_SHARED_LIBS=OFF, or no "
        "ggml program): there is nothing to play a device for"
    )


def _sources(libraries: Path) -> Path | None:
    for folder in (libraries, *libraries.parents):
        if (folder / IMPL).is_file():
            return folder
        cache = folder / "CMakeCache.txt"
        if cache.is_file() and (home := _home(cache.read_text(errors="replace"))) is not None:
            return home
    return None


def _home(cmake_cache: str) -> Path | None:
    found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cmake_cache, re.M)
    if found is None:
        return None
    home = Path(found[1])
    nested = home / "vendor" / "llama.cpp"  # llama-cpp-python builds it from there
    return nested if (nested / IMPL).is_file() else home


def fetch_sources(version: str) -> Path:
    """llama.cpp as in the sdist of llama-cpp-python `version`, fetched once through pip."""
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise InputError(f"{version!r} is no version of {SDIST}")
    home = cache_dir() / "record" / f"source-{version}"
    if not kept.ours(home / IMPL):
        with tempfile.TemporaryDirectory() as folder:
            _unpack(_download(version, Path(folder)), home)
    return home


def _download(version: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--dest", str(into), f"{SDIST}=={version}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(into.glob("*.tar.gz"))
    if run.returncode or not found:
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"pip could not fetch {SDIST}=={version}: {last}")
    return found[0]


def _unpack(archive: Path, home: Path) -> None:
    """The folder vendor/llama.cpp of a source distribution, moved to its place at once."""
    kept.make_folder(home.parent)
    with tempfile.TemporaryDirectory(dir=home.parent) as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        inner = next(Path(folder).glob("*/vendor/llama.cpp"), None)
        if inner is None:
            raise InputError(f"{archive.name}: no llama.cpp in it")
        inner.rename(home)


def plugin(engine: Engine) -> Path:
    """The compiled plugin for an engine, from the cache if nothing has changed."""
    compiler = next((c for c in COMPILERS if shutil.which(c)), None)
    if compiler is None:
        raise InputError(f"no C++ compiler here: one of {', '.join(COMPILERS)} is needed")
    target = cache_dir() / "record" / f"plugin-{_fingerprint(engine)}.so"
    if not kept.ours(target):
        kept.make_folder(target.parent)
        _compile(compiler, engine, target)
    return target


def _fingerprint(engine: Engine) -> str:
    digest = hashlib.sha256(" ".join(map(str, engine.libraries)).encode())
    headers = sorted((engine.sources / "ggml/include").glob("*.h"))
    for file in (*sorted(NATIVE.iterdir()), engine.sources / IMPL, *headers):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, engine: Engine, target: Path) -> None:
    includes = [f"-I{engine.sources / 'ggml' / part}" for part in ("src", "include")]
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", *includes]
    rpath = {f"-Wl,-rpath,{file.parent}" for file in engine.libraries}
    libraries = [*rpath, *map(str, engine.libraries), "-ldl"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *flags, str(NATIVE / "device.cpp"), "-o", str(made), *libraries]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            first = next((x for x in run.stderr.splitlines() if "error" in x), run.stderr[:300])
            raise InputError(
                f"{compiler} cannot compile the plugin against {engine.sources}: {first}"
            )
        made.rename(target)


def libraries_in(folder: Path) -> tuple[Path, ...]:
    """ggml's libraries in a folder: in wheels their names may end in a version. InputError where
    one is not there."""
    found = []
    for stem in ("libggml.so", "libggml-base.so"):
        file = next(iter(sorted(folder.glob(f"{stem}*"))), None)
        if file is None:
            raise InputError(f"{folder}: no {stem}")
        found.append(file)
    return tuple(found)
