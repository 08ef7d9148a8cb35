"""Files that are kept from run to run, and whose they must be.

What lies in the cache may be machine code, so it is used only where nobody but this user and root
can have put it there: each folder from the root down belongs to one of them and may be written by
no one else, or is sticky as /tmp is (there nobody can exchange what another owns). Folders and
files are opened once, each from within the one above it, and what is checked is what was opened;
symbolic links are followed by hand, since the folders behind them count as well.

A kept file is MAGIC, the SHA-256 of everything else (the key under which it is kept included), and
the content. The hash finds damage; against malice stand the owners. A file that is torn does not
pass, so files are written in place: whoever is killed leaves no temporary file behind.
"""

import errno
import hashlib
import os
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ggraph.env import cache_dir
from ggraph.errors import CacheWarning, InputError

MAGIC = b"ggkept1\n"
DIGEST = 32  # bytes of a SHA-256
MOST = 1 << 26  # bytes of a kept file: none of ours has a hundredth of it
LINKS = 40  # symbolic links on the way to a folder; Linux allows as many
TICK = 20_000_000  # nanoseconds; the clock of Linux's file systems goes on every 1 to 10 ms
OTHERS = stat.S_IWGRP | stat.S_IWOTH
FOLDER = (
    getattr(os, "O_PATH", os.O_RDONLY)  # a folder that may be entered, not listed, is as good
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)
FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a FIFO does not block


class Foreign(OSError):
    """Somebody else may have put there what lies in a folder."""


def folder(room: str) -> Path | None:
    """The cache's folder for one kind of file, not made here; None, with a warning, where this user
    has no home."""
    try:
        return cache_dir() / room
    except InputError as error:
        _warn(str(error))
        return None


def read(place: Path | None, name: str, key: str) -> bytes | None:
    """What was kept in a folder under this name ("exp.image") and key, of which the file's name has
    a hash; None where it is absent or damaged, or not this user's alone (which is told once)."""
    try:
        here = enter(place, make=False)
    except OSError:
        return None
    try:
        raw = _content(here, file_of(name, key))
    except OSError:
        return None
    finally:
        os.close(here)
    return checked(raw, key)


def checked(raw: bytes, key: str) -> bytes | None:
    """The content of a kept file's bytes; None where they are damaged or of another key."""
    start = len(MAGIC) + DIGEST
    return raw[start:] if raw[:start] == _head(key, raw[start:]) else None


def write(place: Path | None, name: str, key: str, content: bytes) -> None:
    """Keep something where that can be done: a full disk, a read-only folder or one that is not
    this user's alone is no error."""
    try:
        here = enter(place, make=True)
    except OSError:
        return
    try:
        _put(here, file_of(name, key), _head(key, content) + content)
    except OSError:
        return
    finally:
        os.close(here)


def file_of(name: str, key: str) -> str:
    """The file in which something is kept."""
    stem, dot, kind = name.rpartition(".")
    return f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}{dot}{kind}"


def make_folder(place: Path) -> None:
    """Make a folder, and those above it, for this user alone. OSError where that cannot be done, or
    where others may write on the way there."""
    os.close(_walk(place, make=True))


def ours(path: Path) -> bool:
    """Whether a file or a folder is there, of which no more is checked than whose it is. InputError
    where another user may have put it there, or can change it."""
    try:
        here = _walk(path.parent, make=False)
        try:
            found = os.stat(path.name, dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)
        if told := _whose(found):
            raise Foreign(f"{path} {told}")
    except Foreign as error:
        told = f"{error}, so nothing there is run; GGRAPH_CACHE names another folder"
        raise InputError(told) from None
    except OSError:
        return False
    return True


def holds(path: Path, key: str, check: Callable[[], bool] = lambda: False) -> bool:
    """Whether a large file is what `key` says: it is as it was when `stamp` noted so, or `check`
    finds it out now, which is noted where that can be done."""
    try:
        now, noted = state(path), read(path.parent, f"{path.name}.stamp", key)
        # The note must be younger, lest another change in the same tick of the clock go unseen.
        if noted == now.encode() and _note(path, key).st_mtime_ns > path.stat().st_ctime_ns:
            return True
    except OSError:
        return False
    if not check() or state(path) != now:
        return False
    stamp(path, key)
    return True


def stamp(path: Path, key: str) -> None:
    """Note beside a large file that it is what `key` says, a tick later than it was changed."""
    since = time.time_ns() - path.stat().st_ctime_ns
    if 0 <= since < TICK:
        time.sleep((TICK - since) / 1e9)
    write(path.parent, f"{path.name}.stamp", key, state(path).encode())


def state(path: Path) -> str:
    """What changes when a file does, as far as the file system tells: its place, size and times."""
    s = path.stat()
    return f"{s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}"


def _note(path: Path, key: str) -> os.stat_result:
    return path.with_name(file_of(f"{path.name}.stamp", key)).stat()


def _head(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(MAGIC)
    for part in (key.encode(), content):
        digest.update(len(part).to_bytes(8, "little") + part)
    return MAGIC + digest.digest()


def _content(here: int, name: str) -> bytes:
    """The bytes of a plain file of this user's. OSError where there is none."""
    with open(os.open(name, os.O_RDONLY | FILE, dir_fd=here), "rb") as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST or _whose(found):
            raise OSError(f"{name}: mode {found.st_mode:o}, {found.st_size} bytes")
        return f.read(found.st_size)


def _put(here: int, name: str, raw: bytes) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=here)
    made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE, 0o600, dir_fd=here)
    try:
        with open(made, "wb") as f:
            f.write(raw)
    except OSError:
        os.unlink(name, dir_fd=here)
        raise


def enter(place: Path | None, *, make: bool) -> int:
    """Descriptor of a folder that is this user's all the way up, made if asked for. OSError where
    there is none, or where it is not (which is told once)."""
    if place is None or not hasattr(os, "geteuid"):
        raise OSError("no folder whose owner can be told")
    try:
        return _walk(place, make=make)
    except Foreign as error:
        _warn(str(error))
        raise


def _walk(place: Path, *, make: bool) -> int:
    """Descriptor of a folder, entered from the root down."""
    rest, gone = [*reversed(place.absolute().parts)], list[str]()
    here, links = os.open("/", FOLDER), 0
    try:
        while rest:
            part = rest.pop()
            try:
                inner = _inner(here, part, make)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                rest += reversed(_target(here, part, Path(*gone, part)).parts)
                links += 1
                if links > LINKS:
                    raise OSError(f"{place}: more than {LINKS} symbolic links") from None
                continue
            os.close(here)
            here = inner
            gone.append(part)
            if told := _whose(os.fstat(here), folder=True):
                raise Foreign(f"{Path(*gone)} {told}")
    except BaseException:
        os.close(here)
        raise
    return here


def _inner(here: int, part: str, make: bool) -> int:
    """Descriptor of the folder `part` of an open one, or of the root where that is the part."""
    try:
        return os.open(part, FOLDER, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(part, 0o700, dir_fd=here)
    return os.open(part, FOLDER, dir_fd=here)


def _target(here: int, part: str, link: Path) -> Path:
    """Where the symbolic link `part` leads. NotADirectoryError where it is none."""
    found = os.stat(part, dir_fd=here, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(link))
    if found.st_uid not in (0, os.geteuid()):
        raise Foreign(f"{link} belongs to user {found.st_uid}")
    return Path(os.readlink(part, dir_fd=here))


def _whose(found: os.stat_result, *, folder: bool = False) -> str:
    """Empty where only this user and root can change a file or a folder; else who can."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode):
        return ""  # its mode says nothing
    sticky = folder and found.st_mode & stat.S_ISVTX
    if found.st_mode & OTHERS and not sticky:
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"{reason}, so the cache is not used and kernels are compiled in each run; "
        "GGRAPH_CACHE names another folder",
        CacheWarning,
        stacklevel=2,
    )
