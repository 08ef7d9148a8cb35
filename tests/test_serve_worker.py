"""What the batch's thread says reaches the event loop: in order, whole, and in few pieces."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ggraph.serving.prefix import PrefixTree
from ggraph.serving.text import Plain, Request, Text, begun
from models.serve.errors import Refused
from models.serve.inbox import Ended, Heard, Inbox, together
from models.serve.voice import Chance, Said
from models.serve.worker import Ticket, Worker

END = Ended(None)


def said(text: str) -> Said:
    return Said(1, text)


def test_what_an_answer_says_in_a_row_is_one_text() -> None:
    told = Said(2, "c", Chance(2, -0.5))
    heard: list[Heard] = [
        (0, said("a")), (1, said("x")), (0, said("b")), (0, told), (0, said("d")),
        (1, said("y")), (0, None), (0, said("e")), (1, END), (0, END),
    ]  # fmt: skip
    (found,) = together(heard, one_by_one=False)
    assert [h for h in found if h[0] == 0] == [
        (0, said("ab")), (0, told), (0, said("d")), (0, None), (0, said("e")), (0, END),
    ]  # fmt: skip
    assert [h for h in found if h[0] == 1] == [(1, said("xy")), (1, END)]
    assert together(heard, one_by_one=True) == [[h] for h in heard]
    assert together(heard, one_by_one=False, apart=True) == [heard]


def test_an_inbox_gives_all_that_came_since() -> None:
    async def run() -> None:
        inbox = Inbox(eager=True)
        taking = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        inbox.put((0, said("a")))
        inbox.put((0, END))
        assert await taking == [(0, said("a")), (0, END)]
        leaving = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        inbox.put((0, said("b")))
        assert await inbox.take() == [(0, said("b"))]

    asyncio.run(run())


class Narrow:
    """A wire that takes so many words."""

    def __init__(self, takes: int) -> None:
        self.lock, self.takes, self.idle = threading.Lock(), takes, True
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> bool:
        self.takes -= 1
        self.sent.append(data)
        self.idle = self.takes > 0
        return self.idle


def test_words_go_past_the_loop_while_its_listener_waits_behind_an_idle_wire() -> None:
    """Whatever is on its way by the loop comes first: a word that did not fit, one that was handed
    over, one that was heard."""

    async def run() -> None:
        inbox, wire = Inbox(eager=True), Narrow(2)
        assert not inbox.say(0, said("before")), "nobody listens"
        inbox.listen(lambda index, what: b"x", wire)  # type: ignore[arg-type]  # as a wire does
        taking = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        assert not inbox.say(0, said("b")), "one is on its way"
        inbox.put((0, said("before")))
        inbox.put((0, said("b")))
        assert not inbox.say(0, said("c")), "two are there"
        assert len(await taking) == 2
        assert not inbox.say(0, said("d")), "the listener is at work"
        inbox.put((0, said("c")))
        inbox.put((0, said("d")))
        assert len(await inbox.take()) == 2
        taking = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        assert inbox.say(0, said("e")) and inbox.say(0, said("e")) and not wire.sent
        inbox.send()
        inbox.send()
        assert wire.sent == [b"xx"], "words of a step go together, once"
        assert inbox.say(0, said("f"))
        inbox.send()  # which does not fit
        assert not inbox.say(0, said("g")), "the rest of one is on its way"
        inbox.put((0, said("g")))
        assert await taking == [(0, said("g"))]
        for idle in (False, True):
            wire.takes, wire.idle = 9, idle
            taking = asyncio.ensure_future(inbox.take())
            await asyncio.sleep(0)
            assert inbox.say(0, said("h")) == idle
            if not idle:
                inbox.put((0, said("h")))
                await taking
        inbox.put((0, None))
        assert len(wire.sent) == 3, "what was said goes before what the loop is told"
        await taking
        assert not inbox.say(0, said("i")), "the listener has left"

    asyncio.run(run())


class Standing:
    """A batch whose step does as it is told, once it may."""

    limits = SimpleNamespace(texts=1)

    def __init__(self, step: Callable[["Standing", Callable[..., None]], list[Text]]) -> None:
        self.does, self.may, self.begun = step, threading.Event(), threading.Event()
        self.texts: list[Text] = []

    @property
    def idle(self) -> bool:
        return not self.texts

    def plans(self) -> list[Callable[[], object]]:
        return []

    def submit(self, request: Request) -> Text:
        if not request.prompt:
            raise ValueError("no prompt")
        self.texts.append(begun(request, 1, 1, PrefixTree().root))
        return self.texts[-1]

    def cancel(self, text: Text) -> None:
        text.ended = "cancelled"
        self.texts.remove(text)

    def step(self, meanwhile: Callable[..., None], go_on: Callable[[], bool]) -> list[Text]:
        self.begun.set()
        self.may.wait(10)
        return self.does(self, meanwhile)


class Panic(BaseException):
    """As a library in Rust raises."""


def fail(batch: Standing, meanwhile: Callable[..., None]) -> list[Text]:
    raise RuntimeError("the device is gone")


def panic(batch: Standing, meanwhile: Callable[..., None]) -> list[Text]:
    raise Panic("the device is gone")


def asked(worker: Worker, prompt: Sequence[int] = (1,)) -> Ticket:
    ticket = Ticket(0, Inbox(eager=True))
    worker.submit(ticket, Request(list(prompt), Plain(lambda _: 0), 1))
    return ticket


async def heard(ticket: Ticket) -> list[Any]:
    """What is said to the end; the test fails where that does not come."""
    found: list[Any] = []
    while not any(isinstance(w, Ended) for w in found):
        found += [what for _, what in await asyncio.wait_for(ticket.said.take(), 10)]
    return found


@pytest.mark.parametrize(("step", "named"), [(fail, "RuntimeError"), (panic, "Panic")])
def test_what_waits_when_the_engine_fails_is_told_so(step: Any, named: str) -> None:
    """Whether its step had begun, it came during that step, or it was taken back meanwhile."""

    async def run() -> None:
        batch = Standing(step)
        worker = Worker(batch, 9)  # type: ignore[arg-type]  # as a batch does
        worker.start()
        tickets = [asked(worker)]
        assert worker.refusal("a schema").status == 400
        await asyncio.to_thread(batch.begun.wait, 10)
        tickets += [asked(worker) for _ in range(3)]
        worker.cancel(tickets[1])
        batch.may.set()
        for ticket in tickets:
            (end,) = await heard(ticket)
            assert end.error == f"{named}: the device is gone"
            assert worker.refusal(end.error).status == 503
        assert worker.open == 0 and worker.failure == f"{named}: the device is gone"
        with pytest.raises(Refused, match="the device is gone") as refused:
            asked(worker)
        assert refused.value.status == 503 and worker.open == 0
        await asyncio.to_thread(worker.stop)

    asyncio.run(run())


def test_who_comes_when_the_worker_stops_is_told_so() -> None:
    async def run() -> None:
        worker = Worker(Standing(fail), 9)  # type: ignore[arg-type]
        worker.start()
        await asyncio.to_thread(worker.stop)
        with pytest.raises(Refused, match="the server ends"):
            asked(worker)
        assert worker.failure is None and worker.open == 0

    asyncio.run(run())


def test_an_answer_that_cannot_be_told_ends_alone() -> None:
    """What others have said is told all the same, in order; so is one that cannot begin."""

    async def run() -> None:
        tickets: list[Ticket] = []

        def speak(batch: Standing, meanwhile: Callable[..., None]) -> list[Text]:
            def broken() -> Said:
                raise KeyError("a token")

            for text in ("a", "b"):
                for i, ticket in enumerate(tickets):
                    worker.hear(ticket, broken if i == 0 else lambda text=text: said(text))
            meanwhile(())
            ended, batch.texts = batch.texts, []
            for text in ended:
                text.ended = "stop"
            return ended

        batch = Standing(speak)
        worker = Worker(batch, 9)  # type: ignore[arg-type]
        tickets += [asked(worker) for _ in range(3)]
        bare = asked(worker, ())
        batch.may.set()
        worker.start()  # so that all are in one step
        (end,) = await heard(bare)
        assert end.error == "ValueError: no prompt"
        (end,) = await heard(tickets[0])
        assert end.error == "KeyError: 'a token'"
        for ticket in tickets[1:]:
            words = await heard(ticket)
            assert words[:2] == [said("a"), said("b")] and words[2].error is None
        assert (worker.open, worker.failure) == (0, None)
        await asyncio.to_thread(worker.stop)

    asyncio.run(run())
