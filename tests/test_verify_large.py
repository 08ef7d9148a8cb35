"""Large plans: the work grows with the plan, not with its square.

Tests never time, so steps are counted: lines of `ggraph.verify` that are run. Twice the plan may
take little more than twice the steps: there is sorting, but all is never compared with all.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from growth_kit import work
from plan_strategies import plan_of, with_value

from ggraph.device import DeviceSpec
from ggraph.plan import Access, Actor, Buffer, Certificate, Command, Do, Plan, Region, Value
from ggraph.verify import CounterExample, examine
from ggraph.verify import proof as judging

DEVICE = DeviceSpec("d", "sim", alignment=1, streams=8, host_visible=True)
STREAM = Actor("d", 0)


def launch(label: str, reads: list[Access], writes: list[Access], stream: int = 0) -> Command:
    return Command(Do.LAUNCH, Actor("d", stream), label, None, tuple(reads), tuple(writes))


def laid_out(values: list[Value], commands: list[Command], nbytes: int) -> Plan:
    """Values one behind the other, those that overwrite on what they overwrite."""
    regions: dict[str, Region] = {}
    at = 0
    for v in values:
        if v.same_as is not None:
            regions[v.name] = regions[v.same_as]
            continue
        regions[v.name] = Region("m", (at,), v.nbytes)
        at += v.nbytes
    return plan_of([DEVICE], values, commands, [Buffer("m", "d", nbytes, 1)], regions)


def wide(n: int) -> Plan:
    """One command with n reads and n writes."""
    old = [Value(f"r{i}", "d", 4, initial=True) for i in range(n)]
    new = [Value(f"w{i}", "d", 4) for i in range(n)]
    sides = [[Access(v.name, 0, 4) for v in side] for side in (old, new)]
    return laid_out([*old, *new], [launch("k", *sides)], 8 * n)


def overwritten(n: int) -> Plan:
    """One command that overwrites a value in n pieces and reads it in n pieces that overlap."""
    values = [Value("a", "d", 4 * n), Value("b", "d", 4 * n, same_as="a")]
    reads = [Access("a", i, 4 * n) for i in range(n)]
    writes = [Access("b", 4 * i, 4 * i + 4) for i in range(n)]
    first = launch("a", [], [Access("a", 0, 4 * n)])
    return laid_out(values, [first, launch("b", reads, writes)], 4 * n)


def chain(n: int) -> Plan:
    """A value overwritten n times."""
    values = [Value(f"v{i}", "d", 4, same_as=f"v{i - 1}" if i else None) for i in range(n)]
    whole = [Access(v.name, 0, 4) for v in values]
    commands = [launch(f"v{i}", whole[i - 1 : i], whole[i : i + 1]) for i in range(n)]
    return laid_out(values, commands, 4)


def pieces(n: int) -> Plan:
    """A value written in n pieces, from its end, and read as a whole."""
    values = [Value("v", "d", 4 * n), Value("y", "d", 4)]
    commands = [launch(f"p{i}", [], [Access("v", 4 * i, 4 * i + 4)]) for i in reversed(range(n))]
    last = launch("y", [Access("v", 0, 4 * n)], [Access("y", 0, 4)])
    return laid_out(values, [*commands, last], 4 * n + 4)


def replaced(n: int) -> Plan:
    """One value that n others may replace."""
    values = [Value("v", "d", 4), *(Value(f"y{i}", "d", 4, may_replace=("v",)) for i in range(n))]
    reads, first = [Access("v", 0, 4)], launch("v", [], [Access("v", 0, 4)])
    commands = [launch(f"y{i}", reads, [Access(f"y{i}", 0, 4)]) for i in range(n)]
    return laid_out(values, [first, *commands], 4 * n + 4)


def streams(n: int) -> Plan:
    """n commands on eight streams, joined and forked every sixteen."""
    values, commands = [Value("w", "d", 4, initial=True)], []
    for i in range(n):
        values.append(Value(f"v{i}", "d", 4))
        writes = [Access(f"v{i}", 0, 4)]
        commands.append(launch(f"v{i}", [Access("w", 0, 4)], writes, i % 8))
        if i % 16 == 15:
            commands.append(Command(Do.RECORD, Actor("d", 1), "e", event=f"e{i}"))
            commands.append(Command(Do.WAIT, Actor("d", i % 7), "e", event=f"e{i}"))
    return laid_out(values, commands, 4 * n + 4)


def steps(plan: Plan) -> int:
    """Lines of `ggraph.verify` that judging the plan runs."""
    verdict, found = work(lambda: examine(plan), "verify", nbytes=False)
    assert isinstance(verdict, Certificate), str(verdict)
    return found.lines


@pytest.mark.parametrize("made", [wide, overwritten, chain, pieces, replaced, streams])
def test_twice_the_plan_takes_about_twice_the_steps(made: Callable[[int], Plan]) -> None:
    small, large = steps(made(200)), steps(made(800))
    assert large < 4 * 1.3 * small, f"{made.__name__}: {small} steps, then {large}"


def within_one(reads: list[Access], n: int = 100) -> Plan:
    """One command that writes a value byte by byte, and one that reads it; 64 slots of no bytes."""
    bytes_ = [Access("v", i, i + 1) for i in range(n)]
    values = [Value("v", "d", n), Value("none", "d", 0, slots=64)]
    regions = {"v": Region("m", (0,), n), "none": Region("m", (0,) * 64, 0)}
    commands = [launch("write", [], bytes_), launch("read", reads, [])]
    return plan_of([DEVICE], values, commands, [Buffer("m", "d", n, 1)], regions)


def test_what_a_command_reads_twice_is_looked_at_once() -> None:
    once, often = (within_one([Access("v", 0, 20)] * n, 20) for n in (1, 100))
    assert steps(often) < 2 * steps(once)


def test_accesses_count_and_the_bytes_in_pieces_that_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short text can ask for many looks: a hundred ranges of a hundred pieces, 128 times."""
    every = within_one([Access("v", 0, 100 - i) for i in range(100)])
    whole = within_one([Access("v", 0, 100)])
    visits = 128 * (100 * 2 + 101)
    monkeypatch.setattr(judging, "MOST_VISITS", visits)
    assert isinstance(examine(whole), Certificate)
    for plan, allowed in ((every, visits), (whole, visits - 1)):
        monkeypatch.setattr(judging, "MOST_VISITS", allowed)
        verdict = examine(plan)
        assert isinstance(verdict, CounterExample) and verdict.kind == "capacity"
        assert "pieces of bytes: too many to prove" in verdict.message


def test_what_outlives_runs_is_looked_at_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no command reads it: a kept value in pieces."""
    p = within_one([])
    kept = replace(p.schedule.values["v"], kept=True)
    monkeypatch.setattr(judging, "MOST_VISITS", 128 * (100 * 2 + 101) - 1)
    verdict = examine(with_value(p, kept))
    assert isinstance(verdict, CounterExample) and verdict.kind == "capacity"


def test_the_clocks_of_one_stream_count_too() -> None:
    """147 bytes a command: two million of them, 64 times over, would need 39 gigabytes."""
    slots = {"none": Region("m", (0,) * 64, 0)}
    commands = [launch("nothing", [], [])] * (1 << 16)
    values = [Value("none", "d", 0, slots=64)]
    verdict = examine(plan_of([DEVICE], values, commands, [Buffer("m", "d", 0, 1)], slots))
    assert isinstance(verdict, CounterExample) and verdict.kind == "capacity"
    assert "8388608 commands in 128 runs, by 1 streams: too many" in verdict.message


def test_what_cannot_be_proved_in_time_is_refused() -> None:
    """A clock per stream and command: a million streams would need a terabyte."""
    device = DeviceSpec("d", "sim", alignment=1, streams=1 << 20)
    commands = [Command(Do.RECORD, Actor("d", i), "e", event="e") for i in range(12_000)]
    verdict = examine(plan_of([device], [], commands, [], {}))
    assert isinstance(verdict, CounterExample) and verdict.kind == "capacity"
    assert "24000 commands in 2 runs, by 12000 streams" in verdict.message
