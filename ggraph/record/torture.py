"""Run a program in the orders that hurt, and compare what it prints with an eager run.

A race that `verify` names is a pair of commands that may run in either order. The played devices
can force the second to be first: its partner's stream stops before it until the other is done. If
what the host gets changes, the race is no theory; if the pair was forced and nothing changed, the
bytes happened not to matter; if it could not be forced, something the plan does not know orders it.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE

from ggraph.errors import InputError
from ggraph.record.judge import Verdict, judge, missing
from ggraph.record.log import Recording, read_log
from ggraph.record.run import Program, Run, Stage
from ggraph.verify import races

MOST_DIRECTED = 16  # pairs forced in one torture; a broken program has thousands


@dataclass(frozen=True)
class Trial:
    """One run. `same`: its output is the eager run's, byte for byte; `same_bytes`: so is everything
    that the host got from the devices (logits), which greedy text can hide. `forced`: whether a
    directed order came to pass; None for orders that force nothing."""

    order: str
    why: str
    same: bool
    same_bytes: bool
    status: int | None
    forced: bool | None = None
    output: str = ""
    lost: int = 0  # copies whose destination the program had given back when they ran

    @property
    def sound(self) -> bool:
        """Whether this order changed nothing that anyone can see, and lost nothing."""
        return self.same_bytes and not self.lost

    def to_json(self) -> dict[str, object]:
        """The same as plain data."""
        return dict(vars(self))


@dataclass(frozen=True)
class Outcome:
    """The eager run's output and verdicts, and what every other order did.

    `missing`: why the verdicts are not about a whole run, if they are not.
    """

    output: str
    verdicts: Sequence[Verdict]
    trials: Sequence[Trial]
    missing: Sequence[str] = ()


def torture(
    program: Program,
    stage: Stage,
    *,
    seeds: int = 3,
    timeout: float | None = None,
    tell: Callable[[Trial], None] = lambda _: None,
) -> Outcome:
    """Run a program eagerly, lazily, with each device late, at random and in directed orders.

    InputError where the eager run fails: there is nothing to compare with.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        eager = _run(program, replace(stage, order="eager", poison=False), log, timeout)
        if eager.status != 0:
            raise InputError(f"{program.arguments[0]} ends with status {eager.status}, run eagerly")
        recording = read_log(log)
        verdicts = judge(recording)
        trials = []
        for order, why in (*_general(stage.devices, seeds), *_directed(verdicts)):
            ended = _run(program, replace(stage, order=order, poison=True), log, timeout)
            trials.append(_trial(order, why, (eager, ended), (recording, read_log(log))))
            tell(trials[-1])
    return Outcome(_text(eager.output), verdicts, trials, missing(recording, verdicts))


def _run(program: Program, stage: Stage, log: Path, timeout: float | None) -> Run:
    return program.run(stage, log, output=PIPE, errors=DEVNULL, timeout=timeout)


def _general(devices: int, seeds: int) -> Iterator[tuple[str, str]]:
    yield "eager", "with poison"
    yield "lazy", "nothing before it is waited for"
    for d in range(devices) if devices > 1 else ():
        yield f"late:{d}", f"device {d} late"
    for seed in range(1, seeds + 1):
        yield f"random:{seed}", "at random"


def _directed(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    """Each race that was found, the second access first."""
    orders: dict[str, str] = {}
    for v in (v for v in verdicts if v.diagnosis is not None):
        commands = v.judged.plan.schedule.commands
        for race in races(v.judged.plan):
            first, second = (v.judged.places[s.index] for s in (race.first, race.second))
            if first is None or len(orders) >= MOST_DIRECTED:
                continue
            until = f":{second.stream}.{second.at}" if second is not None else ""
            labels = (commands[s.index].label for s in (race.second, race.first))
            orders.setdefault(f"hold:{first.stream}.{first.at}{until}", " before ".join(labels))
    yield from orders.items()


def _trial(
    order: str, why: str, ended: tuple[Run, Run], logs: tuple[Recording, Recording]
) -> Trial:
    eager, now = ended
    directed = order.startswith("hold:") and ":" in order[5:]
    same = (eager.status, eager.output) == (now.status, now.output)
    same_bytes = same and logs[0].sums == logs[1].sums
    forced = logs[1].forced if directed else None
    output = "" if same else _text(now.output)
    return Trial(order, why, same, same_bytes, now.status, forced, output, logs[1].lost)


def _text(output: bytes) -> str:
    return output.decode(errors="replace")
