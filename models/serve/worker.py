"""The thread in which the batch runs, and how requests get there and answers back."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ggraph import GgraphError
from ggraph.serving.batch import Batch
from ggraph.serving.encoder import Encoding
from ggraph.serving.text import Request, Text

from .errors import ENDS, Refused, ending
from .inbox import Ended, Inbox
from .voice import AnswerVoice, Said, Saying


@dataclass(eq=False)
class Ticket:
    """One answer on its way: what it says arrives in `said` with its index, `Ended` last. Times are
    seconds of one clock: when it was asked for, said its first word and its last."""

    index: int
    said: Inbox
    text: Text | None = None
    begun: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    over: bool = False  # nothing of it is told any more


class Worker:
    """Runs a batch until it is told to stop. Its methods are for the event loop's thread.

    What the texts of a step say is told while the next one computes.

    At most `most` answers may be open; further ones are refused with a time to come again.
    """

    def __init__(self, batch: Batch | Encoding, most: int) -> None:
        self.batch, self.most, self.open = batch, most, 0
        self.failure: str | None = None
        self._over: str | None = None  # why nothing is answered any more
        self._door = threading.Lock()  # of `_over`: who comes in before it is set is answered
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._heard: list[tuple[Ticket, Saying | Ended]] = []  # in this step
        self._outbox: list[tuple[Ticket, Said | Ended]] = []  # which the loop is to tell
        self._tickets: dict[Text, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # where somebody listens
        self._thread = threading.Thread(target=self._run, name="batch", daemon=True)
        self._cold = batch.plans()
        self._seconds = 1.0  # of an answer, lately

    @property
    def cold(self) -> int:
        """Plans that will be made as soon as there is nothing else to do."""
        return len(self._cold)

    def start(self) -> None:
        """Begin; the running loop gets the answers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and every answer that is still open; from any thread but the loop's."""
        self._commands.put(None)
        self._thread.join()

    def check_room(self, count: int, param: str) -> None:
        """Refused where `count` more answers are too many: with a time to come again, unless they
        always are."""
        if self.failure is not None:
            raise Refused(f"the engine has failed: {self.failure}", 503)
        if count > self.most:
            message = f"{count} answers asked for, at most {self.most} may be open here"
            raise Refused(message, param=param)
        if self.open + count > self.most:
            ahead = self.open / self.batch.together
            wait = str(max(1, round(ahead * self._seconds)))
            raise Refused(
                f"{self.open} answers are open, at most {self.most} may be: try again later",
                429,
                headers={"retry-after": wait},
            )

    def submit(self, ticket: Ticket, request: Request) -> None:
        """Have a request answered; what is wrong with it is told by `Ended`. Refused where nothing
        is answered any more."""
        with self._door:
            if self._over is not None:
                raise self.refusal(self._over)
            self.open += 1
            self._commands.put(lambda: self._submit(ticket, request))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this answer any more."""
        self._commands.put(lambda: self._cancel(ticket))

    def refusal(self, error: str) -> Refused:
        """What a client is told of an answer that ended so: not that the request was wrong, where
        the engine has failed or stops."""
        if self._over is None:
            return Refused(error)
        return Refused(error, 503) if self.failure else ending(error)

    def hear(self, ticket: Ticket, saying: Saying) -> None:
        """What an answer says, in the batch's thread; it is asked when it is told."""
        ticket.last = time.perf_counter()
        if ticket.first is None:
            ticket.first = ticket.last
        self._heard.append((ticket, saying))

    def _submit(self, ticket: Ticket, request: Request) -> None:
        if self._over is not None:
            self._end_with(ticket, Ended(None, self._over))
            return
        try:
            ticket.text = self.batch.submit(request)
        except Exception as error:  # its own fault alone
            self._end_with(ticket, Ended(None, _said_of(error)))
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
        self._heard.append((ticket, ended))

    def _run(self) -> None:
        try:
            while self._obey():
                for text in self.batch.step(self._meanwhile, self._commands.empty):
                    self._end(text)
        except BaseException as error:  # a panic of Rust's, too: this end must not go unnoticed
            self.failure = _said_of(error)
        with self._door:
            self._over = self.failure or ENDS
        for text, ticket in self._tickets.items():
            self._end_with(ticket, Ended(text, self._over))
        self._tickets.clear()
        while not self._commands.empty():  # of those who came before the end
            if (command := self._commands.get()) is not None:
                command()
        self._tell()

    def _meanwhile(self, ended: Sequence[Text]) -> None:
        for text in ended:
            self._end(text)
        self._tell()

    def _obey(self) -> bool:
        """Do what was asked for; wait, and make plans meanwhile, where there is nothing to run.
        False at the end."""
        while True:
            if self._commands.empty() and not self.batch.idle:
                return True
            if self.batch.idle:  # no step will come
                self._tell()
            if self._commands.empty() and self._cold:
                self._cold.pop(0)()
                continue
            command = self._commands.get()
            if command is None:
                return False
            command()

    def _tell(self) -> None:
        """Send what was said, and hand over to the loop what that is to tell, where somebody
        waits."""
        heard, self._heard = self._heard, []
        urgent, speaking = False, set[Inbox]()
        for ticket, told in heard:
            if ticket.over:
                continue
            if (what := self._told(ticket, told)) is None:
                speaking.add(ticket.said)
            else:
                self._outbox.append((ticket, what))
                ticket.over = isinstance(what, Ended)
                urgent |= ticket.said.eager or ticket.over
        for inbox in speaking:
            inbox.send()
        if urgent and self._loop is not None:
            outbox, self._outbox = self._outbox, []
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._deliver, outbox)

    def _told(self, ticket: Ticket, told: Saying | Ended) -> Said | Ended | None:
        """What the loop is to tell, None where the wire does. What cannot be told ends its own
        answer, and keeps nobody else's from being told."""
        try:
            what = told if isinstance(told, Ended) else told()
            return None if isinstance(what, Said) and ticket.said.say(ticket.index, what) else what
        except Exception as error:
            self.cancel(ticket)
            return Ended(None, _said_of(error))

    def _deliver(self, outbox: list[tuple[Ticket, Said | Ended]]) -> None:
        for ticket, what in outbox:
            ticket.said.put((ticket.index, what))
            if isinstance(what, Ended):
                self.open -= 1
                self._seconds += 0.1 * (time.perf_counter() - ticket.begun - self._seconds)


def _said_of(error: BaseException) -> str:
    """An error on one line; who made it is named where that was not ggraph."""
    return str(error) if isinstance(error, GgraphError) else f"{type(error).__name__}: {error}"
