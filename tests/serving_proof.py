"""A history as a plan: what every step of a batch read and wrote, for the prover to judge.

Legend: slot s is byte s of the buffer "cache"; a lane is a stream, on which the rows of some texts
run. A row reads the slots of all tokens up to its own, and means the rows of those tokens: which
launch made them is known from the tokens alone, and not from the slots. So the prover, which knows
nothing of pages and prefixes, decides whether every read finds its own text's rows, and not what
somebody else has put there, or is putting there at that moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ggraph.plan import Plan
from ggraph.plan_builder import Bytes, PlanBuilder, Space
from ggraph.serving.batch import Batch
from ggraph.serving.steps import Row

GPU = "sim0"


@dataclass(frozen=True)
class Touched:
    """A row of a step: the slot that it writes and those that it sees, itself last; `means` names
    the beginning of a text that lies in each."""

    slot: int
    seen: tuple[int, ...]
    means: tuple[int, ...]


@dataclass
class Recorder:
    """Notes every step of a batch: its rows, with the number of the text that each belongs to."""

    steps: list[list[tuple[int, Touched]]] = field(default_factory=list)
    _names: dict[tuple[int, int], int] = field(default_factory=dict)  # of (beginning, next token)

    def watch(self, batch: Batch) -> None:
        """From now on."""
        run, step = batch._run, batch.runner.step
        rows: list[tuple[int, tuple[int, ...]]] = []  # as they were then: texts change their lists

        def stepped(given: Sequence[Row], *more: Any, **named: Any) -> Any:
            rows[:] = [(r.slot, tuple(r.seen.tolist())) for r in given]
            return step(given, *more, **named)

        def noted(parts: Sequence[Any], taps: tuple[int, ...]) -> None:
            meant = [(p.text.arrived, m) for p in parts for m in self._meant(p)]
            run(parts, taps)
            found = zip(rows, meant, strict=True)
            self.steps.append([(who, Touched(slot, seen, m)) for (slot, seen), (who, m) in found])

        batch.runner.step = stepped  # type: ignore[method-assign]
        batch._run = noted  # type: ignore[method-assign]

    def _meant(self, part: Any) -> list[tuple[int, ...]]:
        """The names of all beginnings of each of a part's rows."""
        text, certain = part.text, len(part.tokens) - len(part.draft)
        line = self._named((), [*text.tokens[: text.computed], *part.tokens[:certain]])
        found = [line[: text.computed + i + 1] for i in range(certain)]
        for node in range(len(part.draft)):
            said = [part.draft.tokens[n] for n in part.draft.path(node)]
            found.append(self._named(line, said))
        return found

    def _named(self, line: tuple[int, ...], tokens: Sequence[int]) -> tuple[int, ...]:
        names = list(line)
        for token in tokens:
            key = (names[-1] if names else -1, token)
            names.append(self._names.setdefault(key, len(self._names)))
        return tuple(names)


def as_plan(recorder: Recorder, slots: int, lanes: int, waits: str) -> Plan:
    """The history with its texts on `lanes` streams. AssertionError where a row sees a slot in
    which what it means never was.

    `waits`: "host", as `Session.run` does after every step; "slots", where a lane waits for those
    others alone whose slots it takes, or whose rows it sees; or "nobody".
    """
    builder = PlanBuilder()
    builder.device(GPU, streams=lanes)
    history = _History(builder, builder.buffer("cache", GPU, slots))
    for number, step in enumerate(recorder.steps):
        for lane in range(lanes):
            rows = [row for who, row in step if who % lanes == lane]
            if rows:
                history.launch(f"step {number} lane {lane}", lane, rows, waits == "slots")
        if waits == "host":
            builder.host_sync()
    builder.host_sync()
    return builder.plan()


@dataclass
class _History:
    """A plan on its way."""

    builder: PlanBuilder
    cache: Space
    made: dict[tuple[int, int], int] = field(default_factory=dict)  # launch of (meaning, slot)
    users: dict[int, dict[int, str]] = field(default_factory=dict)  # of a slot: events by lane

    def launch(self, label: str, lane: int, rows: Sequence[Touched], waits: bool) -> None:
        """Rows that one lane computes at once."""
        own = {row.slot: row.means[-1] for row in rows}
        reads: set[tuple[int, int]] = set()  # slots, with the launch that is meant
        for row in rows:
            for slot, meaning in zip(row.seen, row.means, strict=True):
                if slot in own:
                    assert own[slot] == meaning, f"{label}: slot {slot} is overwritten and read"
                else:
                    by = self.made.get((meaning, slot))
                    assert by is not None, f"{label}: slot {slot} never held what a row means"
                    reads.add((slot, by))
        touched = {*own, *(slot for slot, _ in reads)}
        if waits:
            others = {e for s in touched for at, e in self.users.get(s, {}).items() if at != lane}
            for event in sorted(others):
                self.builder.wait((GPU, lane), event)
        at = self.builder.launch(
            (GPU, lane), label, reads=self._spans(reads),
            writes=self._spans({(slot, -1) for slot in own}),
        )  # fmt: skip
        for slot, meaning in own.items():
            self.made[meaning, slot] = at
        if waits:
            self.builder.record((GPU, lane), label)
        for slot in touched:
            self.users.setdefault(slot, {})[lane] = label

    def _spans(self, found: set[tuple[int, int]]) -> list[Bytes]:
        """Neighbours of one launch together."""
        spans = []
        for (by, _), run in groupby(
            enumerate(sorted(found, key=lambda f: (f[1], f[0]))),
            key=lambda f: (f[1][1], f[1][0] - f[0]),
        ):
            members = [slot for _, (slot, _) in run]
            span = self.cache[members[0] : members[-1] + 1]
            spans.append(span.called("rows", None if by < 0 else by))
        return spans
