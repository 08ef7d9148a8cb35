"""Those who draft for one text after another: whom to ask, and what each has been told."""

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np

from ggraph.decode.acceptance import Kept
from ggraph.decode.draft.tree import NOTHING, Draft, Drafter
from ggraph.decode.given import words
from ggraph.decode.model import CausalModel
from ggraph.decode.policy import Fixed, Policy
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Result
from ggraph.decode.sampler import Sampler
from ggraph.decode.statistics import Clock
from ggraph.decode.taps import side_by_side
from ggraph.errors import DraftWarning, InputError, printable
from ggraph.tensor import Array

Asking = Generator[tuple[Drafter, int], tuple[Draft, float], Draft]


class Law(Protocol):
    """What stochastic rejection needs of a sampler."""

    def probabilities(self, logits: Array) -> Array:
        """The law f64 [V] that the sampler would draw from."""
        ...

    def uniform(self) -> float:
        """A random number in [0, 1) of the sampler's stream."""
        ...


class Tapped(Protocol):
    """A runner, as far as it matters who reads its taps."""

    @property
    def model(self) -> CausalModel:
        """Whose tokens are drafted."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose inputs its steps give."""
        ...


class Steps(Tapped, Protocol):
    """What an engine drives: a `Runner`, or what plays one."""

    context: int
    past: int
    picks: int | Sampler
    recurrent: bool

    @property
    def longest(self) -> int:
        """Most nodes of a draft that one step verifies."""
        ...

    def prepare(self, tokens: Sequence[int]) -> None:
        """Make the plans that these tokens need."""

    def ready(self, rows: int, reach: int) -> None:
        """Make the plan of a step of `rows` rows that see `reach` slots."""

    def movable(self, rows: int) -> None:
        """Make the plans that keep up to `rows` rows which lie apart."""

    def text(self, tokens: Sequence[int]) -> Result:
        """Append text."""
        ...

    def follow(self, token: int) -> Result:
        """Append one token, which others will follow."""
        ...

    def step(self, rows: Rows, wanted: Sequence[int]) -> Result:
        """Compute rows behind the text."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Make rows of the last step part of the text."""

    def tapped(self, slots: Sequence[int]) -> Mapping[int, Array]:
        """The taps f32 [T, G] of the rows in these slots, by layer."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A drafter that has plans to make, and takes the prompt in before it is asked."""

    @property
    def levels(self) -> int:
        """How deep its drafts with branches may be; 0 where all are chains."""
        ...

    def warm(self, past: int, longest: int) -> None:
        """Make the plans of reading so much text, and of rounds behind it with up to `longest`
        guesses."""
        ...

    def read(self) -> None:
        """Take in what it was told."""
        ...


class Speculation:
    """Drafters that are asked in order as the policy says; without any, plain decoding.

    With `law` (a sampler) drafts are held against the target by stochastic rejection, which keeps
    the law but not the individual text; without it by sample-and-match, which keeps both. The plans
    for drafts of up to `longest` tokens are made before any is needed. A drafter that raises an
    exception is asked no more, and a DraftWarning tells of it: a draft is only a guess.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter] = (),
        policy: Policy | None = None,
        *,
        law: Law | None = None,
        longest: int = 0,
    ) -> None:
        self.drafters, self.policy = tuple(drafters), policy or Fixed(0)
        names = [d.name for d in self.drafters]
        if len({*names}) < len(names):
            raise InputError(f"drafters {names}: each has a name of its own, or nothing is learned")
        self.law, self.longest = law, longest
        self._vocabulary = 0
        self._runner: Steps | None = None  # whose rows the text has
        self._text: list[int] = []  # behind its first token
        self._first = 0  # slot of the row that says the first of these
        self._told: dict[str, int] = {}  # how many of them each drafter knows
        self._lost = set[str]()  # drafters that have raised

    def check(self, runner: Tapped) -> None:
        """InputError where a drafter wants taps that the runner does not have."""
        missing = {i for d in self.drafters for i in d.taps} - set(runner.taps)
        if missing:
            raise InputError(
                f"speculation needs its drafters' taps; drafters: "
                f"{[d.name for d in self.drafters]}, layers not tapped: {sorted(missing)}"
            )
        self._vocabulary = runner.model.vocab_size

    def warm(self, runner: Steps, past: int) -> None:
        """Make the plans that rounds behind `past` tokens will need, so that none waits."""
        longest = min(self.longest, runner.longest)
        for rows in range(1, longest + 2):
            runner.ready(rows, past + rows)
        for drafter in self._asked():
            if longest and isinstance(drafter, Reader):
                with self._trying(drafter):
                    drafter.warm(past, longest)
                runner.movable(drafter.levels + 1 if drafter.levels else 0)

    def begin(self, tokens: Sequence[int], runner: Steps | None = None) -> None:
        """A text begins with the prompt, whose rows are the last of the `runner`, and one token.
        Drafters are told of the tokens in whose place rows are given."""
        tokens = words(tokens)
        self._told = {d.name: 0 for d in self.drafters}
        for drafter in self._asked():
            with self._trying(drafter):
                drafter.begin(tokens[0])
        self._text, self._runner = [*tokens[1:]], runner
        self._first = 0 if runner is None else runner.past - len(self._text)

    def read(self) -> None:
        """Drafters read the prompt, so that the first draft need not wait for it."""
        for drafter in self._asked():
            with self._trying(drafter):
                self._tell(drafter)
                if isinstance(drafter, Reader):
                    drafter.read()

    def draft(self, room: int, clock: Clock) -> Draft:
        """The best draft of at most `room` nodes; none where none is worth its while."""
        asking = self.asking(room)
        try:
            drafter, wanted = next(asking)
            while True:
                drafter, wanted = asking.send(self.proposed(drafter, wanted, clock))
        except StopIteration as end:
            best: Draft = end.value
            return best

    def asking(self, room: int) -> Asking:
        """As `draft`, for whoever asks the drafters himself: yields each that is to be asked with
        how many tokens, and is sent what it proposes and the seconds that took."""
        best = NOTHING
        for drafter in self._asked():
            wanted = self.policy.ask(drafter.name, room)
            if wanted > 0:
                draft, seconds = yield drafter, wanted
                best = self.policy.weigh(drafter.name, draft, best, seconds)
        return best

    def proposed(self, drafter: Drafter, wanted: int, clock: Clock) -> tuple[Draft, float]:
        """A drafter's proposal, and the seconds that it took."""
        clock.lap("host")
        draft = NOTHING
        with self._trying(drafter):
            self._tell(drafter)
            draft = known(drafter.propose(wanted).first(wanted), self._vocabulary)
        return draft, clock.lap("draft")

    def learn(self, draft: Draft, kept: Kept, seconds: float) -> None:
        """What became of a round's draft, and what its step took."""
        if self.drafters:
            self._text += kept.tokens
            self.policy.learn(draft, kept, seconds)

    def lose(self, drafter: Drafter, error: Exception) -> None:
        """A drafter has raised this: it is asked no more."""
        self._lost.add(drafter.name)
        said = f"the drafter {drafter.name!r} raised {type(error).__name__}: "
        said += printable(str(error))
        warnings.warn(f"{said}; the text goes on without it", DraftWarning, stacklevel=2)

    def _asked(self) -> list[Drafter]:
        """The drafters that have not raised."""
        return [d for d in self.drafters if d.name not in self._lost]

    @contextmanager
    def _trying(self, drafter: Drafter) -> Iterator[None]:
        """What a drafter does here may fail."""
        try:
            yield
        except Exception as error:
            self.lose(drafter, error)

    def _tell(self, drafter: Drafter) -> None:
        """What the drafter has not been told yet, with the taps that it wants. It is told when it
        is asked: what is told at once costs less."""
        known = self._told[drafter.name]
        if tokens := self._text[known:]:
            self._told[drafter.name] = len(self._text)
            slots = range(self._first + known, self._first + len(self._text))
            drafter.observe(tokens, self._features(drafter, slots))

    def _features(self, drafter: Drafter, slots: Sequence[int]) -> Array | None:
        """What a drafter is told of the rows in these slots: their taps f32 [N, A*G], or the slots
        i32 [N, 1] where it gathers them."""
        if not drafter.taps or self._runner is None:
            return None
        if getattr(drafter, "gathers", False):
            return np.array(slots, np.int32)[:, None]
        return side_by_side(self._runner.tapped(slots), drafter.taps)


def known(draft: Draft, vocabulary: int) -> Draft:
    """The draft up to its first token that the target does not have. InputError for a law of other
    tokens than the target's."""
    shapes = {law.shape for law in draft.laws.values()} - {(vocabulary,)}
    if shapes:
        raise InputError(f"a law f64 {[*shapes.pop()]}: expected [{vocabulary}]")
    if not draft or (min(draft.tokens) >= 0 and max(draft.tokens) < vocabulary):
        return draft
    bad = [i for i, t in enumerate(draft.tokens) if not 0 <= t < vocabulary]
    return draft.first(bad[0])
