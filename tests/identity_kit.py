"""Every drafter over every architecture: the texts with drafts beside the text without.

A drafter that is never right would show nothing, so each is right now and again: guesses that know
the text and hide it, a model that is the target with noise on its weights, a model's own draft
layer that was made so, and, before the random EAGLE-3 head, guesses that know the text and often
say nothing.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mtp_kit import CALM, EXPERTS, IN_LINE, NEXT, QWEN, with_draft_layer
from safetensors.numpy import load_file, save_file
from test_models_eagle3 import Scripted
from test_models_identity import GREEDY, SEEDED, adversaries

from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.shared import SharedRunner
from ggraph.decode.draft.tree import NOTHING, Draft, Drafter
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
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
CONFIGS = {"greedy": GREEDY, "seeded": SEEDED}
CHAIN, TREE = 4, TreeShape(12, 3, 3)


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


class Target:
    """A model in a session of its own that says one text again and again."""

    def __init__(self, folder: Path, prompt: list[int], head: Path | None = None) -> None:
        self.model, self.session = open_model(folder), open_session(threads=1, exact=True)
        self.head = None if head is None else open_head(head, self.model)
        taps = () if self.head is None else self.head.taps
        self.runner = Runner(self.model, self.session, CONTEXT, cache_dtype=F32, taps=taps)
        self.prompt = prompt
        self.plain = {name: self.text(name, (), 0)[0] for name in CONFIGS}

    def text(self, config: str, drafters: Sequence[Drafter], most: int) -> tuple[list[int], int]:
        """The new tokens, and how many of them were drafted."""
        engine, s = Engine(self.runner, ()), Sampler(CONFIGS[config], self.model.vocab_size)
        engine.reset()
        s.accept_all(self.prompt)
        drafts = Speculation(drafters, Fixed(most))
        text = list(engine.generate(self.prompt, s.sample, s.accept, limit=NEW, drafts=drafts))
        return text, engine.statistics.accepted

    def held(self, make: Callable[[list[int]], Sequence[Drafter]], most: int) -> Outcome:
        """Drafters that `make` makes for a text that it is told, over all configurations."""
        found = Outcome()
        for config, plain in self.plain.items():
            text, kept = self.text(config, make(self.prompt + plain), most)
            found.texts, found.same = found.texts + 1, found.same + (text == plain)
            found.kept += kept
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
    prompt = np.load(golden / "expected.npz")["ids"].tolist()[:11]
    t = Target(golden, prompt, HEAD)
    size, guesses = t.model.vocab_size, Outcome()
    for guess in adversaries([], size, CHAIN):
        guesses += t.held(
            lambda truth, guess=guess: [Scripted(adversaries(truth, size, CHAIN)[guess])], 3 * CHAIN
        )
    yield "guesses", guesses
    yield "suffix", t.held(lambda _: [PromptLookup(least=1), SuffixDrafter()], CHAIN)
    noisy = disturbed(golden, folder / "noisy")
    yield "itself, disturbed", t.held(lambda _: [t.beside(noisy, "noisy.")], CHAIN)
    other = OTHER[t.model.recurrent]
    yield "other model", t.held(lambda _: [t.beside(other, "other.")], CHAIN)
    for words, tree in (("chain", None), ("tree", TREE)):
        most = CHAIN if tree is None else tree.total_tokens - 1
        yield (
            f"eagle3 {words}",
            t.held(lambda truth, tree=tree: [Knowing(truth, size), t.heads(tree)], most),
        )
    t.session.close()
    if name.startswith("tiny2/gemma4"):
        yield from assisted(golden, ASSISTANT)
    own = name.removeprefix("tiny2/")
    if own in (QWEN, EXPERTS, NEXT, *IN_LINE):
        path = with_draft_layer(own, folder / "own")
        t = Target(path, prompt, path)
        for words, tree in (("chain", None), ("tree", TREE)):
            most = CHAIN if tree is None else tree.total_tokens - 1
            yield f"mtp {words}", t.held(lambda _, tree=tree: [t.heads(tree)], most)
        t.session.close()


def assisted(
    golden: Path, assistant: Path, *, helped: bool = True
) -> Iterator[tuple[str, Outcome]]:
    """As `outcomes`, of an assistant, behind guesses that are often silent where it is `helped`."""
    ids = np.load(GOLDEN / "tiny2" / "gemma4_text" / "expected.npz")["ids"].tolist()[:11]
    t = Target(golden, ids, assistant)
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
