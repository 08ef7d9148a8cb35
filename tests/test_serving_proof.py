"""What a batch does to its slots, proved by the prover that judges plans."""

from collections import Counter
from collections.abc import Callable

import pytest
from serving_kit import RECURRENT, SLOTS, STATES, World, greedy, history, play
from serving_proof import Copied, Recorder, as_plan
from small_model import TINY, learnable_model

from ggraph import InputError
from ggraph.serving.parts import Part
from ggraph.serving.prefix import Node, PrefixTree
from ggraph.serving.states import States
from ggraph.serving.steps import Ready
from ggraph.serving.stride import Stride
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from ggraph.verify import Rejected, verify

SEEDS = range(6)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    path = learnable_model(tmp_path_factory.mktemp("proof"))
    return World.of(path, head=TINY / "eagle3_for_llama_tied")


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.recurrent(request.param, tmp_path_factory.mktemp("recurrent proof"))


def recorded(world: World, seed: int) -> Recorder:
    recorder = Recorder()
    play(world, history(seed), watch=recorder.watch)
    return recorder


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_of_a_history_is_proved(world: World, seed: int) -> None:
    """As the session runs it, which waits for each step; and with overlapping lanes where a slot
    that changes hands is waited for."""
    recorder = recorded(world, seed)
    alone = verify(as_plan(recorder, SLOTS, 1, "nobody")).certificate
    assert alone.reads_proved > 0
    for waits in ("host", "slots"):
        assert verify(as_plan(recorder, SLOTS, 2, waits)).certificate.pairs_checked > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_of_strides_is_proved(world: World, seed: int) -> None:
    """Among them those of rows that were begun before their text was known to have ended."""
    recorder, seen = Recorder(), Counter[str]()
    play(world, greedy(history(seed)), seen, watch=recorder.watch)
    assert seen["strides"]
    assert verify(as_plan(recorder, SLOTS, 1, "nobody")).certificate.reads_proved > 0
    assert verify(as_plan(recorder, SLOTS, 2, "slots")).certificate.pairs_checked > 0


def test_a_stride_that_gives_a_slot_away_twice_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts write to one slot in a step that was made while another computed."""
    rows = Stride._rows

    def careless(self: Stride, parts: list[Part], ahead: int) -> Ready:
        if ahead and len(parts) > 1:
            parts[1].slots = parts[0].slots
        return rows(self, parts, ahead)

    recorder, batch = Recorder(), world.fresh(Limits(texts=3), slots=96)
    recorder.watch(batch)
    for i in range(3):
        prompt = [*range(5 + i), 9]
        batch.submit(Request(prompt, Plain(lambda row: int(row.argmax()), greedy=True), 20))
    for turn in range(4):
        if turn == 2:
            verify(as_plan(recorder, SLOTS, 1, "host"))
            monkeypatch.setattr(Stride, "_rows", careless)
        left = iter(range(4))
        batch.step(go_on=lambda left=left: next(left, None) is not None)  # type: ignore[misc]
    with pytest.raises((Rejected, AssertionError), match=r"stale|overwritten|value"):
        verify(as_plan(recorder, SLOTS, 1, "host"))


def together(world: World) -> Recorder:
    """Two rounds of texts in few slots, of which some share a beginning."""
    recorder, batch = Recorder(), world.fresh(Limits(texts=2), slots=96)
    recorder.watch(batch)
    for i in range(6):
        prompt = [*range(30), i] if i % 3 == 0 else [i] * 20
        batch.submit(Request(prompt, Plain(lambda logits: int(logits.argmax())), 12))
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)
    assert batch.memory.evicted and batch.counters.reused
    return recorder


def test_lanes_that_wait_for_nobody_are_refused(world: World) -> None:
    """The shape of vLLM #45357: slots that were given back are filled while a step in flight still
    touches them."""
    recorder = together(world)
    verify(as_plan(recorder, SLOTS, 2, "slots"))
    with pytest.raises(Rejected, match="race"):
        verify(as_plan(recorder, SLOTS, 2, "nobody"))


def evicts_what_is_held(tree: PrefixTree) -> None:
    """A node is forgotten though running texts read it."""
    offer = tree._offer

    def careless(node: Node) -> None:
        users, node.users = node.users, 0
        offer(node)
        node.users = users

    tree._offer = careless  # type: ignore[method-assign]
    tree.hold = lambda node: None  # type: ignore[method-assign]
    tree.release = lambda node: None  # type: ignore[method-assign]


def matches_too_much(tree: PrefixTree) -> None:
    """Another text's rows are taken for one's own: the shape of llama.cpp #27148."""
    match = tree.match

    def generous(tokens: list[int]) -> tuple[Node, list[int]]:
        node, slots = match(tokens)
        more = next(iter(node.children.values()), None)
        return node, [*slots, *(more.slots[: len(tokens) - len(slots)] if more else [])]

    tree.match = generous  # type: ignore[assignment]


@pytest.mark.parametrize("fault", [evicts_what_is_held, matches_too_much])
def test_a_careless_tree_is_found_out(world: World, fault: Callable[[PrefixTree], None]) -> None:
    """Even where every step waits for the one before."""
    recorder, batch = Recorder(), world.fresh(Limits(texts=3), slots=96)
    recorder.watch(batch)
    fault(batch.memory.tree)
    for i in range(6):
        prompt = [*range(20 + i), 60 + i, 61, 62]
        batch.submit(Request(prompt, Plain(lambda logits: int(logits.argmax())), 24))
    with pytest.raises((Rejected, AssertionError), match=r"stale|never held|overwritten|value"):
        for _ in range(400):
            if not batch.idle:
                batch.step()
        verify(as_plan(recorder, SLOTS, 1, "host"))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_of_a_state_is_proved(recurrent: World, seed: int) -> None:
    """Copies of kept states, what texts move on, and what is replayed of drafts."""
    recorder = recorded(recurrent, seed)
    alone = verify(as_plan(recorder, SLOTS, 1, "nobody", STATES)).certificate
    assert alone.reads_proved > 0
    for waits in ("host", "slots"):
        found = verify(as_plan(recorder, SLOTS, 2, waits, STATES)).certificate
        assert found.pairs_checked > 0


def turns(world: World, fault: Callable[[States], None] = lambda states: None) -> Recorder:
    """Two conversations of three turns, one beside the other, with few slots of states."""
    recorder, batch = Recorder(), world.fresh(Limits(texts=2, apart=1), slots=96, states=3)
    assert batch.memory.states is not None
    recorder.watch(batch)
    fault(batch.memory.states)
    said = [[*range(20), i] for i in range(2)]
    for turn in range(3):
        for i, before in enumerate(said):
            best = Plain(lambda logits: int(logits.argmax()))
            text = batch.submit(Request([*before, 50 + turn], best, 4))
            while not batch.idle and text.new < 2 - i:
                batch.step()
            said[i] = text.tokens
    while not batch.idle:
        batch.step()
    assert batch.counters.reused
    return recorder


def test_states_of_lanes_that_wait_for_nobody_are_refused(recurrent: World) -> None:
    recorder = turns(recurrent)
    assert any(isinstance(step, Copied) for step in recorder.steps)
    verify(as_plan(recorder, SLOTS, 2, "slots", STATES))
    with pytest.raises(Rejected, match="race"):
        verify(as_plan(recorder, SLOTS, 2, "nobody", STATES))


def copies_nothing(states: States) -> None:
    """A text goes on from what lies in its slot: another conversation, perhaps."""
    states.resume = lambda node, slot: None  # type: ignore[method-assign]


def forgets_whose(states: States) -> None:
    """A slot is taken from a node, which does not know."""

    def careless(node: Node) -> None:
        if (slot := states._kept.get(node)) is not None:
            states.pool.give([slot])

    states.drop = careless  # type: ignore[method-assign]


def takes_what_is_near(states: States) -> None:
    """A state further down is taken for that of the place."""
    find = states.find

    def generous(node: Node, slots: list[int]) -> tuple[Node, list[int]]:
        below = next((c for c in node.children.values() if c in states._kept), None)
        if below is not None and slots:
            states._kept.setdefault(node, states._kept[below])
        return find(node, slots)

    states.find = generous  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [copies_nothing, forgets_whose, takes_what_is_near])
def test_careless_states_are_found_out(recurrent: World, fault: Callable[[States], None]) -> None:
    with pytest.raises((Rejected, AssertionError, InputError), match=r"stale|never held|value"):
        verify(as_plan(turns(recurrent, fault), SLOTS, 1, "host", STATES))
