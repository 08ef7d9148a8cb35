"""A streamed reply ends with what makes it, with its client, or with whoever cancels it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from models.serve.streamed import Streamed


class Client:
    """Takes what is sent. It is `gone` where that is said, or where it has `enough` pieces."""

    def __init__(self, enough: int = 1 << 30) -> None:
        self.enough, self.heard, self.gone = enough, list[dict[str, Any]](), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.heard.append(message)
        if len(self.heard) > self.enough:
            self.gone.set()

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.heard[1:]]


async def pieces(ended: list[str], count: int) -> AsyncIterator[bytes]:
    try:
        for _ in range(count):
            yield b"a"
        while count == 2:  # says nothing more, and does not end
            await asyncio.sleep(60)
    finally:
        ended.append("ended")


def test_all_pieces_come_and_then_the_end() -> None:
    async def run() -> None:
        client, ended = Client(), list[str]()
        await Streamed(pieces(ended, 3))({"type": "http"}, client.receive, client.send)
        assert client.bodies == [b"a", b"a", b"a", b""] and ended == ["ended"]
        assert client.heard[-1]["more_body"] is False
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_who_makes_the_pieces_is_stopped_where_the_client_leaves() -> None:
    async def run() -> None:
        client, ended = Client(2), list[str]()
        async with asyncio.timeout(30):
            await Streamed(pieces(ended, 2))({"type": "http"}, client.receive, client.send)
        task = asyncio.current_task()
        assert client.bodies == [b"a", b"a"] and ended == ["ended"]
        assert task is not None and not task.cancelling()

    asyncio.run(run())


def test_a_reply_that_is_cancelled_says_so() -> None:
    async def run() -> None:
        client, ended = Client(), list[str]()
        reply = Streamed(pieces(ended, 2))({"type": "http"}, client.receive, client.send)
        task = asyncio.ensure_future(reply)
        while len(client.heard) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["ended"]

    asyncio.run(run())
