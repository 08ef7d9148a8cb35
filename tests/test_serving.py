"""Many texts at once are the texts that decoding alone gives, whatever happens around them."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from serving_kit import CONTEXT, SLOTS, Knowing, World, differences, history
from small_model import TINY, learnable_model, small_model

from ggraph import InputError
from ggraph.decode.policy import Fixed
from ggraph.decode.prices import Prices
from ggraph.decode.runner import Result
from ggraph.decode.speculation import Speculation
from ggraph.serving.batch import Batch
from ggraph.serving.pieces import CUT, MIXED_ROWS, PACE, PAUSE, beside, filling, mixed_bucket
from ggraph.serving.prefix import Node, PrefixTree
from ggraph.serving.prices import SharedPrices
from ggraph.serving.slots import Slots
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Plain, Request, Text
from ggraph.serving.texts import Limits
from ggraph.session import Session

HEAD = TINY / "eagle3_for_llama_tied"
HISTORIES = 24  # as many more as wanted: python scripts/check_serving.py --histories 2000


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("serving")
    return World.of(learnable_model(folder), head=HEAD, smaller=small_model(folder / "other.gguf"))


def best(logits: np.ndarray) -> int:
    return int(np.argmax(logits))


def plain(w: World, prompt: Sequence[int], limit: int) -> list[int]:
    w.plain.engine.reset()
    return list(w.plain.engine.generate(prompt, best, lambda _: None, limit=limit))


def batch_of(w: World, slots: int = SLOTS, limits: Limits | None = None) -> Batch:
    return w.fresh(limits or Limits(), slots)


def asked(w: World, prompt: Sequence[int], limit: int, **more: object) -> Request:
    return Request(prompt, Plain(best, w.batch.tokenizer.eos_ids), limit, **more)  # type: ignore[arg-type]


def finish(batch: Batch) -> None:
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)


def new(text: Text) -> list[int]:
    return text.tokens[len(text.request.prompt) :]


def test_no_history_changes_a_text(world: World) -> None:
    seen: Counter[str] = Counter()
    wrong = [d for seed in range(HISTORIES) for d in differences(world, history(seed), seen)]
    assert not wrong
    del seen["restored"]  # which hangs on when the disk's thread had its turn
    happened = {what for what, count in seen.items() if count}
    assert happened == set(seen), f"nothing was {set(seen) - happened}"


def test_logits_are_brought_back_where_somebody_looks_at_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts that take the greatest no more than that comes back, and the texts are the same."""
    brought: list[bool] = []
    run = ListRunner.run

    def noted(self: ListRunner, *given: Any, **named: Any) -> Result:
        found = run(self, *given, **named)
        brought.append(found.logits.dtype == np.float32)
        return found

    monkeypatch.setattr(ListRunner, "run", noted)
    batch, ends = batch_of(world), world.batch.tokenizer.eos_ids
    prompts, limits = [[3, 1, 4], [1, 5, 9], [2, 6, 5]], (24, 24, 8)
    voices = [*(Plain(best, ends, greedy=True) for _ in "ab"), Plain(best, ends)]
    texts = [
        batch.submit(Request(p, v, limit))
        for p, v, limit in zip(prompts, voices, limits, strict=True)
    ]
    finish(batch)
    wanted = [plain(world, p, limit) for p, limit in zip(prompts, limits, strict=True)]
    assert [new(t) for t in texts] == wanted
    assert brought == [True] * 8 + [False] * 16


def test_a_greatest_logit_that_is_no_number_ends_its_own_text_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Session.run

    def spoiled(self: Session, *given: Any) -> dict[str, np.ndarray]:
        out = run(self, *given)
        if "greatest" in out:
            out["greatest"][0] = np.nan
        return out

    batch, ends = batch_of(world), world.batch.tokenizer.eos_ids
    bad, good = (batch.submit(Request([1, 2, 3], Plain(best, ends, greedy=True), 5)) for _ in "ab")
    batch.step()
    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", spoiled)
        batch.step()
    finish(batch)
    assert bad.ended == "error" and "no finite number" in str(bad.error)
    assert new(good) == plain(world, [1, 2, 3], 5)


def test_cancelling_one_of_a_shared_prefix_leaves_the_others(world: World) -> None:
    """The shape of SGLang #23392: a request goes away while others read what it shares."""
    shared = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    batch = batch_of(world)
    texts = [batch.submit(asked(world, [*shared, i], 20)) for i in range(4)]
    for _ in range(6):
        batch.step()
    batch.cancel(texts[0])
    late = batch.submit(asked(world, [*shared, 9], 20))
    finish(batch)
    for i, text in [*enumerate(texts[1:], 1), (9, late)]:
        assert new(text) == plain(world, [*shared, i], 20)


def test_slots_of_a_refused_draft_are_written_by_nobody_else(world: World) -> None:
    """The shapes of vLLM #45357 and #47728: freed while a step that writes them is on its way, and
    freed once too often where a draft was refused."""
    prompts = [[i, 2, i, 2, i] for i in range(3)]
    batch = batch_of(world, slots=CONTEXT)
    texts = []
    for p in prompts:
        wrong = Knowing([t ^ 1 for t in [*p, *plain(world, p, 20)]], tree=True)
        drafts = Speculation([wrong], Fixed(4))
        texts.append(batch.submit(asked(world, p, 20, drafts=drafts)))
    finish(batch)
    assert batch.counters.drafted > 20
    assert [new(t) for t in texts] == [plain(world, p, 20) for p in prompts]


def test_a_text_gets_its_own_beginning_back_and_no_other(world: World) -> None:
    """The shape of llama.cpp #27148: what the cache holds of another conversation."""
    batch = batch_of(world)
    first, second = [7] * 30 + [1], [7] * 30 + [2]
    answers = []
    for prompt in (first, second, first):
        text = batch.submit(asked(world, prompt, 12))
        finish(batch)
        answers.append(new(text))
        assert answers[-1] == plain(world, prompt, 12)
    assert answers[0] == answers[2]
    assert batch.counters.reused >= 60


def test_texts_that_come_together_share_what_the_first_computes(world: World) -> None:
    batch = batch_of(world, limits=Limits(alone=16, beside=16, texts=4, rows=16))
    prompt = list(range(40))
    texts = [batch.submit(asked(world, [*prompt, i], 2)) for i in range(4)]
    finish(batch)
    assert sum(t.read for t in texts) < 2 * len(prompt)


def test_who_is_sent_back_says_the_same_later(world: World) -> None:
    batch = batch_of(world, slots=CONTEXT)
    prompts = [[i, i + 1] * 5 for i in range(6)]
    texts = [batch.submit(asked(world, p, 50)) for p in prompts]
    finish(batch)
    assert batch.counters.preempted
    assert [new(t) for t in texts] == [plain(world, p, 50) for p in prompts]


def test_higher_priority_goes_first(world: World) -> None:
    batch = batch_of(world, limits=Limits(texts=1))
    low = batch.submit(asked(world, [1, 2], 5))
    high = batch.submit(asked(world, [3, 4], 5, priority=1))
    ended: list[Text] = []
    while not batch.idle:
        ended += batch.step()
    assert ended == [high, low]


def test_features_are_those_of_the_text_alone(world: World) -> None:
    layers = world.batch.model.layer_count
    runner = ListRunner(world.batch.model, world.batch.session, SLOTS, CONTEXT, taps=(0, layers))
    batch = Batch(runner)
    prompts = [[i, 5, 6] for i in range(3)]
    texts = [batch.submit(asked(world, p, 6, features=True)) for p in prompts]
    read = batch.submit(asked(world, prompts[0], 0, features=True))
    finish(batch)
    for p, text in zip(prompts, texts, strict=True):
        assert new(text) == plain(world, p, 6)
        assert np.concatenate(text.features).shape == (8, 2 * world.batch.model.width)
    assert np.array_equal(np.concatenate(read.features), np.concatenate(texts[0].features)[:3])
    assert read.ended == "read"


class Broken(Plain):
    """A voice of which one call fails, its `last`-th."""

    def __init__(self, call: str, error: Exception, last: int) -> None:
        super().__init__(best)

        def fails(given: Any) -> Any:
            nonlocal last
            last -= 1
            if not last:
                raise error
            return getattr(Plain, call)(self, given)

        setattr(self, call, fails)


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize(
    "error", [InputError, ValueError, KeyError, RuntimeError, ZeroDivisionError]
)
@pytest.mark.parametrize("call", ["pick", "accept", "permitted"])
def test_a_voice_that_fails_ends_its_own_text_alone(
    world: World, call: str, error: type[Exception], last: int
) -> None:
    """Whichever of its calls that is, and whatever it raises."""
    batch, prompt, others = batch_of(world), [1, 2, 3], [1, 2, 3, 4]
    said = [plain(world, p, 9) for p in (prompt, others)]
    broken = Broken(call, error("no token may be said"), last)
    drafts = (Speculation([Knowing([*p, *s], tree=False)], Fixed(1))
              for p, s in zip((prompt, prompt, others), (said[0], *said), strict=True))  # fmt: skip
    bad = batch.submit(Request(prompt, broken, 9, drafts=next(drafts)))
    good = [batch.submit(asked(world, p, 9, drafts=next(drafts))) for p in (prompt, others)]
    finish(batch)
    assert bad.ended == "error" and "no token may be said" in str(bad.error)
    assert len(new(bad)) < 9 and new(bad) == said[0][: len(new(bad))]
    if call != "permitted":  # which is asked once a round
        assert len(new(bad)) == last - 1, "what was chosen before is the text's"
    assert [new(t) for t in good] == said


def test_what_does_not_fit_is_refused(world: World) -> None:
    batch = batch_of(world)
    for prompt in ([], [1] * (CONTEXT + 1)):
        with pytest.raises(InputError, match=f"the prompt has {len(prompt)} tokens"):
            batch.submit(asked(world, prompt, 1))
    with pytest.raises(InputError, match="texts of 9 tokens in a cache of 8"):
        ListRunner(world.batch.model, world.batch.session, 8, 9)
    with pytest.raises(InputError, match="texts <= rows"):
        Limits(texts=65)


def test_a_slot_is_given_back_once() -> None:
    pool = Slots(4)
    taken = pool.take(3)
    pool.give(taken[:1])
    with pytest.raises(InputError, match=f"slot {taken[0]} of 4 is given back"):
        pool.give(taken[:1])
    with pytest.raises(InputError, match="5 slots wanted, 2 are free"):
        pool.take(5)


def test_the_tree_forgets_the_oldest_end_first() -> None:
    tree = PrefixTree()
    node, slots, spare = tree.insert(tree.root, [1, 2, 3, 4], [10, 11, 12, 13])
    assert (slots, spare) == ([10, 11, 12, 13], [])
    _, slots, spare = tree.insert(tree.root, [1, 2, 5], [20, 21, 22])
    assert (slots, spare) == ([10, 11, 22], [20, 21])
    tree.hold(node)
    assert tree.evictable == 1
    assert tree.evict(5) == [22]
    tree.release(node)
    assert tree.evict(1) == [13]
    found, slots = tree.match([1, 2, 3, 4])
    assert slots == [10, 11, 12]
    assert sorted(tree.evict(9)) == [10, 11, 12]
    assert found.parent is None
    with pytest.raises(InputError, match="nobody holds"):
        tree.release(tree.insert(tree.root, [1], [10])[0])


def test_a_step_is_cut_where_that_costs_less_than_rows_that_fill_it_up() -> None:
    """Against all ways to cut once, and no way at all."""

    def cost(*pieces: int) -> int:
        return sum(mixed_bucket(p) + CUT for p in pieces)

    for rows in range(1, 257):
        first = filling(rows, 256)
        pieces = (first, rows - first) if first < rows else (rows,)
        least = min(cost(rows), *(cost(n, rows - n) for n in range(1, rows)), cost(rows))
        assert cost(*pieces) == least, f"{rows} rows as {pieces}"
    assert filling(1000, 256) == 256 and filling(200, 192) == 192 and filling(9, 5) == 5


def test_prompts_are_read_in_smaller_pieces_where_rows_are_dear_or_steps_are_short() -> None:
    dear = (0.0, 0.0005, 0.001, 0.002, 0.004, 1.0)
    for going in range(1, 257):
        for step in (0.0, 0.002, 1.0):
            known = [beside(going, 48, row, step) for row in dear]
            assert known == sorted(known, reverse=True) and known[-1] > (0 if going < 200 else -1)
    assert beside(1, 48, 0.0, 0.002) == beside(1, 48, 0.001, 0.0) + 24 == 47
    for row in dear[1:-1]:
        for step in (0.0, 0.002, 0.005, 1.0):
            rows = beside(3, 48, row, step) + 3
            assert rows == MIXED_ROWS[0] or rows * row <= PAUSE, "no step has fewer rows"
            assert rows == MIXED_ROWS[0] or not step or rows * row <= PACE * step


def test_rows_are_dear_where_many_share_a_step() -> None:
    """Alone a draft costs what its rows cost; in a full batch as much as it may bring."""
    prices = Prices()
    for _ in range(200):
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16):
            prices.note_step(rows, 1.0 + 0.5 * (rows - 1))
            prices.note_step(1, 1.0)  # of which there are enough to tell the pace
    shared = SharedPrices(prices)
    alone = shared.rows(4)
    assert alone == pytest.approx(1.5, rel=0.1)
    shared.others = 7
    assert shared.rows(4) > 1.6 * alone
    assert shared.rows(1) == 0


def forgotten_first(tree: PrefixTree, wanted: int) -> list[int]:
    """The slots that should go, found by looking at all nodes for each."""
    left = {node: list(node.slots) for node in tree.nodes()}
    gone: list[int] = []
    while len(gone) < wanted:
        ends = [n for n in left if not n.users and not any(c in left for c in n.children.values())]
        if not ends:
            break
        oldest = min(ends, key=lambda n: n.used)
        gone.append(left[oldest].pop())
        if not left[oldest]:
            del left[oldest]
    return gone


def test_the_tree_has_an_entry_for_each_end_however_often_it_is_used() -> None:
    """Random histories; the oldest ends go first in each, and all that nobody holds can go."""
    r = random.Random(5)
    for _ in range(60):
        tree, held, free = PrefixTree(), list[Node](), iter(range(10_000))
        for _ in range(60):
            tokens = [r.randrange(2) for _ in range(r.randint(1, 8))]
            node, slots = tree.match(tokens)
            if r.random() < 0.5:
                tree.hold(node)
                rest = tokens[len(slots) :]
                end, _, _ = tree.insert(node, rest, [next(free) for _ in rest])
                tree.hold(end)
                tree.release(node)
                held.append(end)
            if held and r.random() < 0.5:
                tree.release(held.pop(r.randrange(len(held))))
            if r.random() < 0.3:
                wanted = r.randint(1, 6)
                expected = forgotten_first(tree, wanted)
                assert sorted(tree.evict(wanted)) == sorted(expected)
            assert len(tree._leaves) <= len(list(tree.nodes()))
        for node in held:
            tree.release(node)
        tree.evict(tree.size)
        assert (tree.size, list(tree.nodes()), tree._leaves) == (0, [], [])
