"""Which pages may ask: of this server, by whatever name, and of sites that were named."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from serve_kit import WEB, Server
from starlette.responses import PlainTextResponse

from models.serve.guard import Guard
from models.serve.server import near

NEAR, FAR = ("127.0.0.1", 80), ("192.0.2.7", 80)
MAPPED = ("::ffff:127.0.0.1", 80)
PAGES: list[tuple[str, str, Any, bool]] = [  # origin, host, where it came in, whether it may
    ("http://localhost:80", "localhost:80", NEAR, True),
    ("http://127.0.0.1:80", "127.0.0.1:80", NEAR, True),
    ("http://[::1]:80", "[::1]:80", ("::1", 80), True),
    ("http://localhost:9000", "localhost:9000", NEAR, True),  # a tunnel's end
    ("http://evil.example:80", "evil.example:80", NEAR, False),  # a name that leads here
    ("http://evil.example:80", "evil.example:80", ("::1", 80), False),
    ("http://evil.example:80", "evil.example:80", MAPPED, False),
    ("http://evil.example:80", "evil.example:80", None, False),  # behind who knows what
    ("http://localhost.evil.example", "localhost.evil.example", NEAR, False),
    ("http://127.0.0.1.evil.example", "127.0.0.1.evil.example", NEAR, False),
    ("http://evil.example@localhost", "evil.example@localhost", NEAR, True),  # is localhost
    ("http://localhost@evil.example", "localhost@evil.example", NEAR, False),
    ("http://box.example", "box.example", FAR, True),  # a name of a server for many
    ("http://evil.example", "box.example", FAR, False),
    ("http://localhost:3000", "localhost:80", NEAR, False),  # another server of this machine
    ("https://named.example", "localhost:80", NEAR, True),
    ("https://named.example", "named.example", NEAR, True),
    ("null", "localhost:80", NEAR, False),
    ("null", "", NEAR, False),
    ("http://[", "[", NEAR, False),
    ("", "", FAR, False),
]


def status(origin: str, host: str, server: Any, named: Sequence[str]) -> int:
    guard, found = Guard(PlainTextResponse("yes"), [], named), list[int]()
    headers = [(b"origin", origin.encode()), (b"host", host.encode())]
    scope = {"type": "http", "path": "/", "headers": headers, "server": server, "method": "POST"}

    async def send(message: Any) -> None:
        found.append(message.get("status", 0))

    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]  # there is no body
    return found[0]


def test_a_key_is_the_bytes_that_its_file_holds() -> None:
    """The last byte of à is a space in Latin-1, in which headers are read."""
    for key in ("plain", "clé", "là", "鍵"):
        guard, found = Guard(PlainTextResponse("yes"), [key], []), list[int]()

        async def send(message: Any, to: list[int] = found) -> None:
            to.append(message.get("status", 0))

        for name, value in ((b"authorization", f"Bearer {key}"), (b"x-api-key", key),
                            (b"x-api-key", f"{key}a")):  # fmt: skip
            scope = {"type": "http", "path": "/v1/models", "headers": [(name, value.encode())]}
            asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]  # there is no body
        assert found[::2] == [200, 200, 401], key


@pytest.mark.parametrize(("origin", "host", "server", "may"), PAGES)
def test_a_page_under_a_name_that_leads_here_is_another_sites(
    origin: str, host: str, server: Any, may: bool
) -> None:
    named = ["https://named.example"]
    assert status(origin, host, server, named) == (200 if may else 403)
    assert status(origin, host, server, ["*"]) == 200


def test_a_server_for_this_machine_alone_has_three_names() -> None:
    three = ["http://localhost:81", "http://127.0.0.1:81", "http://[::1]:81"]
    assert near("127.0.0.1", 81) == near("::1", 81) == three
    assert near("127.0.0.1", 80)[0] == "http://localhost"
    assert near("0.0.0.0", 81) == near("192.0.2.7", 81) == []


def test_a_browser_may_call_this_machine_by_its_other_name(server: Server) -> None:
    """The page's browser asks first, and reads no reply that does not name its site."""
    port = server.url.rpartition(":")[2]
    page = {"origin": f"http://localhost:{port}"}
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "a-b"}
    first = WEB.options(f"{server.url}/tokenize", headers={**page, **wish})
    reply = WEB.post(f"{server.url}/tokenize", json={"content": "a"}, headers=page)
    for r in (first, reply):
        assert (r.status_code, r.headers["access-control-allow-origin"]) == (200, page["origin"])
    assert reply.headers["access-control-expose-headers"] == "x-request-id"
    foreign = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}
    reply = WEB.post(f"{server.url}/tokenize", json={"content": "a"}, headers=foreign)
    assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("kilobytes", [33, 40, 120, 250, 1000])
def test_headers_are_bounded_however_they_come(server: Server, kilobytes: int) -> None:
    """At once, as a client sends them, in many headers or one, or in the address."""
    long = "x" * (kilobytes << 10)
    many = {f"x-{i}": "y" * 1000 for i in range(kilobytes)}
    health = f"{server.url}/health"
    for headers, query in (({"x-long": long}, ""), (many, ""), ({}, long)):
        try:
            reply = httpx.get(health, headers=headers, params={"q": query[: 60 << 10]})
        except httpx.TransportError:  # it hung up before all was sent
            continue
        assert reply.status_code in (400, 431), reply.text
    assert WEB.get(health, headers={"x-long": "x" * (30 << 10)}).status_code == 200
