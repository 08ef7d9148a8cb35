"""Runs in surroundings that are hostile or broken: planted code, two first runs at once, death in
the middle, a full disk, a folder that cannot be written, no home.

Planted code is code that would run: it ends the process with a status of its own, and a test shows
that it does where it lies in a folder of one's own. Another user's hand needs root (chown).
"""

import hashlib
import os
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ggraph import kept
from ggraph.backends.cpu.codegen.image import HEADER
from ggraph.backends.cpu.codegen.isa import host
from ggraph.backends.cpu.codegen.jit import Jit

ROOT = Path(__file__).parent.parent
OTHER = 12345  # a user that is neither this one nor root
PLANTED = 66  # status of a process in which planted code ran
ENTRY = "pool_run"  # what every run calls first
LINUX_X86 = host().is_x86 and sys.platform == "linux"
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can act as another user")
only_linux = pytest.mark.skipif(not LINUX_X86, reason="the planted code is for x86-64 Linux")

CHILD = """
import hashlib, numpy as np
from ggraph.backends.cpu.codegen.jit import WATCHERS
from ggraph.backends.cpu.runtime.pool import Pool
from ggraph.backends.cpu.runtime.program import Assembler
WATCHERS.append(lambda name: print("compiling", name, flush=True))
x = np.linspace(-9, 9, 64, dtype=np.float32).reshape(2, 32)
y, pool = np.zeros_like(x), Pool(2)
asm = Assembler(pool.jit)
asm.add("soft_max", x=x, mask=0, y=y, m=2, n=32, xs=128, ms=0, ys=128, scale=1.0)
pool.run(asm.freeze())
print(hashlib.sha256(y.tobytes()).hexdigest(), flush=True)
"""


def start(cache: Path | None, **more: Any) -> "subprocess.Popen[str]":
    """A process that runs kernels, says which it compiles, and prints a hash of what they wrote."""
    clean = {k: v for k, v in os.environ.items() if k not in ("GGRAPH_CACHE", "HOME")}
    environment = {**clean, "GGRAPH_CACHE": str(cache)} if cache else {**clean, "HOME": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe,
        text=True, **more,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> tuple[list[str], str, list[str]]:
    """What a process compiled, the hash, and its warnings."""
    with process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, (process.returncode, out, err)
    *compiled, digest = out.splitlines()
    return compiled, digest, [line for line in err.splitlines() if "CacheWarning" in line]


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What undisturbed kernels write."""
    compiled, found, told = end(start(tmp_path_factory.mktemp("own")))
    assert compiled and not told
    return found


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that other users may enter, for one's own use: tmp_path keeps them out."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def plant(cpu: Path) -> None:
    """Files that hold planted code under the right key, with the right hash."""
    cpu.mkdir(parents=True, exist_ok=True)
    code = struct.pack("<BIBIH", 0xBF, PLANTED, 0xB8, 231, 0x050F)  # exit_group(PLANTED)
    image = struct.pack("<Q", HEADER).ljust(HEADER, b"\0") + code
    for name in (ENTRY, "pool_work", "soft_max"):
        key = Jit(folder=cpu)._key(name)
        head = kept._head(key, image)
        (cpu / kept.file_of(f"{name}.image", key)).write_bytes(head + image)


def as_other(act: Callable[[], object]) -> None:
    """Do something as another user."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.umask(0o022)  # what he makes is his alone: only its owner gives it away
            act()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@only_linux
def test_planted_code_is_real(tmp_path: Path) -> None:
    plant(tmp_path / "cpu")
    for p in (tmp_path / "cpu", *(tmp_path / "cpu").iterdir()):
        p.chmod(0o700)
    with start(tmp_path) as process:
        process.communicate(timeout=300)
    assert process.returncode == PLANTED, "in a folder of one's own, it would run"


def _open_cache(cache: Path) -> None:
    (cache / "cpu").mkdir(parents=True)
    (cache / "cpu").chmod(0o777)
    as_other(partial(plant, cache / "cpu"))


def _open_parent(cache: Path) -> None:
    """Others may exchange a folder whose parent they may write, whoever owns it."""
    cache.parent.chmod(0o777)
    (cache / "cpu").mkdir(parents=True)
    as_other(lambda: cache.rename(cache.parent / "aside"))
    as_other(partial(plant, cache / "cpu"))


def _shared_sticky(cache: Path) -> None:
    """A folder like /tmp, in which the other user was first."""
    cache.mkdir()
    cache.chmod(0o1777)
    as_other(partial(plant, cache / "cpu"))


def _sticky_files(cache: Path) -> None:
    """Kernels' own folder is like /tmp: files there are the other user's."""
    (cache / "cpu").mkdir(parents=True)
    (cache / "cpu").chmod(0o1777)
    as_other(partial(plant, cache / "cpu"))


def _closed_too_late(cache: Path) -> None:
    _open_cache(cache)
    (cache / "cpu").chmod(0o700)


def _link_to_theirs(cache: Path) -> None:
    cache.parent.chmod(0o1777)
    theirs = cache.parent / "theirs"
    as_other(partial(plant, theirs / "cpu"))
    as_other(lambda: cache.symlink_to(theirs))


def _own_link_to_theirs(cache: Path) -> None:
    cache.parent.chmod(0o1777)
    theirs = cache.parent / "theirs"
    as_other(partial(plant, theirs / "cpu"))
    cache.symlink_to(theirs)


def _link_to_file(cache: Path) -> None:
    """A link to a planted file, set while the folder was open."""
    cache.parent.chmod(0o1777)
    (cache / "cpu").mkdir(parents=True)
    (cache / "cpu").chmod(0o777)
    theirs = cache.parent / "theirs"
    as_other(partial(plant, theirs))
    for p in theirs.iterdir():
        as_other(partial((cache / "cpu" / p.name).symlink_to, p))
    (cache / "cpu").chmod(0o700)


def _fifos(cache: Path) -> None:
    """Opening one would wait for ever."""
    _open_cache(cache)
    for p in (cache / "cpu").iterdir():
        p.unlink()
        as_other(partial(os.mkfifo, p))
    (cache / "cpu").chmod(0o700)


WARNED = (_open_cache, _open_parent, _shared_sticky, _link_to_theirs, _own_link_to_theirs)
REPLACED = (_closed_too_late, _link_to_file, _fifos, _sticky_files)


@only_linux
@needs_root
@pytest.mark.parametrize("attack", WARNED + REPLACED)
def test_nothing_that_another_user_planted_runs(
    open_place: Path, digest: str, attack: Callable[[Path], None]
) -> None:
    cache = open_place / "cache"
    attack(cache)
    compiled, found, told = end(start(cache))
    assert f"compiling {ENTRY}" in compiled
    assert found == digest
    assert len(told) == (attack in WARNED), told
    if attack in REPLACED and attack is not _sticky_files:
        assert end(start(cache))[0] == [], "made anew and kept"


@only_linux
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
@pytest.mark.parametrize("level", [".", "cache", "cache/cpu"])
def test_nothing_runs_from_where_others_may_write(
    tmp_path: Path, digest: str, level: str, mode: int
) -> None:
    cache = tmp_path / "cache"
    plant(cache / "cpu")
    (tmp_path / level).chmod(mode)
    compiled, found, told = end(start(cache))
    assert f"compiling {ENTRY}" in compiled
    assert found == digest
    assert len(told) == 1 and f"(mode {mode:04o})" in told[0]


def test_folders_and_files_are_the_users_alone(tmp_path: Path) -> None:
    end(start(tmp_path / "a" / "cache", umask=0))
    made = list((tmp_path / "a").rglob("*"))
    assert {p.is_dir() for p in made} == {True, False}
    for p in made:
        expected = 0o700 if p.is_dir() else 0o600
        assert stat.S_IMODE(p.stat().st_mode) == expected, p


def test_several_first_runs_at_once(tmp_path: Path, digest: str) -> None:
    cache = tmp_path / "cache"
    running = [start(cache) for _ in range(4)]
    for process in running:
        _, found, told = end(process)
        assert found == digest and not told
    assert end(start(cache)) == ([], digest, [])


@pytest.mark.parametrize("count", range(1, 4))
def test_a_run_that_is_killed_while_compiling_leaves_nothing_in_the_way(
    tmp_path: Path, digest: str, count: int
) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None
        for _ in range(count):
            assert process.stdout.readline().startswith("compiling")
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    compiled, found, told = end(start(tmp_path))
    assert compiled and found == digest and not told
    assert end(start(tmp_path)) == ([], digest, [])
    assert {p.suffix for p in (tmp_path / "cpu").iterdir()} <= {".image", ".o", ".json"}


@pytest.mark.parametrize("limit", [0, 100, 600])
def test_files_that_cannot_be_written_whole_do_not_stay(
    tmp_path: Path, digest: str, limit: int
) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    compiled, found, told = end(start(tmp_path, preexec_fn=small_files))
    assert compiled and found == digest and not told
    assert all(0 < p.stat().st_size < limit for p in (tmp_path / "cpu").iterdir())
    end(start(tmp_path))
    assert end(start(tmp_path)) == ([], digest, [])


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,mode=0700", "none", str(disk)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@needs_root
def test_a_full_disk(tiny_disk: Path, digest: str) -> None:
    (tiny_disk / "filler").write_bytes(bytes(12 << 10))
    for _ in range(2):
        compiled, found, told = end(start(tiny_disk))
        assert compiled and found == digest and not told
    (tiny_disk / "filler").unlink()
    end(start(tiny_disk))
    assert end(start(tiny_disk)) == ([], digest, [])


def read_only(folder: Path, act: Callable[[], None]) -> None:
    """Do something while a folder cannot be written; root, who may write anyhow, is another user
    for that, whose folder it is."""
    folder.mkdir()
    if IS_ROOT:
        os.chown(folder, OTHER, OTHER)
    folder.chmod(0o500)
    try:
        as_other(act) if IS_ROOT else act()
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_cannot_be_written(open_place: Path, made: bool) -> None:
    expected = Jit(folder=None if made else open_place / "own")
    expected.address("copy")

    def run() -> None:
        there = Jit(folder=open_place / "cache" / "cpu")
        assert there.address("copy")
        assert there.compiled == ["copy"]

    read_only(open_place / "cache", run)
    assert list((open_place / "cache").iterdir()) == []


def test_no_home(digest: str) -> None:
    compiled, found, told = end(start(None))
    assert compiled and found == digest
    assert len(told) == 1 and "no home folder" in told[0]


# The runner.


def ggraph(*arguments: str | Path, stdin: bytes = b"", **env: str) -> tuple[int, str, list[str]]:
    """Status, output and the lines on standard error of one command."""
    clean = {k: v for k, v in os.environ.items() if k not in env}
    done = subprocess.run(
        [sys.executable, "-m", "models", *map(str, arguments)], cwd=ROOT, check=False,
        env={**clean, **env}, input=stdin, capture_output=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode().splitlines()


def generate(model: Path, **env: str) -> tuple[str, list[str]]:
    """Text and the runner's own lines beside the statistics."""
    status, out, err = ggraph("generate", "-m", model, "-n", "8", "--temp", "0", "Hi", **env)
    assert status == 0, err
    return out, [line for line in err if line.startswith("ggraph:")]


def test_the_runner_warns_in_one_line_and_writes_the_same_text(tmp_path: Path, model: Path) -> None:
    text, told = generate(model)
    assert text.strip() and not told
    plant(tmp_path / "cpu") if LINUX_X86 else (tmp_path / "cpu").mkdir()
    tmp_path.chmod(0o777)
    again, told = generate(model, GGRAPH_CACHE=str(tmp_path))
    assert again == text
    assert told == [
        f"ggraph: {tmp_path} may be written by others (mode 0777), so the cache is not used and "
        "kernels are compiled in each run; GGRAPH_CACHE names another folder"
    ]
    again, told = generate(model, GGRAPH_CACHE="", HOME="")
    assert again == text and len(told) == 1 and "no home folder" in told[0]


def test_damaged_kernels_are_made_anew(tmp_path: Path, model: Path) -> None:
    text, _ = generate(model, GGRAPH_CACHE=str(tmp_path))
    files = sorted(p for p in (tmp_path / "cpu").iterdir())
    before = {p: hashlib.sha256(p.read_bytes()).digest() for p in files}
    for i, p in enumerate(files):  # each in another way
        raw = p.read_bytes()
        flipped = raw[:8] + bytes([raw[8 + i % 40] ^ 1]) + raw[9:]
        p.write_bytes([flipped, raw[: i % len(raw)], b"", os.urandom(len(raw))][i % 4])
    assert generate(model, GGRAPH_CACHE=str(tmp_path)) == (text, [])
    assert {p: hashlib.sha256(p.read_bytes()).digest() for p in files} == before


@pytest.mark.parametrize("home", ["none", "foreign", "full", "file"])
def test_a_default_model_that_cannot_be_kept_is_one_clear_line(tmp_path: Path, home: str) -> None:
    env = {"GGRAPH_CACHE": str(tmp_path / "cache")}
    if home == "none":
        env = {"GGRAPH_CACHE": "", "HOME": ""}
    if home == "foreign":
        tmp_path.chmod(0o777)
    if home == "full":
        env["GGRAPH_CACHE"] = "/proc/cache"
    if home == "file":
        (tmp_path / "cache").write_text("")
    status, out, err = ggraph("generate", "Hi", **env)
    assert (status, out) == (2, "")
    expected = {
        "none": "ggraph: there is no home folder: GGRAPH_CACHE must name one for the cache",
        "foreign": f"{tmp_path} may be written by others (mode 0777)",
        "full": "ggraph: cannot fetch SmolLM2-135M-Instruct.Q4_1.gguf into /proc/cache: ",
        "file": "Not a directory",
    }
    assert len(err) == 1 and expected[home] in err[0], err


def test_input_that_is_not_utf8_is_refused_with_the_offset(model: Path) -> None:
    generate_ = ("generate", "-m", model, "-n", "4")
    for raw, told in (
        (b"\xff\xfe", "invalid start byte 0xff at offset 0"),
        ("gr\u00fcn \u20ac".encode() + b"\xe2\x82", "unexpected end of data 0xe2 at offset 9"),
        (b"a" * 100_000 + b"\xc3(", "invalid continuation byte 0xc3 at offset 100000"),
        (b"\xed\xa0\x80", "invalid continuation byte 0xed at offset 0"),
    ):
        status, out, err = ggraph(*generate_, "-", stdin=raw)
        assert (status, out) == (2, "")
        assert err == [f"ggraph: standard input is not UTF-8: {told}"]
    status, _, err = ggraph(*generate_, "-", stdin="gr\u00fcn \u20ac \U0001f600".encode())
    assert status == 0, err


def test_arguments_that_are_not_utf8_are_refused_with_the_offset(model: Path) -> None:
    bad = b"\xc3\xbc\xff".decode("utf-8", "surrogateescape")
    for name, arguments in (
        ("the prompt", [bad]),
        ("--system", ["--system", bad, "Hi"]),
        ("--stop", ["--stop", bad, "Hi"]),
    ):
        status, _, err = ggraph("generate", "-m", model, "-n", "4", *arguments)
        assert status == 2
        assert err == [f"ggraph: {name} is not UTF-8: invalid start byte 0xff at offset 2"]


def test_arguments_are_utf8_where_the_locale_is_not(model: Path) -> None:
    """Python hides such bytes of the command line in characters that are none."""
    said = ("generate", "-m", model, "-n", "1", "Say: \u4f60\u597d")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = [ggraph(*said, **env) for env in ({"PYTHONUTF8": "1"}, plain)]
    assert [status for status, _, _ in told] == [0, 0], told
    here, there = (re.findall(r"prompt \d+ tokens", err[-1]) for _, _, err in told)
    assert here == there != []


def test_plans_that_are_not_utf8_are_refused_with_the_offset() -> None:
    status, _, err = ggraph("verify", "-", stdin=b'{"a": "\xff"}')
    assert status == 2 and len(err) == 1 and "position 7" in err[0]


@pytest.mark.parametrize("module", ["pip", "zipfile", "numpy", "json"])
def test_nothing_that_lies_in_the_present_folder_runs(tmp_path: Path, module: str) -> None:
    """`python -m` would run what it finds there: pip is called otherwise."""
    (tmp_path / f"{module}.py").write_text(f"import os\nos._exit({PLANTED})")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        "from dataclasses import replace; from pathlib import Path\n"
        "from models.run.fetch import DEFAULT, fetch\n"
        "fetch(replace(DEFAULT, requirement='ggraph-has-no-such-model==0'), Path('cache'))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, check=False, capture_output=True,
        text=True, timeout=300, env={**os.environ, "PIP_NO_INDEX": "1"},
    )  # fmt: skip
    assert done.returncode == 1 and str(PLANTED) not in done.stderr
    assert "pip could not download ggraph-has-no-such-model==0: ERROR:" in done.stderr
