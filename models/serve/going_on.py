"""The client's side of answers that go on: a stream that survives the death of its server.

`GoingOn.reply` asks a replica and hands its reply on. It notes which tokens the events held that it
handed on (see `told.py`). Where the replica dies, or gives no sign of life for a while, it asks
another one to go on from there: nobody hears a token twice, and nothing is lost. A reply that is
wanted whole goes on in the same way. What no model answers is asked for again from its start.
"""

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import MESSAGES
from .replies import DONE, failed
from .told import END

ANSWERS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES, "/completion", "/infill",
)  # fmt: skip
BUSY, UNABLE = 429, 503  # another replica may have room; this one has failed
LOG = logging.getLogger("ggraph.serve")
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts


@dataclass(frozen=True)
class Head:
    """The beginning of a reply. `replica` names who gives it."""

    status: int
    headers: tuple[tuple[str, str], ...]
    replica: str = ""


Parts = AsyncIterator[Head | bytes]
# Method, path, headers, body, and the replicas that failed this request before: a head, then bytes.
Ask = Callable[
    [str, str, Sequence[tuple[str, str]], bytes, Sequence[str]], AsyncGenerator[Head | bytes, None]
]


class Failed(Exception):
    """A replica died, hung, or cannot go on."""


@dataclass(frozen=True)
class Patience:
    """When to give up: a replica after `silence` seconds without a sign of life, a request after
    `trouble` seconds without progress on any replica, or after `busy` replicas without room."""

    silence: float = 10.0
    trouble: float = 120.0
    busy: int = 3


ALONE = Patience(silence=math.inf, trouble=0.0, busy=1)  # where there is no other replica


@dataclass(eq=False)
class Telling:
    """What a client has been sent of one answer."""

    asked: dict[str, Any]
    streams: bool
    lanes: dict[int, dict[str, Any]] = field(default_factory=dict)
    outcome: dict[str, Any] | None = None  # of a reply that is wanted whole
    ended: bool = False

    @staticmethod
    def of(raw: bytes) -> "Telling | None":
        """A request's; None where its body is none that a model answers, and goes as it is."""
        try:
            asked = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(asked, dict):
            return None
        if asked.get("seed") in (None, -1):
            asked["seed"] = secrets.randbelow(1 << 31)
        asked["going_on"] = _begun()
        return Telling(asked, asked.get("stream") is True)

    def body(self) -> bytes:
        """The request, with what was sent already."""
        begun = {**self.asked["going_on"], "lanes": list(self.lanes.values())}
        return json.dumps({**self.asked, "going_on": begun}).encode()

    def whole(self) -> list[Head | bytes]:
        """The reply that was wanted whole; nothing for a stream."""
        if self.outcome is None:
            return []
        body = json.dumps(self.outcome["body"], ensure_ascii=False, separators=(",", ":"))
        kind = ("content-type", "application/json")
        return [Head(self.outcome["status"], (kind,)), body.encode()]

    def take(self, block: bytes) -> bytes:
        """What a client is to be sent of an event, now that it is noted."""
        block += b"\n\n"
        if block == END:
            self.ended = True
            return b""
        if not block.startswith(b": told "):
            if block.startswith(b"data: ") and not self.streams:
                self.outcome = json.loads(block[6:])
                return b""
            return block if self.streams else b""
        line, _, rest = block.partition(b"\n")
        lane, *tokens = map(int, line.split()[2:])
        known = self.lanes.setdefault(lane, {"lane": lane, "events": 0, "tokens": []})
        known["tokens"] += tokens
        known["events"] += self.streams
        return rest if self.streams else b""


def _begun() -> dict[str, Any]:
    return {"id": secrets.token_hex(12), "created": int(time.time())}


@dataclass(frozen=True)
class GoingOn:
    """Replies of replicas that may die. `ask` asks any of them, rather none that failed before."""

    ask: Ask
    patience: Patience = Patience()

    def reply(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Parts:
        """A head, then bytes. Failed where no replica could give the reply."""
        answers = method == "POST" and path.partition("?")[0] in ANSWERS  # betas have a query
        telling = Telling.of(body) if answers else None
        if telling is None:
            return self._plain(method, path, headers, body)
        return self._answer(path, headers, telling)

    async def _plain(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Parts:
        """A reply of one piece, whoever gives it in the end."""
        trouble = _Trouble(self.patience)
        while True:
            parts = self._alive(self.ask(method, path, headers, body, trouble.failed))
            try:
                head, rest = await _whole(parts)
                trouble.replica = head.replica
                if head.status == UNABLE:
                    raise Failed(f"status {head.status}: {rest[:300]!r}")
                break
            except Failed as error:
                if not await trouble.wait(error):
                    raise
        yield head
        yield rest

    async def _answer(
        self, path: str, headers: Sequence[tuple[str, str]], telling: Telling
    ) -> Parts:
        trouble, begun = _Trouble(self.patience), False
        while not telling.ended:
            parts = self._alive(self.ask("POST", path, headers, telling.body(), trouble.failed))
            try:
                async with contextlib.aclosing(parts):
                    head = await _head(parts)
                    trouble.replica = head.replica
                    if head.status != 200:
                        rest = await _rest(parts)
                        busy = head.status == BUSY and trouble.again()
                        if begun or busy or head.status == UNABLE:
                            raise Failed(f"status {head.status}: {rest[:300]!r}")
                        yield head
                        yield rest
                        return
                    async for sent in _told(parts, telling):
                        trouble.over()
                        if not sent:  # of a reply that is wanted whole
                            continue
                        if not begun:
                            yield head
                        begun = True
                        yield sent
            except Failed as error:
                if await trouble.wait(error):
                    continue
                if not begun:
                    raise
                yield failed(f"no replica can go on: {error}", path) + DONE
                return
        for part in telling.whole():
            yield part

    async def _alive(
        self, parts: AsyncGenerator[Head | bytes, None]
    ) -> AsyncGenerator[Head | bytes, None]:
        """The parts of a reply. Failed where they break off, or nothing comes for too long."""
        try:
            while True:
                try:
                    async with asyncio.timeout(self.patience.silence):
                        part = await anext(parts)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise Failed(f"no sign of life for {self.patience.silence} s") from None
                except Exception as error:  # whatever a dead replica looks like
                    raise Failed(f"{type(error).__name__}: {error}") from error
                yield part
        finally:
            await parts.aclose()


@dataclass(eq=False)
class _Trouble:
    """How long a request has been without a replica that serves it."""

    patience: Patience
    failed: list[str] = field(default_factory=list)
    replica: str = ""
    since: float = field(default_factory=time.monotonic)
    pause: float = FIRST_PAUSE
    refusals: int = 0

    def again(self) -> bool:
        """One more refusal; whether another attempt is due."""
        self.refusals += 1
        return self.refusals < self.patience.busy

    def over(self) -> None:
        """There is progress."""
        self.since, self.pause = time.monotonic(), FIRST_PAUSE

    async def wait(self, error: Failed) -> bool:
        """Wait a little; whether another attempt is due."""
        LOG.info("%s: %s", self.replica or "no replica", error)
        if self.replica:
            self.failed.append(self.replica)
            self.replica = ""
        if time.monotonic() - self.since > self.patience.trouble:
            return False
        await asyncio.sleep(self.pause)
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        return True


async def _head(parts: Parts) -> Head:
    async for part in parts:
        if isinstance(part, Head):
            return part
        break
    raise Failed("the reply has no head")


async def _rest(parts: Parts) -> bytes:
    return b"".join([p async for p in parts if isinstance(p, bytes)])


async def _whole(parts: AsyncGenerator[Head | bytes, None]) -> tuple[Head, bytes]:
    async with contextlib.aclosing(parts):
        return await _head(parts), await _rest(parts)


async def _told(parts: Parts, telling: Telling) -> AsyncIterator[bytes]:
    """What a client is to be sent of each event, which may be nothing. Failed where it breaks
    off."""
    async for block in _blocks(parts):
        yield telling.take(block)
    if not telling.ended:
        raise Failed("the stream broke off")


async def _blocks(parts: Parts) -> AsyncIterator[bytes]:
    """Server-sent events, without the empty lines between them."""
    held = b""
    async for part in parts:
        if isinstance(part, bytes):
            *blocks, held = (held + part).split(b"\n\n")
            for block in blocks:
                yield block
