"""A server as a process of its own, for tests, and what they ask it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
from cli_kit import ROOT

WEB = httpx.Client(timeout=60)
TALK = [{"role": "user", "content": "Say something."}]
ENDLESS = {"256": -100, "257": -100}  # the end tokens of the tiny model
FLAG: dict[str, Any] = {
    "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
    "additionalProperties": False,
}  # fmt: skip
WORD: dict[str, Any] = {
    "type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"],
    "additionalProperties": False,
}  # fmt: skip


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    path: Path
    key: str = "none"

    @property
    def client(self) -> openai.OpenAI:
        return _client(self.url, self.key)

    def end(self) -> int:
        """Its status, once it has ended as a signal asks it to."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@cache  # to make one takes the processor as long as a small answer
def _client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def started(path: Path, *options: str) -> Server:
    """A server of this model, on one thread."""
    command = [sys.executable, "-m", "models", "serve", "-m", str(path), "-t", "1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the server ended with {process.wait()}"
    return Server(process, json.loads(line)["url"], path)


@contextmanager
def served(path: Path, *options: str) -> Iterator[Server]:
    """The same for a while; it ends without a fault."""
    running = started(path, *options)
    try:
        yield running
    finally:
        assert running.end() == 0


def events(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events, read as the HTML standard says."""
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n") if line[:1] != ":"]
        told = {field: value for field, _, value in lines if field}
        if "data" in told and told["data"] != "[DONE]":
            yield told.get("event", ""), json.loads(told["data"])
