"""A recording -> one verdict for each kind of step. Steps that repeat are proved once."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ggraph.plan import Certificate
from ggraph.record.causes import Diagnosis, diagnose
from ggraph.record.convert import Converted, convert
from ggraph.record.log import Kernel, Record, Recording
from ggraph.record.steps import Step, steps
from ggraph.verify import CounterExample, examine


@dataclass(frozen=True)
class Verdict:
    """What was found of one kind of step. `count` steps, of which `different` were proved.

    `judged` is the first that was refused, or the first; `refused` and `diagnosis` say why.
    """

    kind: str
    count: int
    different: int
    judged: Converted
    certificate: Certificate | None
    refused: CounterExample | None
    diagnosis: Diagnosis | None
    whole: bool = True  # False: the recording ended while something of it was in flight

    @property
    def commands(self) -> int:
        """Commands of the step that was judged."""
        return len(self.judged.plan.schedule.commands)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        found = {
            "kind": self.kind,
            "steps": self.count,
            "different": self.different,
            "commands": self.commands,
            "proved": self.refused is None,
        }
        if self.refused is not None:
            found |= {"counter_example": self.refused.to_json(), "stack": self.stack}
        if self.diagnosis is not None:
            found |= self.diagnosis.to_json()
        return found

    @property
    def stack(self) -> tuple[str, ...]:
        """Who touched memory in flight, innermost frame first, where a touch was refused."""
        sites = (self.refused.first, self.refused.second) if self.refused is not None else ()
        stacks = (self.judged.stacks.get(s.index, ()) for s in sites if s is not None)
        return next((s for s in stacks if s), ())


def judge(recording: Recording) -> list[Verdict]:
    """The verdicts on a recording, kind by kind, in the order in which they first came."""
    kinds: dict[object, list[Step]] = {}
    for step in steps(recording):
        kinds.setdefault(_shape(step), []).append(step)
    return [_verdict(same) for same in kinds.values()]


def missing(recording: Recording, verdicts: Sequence[Verdict]) -> list[str]:
    """Why the verdicts are not about a whole run, one line each; empty where they are."""
    found = []
    if not verdicts:
        found.append("nothing was recorded: nothing was enqueued on a played device")
    if recording.cut_short:
        found.append(f"the log ends early: {recording.cut_short}")
    if not all(v.whole for v in verdicts):
        found.append("the recording ends while something is in flight")
    return found


def _verdict(same: list[Step]) -> Verdict:
    different = {_exact(step): step for step in reversed(same)}
    judged: list[tuple[Converted, Certificate | CounterExample]] = []
    for step in reversed(different.values()):
        converted = convert(step)
        judged.append((converted, examine(converted.plan)))
    refused = (pair for pair in judged if isinstance(pair[1], CounterExample))
    chosen, verdict = next(refused, judged[0])
    proved = isinstance(verdict, Certificate)
    return Verdict(
        describe(same[0]),
        len(same),
        len(different),
        chosen,
        verdict if isinstance(verdict, Certificate) else None,
        verdict if isinstance(verdict, CounterExample) else None,
        None if proved else diagnose(chosen.plan),
        same[0].whole,
    )


def describe(step: Step) -> str:
    """What a step is to a person: by the tokens that llama.cpp feeds, else by its kernels."""
    fed = [n for r in step.records if (n := _tokens(r))]
    kernels = [k for r in step.records for k in r.kernels]
    rest = "" if step.whole else ", cut short"
    if not any(k.name for k in kernels):
        return "copies" + rest
    if not fed:
        return f"{kernels[0].name} .. {kernels[-1].name}" + rest
    parts = f" in {len(fed)} parts" if len(fed) > 1 else ""
    return f"{sum(fed)} token{'s' if sum(fed) != 1 else ''}{parts}" + rest


def _tokens(r: Record) -> int:
    """How many tokens the host sets with this record."""
    fed = r.write is not None and r.label.startswith(("set inp_tokens", "H2D inp_tokens"))
    return r.write.nbytes // 4 if fed and r.write is not None else 0


def _shape(step: Step) -> object:
    """Equal for steps that do the same things to the same tensors, wherever these lie."""
    names: dict[int, object] = {}
    parts = []
    for r in step.records:
        key = id(r.kernels)
        if key not in names:
            names[key] = _names(r.kernels)
        if r.kind == "free":  # of something else, mostly: models and contexts come and go
            continue
        parts.append((r.kind, r.stream, re.sub(r"\d+", "#", r.label), names[key]))
    return tuple(parts), sum(map(_tokens, step.records)), step.whole


def _names(kernels: Iterable[Kernel]) -> object:
    return hash(tuple((k.op, k.name) for k in kernels))


def _exact(step: Step) -> object:
    """Equal for steps that touch the same bytes in the same order: equal lists are one object."""
    events: dict[int | None, int] = {}
    parts = []
    for r in step.records:
        event = events.setdefault(r.event, len(events))
        parts.append((r.kind, r.stream, id(r.kernels), r.label, r.read, r.write, event))
    return tuple(parts)
