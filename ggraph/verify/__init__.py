"""Plan -> VerifiedPlan, or a counter-example. Shares no code with the passes.

Written from one page of rules, the happens-before of host and streams, and not from the planner's
code. The plan is unrolled into its steady state; then, in enqueue order (which every ordering rule
respects), each access is held against the last write of its bytes and the reads since:

1. race freedom: two accesses to a byte, one of them a write, are ordered;
2. provenance: the last write before a read is the producer of the value that is read, in the run
   that is meant, and what outlives a run is intact at its end;
3. bounds, alignment, capacity, reach (`static`), and declarations that do what the graph says
   (`wiring`).

Limits: nothing is said of races inside a kernel, and the proof is as good as the accesses that the
commands declare. docs/verify.md has the argument and how to read an answer.
"""

from dataclasses import replace

from ggraph.door import checked
from ggraph.plan import _SEAL, Certificate, Do, Plan, VerifiedPlan
from ggraph.verify.clocks import clocks
from ggraph.verify.derived import lasting_faults, value_faults
from ggraph.verify.freeze import frozen
from ggraph.verify.live import live_bytes
from ggraph.verify.pairs import Race, races
from ggraph.verify.parts import part_faults
from ggraph.verify.proof import Proof
from ggraph.verify.report import CounterExample, Rejected, Repair, Site
from ggraph.verify.rooms import room_faults
from ggraph.verify.rounding import Approximation, approximations, roundings
from ggraph.verify.static import static_faults, unrolled_runs
from ggraph.verify.steps import step_faults
from ggraph.verify.wiring import wiring_faults

__all__ = [
    "Approximation",
    "CounterExample",
    "Race",
    "Rejected",
    "Repair",
    "Site",
    "approximations",
    "examine",
    "races",
    "verify",
]


@checked
def verify(plan: Plan, *, iterations: int = 0) -> VerifiedPlan:
    """Prove a plan sound. Raises Rejected, a PlanError that carries the counter-example.

    `iterations` can ask for more runs to be unrolled than the proof needs, never for fewer.
    """
    return proved(plan, iterations)


def proved(plan: Plan, iterations: int = 0) -> VerifiedPlan:
    """`verify` of a plan that we made: its records are not asked what they are."""
    held = frozen(plan)
    verdict = _verdict(held, iterations)
    if isinstance(verdict, CounterExample):
        raise Rejected(verdict)
    return VerifiedPlan(held, verdict, seal=_SEAL)


@checked
def examine(plan: Plan, *, iterations: int = 0) -> Certificate | CounterExample:
    """The verdict on a plan, without raising: a certificate, or the first fault that was found."""
    return _verdict(plan, iterations)


def _verdict(plan: Plan, iterations: int) -> Certificate | CounterExample:
    """`examine` of a plan whose members were asked already."""
    for fault in static_faults(plan, iterations):
        return fault
    for faults in (value_faults, step_faults, room_faults, wiring_faults, part_faults):
        for fault in faults(plan):
            return fault
    verdict = _proved(plan, unrolled_runs(plan, iterations))
    if isinstance(verdict, CounterExample):
        return verdict
    for fault in lasting_faults(plan):
        return fault
    bound = live_bytes(plan)  # when the proof's tables are gone: each of the two is large
    several = len({c.actor for c in plan.schedule if c.do in (Do.LAUNCH, Do.COPY)}) > 1
    lost = max(0, verdict.peak_bytes - bound) if several else 0
    rounds = tuple(map(str, roundings(plan)))
    return replace(
        verdict,
        live_bound_bytes=bound,
        concurrency_bytes=lost,
        approximations=rounds,
    )


def _proved(plan: Plan, runs: int) -> Certificate | CounterExample:
    """The first fault in `runs` runs, or a certificate in which the bound is still missing."""
    proof = Proof(plan, clocks(plan.schedule.commands, runs), runs)
    if fault := proof.fault():
        return fault
    return Certificate(
        commands=len(plan.schedule.commands),
        unrolled=runs * len(plan.schedule.commands),
        pairs_checked=proof.pairs,
        reads_proved=proof.reads,
        reuses=len(proof.reuses),
        peak_bytes=plan.memory.arena_bytes,
        live_bound_bytes=0,
        concurrency_bytes=0,
        ends_complete=proof.clocks.ends_complete(runs),
    )
