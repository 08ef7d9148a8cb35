"""Speed of a server under many clients: ours, or any that speaks OpenAI's API.

Every client asks again as soon as it was answered; the first round of all is not counted. One text
that is printed without a server is measured by the same figures. Clients run on the processors
that they measure, so they only note when bytes came, and read them when the answer is over.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ggraph import InputError

from .printing import END

START_SECONDS = 120
MARK = b"data: {"
LAST = b"\r\n0\r\n\r\n"  # chunk of a reply, behind another
MOST_READ = 1 << 16  # bytes at once
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Load:
    """What clients ask: prompts of `prompt` random tokens, of which the first `shared` are those of
    all, and `new` tokens of answer, greedily and without an end."""

    clients: int
    prompt: int = 40
    new: int = 64
    shared: int = 0
    rounds: int = 2

    def prompts(self, vocabulary: int, seed: int) -> list[list[list[int]]]:
        """Token ids, by client and round; other ones for every seed and number of clients: what a
        server has read already, it need not read again."""
        r = np.random.default_rng((seed, self.clients))
        common = r.integers(100, vocabulary - 100, self.shared).tolist()
        own = r.integers(
            100, vocabulary - 100, (self.clients, self.rounds + 1, self.prompt - self.shared)
        )
        return [[[*common, *p] for p in rounds] for rounds in own.tolist()]


@dataclass
class Heard:
    """When an answer's request left and its events with text came, in seconds of one clock."""

    asked: float
    times: list[float] = field(default_factory=list)


def measure(url: str, vocabulary: int, load: Load, seed: int) -> dict[str, Any]:
    """Tokens per second of all clients together, and what each waited for."""
    prompts = load.prompts(vocabulary, seed)
    begun, heard = _all(url, load, prompts)
    return figures(load, begun, heard)


def printed(printer: Process, vocabulary: int, load: Load, seed: int) -> dict[str, Any]:
    """The same of one reader of `ggraph generate`, whose texts come one after the other."""
    begun, heard = 0.0, list[Heard]()
    for number, prompt in enumerate(load.prompts(vocabulary, seed)[0]):
        said = _read(printer, prompt, load.new)
        begun = said.asked if number == 1 else begun
        heard += [said] if number else []
    return figures(load, begun, heard)


def _read(printer: Process, prompt: Sequence[int], new: int) -> Heard:
    """When parts of a text came."""
    assert printer.stdin is not None and printer.stdout is not None, "its pipes are not ours"
    asked, heard = json.dumps([prompt, new]).encode() + b"\n", Heard(time.perf_counter())
    printer.stdin.write(asked)
    printer.stdin.flush()
    data = b""
    while not data.endswith(END):
        data = os.read(printer.stdout.fileno(), MOST_READ)
        if not data:
            raise InputError("a process like `ggraph generate` ended amid a text")
        heard.times += [time.perf_counter()] if data != END else []
    return heard


def figures(load: Load, begun: float, heard: Sequence[Heard]) -> dict[str, Any]:
    """Of answers, none of which was asked for before `begun`."""
    last = max(h.times[-1] for h in heard)
    firsts = [h.times[0] - h.asked for h in heard]
    between = [b - a for h in heard for a, b in pairwise(h.times)] or [0.0]  # all said at once
    return {
        "clients": load.clients,
        "prompt_tokens": load.prompt,
        "shared_tokens": load.shared,
        "new_tokens": load.new,
        "tokens_per_second": len(heard) * load.new / (last - begun),
        "first_token_p50": float(np.quantile(firsts, 0.5)),
        "first_token_p95": float(np.quantile(firsts, 0.95)),
        "between_p50": float(np.quantile(between, 0.5)),
        "between_p95": float(np.quantile(between, 0.95)),
    }


def _all(
    url: str, load: Load, prompts: Sequence[Sequence[Sequence[int]]]
) -> tuple[float, list[Heard]]:
    """When counting began, and every answer from then on."""
    requests = [[_request(url, p, load.new) for p in own[1:]] for own in prompts]
    first = _answered(url, [[_request(url, own[0], 4)] for own in prompts])
    assert all(a.heard().times for a in first), "a server says nothing"
    begun = time.perf_counter()
    return begun, [a.heard() for a in _answered(url, requests)]


def _answered(url: str, requests: Sequence[Sequence[bytes]]) -> "list[_Answer]":
    """All answers to the requests of several clients, who ask one thing after the other."""
    found = list[_Answer]()
    with selectors.DefaultSelector() as open_ones:

        def ask(left: Iterator[bytes], line: socket.socket | None) -> None:
            if (request := next(left, None)) is not None:
                found.append(answer := _Answer(url, request, line))
                open_ones.register(answer.line, selectors.EVENT_READ, (answer, left))
            elif line is not None:
                line.close()

        for own in requests:
            ask(iter(own), None)
        while known := open_ones.get_map():
            # One alone is read without asking which: its client runs where it measures
            ready = known.values() if len(known) == 1 else [key for key, _ in open_ones.select()]
            for key in list(ready):
                (answer, left), line = key.data, key.fileobj
                over = answer.is_over()
                if over or answer.line is not line:
                    open_ones.unregister(line)
                if over:
                    ask(left, answer.line)
                elif answer.line is not line:
                    open_ones.register(answer.line, selectors.EVENT_READ, key.data)
    return found


class _Answer:
    """Sends a request, and notes what comes back and when. The connection is kept for the next one,
    as usual libraries do; where the server did not keep it, which shows when nothing comes back,
    another takes its place."""

    def __init__(self, url: str, request: bytes, line: socket.socket | None) -> None:
        parts, self._request, self.asked = urlsplit(url), request, time.perf_counter()
        self.came: list[tuple[float, bytes]] = []
        self._where, self._latest = (parts.hostname or "", parts.port or 80), b""
        self._kept = line is not None
        self.line = line or socket.create_connection(self._where)
        with suppress(ConnectionError):  # which reading will find as well
            self.line.sendall(request)

    def is_over(self) -> bool:
        """Take in what has come; whether that is the end. InputError where the server hung up."""
        try:
            data = self.line.recv(MOST_READ)
        except ConnectionError:
            data = b""
        if not data and self._kept and not self.came:
            self.line.close()
            self.line, self._kept = socket.create_connection(self._where), False
            self.line.sendall(self._request)
            return False
        self.came.append((time.perf_counter(), data))
        if not data:
            raise InputError(f"{self._request[:60]!r}: no whole answer: {self._latest!r}")
        self._latest = (self._latest + data)[-len(LAST) :]
        return self._latest == LAST

    def heard(self) -> Heard:
        """When text came. InputError where the request was refused, or the answer ended early."""
        heard, finish = Heard(self.asked), None
        for when, said in self._events():
            choices = said["choices"]
            finish = choices[0]["finish_reason"] if choices else finish
            heard.times += [] if finish else [when]
        if finish != "length":
            raise InputError(f"{self._request[:60]!r}: ended by {finish!r}, expected all tokens")
        return heard

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """When each event was whole, and what it says. InputError where there is none."""
        whole = b"".join(data for _, data in self.came)
        status, _, _ = whole.partition(b"\r\n")
        if b" 200 " not in status:
            raise InputError(f"{self._request[:60]!r}: {status.decode(errors='replace')}")
        ends = np.cumsum([len(data) for _, data in self.came])
        at = whole.find(MARK)
        while at >= 0:
            end = whole.index(b"\n", at)
            when = self.came[int(np.searchsorted(ends, end, "right"))][0]
            yield when, json.loads(whole[at + len(MARK) - 1 : end])
            at = whole.find(MARK, end)


def _request(url: str, prompt: Sequence[int], new: int) -> bytes:
    """The bytes that ask for an answer, streamed."""
    body = {
        "prompt": list(prompt), "max_tokens": new, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


@contextmanager
def our_server(model: Path, threads: int | None, parallel: int, draft: int) -> Iterator[str]:
    """The address of `ggraph serve` in a process of its own."""
    command = [
        sys.executable, "-m", __package__.split(".")[0], "serve", "-m", str(model), "--port", "0",
        "--json", "--parallel", str(parallel), "--queue", "256", "--draft-max", str(draft),
    ]  # fmt: skip
    if threads is not None:
        command += ["-t", str(threads)]
    with _process(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "the server has no output"
        line = process.stdout.readline()
        if not line:
            raise InputError("ggraph serve did not start")
        url = json.loads(line)["url"]
        _await(urlsplit(url).port or 0, "plans_to_make", "ggraph serve")
        yield url


@contextmanager
def our_printer(model: Path, threads: int) -> Iterator[Process]:
    """A process that prints texts as `ggraph generate` does, and has its model."""
    command = [sys.executable, "-m", f"{__package__}.printing", str(model), str(threads)]
    with _process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        _read(process, [1], 1)  # what else runs would be measured while this one loads
        yield process


@contextmanager
def peer_server(
    binary: str, model: Path, threads: int, parallel: int, context: int
) -> Iterator[str]:
    """The address of llama.cpp's server on the same file, with as many slots."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        binary, "-m", str(model), "-t", str(threads), "-np", str(parallel), "-c",
        str(context * parallel), "--port", str(port), "--host", "127.0.0.1",
    ]  # fmt: skip
    with _process(command, stdout=subprocess.DEVNULL):
        _await(port, "", binary)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _process(command: Sequence[str], stdout: int, stdin: int | None = None) -> Iterator[Process]:
    try:
        process = Process(command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise InputError(f"cannot start {command[0]}: {error.strerror or error}") from None
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _await(port: int, left: str, name: str) -> None:
    """Until a server is well, and has nothing `left` to do."""
    until = time.monotonic() + START_SECONDS
    while not _well(port, left):
        if time.monotonic() > until:
            raise InputError(f"{name} did not start")
        time.sleep(0.2)


def _well(port: int, left: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        return reply.status == 200 and not json.loads(reply.read()).get(left)
    except (OSError, ValueError):
        return False
    finally:
        connection.close()
