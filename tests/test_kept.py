"""Kept files: every damage, whose they may be, and what stands in their place.

Damage is tried byte by byte on each kind of file that ggraph keeps. Files of another user need root
(chown); the rest runs as anybody.
"""

import ast
import importlib
import json
import os
import random
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ggraph import dtype, env, kept
from ggraph.alloc.search import jit as search
from ggraph.backends.cpu.codegen import isa
from ggraph.backends.cpu.codegen.compiler import compile_object
from ggraph.backends.cpu.codegen.image import Unlinkable, link
from ggraph.backends.cpu.codegen.isa import detect, host
from ggraph.backends.cpu.codegen.jit import BAKED
from ggraph.backends.cpu.codegen.simd import KERNELS
from ggraph.backends.cuda import nvrtc
from ggraph.dtype import DType
from ggraph.errors import CacheWarning, InputError

KEY, CONTENT = "key of it", bytes(range(64))
OTHER = 12345  # a user that is neither this one nor root
needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners to be told")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to others"
)
pytestmark = needs_owners


class Told:
    """The warnings of a test."""

    def __init__(self, seen: list[warnings.WarningMessage]) -> None:
        self.seen = seen

    def lines(self) -> list[str]:
        return [str(w.message) for w in self.seen if w.category is CacheWarning]


@pytest.fixture(autouse=True)
def told() -> Iterator[Told]:
    """Warnings are remembered, and none has been given before."""
    kept._warn.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield Told(seen)


def held(folder: Path, name: str = "a.thing", key: str = KEY) -> Path:
    return folder / kept.file_of(name, key)


def put(folder: Path) -> Path:
    kept.write(folder, "a.thing", KEY, CONTENT)
    assert kept.read(folder, "a.thing", KEY) == CONTENT
    return held(folder)


def damages(whole: bytes, *, bits: bool = False) -> Iterator[bytes]:
    """Every byte changed (every bit of it), cut short at many places (at all), nothing, more than
    there was, and random bytes."""
    for i in range(len(whole)):
        for flip in [1 << b for b in range(8)] if bits else [1 << i % 8]:
            yield whole[:i] + bytes([whole[i] ^ flip]) + whole[i + 1 :]
        if bits or i % 16 == 0:
            yield whole[:i]
    yield whole + b"\0"
    yield whole * 2
    dice = random.Random(0)
    for n in (1, len(kept.MAGIC), 40, len(whole), 4 * len(whole)):
        yield dice.randbytes(n)
        yield kept.MAGIC + dice.randbytes(n)


def test_what_was_kept_is_read_under_its_name_and_key_alone(tmp_path: Path) -> None:
    path = put(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for content in (b"", b"other", bytes(1000)):
        kept.write(tmp_path, "a.thing", KEY, content)
        assert kept.read(tmp_path, "a.thing", KEY) == content
    assert kept.read(tmp_path, "a.thing", "another key") is None
    assert kept.read(tmp_path, "b.thing", KEY) is None
    path.rename(held(tmp_path, "a.thing", "another key"))
    assert kept.read(tmp_path, "a.thing", "another key") is None, "the key is under the hash"


def test_every_damage_is_found(tmp_path: Path) -> None:
    path = put(tmp_path)
    whole = path.read_bytes()
    for damaged in damages(whole, bits=True):
        path.write_bytes(damaged)
        assert kept.read(tmp_path, "a.thing", KEY) is None, damaged
    path.write_bytes(whole)
    assert kept.read(tmp_path, "a.thing", KEY) == CONTENT


@pytest.mark.parametrize(
    "kind", ["folder", "full folder", "fifo", "link", "loop", "sparse", "none"]
)
def test_what_is_no_plain_file_is_neither_read_nor_followed(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "mine"
    path, outside = held(folder), tmp_path / "outside"
    put(folder)
    outside.write_bytes(path.read_bytes())
    path.unlink()
    before = outside.read_bytes()
    if "folder" in kind:
        path.mkdir()
    if kind == "full folder":
        (path / "x").write_text("")
    if kind == "fifo":
        os.mkfifo(path)
    if kind in ("link", "loop"):
        path.symlink_to(outside if kind == "link" else path)
    if kind == "sparse":
        with path.open("wb") as f:
            f.truncate(1 << 40)
    assert kept.read(folder, "a.thing", KEY) is None
    kept.write(folder, "a.thing", KEY, b"fresh")
    expected = None if "folder" in kind else b"fresh"  # what others filled is not swept away
    assert kept.read(folder, "a.thing", KEY) == expected
    assert outside.read_bytes() == before


def test_folders_are_made_for_their_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        put(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for p in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"):
        assert stat.S_IMODE(p.stat().st_mode) == 0o700, p
    assert stat.S_IMODE(held(tmp_path / "a/b/c").stat().st_mode) == 0o600


def test_no_folder_no_file_and_no_warning(tmp_path: Path, told: Told) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "absent", tmp_path / "file", Path("/proc/nowhere/x")):
        assert kept.read(folder, "a.thing", KEY) is None
    for folder in (None, tmp_path / "file", tmp_path / "file" / "in it", Path("/proc/nowhere")):
        kept.write(folder, "a.thing", KEY, CONTENT)
        assert kept.read(folder, "a.thing", KEY) is None
    with pytest.raises(OSError, match="directory"):
        kept.make_folder(tmp_path / "file")
    assert told.lines() == []


@pytest.mark.parametrize("mode", [0o722, 0o777, 0o720, 0o702, 0o772])
@pytest.mark.parametrize("level", ["top", "top/middle", "top/middle/cache"])
def test_a_way_on_which_others_may_write_is_not_gone(
    tmp_path: Path, told: Told, level: str, mode: int
) -> None:
    folder = tmp_path / "top/middle/cache"
    path = put(folder)
    (tmp_path / level).chmod(mode)
    before = path.read_bytes()
    for _ in range(3):
        assert kept.read(folder, "a.thing", KEY) is None
        kept.write(folder, "a.thing", KEY, b"other")
    assert path.read_bytes() == before, "nothing is written there"
    with pytest.raises(kept.Foreign, match="may be written by others"):
        kept.make_folder(folder / "more")
    assert len(told.lines()) == 1
    assert told.lines()[0].startswith(
        f"{tmp_path / level} may be written by others (mode {mode:04o}), so the cache is not used"
    )


def test_a_sticky_folder_on_the_way_is_as_good_as_ones_own(tmp_path: Path, told: Told) -> None:
    folder = tmp_path / "tmp" / "cache"
    put(folder)
    (tmp_path / "tmp").chmod(0o1777)
    assert kept.read(folder, "a.thing", KEY) == CONTENT
    put(tmp_path / "tmp" / "another")
    assert told.lines() == []


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_made_anew(tmp_path: Path, mode: int) -> None:
    path = put(tmp_path)
    path.chmod(mode)
    assert kept.read(tmp_path, "a.thing", KEY) is None
    put(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_symbolic_links_to_folders_are_followed_and_what_is_behind_them_counts(
    tmp_path: Path, told: Told
) -> None:
    put(tmp_path / "real/cache")
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute/../real/./cache")
    assert kept.read(tmp_path / "absolute/cache", "a.thing", KEY) == CONTENT
    assert kept.read(tmp_path / "relative", "a.thing", KEY) == CONTENT
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "nowhere").symlink_to("not there/x")
    for name in ("round", "nowhere"):
        assert kept.read(tmp_path / name, "a.thing", KEY) is None
    assert told.lines() == []
    (tmp_path / "real").chmod(0o777)
    assert kept.read(tmp_path / "relative", "a.thing", KEY) is None
    assert len(told.lines()) == 1


@needs_root
@pytest.mark.parametrize("level", ["top", "top/cache", "file", "link"])
def test_what_belongs_to_another_user_is_not_read(tmp_path: Path, told: Told, level: str) -> None:
    folder = tmp_path / "top/cache"
    path = put(folder)
    (tmp_path / "way").symlink_to("top")
    theirs = {"file": path, "link": tmp_path / "way"}.get(level, tmp_path / level)
    os.chown(theirs, OTHER, OTHER, follow_symlinks=False)
    way = tmp_path / "way/cache"
    assert kept.read(way, "a.thing", KEY) is None
    if level == "file":  # in a folder of one's own: it goes
        put(folder)
        assert told.lines() == []
    else:
        assert [t.split(" belongs to ")[1][:10] for t in told.lines()] == [f"user {OTHER}"]


@needs_root
def test_a_user_reads_what_root_keeps_for_all(tmp_path: Path) -> None:
    path = put(tmp_path / "cache")
    path.chmod(0o644)
    for p in (tmp_path / "cache", tmp_path, *tmp_path.parents):
        if p.owner() == "root" and p != Path("/"):
            p.chmod(p.stat().st_mode | 0o111)
    child = os.fork()
    if not child:
        os.setuid(OTHER)
        os._exit(0 if kept.read(tmp_path / "cache", "a.thing", KEY) == CONTENT else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_system_that_tells_no_owners_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    monkeypatch.delattr(os, "geteuid")
    assert kept.read(tmp_path, "a.thing", KEY) is None
    kept.write(tmp_path, "b.thing", KEY, CONTENT)
    assert not held(tmp_path, "b.thing").exists()


@pytest.mark.parametrize("home", ["", "relative", None])
def test_without_a_home_nothing_is_kept_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, told: Told, home: str | None
) -> None:
    monkeypatch.delenv("GGRAPH_CACHE", raising=False)
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(Path, "home", _homeless)
    else:
        monkeypatch.setenv("HOME", home)
    for room in ("cpu", "cuda", "cpu"):
        assert kept.folder(room) is None
    with pytest.raises(InputError, match="no home folder"):
        env.cache_dir()
    assert len(told.lines()) == 1
    monkeypatch.setenv("GGRAPH_CACHE", "/some/where")
    assert kept.folder("cpu") == Path("/some/where/cpu")


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


# Each kind of kept file.


def native() -> tuple[str, bytes]:
    code = compile_object(KERNELS["copy"], host())
    try:
        return "copy.image", link(code, "copy")
    except Unlinkable:
        return "copy.o", code


def compiled_search() -> tuple[str, bytes]:
    @search.compiled
    def twice(n: int) -> int:
        return n + n

    seen: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "read", lambda *a: None)
        patch.setattr(search, "write", lambda place, name, key, content: seen.append(content))
        assert twice(4) == 8
    return "twice.numba", seen[0]


KINDS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "image": native,
    "object": lambda: ("copy.o", compile_object(KERNELS["copy"], host())),
    "search": compiled_search,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_of_native_code_is_found(kind: str, tmp_path: Path) -> None:
    name, content = KINDS[kind]()
    kept.write(tmp_path, name, KEY, content)
    path = held(tmp_path, name)
    whole = path.read_bytes()
    for i in range(len(whole)):
        raw = whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :]
        assert kept.checked(raw, KEY) is None
        assert kept.checked(whole[:i], KEY) is None
    for damaged in (b"", whole[:-1], whole + b"\0", bytes(len(whole))):
        path.write_bytes(damaged)
        assert kept.read(tmp_path, name, KEY) is None
    assert kept.checked(whole, KEY) == content


def test_all_numbers_that_kernels_are_made_of_are_in_their_key() -> None:
    """A table of values elsewhere was not: once changed, old machine code went on with the old."""
    found = set[str]()
    for path in Path(isa.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if not module.startswith("ggraph") or module.startswith("ggraph.backends.cpu"):
                continue
            assert isinstance(node, ast.ImportFrom)
            held = vars(importlib.import_module(module))
            for value in (held.get(a.name) for a in node.names):
                if value is dtype:
                    found.add(dtype.__name__)
                elif isinstance(value, int | float | str | tuple | np.ndarray | DType):
                    found.add(module)
    assert found == {m.__name__ for m in BAKED}


def test_every_damage_of_the_processors_note_leads_to_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    found, key = detect(), isa._telling()
    if key is None:
        pytest.skip("the system does not tell processors apart")
    monkeypatch.setattr(isa, "detect", lambda: found)
    monkeypatch.setattr(isa, "_telling", lambda: key)
    kept.write(kept.folder("cpu"), isa.NOTE, key, json.dumps({"triple": "lie"}).encode())
    path = held(tmp_path / "cpu", isa.NOTE, key)
    try:
        host.cache_clear()
        assert host() == found
        whole = path.read_bytes()
        for damaged in damages(whole):
            path.write_bytes(damaged)
            host.cache_clear()
            assert host() == found
            assert path.read_bytes() == whole
    finally:
        host.cache_clear()


def test_every_damage_of_cuda_code_leads_to_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: CONTENT)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    assert nvrtc.build("norm.cu", "text", {}, "sm_90", "") == CONTENT
    (path,) = (tmp_path / "cuda").iterdir()
    whole = path.read_bytes()
    for damaged in damages(whole):
        path.write_bytes(damaged)
        assert nvrtc.build("norm.cu", "text", {}, "sm_90", "") == CONTENT
        assert path.read_bytes() == whole
    path.unlink()
    path.mkdir()
    assert nvrtc.build("norm.cu", "text", {}, "sm_90", "") == CONTENT


def test_a_compiled_search_is_kept_and_damage_leads_to_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGRAPH_CACHE", str(tmp_path))
    made: list[str] = []
    monkeypatch.setattr(search, "write", lambda *a: (made.append(a[1]), kept.write(*a)))

    def add(a: np.ndarray) -> int:
        total = 0
        for x in a:
            total += x
        return total

    for content in (None, None, b"", b"\x80\x04.", "flip"):
        paths = list((tmp_path / "search").glob("*.numba"))
        if content == "flip":
            raw = bytearray(paths[0].read_bytes())
            raw[len(raw) // 2] ^= 4
            paths[0].write_bytes(raw)
        elif isinstance(content, bytes):
            paths[0].write_bytes(content)
        assert search.compiled(add)(np.arange(10)) == 45
    assert made == ["add.numba"] * 4, "compiled first, found once, and made anew three times"
    (tmp_path / "search").chmod(0o777)
    assert search.compiled(add)(np.arange(10)) == 45
    assert made == ["add.numba"] * 5, "a pickle that others may have written is not opened"


def test_a_large_file_is_looked_at_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "TICK", 0)  # notes come too early, and must not be believed
    path, looked = tmp_path / "large", []

    def check() -> bool:
        looked.append(path.read_bytes())
        return looked[-1] == CONTENT

    def answers(damaged: bytes) -> bool:
        looked.clear()
        path.write_bytes(damaged)
        return kept.holds(path, KEY, check)

    assert not kept.holds(path, KEY, check)
    for damaged in damages(CONTENT):
        assert answers(CONTENT) and looked == [CONTENT]
        assert not answers(damaged) and looked == [damaged], "changed within one tick, too"


def test_an_unchanged_large_file_is_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(CONTENT)
    kept.stamp(path, KEY)
    assert kept.holds(path, KEY)
    assert not kept.holds(path, "another")
    note = held(tmp_path, "large.stamp")
    whole = note.read_bytes()
    for damaged in damages(whole):
        note.write_bytes(damaged)
        os.utime(note, ns=(0, path.stat().st_ctime_ns + 1))
        assert not kept.holds(path, KEY)
    os.utime(note, ns=(0, path.stat().st_ctime_ns))
    note.write_bytes(whole)
    os.utime(note, ns=(0, path.stat().st_ctime_ns))
    assert not kept.holds(path, KEY), "written in the same tick as the file"
