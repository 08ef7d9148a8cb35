"""A connection to which another thread than the event loop's may write."""

import asyncio
import os
import threading


class Wire:
    """Writes past the loop, while the loop has nothing to write. `lock` is held by whoever writes,
    or says who may; what the system does not take at once is left to the loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.lock = threading.Lock()
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._file: int | None = transport.get_extra_info("socket").fileno()

    @property
    def idle(self) -> bool:
        """Whether all that the loop wrote has gone; asked by the loop."""
        return self._file is not None and not self._transport.get_write_buffer_size()

    def send(self, data: bytes) -> bool:
        """Send a chunk of a body, from any thread that holds the lock. Whether all of it has gone:
        where not, the loop writes the rest, before anything that it hears of from now on."""
        if self._file is None:  # nobody is there
            return False
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            sent = os.write(self._file, chunk)
        except BlockingIOError:
            sent = 0
        except OSError:  # the client is gone, as the loop will find
            return False
        if sent < len(chunk):
            self._loop.call_soon_threadsafe(self._write, chunk[sent:])
        return sent == len(chunk)

    def close(self) -> None:
        """The socket is about to be closed, and its number to be another's; called by the loop."""
        with self.lock:
            self._file = None

    def _write(self, rest: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(rest)
