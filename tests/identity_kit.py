"""Every drafter over every architecture: the texts with drafts beside the text without.

A drafter that is never right would show nothing, so each is right now and again: guesses that know
the text and hide it, a model that is the target with noise on its weights, a model's own draft
layer that was made so, and, before the random EAGLE-3 head, guesses that know the text and often
say nothing.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from mtp_kit import CALM, EXPERTS, IN_LINE, NEXT, QWEN, with_draft_layer
from safetensors.numpy import load_file, save_file

from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.shared import SharedRunner
from ggraph.decode.draft.tree import NOTHING, ROOT, Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.tensor import Array
from models.heads.assistant import AssistantHead
from models.heads.dflash import BlockHead
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.load import open_session

GOLDEN = Path(__file__).parent / "golden"
ASSISTANT = GOLDEN / "gemma4_assistant"
HEAD = GOLDEN / "tiny" / "eagle3_for_llama_tied"
OTHER = {False: GOLDEN / "tiny2" / QWEN, True: GOLDEN / "tiny" / "llama_tied"}  # by recurrence
NOISE = 0.02  # of each matrix' spread: such a model says what the target says now and again
CONTEXT, NEW = 96, 24
GREEDY = SamplerConfig(temp=0.0)
SEEDED = SamplerConfig(
    temp=0.9, top_k=30, top_p=0.9, min_p=0.02, repeat_penalty=1.3, seed=11
)  # fmt: skip
CONFIGS = {"greedy": GREEDY, "seeded": SEEDED}
CHAIN, TREE = 4, TreeShape(12, 3, 3)
Guess = Callable[[list[int], int], Draft]


def adversaries(truth: list[int], vocabulary: int, length: int) -> dict[str, Guess]:
    """Drafts that know the text `truth` and make the worst of it."""

    def ahead(text: list[int], limit: int) -> list[int]:
        return truth[len(text) : len(text) + limit]

    def spoilt(tokens: list[int], at: int) -> list[int]:
        return [(t + 1) % vocabulary if i == at else t for i, t in enumerate(tokens)]

    def forked(text: list[int], limit: int) -> Draft:
        """The truth between two branches that begin like it and go wrong, as far as they fit."""
        good = ahead(text, max(1, limit // 3))
        tokens: list[int] = []
        parents: list[int] = []
        for wrong in (0, None, len(good) - 1):
            before = ROOT
            for token in good if wrong is None else spoilt(good, wrong):
                parents.append(before)
                before = len(tokens)
                tokens.append(token)
        return Draft(tuple(tokens[:limit]), tuple(parents[:limit]))

    def wrong_at(at: int, text: list[int], limit: int) -> Draft:
        return Draft.chain(spoilt(ahead(text, limit), at))

    made: dict[str, Guess] = {
        "right": lambda text, limit: Draft.chain(ahead(text, limit)),
        "out of range": lambda text, limit: Draft.chain(
            [*ahead(text, limit - 1), vocabulary, -1][:limit]
        ),
        "forked": forked,
        "stubborn": lambda text, limit: Draft.chain([text[-1]] * limit),
    }
    for at in range(length):
        made[f"wrong at {at}"] = partial(wrong_at, at)
    return made


class Scripted:
    """An adversary: proposes what a function of the text says."""

    taps: tuple[int, ...] = ()
    name = "scripted"

    def __init__(self, guess: Guess) -> None:
        self.text: list[int] = []
        self._guess = guess

    def begin(self, first: int) -> None:
        self.text = [first]

    def observe(self, tokens: Sequence[int], features: Array | None) -> None:
        self.text.extend(tokens)

    def propose(self, limit: int) -> Draft:
        return self._guess(self.text, limit)


@dataclass
class Knowing:
    """Proposes the text that it knows, wrong at every fifth place; at every third it is silent."""

    truth: Sequence[int]
    vocabulary: int
    taps: tuple[int, ...] = ()
    name: str = "knowing"
    count: int = 0

    def begin(self, first: int) -> None:
        """A new text."""
        self.count = 1

    def observe(self, tokens: Sequence[int], features: object) -> None:
        """How far the text is."""
        self.count += len(tokens)

    def propose(self, limit: int) -> Draft:
        """What comes next, or nothing."""
        if self.count % 3 == 0:
            return NOTHING
        known = enumerate(self.truth[self.count : self.count + limit], self.count)
        return Draft.chain([(t + (i % 5 == 0)) % self.vocabulary for i, t in known])


@dataclass
class Outcome:
    """Texts that equal the one without drafts, of how many; drafted tokens that were kept."""

    same: int = 0
    texts: int = 0
    kept: int = 0

    def __iadd__(self, other: "Outcome") -> "Outcome":
        self.same, self.texts = self.same + other.same, self.texts + other.texts
        self.kept += other.kept
        return self

    def __str__(self) -> str:
        return f"{self.same} of {self.texts}, {self.kept} kept"


def prompt_of(golden: Path) -> list[int]:
    """What a golden checkpoint is asked to go on from."""
    ids: list[int] = np.load(golden / "expected.npz")["ids"].tolist()
    return ids[:11]


class Target:
    """A model in a session of its own that goes on from one prompt again and again."""

    def __init__(
        self, folder: Path, prompt: list[int] | None = None, head: Path | None = None
    ) -> None:
        self.model, self.session = open_model(folder), open_session(threads=1, exact=True)
        self.head = None if head is None else open_head(head, self.model)
        taps = () if self.head is None else self.head.taps
        self.runner = Runner(self.model, self.session, CONTEXT, cache_dtype=F32, taps=taps)
        self.prompt = prompt or prompt_of(folder)
        self.kept = 0  # drafted tokens of the last text

    @cached_property
    def plain(self) -> dict[str, list[int]]:
        """The new tokens without drafts, by configuration."""
        return {name: self.text(name) for name in CONFIGS}

    def text(
        self, config: str, drafters: Sequence[Drafter] = (), most: int = 0, ends: Sequence[int] = ()
    ) -> list[int]:
        """The new tokens, drafted for or not."""
        engine, s = Engine(self.runner, ends), Sampler(CONFIGS[config], self.model.vocab_size)
        engine.reset()
        s.accept_all(self.prompt)
        drafts = Speculation(drafters, Fixed(most))
        text = list(engine.generate(self.prompt, s.sample, s.accept, limit=NEW, drafts=drafts))
        self.kept = engine.statistics.accepted
        return text

    def held(self, make: Callable[[list[int]], Sequence[Drafter]], most: int) -> Outcome:
        """Drafters that `make` makes for a text that it is told, over all configurations."""
        found = Outcome()
        for config, plain in self.plain.items():
            text = self.text(config, make(self.prompt + plain), most)
            found += Outcome(text == plain, 1, self.kept)
        return found

    def beside(self, folder: Path, prefix: str) -> ModelDrafter:
        """Another model in the same session as the drafter."""
        model = open_model(folder).beside(prefix)
        return ModelDrafter(Runner(model, self.session, CONTEXT, cache_dtype=F32))

    def heads(self, tree: TreeShape | None = None) -> Drafter:
        """The head that the target was opened with."""
        assert self.head is not None
        head, target = self.head, self.runner
        if isinstance(head, BlockHead):
            blocks = BlockRunner(head, self.session, CONTEXT, cache_dtype=F32, target=target)
            return BlockDrafter(blocks, head.mask, head.block, causal=head.causal)
        if isinstance(head, AssistantHead):
            return EagleDrafter(SharedRunner(head, target), tree=tree)
        runner = DraftRunner(head, self.session, CONTEXT, cache_dtype=F32, target=target)
        return EagleDrafter(runner, tree=tree)


def outcomes(name: str, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """Drafter by drafter, what became of a golden checkpoint's texts; `folder` is empty."""
    golden = GOLDEN / name
    t = Target(golden, head=HEAD)
    size, guesses = t.model.vocab_size, Outcome()

    def scripted(guess: str, truth: list[int]) -> list[Drafter]:
        return [Scripted(adversaries(truth, size, CHAIN)[guess])]

    def behind_knowing(t: Target, tree: TreeShape | None, truth: list[int]) -> list[Drafter]:
        return [Knowing(truth, size), t.heads(tree)]

    def alone(t: Target, tree: TreeShape | None, truth: list[int]) -> list[Drafter]:
        return [t.heads(tree)]

    for guess in adversaries([], size, CHAIN):
        guesses += t.held(partial(scripted, guess), 3 * CHAIN)
    yield "guesses", guesses
    yield "suffix", t.held(lambda _: [PromptLookup(least=1), SuffixDrafter()], CHAIN)
    noisy = disturbed(golden, folder / "noisy")
    yield "itself, disturbed", t.held(lambda _: [t.beside(noisy, "noisy.")], CHAIN)
    other = OTHER[t.model.recurrent]
    yield "other model", t.held(lambda _: [t.beside(other, "other.")], CHAIN)
    for words, tree in (("chain", None), ("tree", TREE)):
        most = CHAIN if tree is None else tree.total_tokens - 1
        yield f"eagle3 {words}", t.held(partial(behind_knowing, t, tree), most)
    t.session.close()
    if name.startswith("tiny2/gemma4"):
        yield from assisted(golden, ASSISTANT)
    own = name.removeprefix("tiny2/")
    if own in (QWEN, EXPERTS, NEXT, *IN_LINE):
        path = with_draft_layer(own, folder / "own")
        t = Target(path, prompt_of(golden), path)
        for words, tree in (("chain", None), ("tree", TREE)):
            most = CHAIN if tree is None else tree.total_tokens - 1
            yield f"mtp {words}", t.held(partial(alone, t, tree), most)
        t.session.close()


def assisted(
    golden: Path, assistant: Path, *, helped: bool = True
) -> Iterator[tuple[str, Outcome]]:
    """As `outcomes`, of an assistant, behind guesses that are often silent where it is `helped`."""
    t = Target(golden, prompt_of(GOLDEN / "tiny2" / "gemma4_text"), assistant)
    for words, tree in (("chain", None), ("tree", TREE)):
        most = CHAIN if tree is None else tree.total_tokens - 1

        def made(truth: list[int], tree: TreeShape | None = tree) -> list[Drafter]:
            known = [Knowing(truth, t.model.vocab_size)] if helped else []
            return [*known, t.heads(tree)]

        yield f"mtp {words}", t.held(made, most)
    t.session.close()


def calm_pair(folder: Path) -> tuple[Path, Path]:
    """Gemma 4 and an assistant in which layers add little: what comes next is a matter of the last
    token, whose embedding the assistant knows by its projection to fewer numbers."""
    paths = []
    for source in (GOLDEN / "tiny2" / "gemma4_text", ASSISTANT):
        path = folder / source.name
        shutil.copytree(source, path)
        held = load_file(path / "model.safetensors")
        for n, v in held.items():
            if "post_" in n and n.endswith("norm.weight"):
                held[n] = (v * CALM).astype(v.dtype)
        paths.append((path, held))
    (target, given), (assistant, made) = paths
    rng, table = np.random.default_rng(2), "model.embed_tokens.weight"
    e, g = made[table].shape[1], given[table].shape[1]
    fewer = (rng.standard_normal((e, g)) / g**0.5).astype(np.float32)
    made[table] = (given[table].astype(np.float32) @ fewer.T).astype(np.float16)
    both = np.concatenate([fewer, 0.02 * rng.standard_normal((e, g))], axis=1)
    made["pre_projection.weight"] = both.astype(np.float16)
    for path, held in ((target, given), (assistant, made)):
        save_file(held, path / "model.safetensors")
    return target, assistant


def disturbed(golden: Path, folder: Path) -> Path:
    """The checkpoint with noise on its matrices."""
    shutil.copytree(golden, folder)
    rng = np.random.default_rng(5)
    held = load_file(folder / "model.safetensors")
    for n, v in sorted(held.items()):
        if v.ndim > 1 and v.dtype.kind == "f":
            noise = NOISE * v.std() * rng.standard_normal(v.shape)
            held[n] = (v + noise).astype(v.dtype)
    save_file(held, folder / "model.safetensors")
    return folder
