"""HTTP for clients that may be slow on purpose: headers have a time in which to arrive. Requests
know the wire on which they are answered."""

from asyncio import TimerHandle, Transport
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .wire import Wire

LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"  # no body

WIRE = "wire"  # of a connection, by this name in the state of its requests


def bounded(head_seconds: float) -> type[H11Protocol]:
    """A protocol that closes a connection whose request's headers take longer than that, counted
    from its first byte, or from the connection where that is the first request. (The body's time is
    the handler's, the time between two requests is uvicorn's.)"""

    class Bounded(H11Protocol):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._late: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wire = Wire(transport)
            self.app_state = {**self.app_state, WIRE: self._wire}
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wire.close()
            super().connection_lost(exc)
            self._forget()

        def _watch(self) -> None:
            """Have the time run exactly while a request's headers are on their way."""
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(head_seconds, self._close)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _close(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(LATE)
                self.transport.close()

    return Bounded
