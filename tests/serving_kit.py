"""Random histories of a batch: arrivals, cancellations, drafts, and little memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from mtp_kit import QWEN, with_draft_layer
from small_model import TINY, small_model

from ggraph.decode.draft.eagle import TreeShape
from ggraph.decode.draft.lookup import SuffixDrafter
from ggraph.decode.draft.tree import Draft
from ggraph.decode.policy import Adaptive, Fixed
from ggraph.decode.prices import Prices
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.serving.batch import Batch
from ggraph.serving.blocks import ListBlock
from ggraph.serving.disk import Disk, Spill
from ggraph.serving.heads import HeadDrafter, ListHead
from ggraph.serving.memory import Memory
from ggraph.serving.prices import SharedPrices
from ggraph.serving.smaller import ListModel
from ggraph.serving.states import States
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Plain, Request, Text
from ggraph.serving.texts import Limits
from ggraph.tensor import Array
from models.heads.dflash import BlockHead
from models.registry import Model
from models.run.drafting import smaller_model
from models.run.load import Loaded, load

CONTEXT = 96  # tokens of a text
SLOTS = 400  # of the cache
TEXTS = 6  # that run together
STATES = 12  # of those and of earlier ones
DRAFTERS = ("", "suffix", "chain", "tree", "head", "head's tree", "model", "head and model")
RECURRENT = "lfm2", QWEN, "granite_hybrid"  # short convolutions, gated delta nets, state spaces
VOCABULARY = 6  # letters of prompts, so that many of them begin alike


class Knowing:
    """Drafts what it knows will come, with an error here and there: a chain, or a tree in which the
    truth is the last branch."""

    name = "knowing"
    taps: tuple[int, ...] = ()

    def __init__(self, text: Sequence[int], tree: bool) -> None:
        self.text, self.tree, self.at = text, tree, 0

    def begin(self, first: int) -> None:
        """A new text."""
        self.at = 1

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        """It goes on."""
        self.at += len(tokens)

    def propose(self, limit: int) -> Draft:
        """The next tokens, of which every fifth is wrong."""
        then = [t ^ (i % 5 == 0) for i, t in enumerate(self.text)][self.at : self.at + 4]
        if not self.tree or len(then) < 2 or limit < 4:
            return Draft.chain(then[:limit])
        return Draft((then[0] ^ 1, then[0], then[1] ^ 1, then[1]), (-1, -1, 1, 1))


MODEL = HeadDrafter("model", lambda _: True, asks="model")  # has no state


@dataclass(frozen=True)
class Asked:
    """One request of a history: when it comes, what it says, when it is cancelled. One that
    `follows` another says that one's text first, as far as it has come, as a next turn does."""

    at: int
    prompt: tuple[int, ...]
    limit: int
    temp: float
    seed: int
    drafter: str  # "", "suffix", "chain", "tree", "head", ..: one of DRAFTERS
    gone_after: int  # steps; 0: stays
    priority: int
    follows: int = -1


@dataclass(frozen=True)
class History:
    """Requests, and the room that there is for them."""

    asked: tuple[Asked, ...]
    slots: int
    limits: Limits
    states: int = STATES
    disk: bool = False


def history(seed: int) -> History:
    """A random history. Prompts share beginnings, and some go on with others' texts."""
    r, further = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    stems = [tuple(r.integers(0, VOCABULARY, int(r.integers(1, 40))).tolist()) for _ in range(3)]
    asked = []
    for i in range(int(r.integers(2, 9))):
        stem = stems[int(r.integers(3))]
        own = tuple(r.integers(0, VOCABULARY, int(r.integers(1, 12))).tolist())
        asked.append(
            Asked(
                int(r.integers(0, 12)),
                stem[: int(r.integers(0, len(stem) + 1))] + own,
                int(r.integers(1, 48)),
                float(r.choice([0.0, 0.7])),
                i if r.random() < 0.5 else 0,
                str(r.choice(DRAFTERS)),
                int(r.integers(1, 14)) if r.random() < 0.25 else 0,
                int(r.integers(0, 2)),
                int(further.integers(-1, i)) if i and further.random() < 0.4 else -1,
            )
        )
    texts = int(r.integers(1, TEXTS + 1))
    limits = Limits(
        texts, int(r.choice([3, 16, 64])), int(r.choice([1, 2, 3])), int(r.choice([8, 16])),
        int(further.choice([1, 4, 16])),
    )  # fmt: skip
    slots, states = int(r.choice([CONTEXT, CONTEXT + 30, SLOTS])), int(further.integers(0, 7))
    return History(tuple(asked), slots, limits, texts + states, bool(further.random() < 0.25))


@dataclass(frozen=True, eq=False)
class World:
    """One model twice: for a batch, and for texts alone."""

    batch: Loaded
    plain: Loaded
    smaller: Model | None = None

    @staticmethod
    def of(
        path: Path, threads: int = 1, head: Path | None = None, smaller: Path | None = None
    ) -> "World":
        """Opened from a file, with a draft head and a draft model for the batch."""
        batch, plain = (load(path, ctx_size=CONTEXT, threads=threads, head=h) for h in (head, None))
        return World(batch, plain, None if smaller is None else smaller_model(batch, smaller))

    @staticmethod
    def recurrent(name: str, folder: Path, threads: int = 1) -> "World":
        """A tiny model whose layers have states: one of `RECURRENT`. Qwen3.5's drafts itself."""
        if name == QWEN:
            source = with_draft_layer(QWEN, folder / "drafting")
        else:
            source = TINY.parent / "tiny2" / name
        path = small_model(folder / f"{name}.gguf", source=source)
        return World.of(path, threads, head=path if name == QWEN else None)

    @cached_property
    def _folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory()

    @cached_property
    def disk(self) -> Disk:
        """What histories keep for later ones."""
        return Disk(Path(self._folder.name), b"", 1 << 24)

    def fresh(self, limits: Limits, slots: int = SLOTS, states: int = STATES) -> Batch:
        """A batch that has done nothing yet, and may use so many slots and states."""
        m = self.batch
        runner = ListRunner(m.model, m.session, SLOTS, CONTEXT, texts=STATES)
        guessers: list[ListHead] = []
        if isinstance(m.head, BlockHead):
            guessers.append(ListBlock(m.head, m.session, SLOTS, CONTEXT))
        elif m.head is not None:
            guessers.append(ListHead(m.head, m.session, SLOTS, CONTEXT))
        if self.smaller is not None:
            guessers.append(ListModel(self.smaller, m.session, SLOTS, CONTEXT))
        batch = Batch(runner, limits, guessers=guessers)
        held = States(states, runner.copy) if runner.texts else None
        batch.memory = Memory(slots, held, limits.apart)
        return batch


def request_of(w: World, a: Asked, prices: Prices) -> Request:
    """A request with a sampler and drafters of its own."""
    m = w.batch
    sampler = Sampler(SamplerConfig(temp=a.temp, seed=a.seed), m.model.vocab_size)
    if a.drafter in ("chain", "tree"):
        knows = Knowing([*a.prompt, *alone(w, a)], a.drafter == "tree")
        drafts = Speculation([knows], Fixed(4))
    elif a.drafter == "head" or (a.drafter == "head's tree" and isinstance(m.head, BlockHead)):
        drafts = Speculation([HeadDrafter("head", lambda _: True)], Fixed(3))
    elif a.drafter == "model":
        drafts = Speculation([MODEL], Fixed(3))
    elif a.drafter == "head and model":
        both = [HeadDrafter("head", lambda chances: len(chances) < 2), MODEL]
        drafts = Speculation(both, Adaptive(prices=SharedPrices(prices)))
    elif a.drafter == "head's tree":
        drafts = Speculation([HeadDrafter("head", lambda _: True, TreeShape(8, 2, 3))], Fixed(7))
    else:
        drafts = Speculation([SuffixDrafter()], Adaptive(prices=SharedPrices(prices)))
    return Request(
        a.prompt,
        Plain(sampler.sample, m.tokenizer.eos_ids, greedy=sampler.config.greedy),
        a.limit,
        a.priority,
        drafts if a.drafter else None,
    )


def play(
    w: World,
    h: History,
    seen: Counter[str] | None = None,
    watch: Callable[[Batch], None] = lambda batch: None,
) -> list[tuple[Asked, Text]]:
    """Run a history to its end; the slots are counted after every step. What happened is added to
    `seen`; `watch` is told the batch before it begins."""
    batch = w.fresh(h.limits, h.slots, h.states)
    batch.disk = Spill(w.disk, batch.runner) if h.disk else None
    watch(batch)
    texts: list[tuple[Asked, Text]] = []
    todo, step = sorted(h.asked, key=lambda a: a.at), 0
    gone: dict[Text, int] = {}
    told, strides = list[Text](), 0
    while todo or not batch.idle:
        while todo and todo[0].at <= step:
            a = _after(todo.pop(0), [t for _, t in texts])
            text = batch.submit(request_of(w, a, batch.prices))
            texts.append((a, text))
            if a.gone_after:
                gone[text] = step + a.gone_after
        for text in [t for t, at in gone.items() if at <= step]:
            batch.cancel(text)
            del gone[text]
        told.clear()
        begun = batch.counters.steps
        last = begun + 1 + step % 5
        ended = batch.step(told.extend, partial(_before, batch, last))
        assert all(t.ended is not None for t in [*told, *ended]), "told of one that goes on"
        assert len({*told, *ended}) == len(told) + len(ended), "told twice of an end"
        strides += batch.counters.steps - begun > 1
        batch.memory.check(batch.running)
        step += max(1, batch.counters.steps - begun)
        assert step < 3000, f"{h} does not come to an end"
    if seen is not None:
        c, cancelled = batch.counters, sum(t.ended == "cancelled" for _, t in texts)
        seen.update(
            texts=len(texts), preempted=c.preempted, reused=c.reused, accepted=c.accepted,
            refused=c.drafted - c.accepted, evicted=batch.memory.evicted, cancelled=cancelled,
            restored=c.restored,
        )  # fmt: skip
        if not batch.runner.texts:
            seen.update(strides=strides)
    return texts


def _before(batch: Batch, step: int) -> bool:
    """Whether steps may go on, before it is that one's turn."""
    return batch.counters.steps < step


def _after(a: Asked, texts: Sequence[Text]) -> Asked:
    """A request with what it follows before its own words, where that fits."""
    if not 0 <= a.follows < len(texts):
        return a
    whole = (*texts[a.follows].tokens, *a.prompt)
    return replace(a, prompt=whole) if len(whole) < CONTEXT else a


def greedy(h: History) -> History:
    """The same history of texts that need nothing but tokens to go on."""
    return replace(h, asked=tuple(replace(a, drafter="", temp=0.0) for a in h.asked))


@lru_cache(maxsize=4096)
def _alone(w: World, prompt: tuple[int, ...], limit: int, temp: float, seed: int) -> list[int]:
    sampler = Sampler(SamplerConfig(temp=temp, seed=seed), w.plain.model.vocab_size)
    w.plain.engine.reset()
    return list(w.plain.engine.generate(prompt, sampler.sample, lambda _: None, limit=limit))


def alone(w: World, a: Asked) -> list[int]:
    """The tokens of a request when nobody else is there, by the plain engine."""
    return _alone(w, a.prompt, a.limit, a.temp, a.seed)


def differences(w: World, h: History, seen: Counter[str] | None = None) -> list[str]:
    """What is wrong with the texts of a history; nothing, one hopes."""
    found = []
    for a, text in play(w, h, seen):
        wanted, got = alone(w, a), text.tokens[len(a.prompt) :]
        whole = text.ended != "cancelled"
        if got != (wanted if whole else wanted[: len(got)]) or text.ended in (None, "error"):
            found.append(f"{a}: {text.ended}, {got}, alone {wanted}")
    return found
