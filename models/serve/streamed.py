"""Replies whose pieces are sent as they come."""

import asyncio

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class Streamed(StreamingResponse):
    """Whoever makes the pieces is stopped where the client goes away.

    They are sent by the task that was there: a group of tasks, as Starlette's own reply has it,
    takes a tenth of a millisecond to begin, for which a step waits, and as much to end.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as somebody waits for."""
        task, gone = asyncio.current_task(), False
        assert task is not None, "a reply is sent by no task"

        async def leave() -> None:
            nonlocal gone
            await self.listen_for_disconnect(receive)
            gone = True
            task.cancel()

        leaving = asyncio.ensure_future(leave())
        try:
            await self.stream_response(send)
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
        finally:
            leaving.cancel()
