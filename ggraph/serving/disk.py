"""Rows of earlier texts on disk, for when the cache has forgotten them, or the process has ended.

A file holds the cache's rows of BLOCK tokens of a text. Its name is a hash of the model and its
options (`identity`), and of all tokens up to the block's end: what a name stands for never changes,
and a text finds its blocks without an index. A block holds its tokens and a digest of its rows; one
that does not hold what its name says is deleted and computed again. Files are safetensors, in which
nothing can run. The oldest go first where there is no more room.

Of a model with recurrent layers there are files of states, too: one holds what stands behind some
tokens of a text, and the rows behind its last whole block. Its name says that and all those tokens.
"""

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ggraph.decode.given import first_given
from ggraph.errors import InputError
from ggraph.lazy import lazy
from ggraph.serving.memory import Memory
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Text
from ggraph.tensor import Array

if TYPE_CHECKING:
    import logging
else:
    logging = lazy("logging")  # which most runs have no use for

BLOCK = 64  # tokens of one file
MOST_WAITING = 1 << 28  # bytes that wait to be written; what comes beside them is not kept
SUFFIX, PART = ".safetensors", ".part"  # of what is there, and of what is being written

Rows = dict[str, Array]  # uint8 [rows, bytes of a row] for each state
Sizes = Mapping[str, tuple[int, int]]  # those numbers


class Disk:
    """Blocks in `folder`, of at most `most_bytes` together, of one model with one set of options.

    One thread writes; the others' methods are for the thread in which the batch runs.
    """

    def __init__(self, folder: Path, identity: bytes, most_bytes: int) -> None:
        if most_bytes < 0:
            raise InputError(f"a disk cache of {most_bytes} bytes: expected 0 or more")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in folder.glob(f"*{PART}"):
                unfinished.unlink()
            found = [(f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob(f"*{SUFFIX}")]
        except OSError as error:
            raise InputError(f"cannot use {folder}: {error.strerror or error}") from None
        self.folder, self.most_bytes = folder, most_bytes
        self.refused = 0  # blocks that were not what their names say
        self.unwritten = 0  # blocks that could not be written
        self._failing = False  # whether the last one could not
        self._first = hashlib.sha256(identity).digest()
        self._sizes = {f.name: size for _, size, f in sorted(found)}  # used longest ago first
        self._lock = threading.Lock()  # of the sizes, and of what waits
        self._waiting = 0  # bytes
        self._todo: queue.SimpleQueue[tuple[str, Rows] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="disk cache", daemon=True)
        self._writer.start()
        self._make_room()

    def close(self) -> None:
        """Write what waits, and end."""
        self._todo.put(None)
        self._writer.join()

    def missing(self, tokens: Sequence[int]) -> list[tuple[int, str]]:
        """First token and name of every whole block of a text that is not there."""
        return [(at, name) for at, name in self._blocks(tokens) if name not in self._sizes]

    def keep(self, name: str, tokens: Sequence[int], rows: Mapping[str, Array]) -> None:
        """Have a block written, with its tokens."""
        block = {**rows, "tokens": np.array(tokens, np.int32)}
        with self._lock:
            if self._waiting and self._waiting + _bytes(block) > MOST_WAITING:
                return
            self._waiting += _bytes(block)
        self._todo.put((name, block))

    def state_name(self, tokens: Sequence[int]) -> str | None:
        """The name of the state behind these tokens, if it is not there."""
        name = _state_name(self._ends(tokens), _raw(tokens), len(tokens))
        return None if name in self._sizes else name

    def state(self, tokens: Sequence[int], start: int) -> tuple[int, str] | None:
        """How many of these tokens, more than `start`, the furthest state stands behind that blocks
        lead to, and its name."""
        known, ends, raw = self.known(tokens, start), self._ends(tokens), _raw(tokens)
        reach = known[-1][0] + BLOCK if known else start // BLOCK * BLOCK
        for count in range(min(reach + BLOCK - 1, len(tokens)), start, -1):
            if (name := _state_name(ends, raw, count)) in self._sizes:
                return count, name
        return None

    def known(self, tokens: Sequence[int], start: int) -> list[tuple[int, str]]:
        """First token and name of the blocks that go on from token `start`, one after another; of
        the first, `start` may be in the middle."""
        blocks = (b for b in self._blocks(tokens) if b[0] + BLOCK > start)
        return list(takewhile(lambda b: b[1] in self._sizes, blocks))

    def load(self, name: str, tokens: Sequence[int], sizes: Sizes) -> Rows | None:
        """The rows of a file, of these sizes; None where they are not to be had."""
        path = self.folder / name
        try:
            block = load_file(path)
            os.utime(path)
        except (OSError, SafetensorError, KeyError, ValueError):
            block = {}
        said = block.pop("digest", None)
        wanted = {**{n: (np.uint8, size) for n, size in sizes.items()},
                  "tokens": (np.int32, (len(tokens),))}  # fmt: skip
        fits = {n: (a.dtype.type, a.shape) for n, a in block.items()} == wanted
        right = fits and said is not None and np.array_equal(said, digest(block))
        if not right or block["tokens"].tolist() != list(tokens):
            self.refused += 1
            self._delete(name)
            return None
        with self._lock:  # it was used last
            if name in self._sizes:
                self._sizes[name] = self._sizes.pop(name)
        del block["tokens"]
        return block

    def _blocks(self, tokens: Sequence[int]) -> Iterator[tuple[int, str]]:
        """First token and name of the whole blocks of a text."""
        for block, end in enumerate(self._ends(tokens)[1:]):
            yield block * BLOCK, end.hex() + SUFFIX

    def _ends(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of what stands before a text's first block, and behind each whole one."""
        ends, raw = [self._first], _raw(tokens)
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            ends.append(_hash(ends[-1], _tail(raw, end - BLOCK, end)))
        return ends

    def _write(self) -> None:
        while (item := self._todo.get()) is not None:
            name, block = item
            if name not in self._sizes:
                self._save(name, block)
                self._make_room()
            with self._lock:
                self._waiting -= _bytes(block)

    def _save(self, name: str, block: Rows) -> None:
        path, part = self.folder / name, (self.folder / name).with_suffix(PART)
        try:
            with open(part, "wb", opener=_private) as file:  # no other name is ever left behind
                file.write(save({**block, "digest": digest(block)}))
            os.replace(part, path)
            with self._lock:
                self._sizes[name] = path.stat().st_size
            self._failing = False
        except (OSError, SafetensorError) as error:  # a full disk: the block is not kept
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self.unwritten += 1
            if not self._failing:  # once, however many texts end until there is room again
                log = logging.getLogger("ggraph.serving")
                log.warning("%s: a block cannot be kept: %s", self.folder, error)
            self._failing = True

    @property
    def held(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(self._sizes.values())

    def _make_room(self) -> None:
        """Delete what was used longest ago."""
        while True:
            with self._lock:
                if sum(self._sizes.values()) <= self.most_bytes:
                    return
                oldest = next(iter(self._sizes))
            self._delete(oldest)

    def _delete(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
        with suppress(OSError):
            (self.folder / name).unlink()


class Spill:
    """What texts of a runner's cache leave on a disk, and find there."""

    def __init__(self, disk: Disk, runner: ListRunner) -> None:
        self.disk, self.runner = disk, runner

    def restore(
        self, text: Text, memory: Memory, slots_for: Callable[[Text, int], list[int]]
    ) -> int:
        """Take over what the disk has of a text beyond what is computed, but for its last token:
        how many tokens."""
        if text.request.features:
            return 0
        begun = text.computed
        if memory.states is not None:
            self._resume(text, memory, slots_for)
            return text.computed - begun
        last = len(text.tokens) - 1
        for first, name in self.disk.known(_plain(text.tokens), begun):
            at, end = text.computed, min(first + BLOCK, last)
            if at >= end or not memory.reserve(text, end - at):
                break
            if (block := self._block(text, first, name)) is None:
                break
            self._put(text, first, end, block, slots_for)
            memory.publish(text)
        return text.computed - begun

    def keep(self, text: Text, memory: Memory) -> None:
        """Have the disk keep what it has not got of a text that ends."""
        tokens = _plain(text.tokens[: 0 if text.request.features else text.computed])
        for first, name in self.disk.missing(tokens):
            self.disk.keep(name, tokens[first : first + BLOCK], self._rows(text, first, BLOCK))
        for count, slot in memory.standing(text) if tokens else ():
            if count > len(tokens):
                break
            if (new := self.disk.state_name(tokens[:count])) is not None:
                first = count // BLOCK * BLOCK
                rows = self._rows(text, first, count - first)
                rows |= {s: self.runner.session.read_rows(s, [slot]) for s in self._states}
                self.disk.keep(new, tokens[first:count], rows)

    def _resume(
        self, text: Text, memory: Memory, slots_for: Callable[[Text, int], list[int]]
    ) -> None:
        """Take over the furthest state, and the rows before it: all of that or nothing."""
        begun = text.computed
        if (found := self.disk.state(_plain(text.tokens[:-1]), begun)) is None:
            return
        count, name = found
        tail = count // BLOCK * BLOCK
        if not memory.reserve(text, count - begun):
            return
        blocks: list[tuple[int, Rows | None]] = []
        for first, block in self.disk.known(text.tokens[:tail], begun):
            blocks.append((first, self._block(text, first, block)))
        sizes = {**self._sizes(count - tail), **{s: (1, n) for s, n in self._states.items()}}
        blocks.append((tail, self.disk.load(name, text.tokens[tail:count], sizes)))
        if any(rows is None for _, rows in blocks):
            return
        for first, rows in blocks:
            self._put(text, first, min(first + BLOCK, count), rows or {}, slots_for)
        held = blocks[-1][1] or {}
        for state in self._states:
            self.runner.session.write_rows(state, [text.state], held[state])
        text.place = count
        memory.publish(text)

    def _put(
        self, text: Text, first: int, end: int, block: Rows,
        slots_for: Callable[[Text, int], list[int]],
    ) -> None:  # fmt: skip
        """The text's next rows, up to token `end`, are these of a block from token `first` on."""
        at = text.computed
        slots = slots_for(text, max(0, end - at))
        for state in self.runner.caches() if slots else ():
            rows = block[state][at - first : end - first]
            self.runner.session.write_rows(state, slots, rows)
        text.slots[at : at + len(slots)], text.computed = slots, at + len(slots)
        text.unread.clear()

    def _block(self, text: Text, first: int, name: str) -> Rows | None:
        return self.disk.load(name, text.tokens[first : first + BLOCK], self._sizes(BLOCK))

    def _rows(self, text: Text, first: int, count: int) -> Rows:
        slots = text.slots[first : first + count].tolist()
        return {s: self.runner.session.read_rows(s, slots) for s in self.runner.caches()}

    def _sizes(self, count: int) -> dict[str, tuple[int, int]]:
        return {name: (count, size) for name, size in self.runner.caches().items()}

    @cached_property
    def _states(self) -> dict[str, int]:
        return self.runner.states() if self.runner.texts else {}


def digest(block: Mapping[str, Array]) -> Array:
    """SHA-256 of a block, uint8 [32]."""
    h = hashlib.sha256()
    for name in sorted(block):
        h.update(name.encode() + b"\0")
        h.update(block[name].tobytes())
    return np.frombuffer(h.digest(), np.uint8)


def _private(path: str, flags: int) -> int:
    """A file of this user's alone, in whatever folder."""
    return os.open(path, flags, 0o600)


def _plain(tokens: Sequence[int]) -> Sequence[int]:
    """What a disk knows of a text: all up to its first image. A name of a file follows from tokens,
    and an image that somebody showed is in no file."""
    return tokens[: first_given(tokens)]


def _bytes(block: Mapping[str, Array]) -> int:
    return sum(a.nbytes for a in block.values())


def _raw(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _tail(raw: bytes, first: int, end: int) -> bytes:
    """Of tokens, some; no more than these are copied, since it is asked for each of a long text."""
    return raw[4 * first : 4 * end]


def _hash(at: bytes, tokens: bytes, what: bytes = b"") -> bytes:
    """Of what stands before some tokens, and them."""
    return hashlib.sha256(at + what + tokens).digest()


def _state_name(ends: Sequence[bytes], raw: bytes, count: int) -> str:
    """Of the state behind these first tokens of a text, of whose whole blocks these are the
    hashes."""
    block = count // BLOCK
    return _hash(ends[block], _tail(raw, block * BLOCK, count), b"state").hex() + SUFFIX
