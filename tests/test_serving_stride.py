"""Steps that follow one another while what they found is told: the same texts, all slots known."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from serving_kit import World, differences, greedy, history
from small_model import learnable_model

from ggraph import InputError
from ggraph.serving.batch import Batch
from ggraph.serving.steps import ListRunner, Ready
from ggraph.serving.text import Plain, Request, Text
from ggraph.serving.texts import Limits
from ggraph.session import Session

HISTORIES = 40
PROMPTS = [3, 1, 4], [1, 5, 9], [2, 6, 5, 3], [5, 8, 9]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.of(learnable_model(tmp_path_factory.mktemp("stride")))


@pytest.mark.parametrize("asks", ["now", "late"])
def test_no_history_of_strides_changes_a_text(
    world: World, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """What is done meanwhile comes before a program that is short, and amid one that is long."""
    if asks == "late":
        later = list[Callable[[], object]]()
        run = Session.run

        def run_first(self: Session, *given: object) -> dict[str, np.ndarray]:
            found = run(self, *given)  # type: ignore[arg-type]
            while later:
                later.pop()()
            return found

        monkeypatch.setattr(Session, "meanwhile", lambda self, work: later.append(work))
        monkeypatch.setattr(Session, "run", run_first)
    seen: Counter[str] = Counter()
    wrong = [d for i in range(HISTORIES) for d in differences(world, greedy(history(i)), seen)]
    assert not wrong
    del seen["accepted"], seen["refused"], seen["restored"]
    assert {what for what, count in seen.items() if count} == set(seen)
    assert seen["strides"] > HISTORIES


@dataclass
class Words:
    """A voice that says when it ends: after so many tokens, well or not."""

    limit: int
    fails: bool = False
    greedy: bool = True

    def pick(self, logits: np.ndarray) -> int:
        return int(logits.argmax())

    def accept(self, token: int) -> str | None:
        self.limit -= 1
        if self.limit < 0 and self.fails:
            raise InputError("a voice that fails")
        return "stop" if self.limit < 0 else None

    def permitted(self, draft: object) -> object:
        return draft


def ran(batch: Batch, voices: Sequence[object], limit: int = 40) -> tuple[list[Text], list[int]]:
    """Texts with these voices, run to their end in as few calls as that takes; and how many there
    were when others had ended."""
    texts = [
        batch.submit(Request(p, v, limit))  # type: ignore[arg-type]
        for p, v in zip(PROMPTS, voices, strict=False)
    ]
    calls, told = 0, list[Text]()
    sizes = list[int]()

    def meanwhile(ended: Sequence[Text]) -> None:
        told.extend(ended)
        sizes.append(len(told))

    while not batch.idle:
        told += batch.step(meanwhile, lambda: True)
        batch.memory.check(batch.running)
        calls += 1
        assert calls < 20, "no call went on"
    assert Counter(told) == Counter(texts), "each is told of once"
    return texts, sizes


def alone(world: World, prompt: Sequence[int], count: int) -> list[int]:
    world.plain.engine.reset()
    best = lambda row: int(row.argmax())  # noqa: E731
    return list(world.plain.engine.generate(prompt, best, lambda _: None, limit=count))


@pytest.mark.parametrize("fails", [False, True])
def test_a_text_that_ends_amid_a_stride_leaves_nothing_behind(world: World, fails: bool) -> None:
    """Its row of the step that had begun is nobody's; others see none of it."""
    texts, sizes = ran(world.fresh(Limits()), [Words(n, fails) for n in (9, 3, 40, 20)])
    for text, prompt in zip(texts, PROMPTS, strict=True):
        got = text.tokens[len(prompt) :]
        assert got == alone(world, prompt, len(got))
    lengths = [len(t.tokens) - len(p) for t, p in zip(texts, PROMPTS, strict=True)]
    assert lengths == [10 - fails, 4 - fails, 40, 21 - fails]
    assert sizes[-1] > 0, "an end was told while others went on"


def test_who_waits_comes_in_when_a_text_ends(world: World) -> None:
    batch = world.fresh(Limits(texts=2))
    texts, _ = ran(batch, [Words(99)] * 4, limit=12)
    assert [t.ended for t in texts] == ["length"] * 4
    assert [t.tokens[len(p) :] for t, p in zip(texts, PROMPTS, strict=True)] == [
        alone(world, p, 12) for p in PROMPTS
    ]
    # Prompts, then 11 tokens, twice: as many steps as without strides
    assert batch.counters.steps <= 2 * 12 + 2


def test_a_stride_stops_where_it_is_told_to(world: World) -> None:
    batch = world.fresh(Limits())
    text = batch.submit(Request(PROMPTS[0], Words(99), 30))  # type: ignore[arg-type]
    batch.step()
    for turns in (1, 3, 7):
        before, left = text.new, iter(range(turns - 1))
        batch.step(go_on=lambda left=left: next(left, None) is not None)  # type: ignore[misc]
        assert text.new == before + turns
        batch.memory.check(batch.running)
    batch.cancel(text)
    batch.memory.check([])
    assert text.tokens[3:] == alone(world, PROMPTS[0], text.new)


def test_a_logit_that_is_no_number_stops_a_stride(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, runs, run = world.fresh(Limits()), list[int](), ListRunner.run

    def spoiled(self: ListRunner, step: Ready, *, greedy: bool = False) -> object:
        found = run(self, step, greedy=greedy)
        runs.append(1)
        if len(runs) == 4:
            found.logits[0] = -1
        return found

    monkeypatch.setattr(ListRunner, "run", spoiled)
    texts, _ = ran(batch, [Words(99), Words(99)], limit=12)
    assert [t.ended for t in texts] == ["error", "length"]
    assert texts[1].tokens[3:] == alone(world, PROMPTS[1], 12)


def test_a_step_that_follows_sees_the_row_before_it(world: World) -> None:
    """Its list ends with the slot that is about to be written, and its own."""
    batch, seen = world.fresh(Limits()), list[list[int]]()
    ready = ListRunner.ready

    def noted(self: ListRunner, rows: Sequence[object], *more: object) -> Ready:
        seen.append([len(r.seen) for r in rows] + [r.seen[-1] == r.slot for r in rows])  # type: ignore[attr-defined]
        return ready(self, rows, *more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ListRunner, "ready", noted)
        ran(batch, [Plain(lambda row: int(row.argmax()), greedy=True)], limit=6)
    assert [s[0] for s in seen[1:]] == [4, 5, 6, 7, 8]
    assert all(s[1] for s in seen[1:])
