"""Words that the batch's thread sends itself come in order and whole, whoever sends the others."""

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPResponse

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from models.serve.inbox import NOTHING_YET, Ended, Inbox
from models.serve.protocol import WIRE, bounded
from models.serve.server import listening
from models.serve.voice import Said
from models.serve.wire import Wire

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PING = b"<ping>"


@dataclass
class Speaker:
    """An answer of `count` words, said by a thread of its own; sometimes the loop says a ping."""

    count: int = 4000
    letters: int = 40
    hurry: float = 0.9  # how often no time passes before the next word
    seen: Counter[str] = field(default_factory=Counter)
    inbox: Inbox = field(default_factory=lambda: Inbox(eager=True))
    wires: list[Wire] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def word(self, number: int) -> str:
        return f"{number}:" + "x" * (number * 7 % self.letters) + ";"

    def speak(self, loop: asyncio.AbstractEventLoop) -> None:
        """As the batch's thread does."""
        chance, number = random.Random(self.count), 0
        while number < self.count:  # which may become less
            said = Said(1, self.word(number))
            past = self.inbox.say(0, said)
            self.seen["past the loop" if past else "by the loop"] += 1
            if not past:
                loop.call_soon_threadsafe(self.inbox.put, (0, said))
            if chance.random() < 0.01:
                loop.call_soon_threadsafe(self.inbox.put, NOTHING_YET)
            if chance.random() > self.hurry / 2:  # a step said one word or some
                self.inbox.send()
            if chance.random() > self.hurry:
                time.sleep(0.0005)
            number += 1
        self.inbox.send()
        loop.call_soon_threadsafe(self.inbox.put, (0, Ended(None)))

    async def answer(self, wire: Wire) -> AsyncIterator[bytes]:
        """As a listener does."""

        def tell(index: int, what: Said | Ended | None) -> bytes:
            return what.text.encode() if isinstance(what, Said) else PING if what is None else b""

        self.wires.append(wire)
        self.inbox.listen(tell, wire)
        loop, ended = asyncio.get_running_loop(), False
        self.thread = threading.Thread(target=self.speak, args=(loop,), daemon=True)
        self.thread.start()
        while not ended:
            heard = await self.inbox.take()
            ended = any(isinstance(what, Ended) for _, what in heard)
            if told := b"".join(tell(index, what) for index, what in heard):
                yield told


@dataclass
class Told:
    """A server that answers as one speaker after the other."""

    port: int
    speakers: list[Speaker]

    def ask(self, speaker: Speaker, room: int | None = None) -> socket.socket:
        self.speakers.append(speaker)
        connection = socket.socket()
        if room is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(ASK)
        return connection


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    speakers = list[Speaker]()

    async def speak(request: Request) -> StreamingResponse:
        return StreamingResponse(speakers.pop().answer(request.scope["state"][WIRE]))

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # as of all who come
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = Starlette(routes=[Route("/", speak)])
    config = uvicorn.Config(app, http=bounded(15), ws="none", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield Told(listener.getsockname()[1], speakers)
    server.should_exit = True
    thread.join()


def read(connection: socket.socket, pause: float) -> bytes:
    """A body in chunks, read with pauses."""
    reply, found = HTTPResponse(connection), b""
    reply.begin()
    assert reply.headers["transfer-encoding"] == "chunked"
    while part := reply.read1(4096):
        found += part
        time.sleep(pause)
    return found


@pytest.mark.parametrize(
    ("letters", "room", "pause", "hurry"),
    [(40, None, 0.0, 0.9), (40, None, 0.0, 0.0), (3000, 2048, 0.0005, 0.9), (300, 2048, 0.0, 0.5)],
    ids=["quick", "unhurried", "slow", "narrow"],
)
def test_every_word_comes_once_in_order(
    told: Told, letters: int, room: int | None, pause: float, hurry: float
) -> None:
    """A client that reads slowly takes a part of a word: the loop sends the rest, and what follows,
    until it has caught up; on a busy machine it may not, so that another answer is asked for."""
    seen = Counter[str]()
    for _ in range(5):
        speaker = Speaker(letters=letters, hurry=hurry, count=1000)
        with closing(told.ask(speaker, room)) as connection:
            body = read(connection, pause).replace(PING, b"")
        assert body.decode() == "".join(map(speaker.word, range(speaker.count)))
        seen += speaker.seen
        if seen["past the loop"] > 10 and (room is None or seen["by the loop"]):
            return
    pytest.fail(f"one of two ways was not taken: {seen}")


def test_a_wire_whose_client_left_writes_to_nobody(told: Told) -> None:
    """The number of its file is the next connection's, whose answer would have its words."""
    speaker = Speaker(count=1 << 30, hurry=0.0)
    with closing(told.ask(speaker)) as connection:
        assert connection.recv(4096)
    while not speaker.wires or speaker.wires[0].idle:
        time.sleep(0.001)
    other = Speaker(count=500)
    with closing(told.ask(other)) as connection:
        body = read(connection, 0.0).replace(PING, b"")
    speaker.count = 0
    speaker.thread.join()
    assert body.decode() == "".join(map(other.word, range(500)))
    assert not speaker.wires[0].send(b"to whom?")


def test_words_go_at_once() -> None:
    """Else the system holds a small one back until the client has acknowledged the one before,
    which on a connection that is used again takes 40 ms."""

    async def held() -> int:
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[asyncio.BaseTransport] = loop.create_future()

        class Noted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connected.set_result(transport)

        listener = listening("127.0.0.1", 0)
        server = await loop.create_server(Noted, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        transport = await connected
        accepted = transport.get_extra_info("socket")
        found = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.abort()
        writer.close()
        server.close()
        return int(found)

    assert asyncio.run(held())
