"""Acceptance of a head over sound and racing plans: what users saw of EAGLE-3."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ggraph import InputError
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.policy import Fixed
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.hazards.drafting import DRAFT_RECIPES, UnprovedSession

from ..run.load import Loaded


@dataclass(frozen=True)
class DraftReport:
    """How one recipe's plans drafted. `refused` of the head's `plans` are refused by `verify`, the
    first for `reason`; `identical` says whether the text is that of plain decoding."""

    recipe: str
    plans: int
    refused: int
    reason: str
    foreign_reads: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_length: float
    first_accepted: float
    identical: bool

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; the acceptance length counts the bonus token."""
        return vars(self) | {"acceptance_length_counts_bonus": True}


def drafts_under(m: Loaded, ids: Sequence[int], limit: int, most: int) -> list[DraftReport]:
    """`limit` tokens after `ids`, greedily, with drafts of `most` tokens, once per recipe. The
    target runs its own proved plans throughout. InputError without a head that drafts in turn."""
    if m.head is None or getattr(m.head, "masked", None) is not None:
        raise InputError("give an EAGLE-3 head that drafts one token after another")
    if not 1 <= most <= 16 or limit < 2:
        raise InputError(f"drafts of {most}, {limit} tokens: expected 1 to 16, and 2 or more")
    sampler = Sampler(SamplerConfig(temp=0.0), m.model.vocab_size)
    m.engine.reset()
    plain = list(m.engine.generate(ids, sampler.sample, sampler.accept, limit=limit))
    return [_run(m, ids, limit, most, name, plain) for name in DRAFT_RECIPES]


def _run(
    m: Loaded, ids: Sequence[int], limit: int, most: int, name: str, plain: Sequence[int]
) -> DraftReport:
    assert m.head is not None, name
    session = UnprovedSession(DRAFT_RECIPES[name])
    runner = DraftRunner(m.head, session, m.runner.context)
    drafter = EagleDrafter(runner, reads_logits=True)  # that is what may come too early
    drafts = Speculation([drafter], Fixed(most))
    sampler = Sampler(SamplerConfig(temp=0.0), m.model.vocab_size)
    m.engine.reset()
    found = m.engine.generate(ids, sampler.sample, sampler.accept, limit=limit, drafts=drafts)
    text, s = list(found), m.engine.statistics
    return DraftReport(
        name,
        session.plans,
        len(session.refused),
        session.refused[0].message if session.refused else "",
        session.faults,
        s.rounds,
        s.drafted,
        s.accepted,
        s.acceptance_length,
        s.accepted_at[0] / s.tried_at[0] if s.tried_at else 0.0,
        text == plain,
    )
