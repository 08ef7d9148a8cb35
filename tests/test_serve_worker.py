"""What the batch's thread says reaches the event loop: in order, whole, and in few pieces."""

import asyncio
import threading

from models.serve.bell import Bell
from models.serve.voice import Chance, Said
from models.serve.worker import Ended, Heard, Inbox, together

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
        inbox = Inbox()
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


def test_a_bell_is_heard_from_another_thread_until_it_is_closed() -> None:
    """However often it is rung before the loop gets there: its pipe may be full."""

    async def run() -> list[int]:
        handed, seen, done = list[int](), list[int](), asyncio.Event()

        def call() -> None:
            seen.extend(handed[len(seen) :])
            if len(seen) == 100_000:
                done.set()

        bell = Bell(call)

        def ring() -> None:
            for i in range(100_000):
                handed.append(i)
                bell.ring()

        thread = threading.Thread(target=ring)
        thread.start()
        await done.wait()
        thread.join()
        handed.append(-1)
        bell.close()
        return seen

    assert asyncio.run(run()) == [*range(100_000), -1]
