"""Drafters by name, as the runner's options give them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ggraph import InputError
from ggraph.decode.draft.block import BlockDrafter, BlockRunner
from ggraph.decode.draft.eagle import WINDOW, EagleDrafter, TreeShape
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.parallel import ParallelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.shared import SharedRunner
from ggraph.decode.draft.tree import NOTHING, Drafter
from ggraph.decode.model import LONGEST_DRAFT
from ggraph.decode.policy import Adaptive, Fixed, Policy
from ggraph.decode.prices import Prices
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import SamplerConfig
from ggraph.formats import open_checkpoint
from ggraph.formats.lazy_array import row_numbers, taken
from ggraph.lazy import lazy

from ..architecture import changed
from ..eagle3 import Head
from ..heads.assistant import AssistantHead, is_assistant
from ..heads.dflash import BlockHead
from ..heads.eagle1 import FirstHead
from ..heads.layouts import AnyHead
from ..heads.mtp import NextHead
from ..registry import Model, open_model
from .load import Loaded, OnlyReads

if TYPE_CHECKING:
    from importlib import metadata
else:
    metadata = lazy("importlib.metadata")

NAMES = ("eagle3", "mtp", "dflash", "suffix", "lookup", "model")
GROUP = "ggraph.drafters"  # of entry points: each names a function of the target's Runner
# As llama.cpp has it: what files of one vocabulary may pad it by, and the tokens at its beginning
# that they may name differently
PADDING, MARKERS = 128, 5
TABLES = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")  # a row per token
HEADS = ("eagle3", "mtp", "dflash")  # drafters that read the target's features


@dataclass(frozen=True)
class DraftOptions:
    """What to draft with. `names` are tried in order; `most` 0 switches drafting off.

    `fixed` drafts always `most` tokens; else the length follows measured prices. A `tree`
    has its own size, so that only whether to draft is decided.
    """

    names: tuple[str, ...] = ("suffix",)
    most: int = 8
    least: int = 0
    p_min: float = 0.0
    fixed: bool = False
    tree: TreeShape | None = None
    model_draft: Path | None = None

    def __post_init__(self) -> None:
        known = NAMES if set(self.names) <= set(NAMES) else (*NAMES, *installed())
        if not self.names or not set(self.names) <= set(known):
            raise InputError(f"--draft {','.join(self.names)!r}; known: {', '.join(known)}")
        if not 0 <= self.least <= self.most <= LONGEST_DRAFT:
            raise InputError(
                f"--draft-min {self.least}, --draft-max {self.most}: expected 0 to "
                f"{LONGEST_DRAFT}, in order"
            )
        if not 0.0 <= self.p_min <= 1.0:
            raise InputError(f"--draft-p-min {self.p_min}: expected a chance from 0 to 1")

    @property
    def longest(self) -> int:
        """Most nodes of one draft."""
        return self.most if self.tree is None else self.tree.total_tokens - 1


def installed() -> dict[str, "metadata.EntryPoint"]:
    """Drafters that installed packages bring in the group `ggraph.drafters`, by name."""
    return {p.name: p for p in metadata.entry_points(group=GROUP) if p.name not in NAMES}


def tree_shape(text: str | None) -> TreeShape | None:
    """`TOTAL,DEPTH,TOP_K` as a tree; None stays None. InputError for anything else."""
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isdecimal() for p in parts):
        raise InputError(f"--tree {text!r}: expected TOTAL,DEPTH,TOP_K, such as 16,4,4")
    total, depth, top_k = map(int, parts)
    return TreeShape(total, depth, top_k)


def make_policy(options: DraftOptions, prices: Prices) -> Policy:
    """How long to draft. `prices` are those that earlier texts on this machine measured."""
    if options.fixed:
        return Fixed(options.longest)
    return Adaptive(most=options.longest, least=options.least, prices=prices)


def make_drafters(
    m: Loaded,
    options: DraftOptions,
    law: SamplerConfig | None = None,
    policy: Policy | None = None,
) -> Sequence[Drafter]:
    """The drafters in order, which may ask `policy` whether to go on. By a `law` a head's chains
    are drawn, of which stochastic rejection keeps more than of its best guesses. InputError when
    one needs what is not there."""
    return [_make(name, m, options, law, policy) for name in options.names]


def _make(
    name: str, m: Loaded, options: DraftOptions, law: SamplerConfig | None, policy: Policy | None
) -> Drafter:
    if name == "suffix":
        return SuffixDrafter()
    if name == "lookup":
        return PromptLookup()
    if name in HEADS:
        if m.head is None or not isinstance(m.head, _FITTING[name]):
            raise InputError(_MISSING[name])
        return _with_head(name, m, m.head, options, law, policy)
    if name not in NAMES:
        return _brought(name, m)
    if options.model_draft is None:
        raise InputError("the model drafter needs a model: give one with --model-draft")
    return _smaller(m, options.model_draft, options)


def _brought(name: str, m: Loaded) -> Drafter:
    """A drafter of an installed package, made for the target. InputError for what is none."""
    made = installed()[name].load()(m.runner)
    lacking = [a for a in ("name", "taps", "begin", "observe", "propose") if not hasattr(made, a)]
    if lacking:
        raise InputError(f"the drafter {name!r} of an installed package lacks {', '.join(lacking)}")
    drafter: Drafter = made
    return drafter


_FITTING: dict[str, tuple[type, ...]] = {  # "eagle3" is any head that was given
    "eagle3": (Head, FirstHead, AssistantHead, BlockHead),
    "mtp": (NextHead, AssistantHead),
    "dflash": (BlockHead,),
}
_MISSING = {
    "eagle3": "the eagle3 drafter needs a head: give one with --head",
    "mtp": "the mtp drafter needs a model whose own layers draft, or its assistant as --head",
    "dflash": "the dflash drafter needs a drafter of that kind: give one with --head",
}


def _with_head(
    name: str,
    m: Loaded,
    head: AnyHead,
    options: DraftOptions,
    law: SamplerConfig | None,
    policy: Policy | None,
) -> Drafter:
    """In turn or as a tree, or in parallel where the head was made for that."""
    runner = _runner(m, head)
    masked = head.masked if isinstance(head, Head) else None
    if options.tree is not None and (masked is not None or isinstance(head, BlockHead)):
        raise InputError(f"{head.name} drafts all tokens in parallel, which makes no tree")
    if isinstance(head, BlockHead):
        assert isinstance(runner, BlockRunner), head.name
        return BlockDrafter(
            runner, head.mask, head.block, causal=head.causal, p_min=options.p_min, law=law,
            name=name,
        )  # fmt: skip
    if masked is None:
        return EagleDrafter(
            runner, tree=options.tree, p_min=options.p_min, law=law,
            window=None if options.fixed else WINDOW,
            goes_on=goes_on(policy, name) if policy is not None else None, name=name,
        )  # fmt: skip
    return ParallelDrafter(runner, masked, p_min=options.p_min, law=law)


def _runner(m: Loaded, head: AnyHead) -> DraftRunner:
    """Steps of the head over a cache of its own, or the target's. InputError where that is on
    other devices."""
    if isinstance(head, BlockHead):
        return BlockRunner(head, m.drafts, m.runner.context, target=m.runner)
    if not isinstance(head, AssistantHead):
        masked = isinstance(head, Head) and head.masked is not None  # a row of the host's
        target = None if masked else m.runner
        return DraftRunner(head, m.drafts, m.runner.context, target=target)
    if m.draft_session is not None:
        raise InputError(f"{head.name} reads the target's keys and values: no --device-draft")
    return SharedRunner(head, m.runner)


def goes_on(policy: Policy, name: str) -> Callable[[Sequence[float]], bool]:
    """Whether a drafter that has made guesses of these chances is to make another."""
    return lambda chances: policy.ask(name, LONGEST_DRAFT, NOTHING, chances) > len(chances)


def _smaller(m: Loaded, path: Path, options: DraftOptions) -> Drafter:
    model = smaller_model(m, path)
    context = min(m.runner.context, model.context_length)  # beyond which it was not trained
    runner = Runner(model, m.drafts, context)
    return ModelDrafter(runner, p_min=options.p_min, inner=PromptLookup())


def smaller_model(m: Loaded, path: Path) -> Model:
    """A draft model; it must have the target's vocabulary, or its guesses would mean nothing. How
    files pad that may differ: tokens which the target has not are cut off."""
    if is_assistant(open_checkpoint(path)):
        raise InputError(f"{path} drafts from the model's own keys and values: --head {path}")
    model = open_model(path).reaching(m.runner.context)
    if not model.causal:
        raise OnlyReads(model)
    if abs(model.vocab_size - m.model.vocab_size) > PADDING:
        raise InputError(
            f"{path}: the draft model has {model.vocab_size} tokens, {m.model.name} has "
            f"{m.model.vocab_size}: more than {PADDING} apart"
        )
    mine = m.model.checkpoint.metadata.get("tokenizer.ggml.tokens")
    other = model.checkpoint.metadata.get("tokenizer.ggml.tokens")
    if mine is not None and other is not None:
        shared = slice(MARKERS, min(len(mine), len(other)))
        if list(mine[shared]) != list(other[shared]):
            raise InputError(
                f"{path}: the draft model's tokens differ from those of {m.model.name}"
            )
    return _cut(model, m.model.vocab_size).beside("small.")


def _cut(model: Model, count: int) -> Model:
    """The model with its first `count` tokens."""
    if model.vocab_size <= count:
        return model
    held = {
        n: changed(t, taken(t.storage, row_numbers(t.storage)[:count])) if n in TABLES else t
        for n, t in model.catalogue.items()
    }
    return replace(model, config=replace(model.config, vocab_size=count), catalogue=held)
