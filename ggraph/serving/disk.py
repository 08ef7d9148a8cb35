"""Rows of earlier texts on disk, for when the cache has forgotten them, or the process has ended.

A file holds the cache's rows of BLOCK tokens of a text. Its name is a hash of the model and its
options (`identity`), and of all tokens up to the block's end: what a name stands for never changes,
and a text finds its blocks without an index. A block holds its tokens and a digest of its rows; one
that does not hold what its name says is deleted and computed again. Files are safetensors, in which
nothing can run. The oldest go first where there is no more room.
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

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ggraph.errors import InputError
from ggraph.serving.memory import Memory
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Text
from ggraph.tensor import Array

BLOCK = 64  # tokens of one file
MOST_QUEUED = 64  # blocks that wait to be written; further ones are not kept
SUFFIX, PART = ".safetensors", ".part"  # of what is there, and of what is being written

Rows = dict[str, Array]  # uint8 [BLOCK, bytes of a row] for each state


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
        self._first = hashlib.sha256(identity).digest()
        self._sizes = {f.name: size for _, size, f in sorted(found)}  # used longest ago first
        self._lock = threading.Lock()  # of the sizes
        self._todo: queue.Queue[tuple[str, Rows] | None] = queue.Queue(MOST_QUEUED)
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
        with suppress(queue.Full):
            self._todo.put_nowait((name, {**block, "digest": digest(block)}))

    def known(self, tokens: Sequence[int], start: int) -> list[tuple[int, str]]:
        """First token and name of the blocks that go on from token `start`, one after another; of
        the first, `start` may be in the middle."""
        blocks = (b for b in self._blocks(tokens) if b[0] + BLOCK > start)
        return list(takewhile(lambda b: b[1] in self._sizes, blocks))

    def load(self, name: str, tokens: Sequence[int], shapes: Mapping[str, int]) -> Rows | None:
        """The rows of a block, with so many bytes each; None where they are not to be had."""
        path = self.folder / name
        try:
            block = load_file(path)
            os.utime(path)
        except (OSError, SafetensorError, KeyError, ValueError):
            block = {}
        said = block.pop("digest", None)
        wanted = {**{n: (np.uint8, (BLOCK, size)) for n, size in shapes.items()},
                  "tokens": (np.int32, (BLOCK,))}  # fmt: skip
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
        at = self._first
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            held = np.array(tokens[first : first + BLOCK], "<i4")
            at = hashlib.sha256(at + held.tobytes()).digest()
            yield first, at.hex() + SUFFIX

    def _write(self) -> None:
        while (item := self._todo.get()) is not None:
            name, block = item
            path, part = self.folder / name, (self.folder / name).with_suffix(PART)
            if name in self._sizes:
                continue
            try:
                save_file(block, part)
                os.replace(part, path)
                with self._lock:
                    self._sizes[name] = path.stat().st_size
            except OSError:  # a full disk: the block is not kept
                part.unlink(missing_ok=True)
            self._make_room()

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
        if runner.texts:
            raise InputError(
                f"{runner.model.name} has recurrent layers, whose states are not kept on disk"
            )
        self.disk, self.runner = disk, runner

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return self.runner.caches()

    def restore(
        self, text: Text, memory: Memory, slots_for: Callable[[Text, int], list[int]]
    ) -> int:
        """Take over what the disk has of a text beyond what is computed, but for its last token:
        how many tokens."""
        begun, last, write = text.computed, len(text.tokens) - 1, self.runner.session.write_rows
        found = [] if text.request.features else self.disk.known(text.tokens, begun)
        for first, name in found:
            at, end = text.computed, min(first + BLOCK, last)
            if at >= end or not memory.reserve(text, end - at):
                break
            told = text.tokens[first : first + BLOCK]
            if (block := self.disk.load(name, told, self._sizes)) is None:
                break
            slots = slots_for(text, end - at)
            for state, rows in block.items():
                write(state, slots, rows[at - first : end - first])
            text.slots[at:end], text.computed = slots, end
            text.unread.clear()
            memory.publish(text)
        return text.computed - begun

    def keep(self, text: Text) -> None:
        """Have the disk keep what it has not got of a text that ends."""
        known = 0 if text.request.features else text.computed
        for first, name in self.disk.missing(text.tokens[:known]):
            slots = text.slots[first : first + BLOCK].tolist()
            rows = {s: self.runner.session.read_rows(s, slots) for s in self._sizes}
            self.disk.keep(name, text.tokens[first : first + BLOCK], rows)


def digest(block: Mapping[str, Array]) -> Array:
    """SHA-256 of a block, uint8 [32]."""
    h = hashlib.sha256()
    for name in sorted(block):
        h.update(name.encode() + b"\0")
        h.update(block[name].tobytes())
    return np.frombuffer(h.digest(), np.uint8)
