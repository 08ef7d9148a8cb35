"""Options and output of drafting, which `generate` and `eagle3` share."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ggraph import InputError
from ggraph.decode.statistics import Statistics

from ..run.drafting import HEADS, NAMES, DraftOptions, tree_shape
from ..run.generation import Comparison, Drafting, Generation, compare, comparison_facts
from ..run.load import Loaded
from ..run.shipped import head_for
from .common import COMPILING, note, print_json, terminal
from .profile import print_profile, profiled

Head = Annotated[
    Path | None,
    typer.Option(help="Draft head, or Gemma 4's assistant: folder or GGUF; SmolLM2 has one."),
]


@dataclass(frozen=True)
class DraftFlags:
    """Who drafts, how much, and by which rule drafts are kept."""

    head: Head = None
    draft: Annotated[
        str | None, typer.Option(help=f"Drafters in order, of {', '.join(NAMES)}.")
    ] = None
    model_draft: Annotated[
        Path | None, typer.Option("--model-draft", "-md", help="A smaller model to draft with.")
    ] = None
    draft_max: Annotated[int, typer.Option(help="Most drafted tokens per round.")] = 8
    draft_min: Annotated[int, typer.Option(help="Fewest, when drafting at all.")] = 0
    draft_p_min: Annotated[float, typer.Option(help="End a draft below this chance.")] = 0.0
    fixed: Annotated[bool, typer.Option("--fixed", help="Always draft --draft-max tokens.")] = False
    tree: Annotated[str | None, typer.Option(help="Dynamic tree: TOTAL,DEPTH,TOP_K.")] = None
    accept: Annotated[str, typer.Option(help="match (same text) or reject (same law).")] = "match"
    device_draft: Annotated[
        str | None, typer.Option("--device-draft", help="Draft there, on streams of its own.")
    ] = None

    @property
    def named(self) -> bool:
        """Whether any drafter was asked for."""
        return not (self.head is None and self.draft is None and self.model_draft is None)

    def head_of(self, model: Path) -> Path | None:
        """The head that was given, else the one that comes with ggraph for the model, where no
        other drafter was asked for."""
        named = self.draft.split(",") if self.draft is not None else []
        if self.head is None and "mtp" in named:
            return model
        wanted = "eagle3" in named if self.draft is not None else self.model_draft is None
        return head_for(model) if self.head is None and wanted else self.head

    def drafting(self, head: Path | None, wanted: bool, model: Path) -> Drafting:
        """The options as one value. InputError for bad ones, and for those that would change
        nothing, as all would where no drafts are `wanted`. Without `--draft` the text's own
        repetitions draft, and where there are none the head (which alone makes trees; `model`
        itself where its own layers draft), or the smaller model alone."""
        kind = "mtp" if head == model else "eagle3"
        with_head = f"suffix,{kind}" if self.tree is None else kind
        alone = "model" if self.model_draft is not None else "suffix"
        fallback = with_head if head is not None else alone
        names = tuple((fallback if self.draft is None else self.draft).split(","))
        lengths = (self.draft_max, self.draft_min, self.draft_p_min)
        tree, small = tree_shape(self.tree), self.model_draft
        given = DraftOptions(names, *lengths, fixed=self.fixed, tree=tree, model_draft=small)
        made = Drafting(given, self.accept)
        self._refuse_idle(names, wanted)
        return made

    def _refuse_idle(self, names: tuple[str, ...], wanted: bool) -> None:
        """InputError where an option was given that nothing would look at."""
        idle = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if idle and not wanted:
            raise InputError(f"{_flags(idle)} without drafts: add --draft, --head or --model-draft")
        needs = {"head": HEADS, "tree": ("eagle3", "mtp"), "model_draft": ("model",)}
        for name, drafters in needs.items():
            if name in idle and not set(drafters) & set(names):
                raise InputError(
                    f"{_flags([name])} is for the {' or '.join(drafters)} drafter, not "
                    f"{','.join(names)}"
                )


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--" + n.replace("_", "-") for n in names)


def print_comparison(
    m: Loaded, run: Generation, drafting: Drafting, as_json: bool, profile: bool
) -> None:
    """Decode both ways, print the text with drafted tokens in colour, then the figures; with
    `profile` also where the time of one more speculative run went."""
    found = compare(run, drafting)
    facts = comparison_facts(m, found)
    if not as_json:
        COMPILING.clear()
        terminal().print(painted(found), soft_wrap=True)
        _print_figures(facts, found)
    if profile:
        facts["profile"] = profiled(m, run, drafting)
    if as_json:
        print_json({"text": found.text, **facts})
    elif profile:
        print_profile(facts["profile"])


def _print_figures(facts: dict[str, Any], found: Comparison) -> None:
    same = "identical text" if found.identical else "another text"
    note(
        f"plain {facts['plain_tokens_per_second']:.1f} tokens/s · speculative "
        f"{facts['speculative_tokens_per_second']:.1f} tokens/s · {same}"
        + _gain(found)
        + f"\n{speculation_line(found.speculation)} (green: drafted and kept)"
    )


def _gain(found: Comparison) -> str:
    """Speed against plain decoding; where nothing was drafted there is none to speak of."""
    if not found.speculation.drafted:
        return " · nothing was drafted"
    return f" · {found.speedup:.2f}x" if found.speedup else ""


def painted(c: Comparison) -> Text:
    """The text; tokens that were drafted and kept are green."""
    text = Text()
    for i, piece in enumerate(c.pieces):
        drafted = i + 1 < len(c.tokens) and c.rounds[i + 1] == c.rounds[i] > 0
        text.append(piece, style="green" if drafted else "")
    return text


def speculation_line(s: Statistics) -> str:
    """What the drafts brought and where the time went, for people."""
    by_position = [a / t for a, t in zip(s.accepted_at, s.tried_at, strict=True) if t]
    shares = " ".join(f"{x:.0%}" for x in by_position)
    return (
        f"acceptance length {s.acceptance_length:.2f} (bonus counted) over {s.rounds} rounds · "
        f"{s.accepted} of {s.drafted} drafted tokens kept"
        + (f" · by position {shares}" if shares else "")
        + f"\ntime: draft {s.draft_seconds:.2f} s, verify {s.verify_seconds:.2f} s, "
        f"sample {s.sample_seconds:.2f} s, host {s.host_seconds:.2f} s"
    )
