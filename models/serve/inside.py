"""An application asked without a socket, by whoever runs in its process."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from .going_on import Head


@dataclass(frozen=True)
class Inside:
    """Asks `app`, and says in its heads that it is `name`."""

    app: ASGIApp
    name: str = ""

    @contextlib.asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """The application's life."""
        into: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        out: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        task = asyncio.ensure_future(self.app(scope, into.get, out.put))
        try:
            for kind in ("startup", "shutdown"):
                into.put_nowait({"type": f"lifespan.{kind}"})
                said = await out.get()
                if said["type"] != f"lifespan.{kind}.complete":
                    raise RuntimeError(f"the application: {said}")
                if kind == "startup":
                    yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ask(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        failed: Sequence[str] = (),
    ) -> AsyncGenerator[Head | bytes, None]:
        """A head, then bytes. Whoever stops listening is gone for the application."""
        heard, gone = asyncio.Queue[dict[str, Any] | None](), asyncio.Event()
        todo = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if todo:
                return todo.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            heard.put_nowait(message)

        task = asyncio.ensure_future(self.app(_scope(method, path, headers), receive, send))
        task.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            while (message := await heard.get()) is not None:
                if message["type"] == "http.response.start":
                    found = [
                        (k.decode("latin-1"), v.decode("latin-1")) for k, v in message["headers"]
                    ]
                    yield Head(message["status"], tuple(found), self.name)
                elif message.get("body"):
                    yield message["body"]
            await task
        finally:
            gone.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _scope(method: str, path: str, headers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    where, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": where,
        "raw_path": where.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers],
        "client": None,
        "server": None,
        "state": {},
    }
