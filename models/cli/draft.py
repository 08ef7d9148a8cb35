"""Options and output of drafting, which `generate` and `eagle3` share."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ggraph.decode.speculate import SpeculationStatistics

from ..run.drafting import DraftOptions, tree_shape
from ..run.generation import Comparison, Drafting, Generation, compare, comparison_facts
from ..run.load import Loaded
from ..run.shipped import head_for
from .common import notes, print_json

Head = Annotated[
    Path | None, typer.Option(help="Draft head: folder or GGUF file; SmolLM2 has one.")
]
Draft = Annotated[
    str | None, typer.Option(help="Drafters in order, of eagle3, suffix, lookup, model.")
]
ModelDraft = Annotated[Path | None, typer.Option(help="A smaller model to draft with.")]
DraftMax = Annotated[int, typer.Option(help="Most drafted tokens per round.")]
DraftMin = Annotated[int, typer.Option(help="Fewest, when drafting at all.")]
DraftPMin = Annotated[float, typer.Option(help="End a draft below this chance.")]
Fixed = Annotated[bool, typer.Option("--fixed", help="Always draft --draft-max tokens.")]
Tree = Annotated[str | None, typer.Option(help="Dynamic tree: TOTAL,DEPTH,TOP_K.")]
DeviceDraft = Annotated[
    str | None, typer.Option("--device-draft", help="Draft there, on streams of its own.")
]
Accept = Annotated[str, typer.Option(help="match (same text) or reject (same law).")]


def known_head(
    head: Path | None, model: Path, draft: str | None, model_draft: Path | None
) -> Path | None:
    """The head that was given, else the one that comes with ggraph for the model, where no other
    drafter was asked for."""
    wanted = "eagle3" in draft.split(",") if draft is not None else model_draft is None
    return head_for(model) if head is None and wanted else head


def drafting_from(
    head: Path | None,
    draft: str | None,
    model_draft: Path | None,
    lengths: tuple[int, int, float],
    fixed: bool,
    tree: str | None,
    accept: str,
) -> Drafting:
    """The options as one value; `lengths` are most, fewest and least chance. InputError for bad
    ones. Without `draft` the text's own repetitions draft, and where there are none the head (which
    alone makes trees), or the smaller model alone."""
    with_head = "suffix,eagle3" if tree is None else "eagle3"
    fallback = with_head if head is not None else "model" if model_draft is not None else "suffix"
    names = tuple((fallback if draft is None else draft).split(","))
    return Drafting(
        DraftOptions(names, *lengths, fixed=fixed, tree=tree_shape(tree), model_draft=model_draft),
        accept,
    )


def print_comparison(m: Loaded, run: Generation, drafting: Drafting, as_json: bool) -> None:
    """Decode both ways, print the text with drafted tokens in colour, then the figures."""
    found = compare(run, drafting)
    if as_json:
        print_json({"text": found.text, **comparison_facts(m, found)})
        return
    Console(highlight=False, soft_wrap=True).print(painted(m, found))
    facts = comparison_facts(m, found)
    same = "identical text" if found.identical else "another text"
    notes().print(
        f"[dim]plain {facts['plain_tokens_per_second']:.1f} tokens/s · speculative "
        f"{facts['speculative_tokens_per_second']:.1f} tokens/s · {same}"
        + (f" · {found.speedup:.2f}x" if found.speedup else "")
        + f"\n{speculation_line(found.speculation)} (green: drafted and kept)[/dim]",
        soft_wrap=True,
    )


def painted(m: Loaded, c: Comparison) -> Text:
    """The text; tokens that were drafted and kept are green."""
    text = Text()
    for i, token in enumerate(c.tokens):
        drafted = i + 1 < len(c.tokens) and c.rounds[i + 1] == c.rounds[i] > 0
        piece = m.tokenizer.token_bytes(token).decode("utf-8", "replace")
        if token not in m.engine.ends:
            text.append(piece, style="green" if drafted else "")
    return text


def speculation_line(s: SpeculationStatistics) -> str:
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
