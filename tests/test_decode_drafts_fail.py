"""A drafter that raises ends its own drafts: no text, alone or among others, and not the server."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cli_kit import ggraph
from serving_kit import World
from small_model import TINY, learnable_model, small_model

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.lookup import SuffixDrafter
from ggraph.decode.draft.tree import Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Adaptive, Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.errors import DraftWarning
from ggraph.serving.batch import Batch
from ggraph.serving.heads import HeadDrafter, ListHead
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from ggraph.tensor import Array
from models.registry import open_model
from models.run.load import open_session

PROMPT, NEW = [5, 6, 7] * 4, 24
GREEDY, DRAWN = SamplerConfig(temp=0), SamplerConfig(seed=3)
RAISED = r"the drafter 'failing' raised {}; the text goes on without it"


@dataclass
class Failing:
    """Knows the text, and raises in the `turn`-th call of one of its methods; or proposes then what
    is no draft ("list"), or one whose law is none of the target's ("law")."""

    where: str
    turn: int
    truth: Sequence[int]
    name: str = "failing"
    taps: tuple[int, ...] = ()
    levels: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    length: int = 0

    def _called(self, where: str) -> bool:
        """Whether a call goes wrong in another way than by raising."""
        self.calls[where] = self.calls.get(where, 0) + 1
        assert self.calls[where] <= self.turn, "it is asked again"
        if self.where == where and self.calls[where] == self.turn:
            raise RuntimeError(f"no {where}\nggraph: another line")
        asked = where == "propose" and self.where in ("list", "law")
        return asked and self.calls[where] == self.turn

    def warm(self, past: int, longest: int) -> None:
        """No plans."""
        self._called("warm")

    def begin(self, first: int) -> None:
        """A text of one token."""
        self._called("begin")
        self.length = 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """It goes on."""
        self._called("observe")
        self.length += len(tokens)

    def read(self) -> None:
        """Nothing is read."""
        self._called("read")

    def propose(self, limit: int) -> Draft:
        """The truth, of which the second token is wrong."""
        bad = self._called("propose")
        then = list(self.truth[self.length : self.length + limit])
        then[1:2] = [t ^ 1 for t in then[1:2]]
        if not bad:
            return Draft.chain(then)
        return then if self.where == "list" else Draft((1,), (-1,), {-1: np.ones(7)})  # type: ignore[return-value]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with closing(open_session(threads=1)) as session:
        yield Runner(open_model(TINY / "llama_tied"), session, 64)


def text(runner: Runner, config: SamplerConfig, drafters: Sequence[Drafter], by: bool) -> list[int]:
    """A text of the engine, with drafts, or with none."""
    sampler = Sampler(config, runner.model.vocab_size)
    drafts = Speculation(drafters, Fixed(4), longest=4, law=sampler if by else None)
    runner.past = 0
    engine = Engine(runner, ())
    found = engine.generate(PROMPT, sampler.sample, sampler.accept, limit=NEW, drafts=drafts)
    return list(found)


WAYS = [(w, 1) for w in ("warm", "begin", "read")]
WAYS += [(w, n) for w in ("observe", "propose", "list", "law") for n in (1, 3)]


@pytest.mark.parametrize(("where", "turn"), WAYS)
@pytest.mark.parametrize("config", [GREEDY, DRAWN])
def test_a_text_goes_on_without_a_drafter_that_raises(
    runner: Runner, where: str, turn: int, config: SamplerConfig
) -> None:
    """It is asked no more, and the next one of the text's drafters instead."""
    plain = text(runner, config, [], False)
    other = SuffixDrafter()
    failing = Failing(where, turn, [*PROMPT, *plain])
    said = {"list": "AttributeError", "law": "InputError"}.get(where, rf"RuntimeError: no {where}")
    with pytest.warns(DraftWarning, match=RAISED.format(f"{said}.*")) as told:
        assert text(runner, config, [failing, other], False) == plain
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert other._automaton.size > len(PROMPT) + 3, "the other one is told of the text"


@pytest.mark.parametrize("where", ["propose", "law"])
def test_neither_does_rejection_end_with_it(runner: Runner, where: str) -> None:
    plain = text(runner, GREEDY, [], False)
    with pytest.warns(DraftWarning):
        made = text(runner, GREEDY, [Failing(where, 2, [*PROMPT, *plain])], True)
    assert made == plain


def test_the_tests_see_what_our_drafters_raise(runner: Runner) -> None:
    with pytest.raises(DraftWarning, match="no propose") as caught:
        text(runner, GREEDY, [Failing("propose", 1, [*PROMPT, *range(99)])], False)
    assert isinstance(caught.value.__context__, RuntimeError)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder, head = tmp_path_factory.mktemp("fail"), TINY / "eagle3_for_llama_tied"
    return World.of(learnable_model(folder), head=head, smaller=small_model(folder / "other.gguf"))


def best(logits: Array) -> int:
    return int(logits.argmax())


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7], [*range(40)]]


def alone(w: World, prompt: Sequence[int]) -> list[int]:
    w.plain.engine.reset()
    return list(w.plain.engine.generate(prompt, best, lambda _: None, limit=NEW))


def request(w: World, prompt: Sequence[int], drafts: Speculation) -> Request:
    return Request(prompt, Plain(best, w.batch.tokenizer.eos_ids), NEW, drafts=drafts)


def finish(batch: Batch) -> None:
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)


@pytest.mark.parametrize(
    ("where", "turn"), [("begin", 1), *((w, 3) for w in ("observe", "propose", "list"))]
)
def test_the_texts_of_a_batch_are_unharmed(world: World, where: str, turn: int) -> None:
    batch, (first, *others) = world.fresh(Limits()), PROMPTS
    knows = Failing(where, turn, [*first, *alone(world, first)])
    texts = [batch.submit(request(world, first, Speculation([knows], Fixed(3))))]
    for p in others:
        texts.append(batch.submit(request(world, p, Speculation([SuffixDrafter()], Adaptive()))))
    with pytest.warns(DraftWarning) as told:
        finish(batch)
    assert len(told) == 1
    for t, prompt in zip(texts, PROMPTS, strict=True):
        assert (t.tokens[len(prompt) :], t.error) == (alone(world, prompt), None)
    assert texts[0].drafted == (0 if where == "begin" else 6), "no more drafts of that one"


@dataclass(frozen=True)
class Watched(Fixed):
    """How many tokens of drafts there were, by drafter."""

    drafted: dict[str, int] = field(default_factory=dict)

    def weigh(self, drafter: str, draft: Draft, best: Draft, seconds: float) -> Draft:
        self.drafted[drafter] = self.drafted.get(drafter, 0) + len(draft)
        return super().weigh(drafter, draft, best, seconds)

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """Nothing."""


@pytest.mark.parametrize("kind", ["head", "model"])
def test_one_who_drafts_for_all_may_raise(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who have asked it go on without it; who comes later asks it again."""
    batch, turns = world.fresh(Limits()), iter([False, False, True])
    (guesser,) = [g for g in batch.guessers if g.kind == kind]
    ask = ListHead._ask

    def fails(self: ListHead, *given: object, **named: object) -> None:
        if next(turns, False):
            raise MemoryError("no room for a plan")
        ask(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(guesser, "_ask", fails.__get__(guesser))
    watched = [Watched(3, {}) for _ in PROMPTS]
    each = lambda w: Speculation([HeadDrafter(kind, lambda _: True, asks=kind)], w)  # noqa: E731
    asked = zip(PROMPTS, watched, strict=True)
    texts = [batch.submit(request(world, p, each(w))) for p, w in asked]
    with pytest.warns(DraftWarning, match=f"'{kind}' raised MemoryError: no room") as told:
        finish(batch)
    assert 1 <= len(told) <= len(PROMPTS)
    before = [w.drafted.get(kind, 0) for w in watched]
    later = Watched(3, {})
    texts.append(batch.submit(request(world, PROMPTS[0], each(later))))
    finish(batch)
    for t, prompt in zip(texts, [*PROMPTS, PROMPTS[0]], strict=True):
        assert (t.tokens[len(prompt) :], t.error) == (alone(world, prompt), None)
    assert max(before) < later.drafted[kind] and later.drafted[kind] > 6


BROKEN = """
from ggraph.decode.draft.lookup import PromptLookup

class Broken(PromptLookup):
    def __init__(self, runner):
        super().__init__(least=1)
        self.name, self.left = "broken", 3

    def propose(self, limit):
        self.left -= 1
        if self.left < 0:
            raise KeyError("a table of mine")
        return super().propose(limit)
"""


def test_a_drafter_of_an_installed_package_that_raises_costs_a_line(tmp_path: Path) -> None:
    """As a user meets it: the text is whole, and says so once on standard error."""
    (tmp_path / "broken_drafter.py").write_text(BROKEN)
    info = tmp_path / "broken_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ggraph.drafters]\nbroken = broken_drafter:Broken\n")
    model = small_model(tmp_path / "small.gguf")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    call = ["generate", "-m", model, "-p", "to be or not to be or not", "-n", "40", "--temp", "0"]
    plain = ggraph(*call, env=env)
    status, out, err = ggraph(*call, "--draft", "broken", "--fixed", env=env)
    assert plain[0] == status == 0 and plain[1].strip()
    assert plain[1].splitlines()[0] in out
    lines = [line for line in err.splitlines() if "broken" in line]
    assert lines == [
        "ggraph: the drafter 'broken' raised KeyError: 'a table of mine'; the text goes on without "
        "it"
    ], err
