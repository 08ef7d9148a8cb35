"""A history as a plan: what every step of a batch read and wrote, for the prover to judge.

Legend: slot s is byte s of the buffer "cache", of "states" or of "log"; a lane is a stream, on
which the rows of some texts run. A row reads the slots of all tokens up to its own, and means the
rows of those tokens; a text of a recurrent model reads its slot of states, and means the tokens
that it stands behind. Which launch made them is known from the tokens alone, and not from the
slots. So the prover, which knows nothing of pages and prefixes, decides whether every read finds
its own text's rows, and not what somebody else has put there, or is putting there at that moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from ggraph.decode.model import LOG
from ggraph.plan import Plan
from ggraph.plan_builder import Bytes, PlanBuilder, Space
from ggraph.serving.batch import Batch
from ggraph.serving.steps import Ready, Row

GPU = "sim0"
CACHE, STATES, LOGGED = "cache", "states", "log"


class Place(NamedTuple):
    """A slot of one of the three."""

    space: str
    slot: int


Meant = tuple[
    tuple[Place, int], ...
]  # places, with the name of the text's beginning that lies in each


@dataclass(frozen=True)
class Touched:
    """What a row of a step, or a text's state, reads and writes."""

    reads: Meant
    writes: Meant


@dataclass(frozen=True)
class Copied:
    """A slot of states that was copied to another."""

    source: int
    target: int


Step = list[tuple[int, Touched]]  # with the number of the text


@dataclass
class Recorder:
    """Notes every step of a batch, with the number of the text that each row belongs to, and every
    copy of a state between them."""

    steps: list[Step | Copied] = field(default_factory=list)
    _names: dict[tuple[int, int], int] = field(default_factory=dict)  # of (beginning, next token)

    def watch(self, batch: Batch) -> None:
        """From now on."""
        run, runner, states = batch._run, batch.runner, batch.memory.states
        ready, compute = runner.ready, runner.run
        made: dict[int, tuple[Ready, list[tuple[Row, list[int]]]]] = {}
        meant: list[tuple[int, tuple[int, ...]]] = []
        courses: Step = []

        def readied(given: Sequence[Row], *more: Any) -> Ready:
            # Lists as they are now: texts change them
            step = ready(given, *more)
            made[id(step)] = step, [(r, r.seen.tolist()) for r in given]
            return step

        def computed(step: Ready, **named: Any) -> Any:
            given = made.pop(id(step))[1]
            tokens = step.feeds.stored["tokens"].tolist()
            whose = meant or [
                self._of_stride(batch, r, t) for (r, _), t in zip(given, tokens, strict=False)
            ]
            found = zip(given, whose, strict=True)
            rows = [(who, _row(r.slot, seen, m)) for (r, seen), (who, m) in found]
            self.steps.append(rows + courses)
            meant.clear()
            return compute(step, **named)

        def noted(parts: Sequence[Any], taps: tuple[int, ...]) -> None:
            meant[:] = [(p.text.arrived, m) for p in parts for m in self._meant(p)]
            courses[:] = [(p.text.arrived, self._course(p)) for p in parts if states is not None]
            run(parts, taps)

        runner.ready = readied  # type: ignore[method-assign]
        runner.run = computed  # type: ignore[method-assign]
        batch._run = noted  # type: ignore[method-assign]
        if states is not None:
            copy = states._copy

            def copied(source: int, target: int) -> None:
                self.steps.append(Copied(source, target))
                copy(source, target)

            states._copy = copied

    def _of_stride(self, batch: Batch, row: Row, token: int) -> tuple[int, tuple[int, ...]]:
        """Whose row a step has of which the batch was told tokens alone, and what it stands for."""
        (text,) = [t for t in batch.running if t.slots[row.position] == row.slot]
        return text.arrived, self._named((), [*text.tokens[: row.position], token])

    def _meant(self, part: Any) -> list[tuple[int, ...]]:
        """The names of all beginnings of each of a part's rows."""
        text, certain = part.text, part.certain
        line = self._named((), [*text.tokens[: text.computed], *part.tokens[:certain]])
        found = [line[: text.computed + i + 1] for i in range(certain)]
        for node in range(len(part.draft)):
            said = [part.draft.tokens[n] for n in part.draft.path(node)]
            found.append(self._named(line, said))
        return found

    def _course(self, part: Any) -> Touched:
        """A text's state before a step and the rows of the log that are replayed; its state behind
        the rows that are certain, and what the log gets of the draft."""
        text, meant = part.text, self._meant(part)
        line, stands = meant[part.certain - 1], text.computed - len(text.replay)
        replayed = [(Place(LOGGED, row), line[stands + i]) for i, row in enumerate(text.replay)]
        if stands:
            replayed.append((Place(STATES, text.state), line[stands - 1]))
        drafted = zip(part.log, meant[part.certain :], strict=True)
        logged = [(Place(LOGGED, row), m[-1]) for row, m in drafted]
        return Touched(tuple(replayed), ((Place(STATES, text.state), line[-1]), *logged))

    def _named(self, line: tuple[int, ...], tokens: Sequence[int]) -> tuple[int, ...]:
        names = list(line)
        for token in tokens:
            key = (names[-1] if names else -1, token)
            names.append(self._names.setdefault(key, len(self._names)))
        return tuple(names)


def _row(slot: int, seen: Sequence[int], means: Sequence[int]) -> Touched:
    """A row, which is written to its slot and sees those, itself last."""
    reads = zip((Place(CACHE, s) for s in seen), means, strict=True)
    return Touched(tuple(reads), ((Place(CACHE, slot), means[-1]),))


def as_plan(recorder: Recorder, slots: int, lanes: int, waits: str, states: int = 1) -> Plan:
    """The history with its texts on `lanes` streams. AssertionError where a row sees a slot in
    which what it means never was.

    `waits`: "host", as `Session.run` does after every step; "slots", where a lane waits for those
    others alone whose slots it takes, or whose rows it sees; or "nobody".
    """
    builder = PlanBuilder()
    builder.device(GPU, streams=lanes)
    sizes = {CACHE: slots, STATES: states, LOGGED: LOG}
    history = _History(builder, {n: builder.buffer(n, GPU, size) for n, size in sizes.items()})
    for number, step in enumerate(recorder.steps):
        if isinstance(step, Copied):
            history.copy(f"copy {number}", step, waits == "slots")
        else:
            for lane in range(lanes):
                touched = [row for who, row in step if who % lanes == lane]
                if touched:
                    history.launch(f"step {number} lane {lane}", lane, touched, waits == "slots")
        if waits == "host":
            builder.host_sync()
    builder.host_sync()
    return builder.plan()


@dataclass
class _History:
    """A plan on its way."""

    builder: PlanBuilder
    spaces: dict[str, Space]
    made: dict[tuple[int, Place], int] = field(default_factory=dict)  # launch of (meaning, place)
    holds: dict[Place, int] = field(default_factory=dict)  # what was put there last
    users: dict[Place, dict[int, str]] = field(default_factory=dict)  # events by lane

    def copy(self, label: str, copied: Copied, waits: bool) -> None:
        """A state goes on elsewhere as what it is; who means something else will find out."""
        source, target = (Place(STATES, s) for s in (copied.source, copied.target))
        meaning = self.holds[source]
        touched = Touched(((source, meaning),), ((target, meaning),))
        self.launch(label, 0, [touched], waits)

    def launch(self, label: str, lane: int, rows: Sequence[Touched], waits: bool) -> None:
        """Rows that one lane computes at once. A state that it moves on is read before."""
        own = {place: meaning for row in rows for place, meaning in row.writes}
        reads: dict[Place, int] = {}  # with the launch that is meant
        for place, meaning in (r for row in rows for r in row.reads):
            if own.get(place) != meaning or place.space == STATES:
                told = f"{label}: {place}"
                assert place not in own or place.space == STATES, f"{told} is overwritten and read"
                by = self.made.get((meaning, place))
                assert by is not None, f"{told} never held what a row means"
                reads[place] = by
        if waits:
            touched = {*own, *reads}
            others = {e for s in touched for at, e in self.users.get(s, {}).items() if at != lane}
            for event in sorted(others):
                self.builder.wait((GPU, lane), event)
        before = {p: by for p, by in reads.items() if p in own}
        if before:
            self.builder.launch((GPU, lane), f"{label} begins", reads=self._spans(before))
        at = self.builder.launch(
            (GPU, lane), label,
            reads=self._spans({p: by for p, by in reads.items() if p not in own}),
            writes=self._spans(dict.fromkeys(own, -1)),
        )  # fmt: skip
        self._note(label, lane, own, at, reads, waits)

    def _note(
        self, label: str, lane: int, own: dict[Place, int], at: int, reads: dict[Place, int],
        waits: bool,
    ) -> None:  # fmt: skip
        """What lies where now, and who used it."""
        self.holds |= own
        self.made |= {(meaning, place): at for place, meaning in own.items()}
        if waits:
            self.builder.record((GPU, lane), label)
        for place in (*own, *reads):
            self.users.setdefault(place, {})[lane] = label

    def _spans(self, found: dict[Place, int]) -> list[Bytes]:
        """Neighbours of one launch together."""
        spans = []
        ordered = sorted((by, place) for place, by in found.items())
        for (by, space, _), run in groupby(
            enumerate(ordered), key=lambda f: (f[1][0], f[1][1].space, f[1][1].slot - f[0])
        ):
            members = [place.slot for _, (_, place) in run]
            span = self.spaces[space][members[0] : members[-1] + 1]
            spans.append(span.called("rows", None if by < 0 else by))
        return spans
