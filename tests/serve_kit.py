"""A server as a process of its own, for tests."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import openai

ROOT = Path(__file__).parent.parent


@dataclass
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    path: Path
    key: str = "none"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)


def started(path: Path, *options: str) -> Server:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "models",
            "serve",
            "-m",
            str(path),
            "--port",
            "0",
            "--json",
            *options,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the server ended with {process.wait()}"
    return Server(process, json.loads(line)["url"], path)


def ended(server: Server) -> int:
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(30)
