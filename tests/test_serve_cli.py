"""What `ggraph serve` is told, and how it ends."""

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from serve_kit import started
from small_model import small_model
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from ggraph import InputError
from models.cli import serve
from models.cli.app import app
from models.serve.server import Server, listening

ROOT = Path(__file__).parent.parent
ENDS = ("server_error", "the server ends")


def test_lines_of_a_key_file_that_are_no_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for coding in ("utf-8", "utf-8-sig"):  # the latter as programs on Windows write it
        keys.write_text("  one \n\n# of the kitchen\n\t\n  # one\ntwo#2\n#three\n", coding)
        assert serve._keys(keys) == ("one", "two#2")
    keys.write_text("# nothing yet\n\n")
    with pytest.raises(InputError, match="holds no API key"):
        serve._keys(keys)


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("serve", "uvicorn", "serve"), ("serve --ray", "ray", "ray"), ("batch", "llguidance", "serve"),
     ("batch --ray", "ray", "ray")],
)  # fmt: skip
def test_what_is_not_installed_is_told_before_a_model_is_looked_for(
    command: str, missing: str, extra: str, tmp_path: Path
) -> None:
    """It would be fetched and loaded for nothing."""
    asked, model = tmp_path / "in.jsonl", tmp_path / "none.gguf"
    asked.write_text('{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}')
    files = [str(asked), str(tmp_path / "out.jsonl")] * command.startswith("batch")
    arguments = ["ggraph", *command.split(), *files, "-m", str(model)]
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv = {arguments!r}\n"
    code += "import runpy; runpy.run_module('models', run_name='__main__', alter_sys=False)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = f"{missing} is not installed: pip install 'ggraph-runtime[{extra}]'"
    assert done.returncode != 0 and said in done.stderr, done.stderr


@pytest.mark.parametrize(
    "origin",
    ["junk", "", " ", "example.org", "https://", "https://example.org/", "https://example.org/a",
     "https://Example.org", "HTTPS://example.org", "https://example.org:443", "http://a.org:80",
     "http://a.org:", "http://a.org:8080x", "https://a b.org", "//example.org", "https://a.org\n",
     "https://me@a.org", "https://*.a.org", "https://ä.org", "http://[::1"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(origin: str, tmp_path: Path) -> None:
    arguments = ["serve", "-m", str(tmp_path / "none.gguf"), "--cors-origin", origin]
    found = CliRunner().invoke(app, arguments).exception
    assert isinstance(found, InputError) and f"--cors-origin {origin!r}" in str(found), found


def test_origins_as_browsers_send_them() -> None:
    known = ("*", "null", "http://localhost:3000", "https://example.org", "https://example.org:80",
             "http://a.org:443", "http://[::1]:8080", "chrome-extension://abc",
             "https://xn--4ca.org", "http://10.0.0.1:8000")  # fmt: skip
    assert serve._origins(known) == known


def test_a_head_and_none_are_not_one_wish(tmp_path: Path) -> None:
    """The file that was named was not even looked at."""
    arguments = ["serve", "-m", str(tmp_path / "none.gguf"), "--head", "a", "--no-head"]
    found = CliRunner().invoke(app, arguments).exception
    assert isinstance(found, InputError) and "--no-head and --head a" in str(found), found


def test_no_host_is_not_every_address() -> None:
    """As where a script's variable is empty: the server was open to the whole network."""
    with pytest.raises(InputError, match="--host ''"):
        listening("", 0).close()


def test_a_second_signal_tells_who_waits_to_come_again(tmp_path: Path) -> None:
    """One whose answer is being made, and one who is queued behind it: not that the server has a
    fault, as status 500 would say."""
    path = small_model(tmp_path / "m.gguf", {"llama.context_length": 60_000})
    server = started(path, "-c", "0", "--parallel", "1")
    endless = {"prompt": "abc", "max_tokens": 50_000, "logit_bias": {257: -100}}

    def ask() -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=endless, timeout=60)

    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask) for _ in range(2)]
        while httpx.get(f"{server.url}/health").json()["open"] < 2:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None and not any(a.done() for a in asked)
        assert server.end() == 0
        for reply in (a.result() for a in asked):
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.json()["error"]["type"] == "server_error"


def test_a_second_signal_tells_who_reads_a_stream(tmp_path: Path) -> None:
    """By an event in the stream's own form: it broke off, as where a network fails."""
    path = small_model(tmp_path / "m.gguf", {"llama.context_length": 60_000})
    server = started(path, "-c", "0")
    more = {"logit_bias": {257: -100}, "stream": True}
    asked = [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
        ("completions", {"prompt": "abc", "max_tokens": 50_000}),
        ("responses", {"input": "abc"}),
    ]
    begun = threading.Barrier(len(asked) + 1)

    def ask(where: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        found = list[str]()
        url = f"{server.url}/v1/{where}"
        with httpx.stream("POST", url, json={**body, **more}, timeout=60) as reply:
            for line in reply.iter_lines():  # which fails where the reply is not whole
                if line.startswith("data: {"):
                    found.append(line.removeprefix("data: "))
                    if len(found) == 10:
                        begun.wait(30)
        return [json.loads(line) for line in found]

    with ThreadPoolExecutor() as pool:
        replies = [pool.submit(ask, *a) for a in asked]
        begun.wait(30)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None and not any(r.done() for r in replies)
        assert server.end() == 0
        chat, plain, response = (r.result() for r in replies)
    for events, count in ((chat, 2), (plain, 1)):
        errors = [e["error"] for e in events if "error" in e]
        assert [(e["type"], e["message"]) for e in errors] == [ENDS] * count
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-count])
    assert (response[-1]["type"], response[-1]["message"]) == ("error", ENDS[1])


def test_who_still_reads_when_the_time_to_end_is_over_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream was cut there, in the middle of a reply."""
    monkeypatch.setattr("models.serve.server.DRAIN_SECONDS", 0.5)
    ends = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"begun "
        await ends.wait()
        yield b"and told"

    async def reply(request: Request) -> StreamingResponse:
        return StreamingResponse(endless())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        ends.set()

    app = Starlette(routes=[Route("/", reply)], lifespan=lifespan)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with httpx.stream("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/") as stream:
        parts = stream.iter_text()
        heard = next(parts)
        server.handle_exit(signal.SIGTERM, None)
        begun = time.monotonic()
        heard += "".join(parts)
    thread.join(30)
    assert heard == "begun and told" and 0.4 < time.monotonic() - begun < 10


@pytest.mark.parametrize("pause", [0.0, 0.0002, 0.05, 0.5])
@pytest.mark.parametrize("asked", [True, False])
def test_further_interrupts_end_a_server_without_a_traceback(
    pause: float, asked: bool, tmp_path: Path
) -> None:
    """With answers that would take minutes, one whole and one in pieces, or with none."""
    path = small_model(tmp_path / "m.gguf", {"llama.context_length": 60_000})
    process = subprocess.Popen(
        [sys.executable, "-m", "models", "serve", "-m", str(path), "-t", "1", "-c", "0",
         "--port", "0", "--json"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    begun = threading.Event()

    def ask(stream: bool) -> None:
        body = {"prompt": "abc", "max_tokens": 50_000, "stream": stream, "logit_bias": {257: -100}}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_bytes():
                    begun.set()
        except httpx.HTTPError:
            pass  # it was cut off

    clients = [threading.Thread(target=ask, args=(s,)) for s in (False, True) if asked]
    for c in clients:
        c.start()
    assert not asked or begun.wait(30)
    process.send_signal(signal.SIGINT)
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        time.sleep(pause or 0.01)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    for c in clients:
        c.join()
    assert err == "" and process.returncode in (0, -signal.SIGINT)


def test_the_log_keeps_what_is_a_fault() -> None:
    def made(error: BaseException | None, text: str) -> logging.LogRecord:
        about = None if error is None else (type(error), error, None)
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, text, None, about)

    assert serve._is_fault(made(ValueError("x"), "Exception in ASGI application"))
    assert serve._is_fault(made(None, "Traceback ..\nValueError: x\n"))
