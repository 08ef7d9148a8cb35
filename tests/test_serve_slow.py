"""Clients that send their headers slowly are sent away, and no others."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from models.serve.protocol import bounded


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=bounded(0.2), ws="none", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def until_closed(connection: socket.socket) -> bytes:
    """All that the server says until it hangs up."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"P", HEAD[:-1], HEAD[:-2]])
def test_headers_that_do_not_come_end_the_connection(port: int, begun: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), 30)) as c:
        c.sendall(begun)
        assert until_closed(c).startswith(b"HTTP/1.1 408 ")


def test_a_header_at_a_time_does_not_help(port: int) -> None:
    """The classic slow attack: each line is on time, their end never comes."""
    with closing(socket.create_connection(("127.0.0.1", port), 30)) as c:
        c.sendall(HEAD[:-2])
        c.settimeout(0.02)
        said = b""
        for _ in range(1000):
            try:
                said = c.recv(4096)
                break
            except TimeoutError:
                c.sendall(b"x-more: 1\r\n")
        assert said.startswith(b"HTTP/1.1 408 ")


def test_the_second_request_of_a_connection_has_a_time_too(port: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), 30)) as c:
        c.sendall(HEAD + b"abc")
        said = b""
        while not said.endswith(b"abc"):
            said += c.recv(4096)
        assert said.startswith(b"HTTP/1.1 200 ")
        c.sendall(HEAD[:9])
        assert until_closed(c).startswith(b"HTTP/1.1 408 ")


def test_a_body_is_not_a_header(port: int) -> None:
    """Its time is the handler's: a whole head, then other connections' time passes, then a body."""
    with closing(socket.create_connection(("127.0.0.1", port), 30)) as c:
        c.sendall(HEAD)
        with closing(socket.create_connection(("127.0.0.1", port), 30)) as other:
            assert until_closed(other).startswith(b"HTTP/1.1 408 ")
        c.sendall(b"abc")
        assert c.recv(4096).startswith(b"HTTP/1.1 200 ")
