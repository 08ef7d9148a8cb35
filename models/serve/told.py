"""The server's side of answers that go on: what a client was sent, so that another can go on.

A request that brings `going_on` is answered by events that say which tokens they hold:

    : told LANE TOKEN TOKEN ..
    data: {..}

A lane is a choice, or what comes before the first and after the last word of all. An answer's
events follow from its request, its seed and its tokens, so whoever is asked again with the tokens
makes the same events, leaves out as many as were sent, and goes on. The tokens are a draft that is
verified like any: what the model would not say ends in an error, and cannot be put into its mouth.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.tree import NOTHING, Draft
from ggraph.decode.policy import Policy
from ggraph.decode.speculation import Asking, Speculation, Steps

from .errors import Refused, body
from .inbox import Ended
from .replies import PING, Events, event
from .schema import GoingOn
from .voice import Said

BEFORE, AFTER = -1, -2  # the lanes around those of the choices
PING_SECONDS = 2.0  # from one sign of life to the next, where somebody else could go on
END = b": told end\n\n"


class Elsewhere(Exception):
    """This server cannot go on with an answer; another one can."""


class Retold(Speculation):
    """Drafts what a text has said already, then like others; those are told of it, but do not learn
    from it how often they are right."""

    def __init__(
        self, told: Sequence[int], drafters: Sequence[Any] = (), policy: Policy | None = None
    ) -> None:
        super().__init__(drafters, policy)
        self.told, self._at = told, 0

    def begin(self, tokens: Sequence[int], runner: Steps | None = None) -> None:
        """As `Speculation`; the first new token is there."""
        super().begin(tokens, runner)
        self._at = 1

    def asking(self, room: int) -> Asking:
        """What was said next, and then as `Speculation`."""
        if self._at < len(self.told):
            return Draft.chain(self.told[self._at : self._at + room])
        best = yield from super().asking(room)
        return best

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """As `Speculation`."""
        again = self._at < len(self.told)
        self._at += len(kept.tokens)
        super().learn(NOTHING if again else draft, kept, seconds)


@dataclass(eq=False)
class Journal:
    """What was sent of one request's answers, and which tokens the next events hold."""

    begun: GoingOn
    lane: int = BEFORE  # of the events that come now
    events: dict[int, int] = field(default_factory=dict)  # made here, by lane
    said: dict[int, int] = field(default_factory=dict)  # tokens, by lane
    tokens: dict[int, list[int]] = field(default_factory=dict)  # new, and not yet told
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def told(self, lane: int) -> list[int]:
        """The tokens that a lane had elsewhere."""
        return [t for known in self.begun.lanes if known.lane == lane for t in known.tokens]

    def check(self, vocabulary: int) -> None:
        """Refused where a token is none."""
        for lane in self.begun.lanes:
            if lane.tokens and max(lane.tokens) >= vocabulary:
                raise Refused(f"going_on: token {max(lane.tokens)}, expected 0 to {vocabulary - 1}")

    def note(self, index: int, what: Said | Ended | None) -> None:
        """A choice says something. Elsewhere where this server, not the request, is at fault."""
        if isinstance(what, Ended) and what.error is not None and _is_ours(what):
            raise Elsewhere(what.error)
        if what is not None:
            self.lane = index
        if isinstance(what, Said) and what.token is not None:
            self.said[index] = self.said.get(index, 0) + 1
            if self.said[index] > len(self.told(index)):
                self.tokens.setdefault(index, []).append(what.token)
                self.news.set()

    def close(self) -> None:
        """All choices have ended."""
        self.lane = AFTER

    async def streamed(self, events: Events) -> Events:
        """The events that were not sent yet, each with its tokens."""
        sent = {lane.lane: lane.events for lane in self.begun.lanes}
        async for e in events:
            if e == PING:
                yield e
                continue
            lane = self.lane
            for one in e.split(b"\n\n")[:-1]:  # several may come at once
                self.events[lane] = self.events.get(lane, 0) + 1
                tokens = self.tokens.pop(lane, ())
                if self.events[lane] > sent.get(lane, 0):
                    yield _told(lane, tokens) + one + b"\n\n"
        yield END

    async def whole(self, work: Awaitable[dict[str, Any]], path: str) -> Events:
        """Tokens as they come, then an event with the status and the body of an address's reply."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.news.set())
        try:
            while not task.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(PING_SECONDS):
                        await self.news.wait()
                self.news.clear()
                if not self.tokens:
                    yield PING
                for lane in list(self.tokens):
                    yield _told(lane, self.tokens.pop(lane)) + b"\n"
            yield event(_outcome(task, path))
            yield END
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _outcome(task: "asyncio.Future[dict[str, Any]]", path: str) -> dict[str, Any]:
    try:
        return {"status": 200, "body": task.result()}
    except Refused as error:
        return {"status": error.status, "body": body(error, path)}


def _is_ours(ended: Ended) -> bool:
    """Whether an answer failed by what happened to this server, or by what its model would say."""
    if ended.text is None:
        return False
    error = ended.text.error
    return ended.text.ended != "error" or (isinstance(error, Refused) and error.status == 409)


def _told(lane: int, tokens: Sequence[int]) -> bytes:
    return f": told {' '.join(map(str, (lane, *tokens)))}\n".encode()


def journal_of(begun: GoingOn | None, vocabulary: int) -> Journal | None:
    """The journal of a request; None where it cannot go on elsewhere. Refused for tokens that are
    none."""
    if begun is None:
        return None
    journal = Journal(begun)
    journal.check(vocabulary)
    return journal
