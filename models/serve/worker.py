"""The thread in which the batch runs, and how requests get there and answers back."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ggraph import GgraphError
from ggraph.serving.batch import Batch
from ggraph.serving.text import Request, Text

from .bell import Bell
from .errors import Refused
from .voice import AnswerVoice, Said


@dataclass(frozen=True)
class Ended:
    """The last of an answer: its text, or what went wrong."""

    text: Text | None
    error: str | None = None


Heard = tuple[int, Said | Ended | None]
NOTHING_YET: Heard = (0, None)  # what is heard where nothing was said for a while
GAP = 0.005  # seconds that what is said may wait for more


class Inbox:
    """What the answers to one request say, for one listener. Of the event loop's thread."""

    def __init__(self) -> None:
        self._heard: list[Heard] = []
        self._news: asyncio.Future[None] | None = None

    def put(self, heard: Heard) -> None:
        """Something is said."""
        self._heard.append(heard)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def take(self) -> list[Heard]:
        """All that was said since, at least one thing."""
        while not self._heard:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        heard, self._heard = self._heard, []
        return heard


def together(heard: Sequence[Heard], *, one_by_one: bool) -> list[list[Heard]]:
    """What was heard, in one part: all that an answer says in a row is one text there, but for what
    is told with chances. Or as it is, `one_by_one`."""
    if one_by_one:
        return [[h] for h in heard]
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
            found[at] = index, replace(what, text=before.text + what.text)
            continue
        found.append((index, what))
    return [found]


@dataclass(eq=False)
class Ticket:
    """One answer on its way: what it says arrives in `said` with its index, `Ended` last."""

    index: int
    said: Inbox
    heard: bool = False  # whether it has said anything, in the batch's thread
    text: Text | None = None
    begun: float = field(default_factory=time.perf_counter)

    def age(self) -> float:
        """Seconds since it was asked for."""
        return time.perf_counter() - self.begun


class Worker:
    """Runs a batch until it is told to stop. Its methods are for the event loop's thread.

    At most `most` answers may be open; further ones are refused with a time to come again.
    """

    def __init__(self, batch: Batch, most: int) -> None:
        self.batch, self.most, self.open = batch, most, 0
        self.failure: str | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: list[tuple[Ticket, Said | Ended]] = []
        self._tickets: dict[Text, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="batch", daemon=True)
        self._handed: deque[list[tuple[Ticket, Said | Ended]]] = deque()
        self._bell: Bell | None = None  # where somebody listens
        self._cold = batch.plans()
        self._seconds = 1.0  # of an answer, lately
        self._told = 0.0  # when something was handed over
        self._urgent = False  # whether somebody waits for what is to be handed over

    @property
    def cold(self) -> int:
        """Plans that will be made as soon as there is nothing else to do."""
        return len(self._cold)

    def start(self) -> None:
        """Begin; the running loop gets the answers."""
        self._bell, self._loop = Bell(self._deliver), asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and every answer that is still open; from any thread but the loop's."""
        self._commands.put(None)
        self._thread.join()
        if self._bell is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._bell.close)

    def check_room(self, count: int) -> None:
        """Refused, with a time to come again, where `count` more answers are too many."""
        if self.failure is not None:
            raise Refused(f"the engine has failed: {self.failure}", 503)
        if self.open + count > self.most:
            ahead = self.open / self.batch.limits.texts
            wait = str(max(1, round(ahead * self._seconds)))
            raise Refused(
                f"{self.open} answers are open, at most {self.most} may be: try again later",
                429,
                headers={"retry-after": wait},
            )

    def submit(self, ticket: Ticket, request: Request) -> None:
        """Have a request answered; what is wrong with it is told by `Ended`."""
        self.open += 1
        self._commands.put(lambda: self._submit(ticket, request))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more."""
        self._commands.put(lambda: self._cancel(ticket))

    def hear(self, ticket: Ticket, said: Said) -> None:
        """What an answer says, in the batch's thread."""
        self._outbox.append((ticket, said))
        if not ticket.heard:
            ticket.heard = self._urgent = True

    def _submit(self, ticket: Ticket, request: Request) -> None:
        try:
            ticket.text = self.batch.submit(request)
        except GgraphError as error:
            self._end_with(ticket, Ended(None, str(error)))
            return
        self._tickets[ticket.text] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.text in self._tickets:
            self.batch.cancel(ticket.text)
            self._end(ticket.text)

    def _end(self, text: Text) -> None:
        voice, ticket = text.request.voice, self._tickets.pop(text)
        if isinstance(voice, AnswerVoice) and text.ended != "stop":
            voice.rest()
        error = None if text.error is None else str(text.error)
        self._end_with(ticket, Ended(text, error))

    def _end_with(self, ticket: Ticket, ended: Ended) -> None:
        self._outbox.append((ticket, ended))
        self._urgent = True

    def _run(self) -> None:
        try:
            while self._obey():
                begun = time.perf_counter()
                for text in self.batch.step():
                    self._end(text)
                now = time.perf_counter()
                if self._urgent or 2 * now - begun - self._told > GAP:
                    self._flush()
                    self._told = now
        except Exception as error:  # the thread's end must not go unnoticed
            self.failure = f"{type(error).__name__}: {error}"
        for text in list(self._tickets):
            self._end_with(self._tickets.pop(text), Ended(text, self.failure or "stopping"))
        self._flush()

    def _obey(self) -> bool:
        """Do what was asked for; wait, and make plans meanwhile, where there is nothing to run.
        False at the end."""
        while True:
            try:
                command = self._commands.get(block=self.batch.idle and not self._cold)
            except queue.Empty:
                if not self.batch.idle:
                    return True
                self._cold.pop(0)()
                continue
            if command is None:
                return False
            command()
            if self._urgent:
                self._flush()

    def _flush(self) -> None:
        """Hand over what was said, all at once. Each time costs the event loop, the client and
        the system's ways between them 0.2 ms of a processor on which a step would run; so where
        steps are short, what they say waits for the next one, if that will end within `GAP`."""
        self._urgent = False
        if self._outbox and self._bell is not None:
            self._handed.append(self._outbox)
            self._outbox = []
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._bell.ring()

    def _deliver(self) -> None:
        while self._handed:
            for ticket, what in self._handed.popleft():
                ticket.said.put((ticket.index, what))
                if isinstance(what, Ended):
                    self.open -= 1
                    self._seconds += 0.1 * (ticket.age() - self._seconds)
