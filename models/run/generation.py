"""One prompt, decoded plainly or with drafts, as often as wanted in one process."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ggraph import InputError
from ggraph.decode.acceptance import only
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.decode.statistics import Statistics
from ggraph.ops.draw import MOST
from ggraph.text.stream import TextStream

from .drafting import DraftOptions, make_drafters, make_policy
from .load import Loaded

RULES = ("match", "reject")


@dataclass(frozen=True)
class Drafting:
    """How to draft, and the rule by which drafts are kept: the same text, or the same law."""

    options: DraftOptions
    rule: str = "match"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InputError(f"--accept {self.rule!r}; known: {', '.join(RULES)}")


class Generation:
    """A prompt with its sampler. Every run starts afresh, with the same random numbers.

    After a run: `tokens`, the round that brought each of them in `rounds`, and why it `stopped`.
    """

    def __init__(
        self,
        m: Loaded,
        ids: Sequence[int],
        config: SamplerConfig,
        limit: int,
        stops: Sequence[str] = (),
    ) -> None:
        if limit < -1:
            raise InputError(f"--n-predict {limit}: expected a count, or -1 for no limit")
        TextStream(m.tokenizer, stops)  # refuses bad stop strings before anything runs
        seed = secrets.randbelow(1 << 31) if config.seed is None else config.seed
        self.m, self.ids, self.config = m, list(ids), replace(config, seed=seed)
        self.limit, self.stops = limit, tuple(stops)
        self.tokens: list[int] = []
        self.rounds: list[int] = []
        self._drafts = False
        self.stopped = "length"

    @property
    def statistics(self) -> Statistics:
        """What the last run took."""
        return self.m.engine.statistics

    @property
    def speculation(self) -> Statistics | None:
        """The same, None where the last run was a plain one."""
        return self.statistics if self._drafts else None

    def run(self, drafting: Drafting | None) -> Iterator[str]:
        """The answer's text, piece by piece, without what ends it."""
        self.tokens, self.rounds, self._drafts = [], [], drafting is not None
        stream = TextStream(self.m.tokenizer, self.stops)
        for token in self._decode(drafting):
            self.tokens.append(token)
            self.rounds.append(self.statistics.rounds if self._drafts else 0)
            if token not in self.m.engine.ends:
                yield stream.push(token)
            if stream.stopped is not None:
                self.stopped = "stop string"
                return
        self.stopped = self.statistics.stopped_by
        yield stream.finish()

    def _decode(self, drafting: Drafting | None) -> Iterator[int]:
        sampler, engine = Sampler(self.config, self.m.model.vocab_size), self.m.engine
        sampler.accept_all(self.ids)
        drafts = None if drafting is None else self._speculation(drafting, sampler)
        picks = self._picks(sampler, drafts is not None and drafts.law is not None)
        engine.reset()
        self.m.runner.picks = picks
        pick = only if picks == 1 else sampler.sample
        return engine.generate(self.ids, pick, sampler.accept, limit=self.limit, drafts=drafts)

    def _picks(self, sampler: Sampler, by_law: bool) -> int | Sampler:
        """What a step brings back of a row: the best token of greedy text, a drawn token, the
        `top_k` greatest where drafts are held against the law; 0 for all logits. Where results are
        not copied, a draw finds what it needs in all logits itself."""
        c = self.config
        if c.penalises:
            return 0
        if c.greedy and not by_law:
            return 1
        known = 1 < c.top_k < self.m.model.vocab_size and c.top_k <= MOST
        if not known or not self.m.session.replays:
            return 0
        return c.top_k if by_law or c.greedy else sampler

    def _speculation(self, drafting: Drafting, sampler: Sampler) -> Speculation:
        """Drafters and a policy for one run."""
        options, law = drafting.options, sampler if drafting.rule == "reject" else None
        drawn = self.config if law is not None and not self.config.greedy else None
        policy = make_policy(options, self.m.prices)
        drafters = make_drafters(self.m, options, drawn, policy)
        return Speculation(drafters, policy, law=law, longest=options.longest)


@dataclass(frozen=True)
class Comparison:
    """The same prompt, seed and process, plainly and with drafts. Seconds are those of decoding
    after the prompt; `rounds` tells for each token which verification brought it, and `pieces` what
    may be shown of the text with it, and last what was held back until the end."""

    pieces: Sequence[str]
    plain: Sequence[int]
    tokens: Sequence[int]
    rounds: Sequence[int]
    plain_seconds: float
    seconds: float
    speculation: Statistics

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.pieces)

    @property
    def identical(self) -> bool:
        """Whether both ways gave the same tokens."""
        return self.plain == self.tokens

    @property
    def speedup(self) -> float | None:
        """Plain seconds over speculative ones, None where that compares different texts, or where
        nothing was drafted."""
        known = self.identical and self.seconds and self.speculation.drafted
        return self.plain_seconds / self.seconds if known else None


def compare(run: Generation, drafting: Drafting) -> Comparison:
    """Both ways in turn, twice: plans and first touches of memory belong to neither."""
    "".join(run.run(None))
    "".join(run.run(drafting))
    "".join(run.run(None))
    plain, plain_seconds = run.tokens, run.statistics.decode_seconds
    pieces = list(run.run(drafting))
    spent, speculation = run.statistics.decode_seconds, run.speculation
    assert speculation is not None, "a run with drafts has no statistics"
    return Comparison(pieces, plain, run.tokens, run.rounds, plain_seconds, spent, speculation)


def speculation_facts(s: Statistics) -> dict[str, Any]:
    """What drafts did and took. The acceptance length counts the bonus token, which the target
    adds to every round; shares by position are of the drafts that reached it."""
    pairs = zip(s.accepted_at, s.tried_at, strict=True)
    return {
        "rounds": s.rounds,
        "acceptance_length": s.acceptance_length,
        "acceptance_length_counts_bonus": True,
        "drafted": s.drafted,
        "accepted": s.accepted,
        "drafted_by_position": list(s.tried_at),
        "accepted_by_position": [a / t if t else 0.0 for a, t in pairs],
        "draft_seconds": s.draft_seconds,
        "verify_seconds": s.verify_seconds,
        "sample_seconds": s.sample_seconds,
        "host_seconds": s.host_seconds,
    }


def comparison_facts(m: Loaded, c: Comparison) -> dict[str, Any]:
    """All figures of a comparison."""
    return {
        "model": m.model.name,
        "head": m.head.name if m.head is not None else None,
        "identical": c.identical,
        "tokens": len(c.tokens),
        **speculation_facts(c.speculation),
        "plain_seconds": c.plain_seconds,
        "speculative_seconds": c.seconds,
        "plain_tokens_per_second": _rate(c.plain, c.plain_seconds),
        "speculative_tokens_per_second": _rate(c.tokens, c.seconds),
        "speedup": c.speedup,
        "date": time.strftime("%Y-%m-%d"),
    }


def _rate(tokens: Sequence[int], seconds: float) -> float:
    return (len(tokens) - 1) / seconds if seconds and len(tokens) > 1 else 0.0
