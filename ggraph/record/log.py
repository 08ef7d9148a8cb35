"""The log of a played device, read back: what the host did, in order.

Each line is one primitive (native/log.hpp). Logs are bounded when they are written; one that was
cut short says so and is judged up to there.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggraph.errors import FormatError

HOST_STREAM = -1  # the CPU backend computes on the calling thread
MOST_DEVICES = 8  # that the plugin plays
MOST, ANY_SUM = 1 << 62, (1 << 64) - 1  # of numbers, and of sums


@dataclass(frozen=True)
class Range:
    """`nbytes` bytes of the program's address space, and the tensor that lies there if known.

    `writer`: which kernel of the same list made what is meant here, -1 where none of them did.
    """

    address: int
    nbytes: int
    name: str = ""
    writer: int = -1

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.nbytes


@dataclass(frozen=True)
class Kernel:
    """One node of a graph: what it reads and writes. `solid`: `writes` has no gaps.

    `view`: the program put it onto another tensor's bytes, as ggml's in-place operations do.
    """

    op: str
    name: str
    writes: Range
    solid: bool
    reads: tuple[Range, ...]
    view: bool = False


@dataclass(frozen=True)
class Record:
    """One step of the host. `kind` is graph, copy, rec, wait, sync, host or free.

    `stream` is where it was enqueued (sync: what is waited for), `at` the place in that stream of
    its first command; `read` and `write` are of copies and host accesses. Of a buffer that is
    freed `write` is all of it: whoever gets those bytes next may write there.
    """

    kind: str
    stream: int | None = None
    at: int = 0
    label: str = ""
    kernels: tuple[Kernel, ...] = ()
    read: Range | None = None
    write: Range | None = None
    event: int | None = None
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memory:
    """A buffer that a played device allocated: on device `device`, or pinned."""

    number: int
    pinned: bool
    device: int
    address: int
    nbytes: int


@dataclass
class Recording:
    """A whole log. `memories` are all buffers that were ever allocated, with when they lived."""

    contract: str = ""
    devices: int = 0
    cut_short: str = ""
    forced: bool = False  # a directed order came to pass
    lost: int = 0  # copies whose destination the program had given back when they ran
    records: list[Record] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)  # of what the host got
    lived: dict[int, tuple[int, int]] = field(default_factory=dict)  # buffer -> [first, past last)
    device_of: dict[int, int] = field(default_factory=dict)  # stream -> device

    def memories_at(self, index: int) -> list[Memory]:
        """The buffers that exist when `records[index]` happens, by address."""
        alive = (m for m in self.memories if self.lived[m.number][0] <= index)
        here = (m for m in alive if index < self.lived[m.number][1])
        return sorted(here, key=lambda m: m.address)


def read_log(path: Path) -> Recording:
    """The recording in a log file, gzipped or not. FormatError where it is none."""
    reader, number = _Reader(), 0
    try:
        for line in _lines(path):
            number += 1
            reader.take(json.loads(line))
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        raise FormatError(f"{path}:{number}: no log of a recorded program: {error!r}") from None
    if not reader.found.devices:
        raise FormatError(f"{path}: the program never met the played devices")
    return reader.found


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from file


class _Reader:
    def __init__(self) -> None:
        self.found = Recording()
        self._lists: dict[int, tuple[Kernel, ...]] = {}
        self._count: dict[int, int] = {}  # commands enqueued so far, per stream

    def take(self, line: dict[str, Any]) -> None:
        found, now = self.found, len(self.found.records)
        match line["t"]:
            case "begin":
                found.contract = str(line["contract"])
                found.devices = _number(line, "devices", most=MOST_DEVICES)
            case "stream":
                found.device_of[_number(line, "be")] = self._device(line)
            case "nodes":
                self._lists[_number(line, "id")] = tuple(map(_kernel, line["nodes"]))
            case "alloc":
                number, at, size = (_number(line, k) for k in ("buf", "base", "n"))
                m = Memory(number, bool(line["host"]), self._device(line), at, size)
                found.memories.append(m)
                found.lived[m.number] = (now, 1 << 62)
            case "free":
                found.lived[line["buf"]] = (found.lived[line["buf"]][0], now + 1)
                found.records.append(_freed(found, line["buf"]))
            case "full":
                found.cut_short = str(line["why"])
            case "sum":
                place = _number(line, "be", HOST_STREAM), _number(line, "at")
                found.sums[place] = _number(line, "sum", most=ANY_SUM)
            case "forced":
                found.forced = True
            case "lost":
                found.lost += 1
                self._given_back(_range([line["at"], line.get("n", 1)], ""))
            case kind:
                found.records.append(self._record(kind, line))

    def _device(self, line: dict[str, Any]) -> int:
        """Which of the devices a line is about."""
        return _number(line, "dev", most=self.found.devices - 1)

    def _given_back(self, gone: Range) -> None:
        """A copy found no memory where it was to write. The program gave that back while the copy
        was in flight: before the waits that made it run, which are the last records here."""
        records = self.found.records
        at = len(records)
        while at and records[at - 1].kind == "sync":
            at -= 1
        records.insert(at, Record("host", label="memory is given back", write=gone))
        for number, (first, past) in self.found.lived.items():
            self.found.lived[number] = (first + (first > at), past + (past > at))

    def _record(self, kind: str, line: dict[str, Any]) -> Record:
        label = line.get("what", "")
        if kind == "host":
            read, write = (_range(line[k], label) if k in line else None for k in "rw")
            stack = tuple(line.get("stack", ()))
            return Record(kind, label=label, read=read, write=write, stack=stack)
        if kind == "sync":
            stream, event = (_number(line, k) if k in line else None for k in ("be", "ev"))
            return Record(kind, stream, event=event)
        stream = _number(line, "be", HOST_STREAM)
        if stream not in self.found.device_of and (stream, kind) != (HOST_STREAM, "graph"):
            raise ValueError(f"stream {stream} was never opened")
        at = self._count.get(stream, 0)
        if kind == "graph":
            kernels = self._lists[line["id"]]
            self._count[stream] = at + len(kernels)
            return Record(kind, stream, at, kernels=kernels)
        if kind == "copy":
            self._count[stream] = at + 1
            source = _range([line["src"], line["n"]], label) if line["src"] else None
            return Record(
                kind, stream, at, label, (), source, _range([line["dst"], line["n"]], label)
            )
        if kind in ("rec", "wait"):
            self._count[stream] = at + 1
            return Record(kind, stream, at, event=_number(line, "ev"))
        raise ValueError(f"unknown line {kind!r}")


def _freed(found: Recording, number: int) -> Record:
    (m,) = (m for m in found.memories if m.number == number)
    return Record("free", label=f"free buffer{number}", write=Range(m.address, m.nbytes))


def _kernel(node: list[Any]) -> Kernel:
    op, name, target, solid, sources, *view = node  # older logs do not tell views
    writes = _range(target, f"{op} {name}")
    reads = tuple(map(_source, sources))
    return Kernel(str(op), str(name), writes, bool(solid), reads, any(view))


def _source(raw: list[Any]) -> Range:
    place = _range([raw[0], raw[1]], "")
    return Range(place.address, place.nbytes, str(raw[2]), _whole(raw[3], "writer", least=-1))


def _range(pair: list[int], label: str) -> Range:
    address, nbytes = pair
    return Range(_whole(address, "address"), _whole(nbytes, "bytes"), _tensor(label))


def _number(line: dict[str, Any], key: str, least: int = 0, most: int = MOST) -> int:
    return _whole(line[key], key, least, most)


def _whole(value: object, what: str, least: int = 0, most: int = MOST) -> int:
    """A number of the log. ValueError where it is none, or out of its range."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what}: expected a whole number from {least} to {most}, got {value!r}")
    return value


def _tensor(label: str) -> str:
    """The tensor's name in "H2D name"."""
    return label.partition(" ")[2] or label
