"""A process that serves: uvicorn, with its ways of ending."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from types import FrameType

import uvicorn

from ggraph import InputError

from .app import make_app
from .guard import HEAD_BYTES
from .protocol import bounded
from .reader import Reader

DRAIN_SECONDS = 600  # for answers that are open when a server, or a replica, is to end
LAST_SECONDS = 2  # for the last words to clients
# Seconds between two requests of a connection: more than clients (5 to 15) and proxies (60) keep
# one that is idle, as what is on its way to who hangs up first is lost
IDLE_SECONDS = 75
MOST_CONNECTIONS = 768  # a process may usually have 1,024 files open


class Server(uvicorn.Server):
    """The first signal lets open answers end; a second one, or `DRAIN_SECONDS`, ends them."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As told by `signal`."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Open answers end by themselves or, at a second signal or too late, with the application:
        who waits is told, and nothing computes any more when the model is closed."""
        drained = asyncio.create_task(super().shutdown(sockets))
        until = time.monotonic() + DRAIN_SECONDS
        while not (drained.done() or self.force_exit):
            await asyncio.wait({drained}, timeout=0.05)
            self.force_exit |= time.monotonic() > until
        if self.force_exit:
            await self.lifespan.shutdown()
            await asyncio.wait({drained, *self.server_state.tasks}, timeout=LAST_SECONDS)
        else:
            await drained


def serve(
    service: Reader, host: str, port: int, ready: Callable[[str], None], *, log: bool
) -> None:
    """Serve until a signal; from then on Ctrl-C ends the process without a word. `ready` is told
    the address; port 0 takes a free one. InputError where the address cannot be had."""
    listener = listening(host, port)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    config = uvicorn.Config(
        make_app(service, near(*address[:2])),
        log_level=logging.INFO if log else logging.WARNING,
        access_log=log,
        server_header=False,
        http=bounded(service.settings.head_seconds),
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=HEAD_BYTES,  # of a head that comes in parts
        ws="none",
    )
    server = Server(config)

    async def run() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            ready(f"http://{shown}:{address[1]}")
        await task

    # Before uvicorn has its handlers in place, and after: asyncio's, and Python's own, would raise
    # wherever the process is, in a weak reference's callback too, which prints it and goes on
    signal.signal(signal.SIGINT, server.handle_exit)
    try:
        asyncio.run(run())
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def near(host: str, port: int) -> list[str]:
    """The sites that a server is to this machine's browsers, where nobody else's can reach it."""
    if not ip_address(host).is_loopback:
        return []
    end = "" if port == 80 else f":{port}"
    return [f"http://{name}{end}" for name in ("localhost", "127.0.0.1", "[::1]")]


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. InputError where that cannot be had, or where no host is named:
    that would be every address of this machine."""
    if not host:
        raise InputError("--host '': expected an address, such as 127.0.0.1, or 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, since asyncio lets words go at once (TCP_NODELAY) only where it is
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(f"cannot listen on {host}:{port}: {error}") from None
    return listener
