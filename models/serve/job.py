"""A file of requests, answered line by line, and gone on with after any end.

Both files are those of OpenAI's batches. The file of answers is also the journal: it is only ever
added to, a whole line at a time, and who begins takes away a last line without an end. So each
request has one answer there or none, whenever the process was killed, and what has none is asked.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggraph import InputError
from ggraph.errors import shown

from .going_on import ANSWERS, Failed, GoingOn, Head
from .replies import one_line

URLS = (*ANSWERS, "/v1/embeddings", "/v1/rerank")
BEGUN = b'{"id": "batch_'  # a line of answers
# Seconds until one who was refused for lack of room asks again
FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0


@dataclass(frozen=True)
class Line:
    """One request of a job."""

    custom_id: str
    url: str
    body: bytes


def read_requests(path: Path) -> list[Line]:
    """The requests of a file. InputError, naming the line, where one is none."""
    lines, seen = list[Line](), dict[str, int]()
    for number, raw in enumerate(_read(path).splitlines(), 1):
        if not raw.strip():
            continue
        line = _line(raw, f"{path}:{number}")
        if line.custom_id in seen:
            first = seen[line.custom_id]
            raise InputError(f"{path}:{number}: custom_id {line.custom_id!r} is that of {first}")
        seen[line.custom_id] = number
        lines.append(line)
    return lines


def _line(raw: bytes, where: str) -> Line:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON: {error}") from None
    if not isinstance(given, dict):
        raise InputError(f"{where}: expected an object, got {type(given).__name__}")
    name, method, url, body = (given.get(k) for k in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: custom_id: expected a string, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: custom_id {name!r} is no text: half a letter alone") from None
    if method != "POST" or url not in URLS:
        raise InputError(f"{where}: expected POST to one of {', '.join(URLS)}, got {method} {url}")
    if not isinstance(body, dict):
        raise InputError(f"{where}: body: expected an object, got {type(body).__name__}")
    asked = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    return Line(name, url, json.dumps(asked).encode())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


@dataclass(eq=False)
class Results:
    """The file of answers, while one process adds to it."""

    file: int
    done: set[str] = field(default_factory=set)

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path, asked: Sequence[Line]) -> Iterator["Results"]:
        """Go on with a file, or begin one. InputError where another process does so, or where it
        is none, or holds what no request asked for."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):  # a pipe's end would never come
                raise InputError(f"cannot write {path}: it is no file, which can be gone on with")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{path}: another process is writing it") from None
            raw = _read(path)
            end = raw.rfind(b"\n") + 1
            done = _done(raw[:end], path, {a.custom_id for a in asked})
            if not raw.startswith(BEGUN[: len(raw) - end], end):  # what is taken away was ours
                raise InputError(f"{path} does not end with an answer of a job, or part of one")
            os.ftruncate(file, end)
            yield Results(file, done)
            os.fsync(file)
        finally:
            os.close(file)

    def add(self, line: Line, status: int, body: bytes, request: str) -> None:
        """One answer."""
        response = {"status_code": status, "request_id": request, "body": json.loads(body)}
        whole = {
            "id": f"batch_{request}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        rest = memoryview(one_line(whole) + b"\n")
        while rest:
            rest = rest[os.write(self.file, rest) :]
        self.done.add(line.custom_id)


def _done(raw: bytes, path: Path, asked: set[str]) -> set[str]:
    found = set[str]()
    for number, text in enumerate(raw.splitlines(), 1):
        try:
            name = json.loads(text)["custom_id"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(f"{path}:{number} is no answer of a job") from None
        if not isinstance(name, str) or name not in asked or name in found:
            named = f"{path}:{number}: custom_id {shown(name)}"
            raise InputError(f"{named} is not of this job, or twice")
        found.add(name)
    return found


async def run(
    lines: Sequence[Line],
    results: Results,
    replicas: GoingOn,
    at_once: int,
    tell: Callable[[Line], Any],
) -> None:
    """Answer what has no answer yet, `at_once` requests at a time. InputError where the server
    fails; what was answered stays."""
    todo = iter([line for line in lines if line.custom_id not in results.done])

    async def work() -> None:
        for line in todo:
            try:
                status, body = await _reply(replicas, line)
            except Failed as error:
                raise InputError(f"{line.custom_id}: no replica can answer: {error}") from None
            if status >= 500:
                raise InputError(f"{line.custom_id}: status {status}: {body.decode()[:300]}")
            number = len(results.done)
            results.add(line, status, body, f"req_{number:08d}")
            tell(line)

    workers = [asyncio.ensure_future(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for w in workers:
            w.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _reply(replicas: GoingOn, line: Line) -> tuple[int, bytes]:
    wait = FIRST_WAIT
    while True:
        status, body = 500, b""
        headers = [("content-type", "application/json")]
        async for part in replicas.reply("POST", line.url, headers, line.body):
            if isinstance(part, Head):
                status = part.status
            else:
                body += part
        if status != 429:
            return status, body
        await asyncio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)
