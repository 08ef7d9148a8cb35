"""Whatever drafts hold, a text with them says what it says without, and ends where it ends then."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from small_model import small_model

from ggraph import dtypes
from ggraph.decode.acceptance import match, only, reject
from ggraph.decode.draft.lookup import PromptLookup
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.tree import Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.errors import InputError
from ggraph.formats.checkpoint import RawTensor
from ggraph.session import Session
from ggraph.tensor import Array
from models.registry import Model, open_model
from models.run.drafting import DraftOptions, make_drafters
from models.run.load import load, open_session

GOLDEN = Path(__file__).parent / "golden"
LLAMA, QWEN, LFM = "tiny/llama_tied", "tiny2/qwen3_5", "tiny2/lfm2"
PROMPT, BAD = [5, 6, 7] * 5, 311


@dataclass
class Said:
    """Proposes what it is told to: of the text behind, and the most nodes that are wanted."""

    says: Callable[[Sequence[int], int], Draft]
    truth: Sequence[int] = ()
    name: str = "said"
    taps: tuple[int, ...] = ()
    _length: int = field(default=0, init=False)

    def begin(self, first: int) -> None:
        """A text of one token."""
        self._length = 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """It goes on."""
        self._length += len(tokens)

    def propose(self, limit: int) -> Draft:
        """What is said of what comes."""
        return self.says(self.truth[self._length :], limit)


def spoiled(model: Model) -> Model:
    """The model with an output matrix of its own, to which a token is no number."""
    held = dict(model.catalogue)
    table = held["token_embd.weight"].float32()
    told = RawTensor("output.weight", dtypes.F32, table.shape, table)
    held.setdefault("output.weight", told)
    broken = table.copy()
    broken[BAD] = np.nan
    held["token_embd.weight"] = RawTensor("token_embd.weight", dtypes.F32, table.shape, broken)
    return replace(model, catalogue=held)


@cache
def model_of(name: str) -> Model:
    """A checkpoint, read once."""
    return open_model(GOLDEN / name)


@pytest.fixture
def session() -> Iterator[Session]:
    """One that is closed."""
    made = open_session(threads=1)
    yield made
    made.close()


def text(
    runner: Runner, drafter: Drafter | None, most: int, *, config: SamplerConfig, picks: str = "",
    limit: int = 40, prompt: Sequence[int] = PROMPT,
) -> list[int]:  # fmt: skip
    """A text, with drafts of `most` nodes."""
    sampler = Sampler(config, runner.model.vocab_size)
    known: dict[str, int | Sampler] = {"": 0, "best": 1, "greatest": 40, "drawn": sampler}
    runner.picks, runner.past = known[picks], 0
    drafts = None if drafter is None else Speculation([drafter], Fixed(most), longest=most)
    engine = Engine(runner, ())
    found = engine.generate(prompt, sampler.sample, sampler.accept, limit=limit, drafts=drafts)
    return list(found)


GREEDY, DRAWN = SamplerConfig(temp=0), SamplerConfig(seed=3)
WRONG: dict[str, Callable[[Sequence[int], int], Draft]] = {
    "chain": lambda then, most: Draft.chain([*then[:1], BAD, *then[2:4]]),
    "root": lambda then, most: Draft.chain([BAD, 1]),
    "tree": lambda then, most: Draft((BAD, *then[:1], BAD, *then[1:2]), (-1, -1, 1, 1)),
}


@pytest.mark.parametrize("name", [LLAMA, QWEN, "tiny/mistral_sliding"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("picks", ["", "best", "greatest", "drawn"])
def test_what_a_wrong_guess_brings_is_nobodys(
    session: Session, name: str, wrong: str, picks: str
) -> None:
    """Logits behind a guess that is refused are looked at by nobody, whatever they are; nor are
    its keys, values and states."""
    runner = Runner(spoiled(model_of(name)), session, 64)
    config = DRAWN if picks == "drawn" else GREEDY
    plain = text(runner, None, 0, config=config, picks=picks)
    assert BAD not in plain and len(plain) > 10
    truth = [*PROMPT, *plain, 1, 1, 1, 1]
    drafter = Said(lambda then, most: WRONG[wrong](then, most).first(most), truth)
    assert text(runner, drafter, 4, config=config, picks=picks) == plain
    with pytest.raises(InputError, match="greatest value is"):
        text(runner, None, 0, config=config, picks=picks, prompt=[1, BAD])


@pytest.mark.parametrize("name", [LLAMA, QWEN, LFM])
@pytest.mark.parametrize("asked", [64, 70, 600])
def test_a_draft_is_no_longer_than_a_step_may_be(session: Session, name: str, asked: int) -> None:
    """Whether it is the policy that asks for more, or a drafter that gives more than was asked."""
    runner = Runner(model_of(name), session, 1300)
    limit = min(asked, 100) + 60 if runner.recurrent else asked + 60
    plain = text(runner, None, 0, config=GREEDY, limit=limit)
    for most, more in ((asked, 0), (4, asked)):
        says = lambda then, wanted, more=more: Draft.chain(then[: more or wanted])  # noqa: E731
        drafter = Said(says, [*PROMPT, *plain])
        assert text(runner, drafter, most, config=GREEDY, limit=limit) == plain


@pytest.mark.parametrize("name", [LLAMA, QWEN, LFM])
@pytest.mark.parametrize("context", [4, len(PROMPT), 20, 40])
def test_a_draft_model_whose_context_ends_says_no_more(
    session: Session, name: str, context: int
) -> None:
    target = Runner(model_of(LLAMA), session, 200)
    plain = text(target, None, 0, config=GREEDY, limit=60)
    for most in (3, 100):
        small = Runner(model_of(name).beside("small."), session, context)
        drafter = ModelDrafter(small, inner=PromptLookup(least=1))
        assert text(target, drafter, most, config=GREEDY, limit=60) == plain
        assert small.past <= context


def test_a_draft_model_reads_no_more_than_it_was_trained_for(tmp_path: Path) -> None:
    """Its table of positions may end there."""
    told = {"llama.context_length": 24}
    small, path = small_model(tmp_path / "few.gguf", told), small_model(tmp_path / "small.gguf")
    with closing(load(path, threads=1)) as m:
        options = DraftOptions(("model",), 3, fixed=True, model_draft=small)
        (drafter,) = make_drafters(m, options)
        assert isinstance(drafter, ModelDrafter) and drafter.runner.context == 24
        plain = text(m.runner, None, 0, config=GREEDY, limit=30)
        assert text(m.runner, drafter, 3, config=GREEDY, limit=30) == plain
        assert drafter.runner.past > 15, "it drafted as long as it could"


def test_what_goes_wrong_amid_a_draft_comes_behind_the_tokens_before_it(session: Session) -> None:
    runner = Runner(model_of(LLAMA), session, 64)
    plain = text(runner, None, 0, config=GREEDY)
    for last, law in ((n, law) for n in (1, 2, 5, 9) for law in (False, True)):
        sampler = Broken(GREEDY, runner.model.vocab_size, last)
        drafter = Said(lambda then, most: Draft.chain(then[:most]), [*PROMPT, *plain])
        drafts = Speculation([drafter], Fixed(4), law=sampler if law else None)
        for speculation in (None, drafts):
            runner.past, runner.picks, sampler.left = 0, 0, last
            found, engine = list[int](), Engine(runner, ())
            answer = engine.generate(PROMPT, sampler.sample, sampler.accept, drafts=speculation)
            with pytest.raises(InputError, match="no more"):
                for token in answer:
                    found.append(token)  # what came before is looked at
            assert found == plain[:last], (last, law, speculation)


class Broken(Sampler):
    """A sampler that chooses `last` tokens."""

    def __init__(self, config: SamplerConfig, vocabulary: int, last: int) -> None:
        super().__init__(config, vocabulary)
        self.left = last

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise InputError("no more")

    def sample(self, logits: Array) -> int:
        """The best token."""
        self._count()
        return super().sample(logits)

    def probabilities(self, logits: Array) -> Array:
        """The law of the best token."""
        self._count()
        return super().probabilities(logits)


def test_an_error_keeps_what_was_chosen_before_it() -> None:
    draft, error = Draft.chain([1, 2, 3]), InputError("none")

    def row(at: int) -> Array:
        if at == 2:
            raise error
        return np.eye(5)[at + 1]

    rows = type("Rows", (), {"__getitem__": lambda _, at: row(at)})()
    by_law = reject(draft, row, lambda t: None, lambda: 0.5, frozenset(), 9)
    matched = match(draft, rows, lambda r: int(r.argmax()), lambda t: None, frozenset(), 9)
    for kept in (by_law, matched):
        assert (kept.nodes, kept.tokens, kept.error) == ((0, 1), (1, 2), error)
    with pytest.raises(InputError, match="greatest value is no finite number"):
        only(np.array([-1], np.int32))
