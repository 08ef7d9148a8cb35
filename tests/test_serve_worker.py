"""What the batch's thread says reaches the event loop: in order, whole, and in few pieces."""

import asyncio
import threading

from models.serve.inbox import Ended, Heard, Inbox, together
from models.serve.voice import Chance, Said

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
