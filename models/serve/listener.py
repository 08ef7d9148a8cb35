"""Who hears what is said to a request, in the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from .inbox import NOTHING_YET, Ended, Heard, together
from .metrics import Metrics
from .reader import Answers, Reader
from .told import PING_SECONDS
from .worker import Ticket


class _Silence:
    """Says so where nothing is said for some seconds, by one timer for a whole answer."""

    def __init__(self, answers: Answers, seconds: float) -> None:
        self.loop, self.said, self.seconds = asyncio.get_running_loop(), answers.said, seconds
        self.timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        if time.monotonic() - self.said.latest >= self.seconds:
            self.said.put(NOTHING_YET)
        self.timer = self.loop.call_later(self.seconds, self._look)


@dataclass(eq=False)
class Listener:
    """Hears the answers of one model."""

    service: Reader
    metrics: Metrics

    async def heard(self, answers: Answers) -> AsyncIterator[list[Heard]]:
        """What the answers say, in order; None where nothing was said for a while. What has come
        comes at once, but one by one where a journal counts tokens. Whoever stops listening ends
        the answers."""
        left, journal = len(answers.tickets), answers.journal
        seconds = self.service.settings.ping_seconds if journal is None else PING_SECONDS
        silence = _Silence(answers, seconds)
        try:
            while left:
                heard = await answers.said.take()
                one_by_one = journal is not None
                for items in together(heard, one_by_one=one_by_one, apart=answers.apart):
                    for index, what in items:
                        if isinstance(what, Ended):
                            left -= 1
                            self._measure(answers.tickets[index], what)
                    if journal is not None:
                        journal.note(*items[0])
                    yield items
            if journal is not None:
                journal.close()
        finally:
            silence.timer.cancel()
            if left:
                self.service.cancel(answers)

    def _measure(self, ticket: Ticket, ended: Ended) -> None:
        if ticket.first is None:
            return
        self.metrics.first.observe(ticket.first - ticket.begun)
        if ended.text is not None and ended.text.new > 1:
            self.metrics.between.observe((ticket.last - ticket.first) / (ended.text.new - 1))
