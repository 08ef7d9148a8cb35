"""`ggraph eagle3` = `python -m models.eagle3`: plain and speculative, side by side. Floor 10."""

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ggraph import GgraphError, InputError
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculate import SpeculationStatistics, Speculator

from .cli_common import (
    AsJson,
    Context,
    ModelPath,
    Threads,
    complain,
    model_path,
    notes,
    print_json,
    read_prompt,
)
from .drafting import DraftOptions, make_drafters, make_policy, tree_shape
from .load import Loaded, load

RULES = ("match", "reject")


def eagle3(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: ModelPath = None,
    head: Annotated[Path | None, typer.Option(help="EAGLE-3 head: folder or GGUF file.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Drafters in order, of eagle3, suffix, lookup, model.")
    ] = None,
    model_draft: Annotated[Path | None, typer.Option(help="A smaller model to draft with.")] = None,
    draft_max: Annotated[int, typer.Option(help="Most drafted tokens per round.")] = 8,
    draft_min: Annotated[int, typer.Option(help="Fewest, when drafting at all.")] = 0,
    draft_p_min: Annotated[float, typer.Option(help="End a draft below this chance.")] = 0.0,
    fixed: Annotated[bool, typer.Option(help="Always draft --draft-max tokens.")] = False,
    tree: Annotated[str | None, typer.Option(help="Dynamic tree: TOTAL,DEPTH,TOP_K.")] = None,
    accept: Annotated[str, typer.Option(help="match (same text) or reject (same law).")] = "match",
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", help="New tokens.")] = 128,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the best token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    ctx_size: Context = None,
    threads: Threads = None,
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decode plainly and with drafts, and show that the text is the same and what it saved.

    Examples:

      python -m models.eagle3 "Plan a one day trip to DC."

      ggraph eagle3 --model llama.gguf --head head.gguf --tree 16,4,4 "Hello"
    """
    if accept not in RULES:
        raise InputError(f"--accept {accept!r}; known: {', '.join(RULES)}")
    fallback = "eagle3" if head is not None else "model" if model_draft is not None else "suffix"
    names = fallback if draft is None else draft
    options = DraftOptions(
        tuple(names.split(",")), draft_max, draft_min, draft_p_min, fixed, tree_shape(tree),
        model_draft,
    )  # fmt: skip
    text = read_prompt(prompt)
    path = model_path(model, as_json)
    if draft is None and names == "suffix":
        notes().print(f"[dim]no EAGLE-3 head for {path.stem}: drafting with suffix[/dim]")
    with closing(load(path, ctx_size=ctx_size, threads=threads, head=head, exact=exact)) as m:
        ids = m.prompt_ids(text, chat=not no_chat)
        run = Comparison(m, ids, SamplerConfig(temp=temp, seed=seed), n_predict)
        run.plain()  # plans and first touches of memory belong to neither side
        plain, plain_seconds = run.plain()
        run.speculative(options, accept)
        tokens, seconds, statistics = run.speculative(options, accept)
        facts = summary(m, plain, plain_seconds, tokens, seconds, statistics)
        if as_json:
            print_json({"text": m.tokenizer.decode(tokens, special=False), **facts})
        else:
            show(m, run, tokens, facts)


class Comparison:
    """The same prompt and seed, plainly and with drafts, in one process."""

    def __init__(self, m: Loaded, ids: list[int], config: SamplerConfig, limit: int) -> None:
        self.m, self.ids, self.config, self.limit = m, ids, config, limit
        self.rounds: list[int] = []  # tokens gained by each round of the last speculative run

    def _sampler(self) -> Sampler:
        sampler = Sampler(self.config, self.m.model.vocab_size)
        sampler.accept_all(self.ids)
        self.m.engine.reset()
        return sampler

    def plain(self) -> tuple[list[int], float]:
        """Tokens, and seconds of decoding after the prompt."""
        s, engine = self._sampler(), self.m.engine
        tokens = list(engine.generate(self.ids, s.sample, s.accept, limit=self.limit))
        return tokens, engine.statistics.decode_seconds

    def speculative(
        self, options: DraftOptions, rule: str
    ) -> tuple[list[int], float, SpeculationStatistics]:
        """Tokens, seconds of decoding after the prompt, and what the drafts did."""
        s, engine = self._sampler(), self.m.engine
        law = s if rule == "reject" else None
        drafters = make_drafters(self.m, options)
        speculator = Speculator(engine, drafters, make_policy(options), law=law)
        speculator.warm(options.most)
        tokens, self.rounds = [], []
        for token in speculator.generate(self.ids, s.sample, s.accept, limit=self.limit):
            tokens.append(token)
            self.rounds.append(speculator.statistics.rounds)
        return tokens, engine.statistics.decode_seconds, speculator.statistics


def summary(
    m: Loaded,
    plain: list[int],
    plain_seconds: float,
    tokens: list[int],
    seconds: float,
    s: SpeculationStatistics,
) -> dict[str, Any]:
    """All figures of a comparison; the acceptance length counts the bonus token."""
    pairs = zip(s.accepted_at, s.tried_at, strict=True)
    return {
        "model": m.model.name,
        "head": m.head.name if m.head is not None else None,
        "identical": plain == tokens,
        "tokens": len(tokens),
        "rounds": s.rounds,
        "acceptance_length": s.acceptance_length,
        "drafted": s.drafted,
        "accepted": s.accepted,
        "accepted_by_position": [a / t if t else 0.0 for a, t in pairs],
        "plain_seconds": plain_seconds,
        "speculative_seconds": seconds,
        "plain_tokens_per_second": _rate(plain, plain_seconds),
        "speculative_tokens_per_second": _rate(tokens, seconds),
        "speedup": plain_seconds / seconds if seconds and plain == tokens else None,
        "draft_seconds": s.draft_seconds,
        "verify_seconds": s.verify_seconds,
        "sample_seconds": s.sample_seconds,
        "host_seconds": s.host_seconds,
        "date": time.strftime("%Y-%m-%d"),
    }


def _rate(tokens: list[int], seconds: float) -> float:
    return (len(tokens) - 1) / seconds if seconds and len(tokens) > 1 else 0.0


def show(m: Loaded, run: Comparison, tokens: list[int], facts: dict[str, Any]) -> None:
    """The text with drafted tokens in colour, then the figures."""
    painted = Text()
    for i, token in enumerate(tokens):
        drafted = i + 1 < len(tokens) and run.rounds[i + 1] == run.rounds[i]
        piece = m.tokenizer.token_bytes(token).decode("utf-8", "replace")
        if token not in m.engine.ends:
            painted.append(piece, style="green" if drafted and run.rounds[i] else "")
    Console(highlight=False, soft_wrap=True).print(painted)
    same = "identical text" if facts["identical"] else "another text"
    notes().print(
        f"[dim]plain {facts['plain_tokens_per_second']:.1f} tokens/s · speculative "
        f"{facts['speculative_tokens_per_second']:.1f} tokens/s · {same}"
        + (f" · {facts['speedup']:.2f}x" if facts["speedup"] else "")
        + f"\nacceptance length {facts['acceptance_length']:.2f} (bonus counted) over "
        f"{facts['rounds']} rounds · {facts['accepted']} of {facts['drafted']} drafted tokens kept"
        f"\ntime: draft {facts['draft_seconds']:.2f} s, verify {facts['verify_seconds']:.2f} s, "
        f"sample {facts['sample_seconds']:.2f} s, host {facts['host_seconds']:.2f} s "
        "(green: drafted and kept)[/dim]",
        soft_wrap=True,
    )


def main() -> None:
    """Entry point of `python -m models.eagle3`."""
    try:
        typer.run(eagle3)
    except GgraphError as error:
        complain(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
