"""States that texts of recurrent models leave behind, and what later texts begin with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_kit import CONTEXT, RECURRENT, Asked, World, alone, request_of
from test_serving_recurrent import finish

from ggraph import InputError
from ggraph.serving.batch import Batch
from ggraph.serving.memory import Memory
from ggraph.serving.states import States
from ggraph.serving.text import Plain, Request, Text, begun
from ggraph.serving.texts import Limits

FINE = Limits(texts=3, alone=256, apart=1)
SLOTS, STATES = 40, 4  # of the small memory


@pytest.fixture(scope="module", params=RECURRENT)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.recurrent(request.param, tmp_path_factory.mktemp("states"))


def said(w: World, batch: Batch, prompt: Sequence[int], limit: int = 6, drafter: str = "") -> Text:
    """A text that is run to its end, and says what it would have said alone."""
    a = Asked(0, tuple(prompt), limit, 0.0, 0, drafter, 0, 0)
    text = batch.submit(request_of(w, a, batch.prices))
    finish(batch)
    assert text.tokens[len(prompt) :] == alone(w, a)
    return text


@pytest.mark.parametrize("drafter", ["", "suffix", "chain", "tree"])
def test_a_next_turn_computes_its_new_tokens_alone(world: World, drafter: str) -> None:
    """And the last one of what was said, whose row nobody needed; or, behind a draft, those that
    were drafted last, which the state does not hold."""
    batch, prompt = world.fresh(FINE), [1, 2, 3, 4] * 5
    for turn in range(3):
        text = said(world, batch, prompt, 8, drafter)
        fresh = 3 if turn else len(prompt)
        assert fresh <= text.read <= fresh + (5 if drafter else 1)
        assert text.reused == len(prompt) - text.read
        prompt = [*text.tokens, 7, turn, 9]
    assert batch.counters.prompt_rows < 20 + 2 * 9


def test_the_same_prompt_again_computes_its_last_token(world: World) -> None:
    batch, prompt = world.fresh(FINE), list(range(30))
    assert [said(world, batch, prompt).read for _ in range(3)] == [30, 1, 1]


def test_a_state_is_kept_where_a_prompt_parts_from_what_was_known(world: World) -> None:
    """Of a beginning that many share the second text learns where it ends, and the third goes on
    from there."""
    batch, shared = world.fresh(FINE), list(range(40))
    reads = [said(world, batch, [*shared, 50 + i, 60 + i, 3]).read for i in range(4)]
    assert reads == [43, 43, 3, 3]


def test_a_state_is_kept_where_the_stem_ends(world: World) -> None:
    """Whoever asks may know where later prompts will part, before the tree can."""
    batch, shared = world.fresh(FINE), list(range(40))
    a = Asked(0, (*shared, 50, 51), 4, 0.0, 0, "", 0, 0)
    asked = request_of(world, a, batch.prices)
    batch.submit(Request(asked.prompt, asked.voice, asked.limit, stem=len(shared)))
    finish(batch)
    assert said(world, batch, [*shared, 60, 61, 62]).read == 3


def test_states_lie_apart(world: World) -> None:
    """A cut costs a step: a prompt has none for a state near the one before."""
    batch = world.fresh(Limits(texts=3, apart=16))
    said(world, batch, list(range(16)))
    assert (batch.counters.steps, batch.memory.states.kept) == (6, 1)  # what the text itself left
    said(world, batch, list(range(50, 67)))
    assert (batch.counters.steps, batch.memory.states.kept) == (13, 3)
    # Its own beginning is as long as the other's, and 15 tokens are no 16
    said(world, batch, [*range(16), 5, 5])
    assert batch.counters.steps == 13 + 6 + 1


def test_texts_that_come_together_share_one_reading(world: World) -> None:
    """As the choices of one request do."""
    batch, prompt = world.fresh(Limits(texts=3, alone=16, beside=16, apart=1)), list(range(40))
    asked = [Asked(0, tuple(prompt), 6, 0.7, seed, "", 0, 0) for seed in range(3)]
    texts = [batch.submit(request_of(world, a, batch.prices)) for a in asked]
    finish(batch)
    # The second begins to read where the first one's last step had room left
    assert [t.read for t in texts] == [40, 16 - 7 + 1, 1]
    for a, text in zip(asked, texts, strict=True):
        assert text.tokens[len(prompt) :] == alone(world, a)


def test_who_is_sent_back_goes_on_from_a_kept_state(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows behind the beginning that another text still holds are taken from it; the state at
    that beginning's end stays."""
    batch, shared = world.fresh(FINE, slots=CONTEXT), range(30)
    begin, began = batch.memory.begin, list[tuple[int, int]]()

    def noted(text: Text) -> None:
        began.append((text.arrived, text.computed))
        begin(text)

    monkeypatch.setattr(batch.memory, "begin", noted)
    every = [Asked(0, (*shared, 50 + i), 50, 0.0, 0, "", 0, 0) for i in range(2)]
    texts = []
    for a in every:
        texts.append(batch.submit(request_of(world, a, batch.prices)))
        batch.step()
    finish(batch)
    assert batch.counters.preempted
    assert began[0] == (1, 0) and len(began) > 2 and all(at >= 30 for _, at in began[1:])
    for a, text in zip(every, texts, strict=True):
        assert text.tokens[31:] == alone(world, a)


def test_a_text_that_is_cancelled_leaves_what_it_has_read(world: World) -> None:
    batch, prompt = world.fresh(Limits(texts=3, alone=16, beside=1, apart=64)), list(range(40))
    a = Asked(0, tuple(prompt), 6, 0.0, 0, "", 0, 0)
    text = batch.submit(request_of(world, a, batch.prices))
    batch.step()
    batch.cancel(text)
    batch.memory.check(batch.running)
    assert said(world, batch, prompt).read == 40 - 16


def test_there_are_no_more_states_than_slots_of_them(world: World) -> None:
    """Twenty texts, four states: what was used longest ago goes, and nothing else does."""
    batch = world.fresh(Limits(texts=2, apart=1), states=STATES)
    prompts = [[i, 2, 3, i, 5, 6] for i in range(20)]
    for p in prompts:
        said(world, batch, p)
        said(world, batch, prompts[0])  # is used all the time
    assert batch.memory.states.kept == STATES
    assert [said(world, batch, prompts[i]).read for i in (19, 0, 10)] == [1, 1, 6]


def test_rows_that_go_take_their_states_along(world: World) -> None:
    batch, prompt = world.fresh(FINE), list(range(30))
    said(world, batch, prompt)
    kept = batch.memory.states.kept
    batch.memory.pool.give(batch.memory.tree.evict(1))
    assert batch.memory.states.kept == kept - 1
    assert said(world, batch, prompt).read == 1  # the prompt's own is there
    batch.memory.pool.give(batch.memory.tree.evict(SLOTS + CONTEXT))
    assert batch.memory.states.kept == 0
    assert said(world, batch, prompt).read == 30


@dataclass
class Told:
    """A memory whose states are the tokens that went into each slot."""

    held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: Memory = field(init=False)
    running: list[Text] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.memory = Memory(SLOTS, States(STATES, self.copy), apart=2)

    def copy(self, source: int, target: int) -> None:
        self.held[target] = self.held[source]

    def begin(self, prompt: Sequence[int], stem: int) -> None:
        """Half as many texts as states run; what is kept for a text is what it begins with."""
        if len(self.running) == STATES // 2:
            return
        self.count += 1
        request = Request(prompt, Plain(lambda _: 0), stem=min(stem, len(prompt) - 1))
        text = begun(request, self.count, 8, self.memory.tree.root)
        self.memory.look_up(text)
        self.memory.begin(text)
        self.running.append(text)

    def advance(self, which: int, count: int, drafted: int) -> None:
        """A text computes some of its tokens, of which the last may have been drafted."""
        if not self.running:
            return
        text = self.running[which % len(self.running)]
        self.memory.look_up(text)
        count = min(count, self.memory.ahead(text))
        if not count or not self.memory.reserve(text, count):
            return
        at = text.computed
        assert not at or self.held[text.state] == tuple(text.tokens[: at - len(text.replay)])
        text.slots[at : at + count] = text.spare[:count]
        del text.spare[:count]
        drafted = min(drafted, count - 1, self.memory.log.free)
        self.held[text.state] = tuple(text.tokens[: at + count - drafted])
        text.computed += count
        self.memory.replay(text, self.memory.log.take(drafted), range(drafted))
        self.memory.publish(text)

    def end(self, which: int) -> None:
        """A text goes."""
        if self.running:
            self.memory.forget(self.running.pop(which % len(self.running)))

    def check(self) -> None:
        """Slots are counted, and each kept state is that of its node's path."""
        self.memory.check(self.running)
        for node in self.memory.tree.nodes():
            line, at = list[int](), node
            while at.parent is not None:
                line, at = [*at.tokens, *line], at.parent
            slot = self.memory.states.slot_of(node)
            assert slot is None or self.held[slot] == tuple(line)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
ACTS = st.one_of(
    st.tuples(st.just("begin"), PROMPTS, st.integers(0, 11)),
    st.tuples(st.just("advance"), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 3)),
)


@given(st.lists(ACTS, max_size=60))
def test_a_kept_state_is_always_that_of_its_place(acts: list[tuple[object, ...]]) -> None:
    told = Told()
    for name, *more in acts:
        getattr(told, str(name))(*more)
        told.check()


def test_a_slot_of_states_that_is_lost_is_missed(world: World) -> None:
    batch = world.fresh(FINE)
    said(world, batch, [1, 2, 3])
    batch.memory.states.pool.take(1)
    with pytest.raises(InputError, match="slots are held"):
        batch.memory.check(batch.running)
