"""The way from the batch's thread to whoever listens to a request's answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggraph.serving.text import Text

from .voice import Said
from .wire import Wire


@dataclass(frozen=True)
class Ended:
    """The last of an answer: its text, or what went wrong."""

    text: Text | None
    error: str | None = None


Heard = tuple[int, Said | Ended | None]
Tell = Callable[[int, Said], bytes]  # the events of what an answer says
NOTHING_YET: Heard = (0, None)  # what is heard where nothing was said for a while


class Inbox:
    """What the answers to one request say, for one listener in the event loop. One that is `eager`
    wants each word when it is said, any other all of them at the end.

    A listener that knows its client's wire need not be woken for a word: while it waits, and
    nothing is on its way to it, the batch's thread makes the word's events, and sends those of a
    step together. Each time the loop does so takes 0.2 ms of a processor on which a step would run.
    """

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self.latest = time.monotonic()  # when something was heard
        self._heard: list[Heard] = []
        self._news: asyncio.Future[None] | None = None
        self._wire: Wire | None = None
        self._tell: Tell
        self._waits = False  # whether the listener does, behind a wire that is idle
        self._unsent = b""  # events for the wire, of this step
        self._handed = self._came = 0  # words for the loop, and those that are there

    def listen(self, tell: Tell, wire: Wire) -> None:
        """What is said may be told past the loop from now on."""
        self._tell, self._wire = tell, wire

    def say(self, index: int, said: Said) -> bool:
        """In the batch's thread: whether `send` tells the client; if not, the loop is to."""
        wire = self._wire
        if wire is not None:
            with wire.lock:
                if self._waits and self._handed == self._came:
                    self._unsent += self._tell(index, said)
                    self.latest = time.monotonic()
                    return True
        self._handed += 1
        return False

    def send(self) -> None:
        """In any thread: what was said goes to the client."""
        wire = self._wire
        if wire is not None:
            with wire.lock:
                self._send(wire)

    def _send(self, wire: Wire) -> None:
        if self._unsent:
            self._waits &= wire.send(self._unsent)
            self._unsent = b""

    def put(self, heard: Heard) -> None:
        """Something is heard in the loop."""
        self._wait(False)
        self._came += isinstance(heard[1], Said)
        self._heard.append(heard)
        self.latest = time.monotonic()
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def take(self) -> list[Heard]:
        """All that was heard since, at least one thing."""
        while not self._heard:
            self._news = asyncio.get_running_loop().create_future()
            self._wait(True)
            try:
                await self._news
            finally:
                self._wait(False)
        heard, self._heard = self._heard, []
        return heard

    def _wait(self, waits: bool) -> None:
        wire = self._wire
        if wire is not None:
            with wire.lock:
                self._send(wire)  # before what the loop writes
                self._waits = waits and wire.idle


def together(heard: Sequence[Heard], *, one_by_one: bool, apart: bool = False) -> list[list[Heard]]:
    """What was heard, in one part: all that an answer says in a row is one text there, but for what
    is told with chances, unless tokens are to stay `apart`. Or as it is, `one_by_one`."""
    if one_by_one:
        return [[h] for h in heard]
    if apart:
        return [list(heard)]
    found, last = list[Heard](), dict[int, int]()  # where each answer's latest text is
    for index, what in heard:
        at = last.get(index)
        if not isinstance(what, Said) or what.chance is not None:
            last.pop(index, None)
        elif at is None:
            last[index] = len(found)
        else:
            before = found[at][1]
            assert isinstance(before, Said), f"answer {index}: {before} is no text"
            text, thought = before.text + what.text, before.thought + what.thought
            found[at] = index, what._replace(text=text, thought=thought)
            continue
        found.append((index, what))
    return [found]
