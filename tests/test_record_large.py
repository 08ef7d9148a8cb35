"""Large plans with races: what is said of them grows with the plan and its races."""

from functools import partial

from growth_kit import work
from plan_strategies import plan_of

from ggraph.device import DeviceSpec
from ggraph.plan import Access, Actor, Buffer, Command, Do, Plan, Region, Value
from ggraph.record.causes import diagnose

DEVICE = DeviceSpec("d", "sim", alignment=1, streams=2, host_visible=True)


def launch(label: str, reads: list[Access], writes: list[Access], stream: int = 0) -> Command:
    return Command(Do.LAUNCH, Actor("d", stream), label, None, tuple(reads), tuple(writes))


def unsynchronised(n: int) -> Plan:
    """One stream writes what another reads, on bytes used again and again; waits are missing."""
    values = [Value(f"v{i}", "d", 4) for i in range(n)]
    regions = {v.name: Region("m", (4 * (i % 8),), 4) for i, v in enumerate(values)}
    commands: list[Command] = []

    def event(after: int, before: int, name: str) -> None:
        commands.append(Command(Do.RECORD, Actor("d", after), name, event=name))
        commands.append(Command(Do.WAIT, Actor("d", before), name, event=name))

    for i, v in enumerate(values):
        whole = [Access(v.name, 0, 4)]
        commands.append(launch(f"write {i}", [], whole))
        if i % 16 != 5:
            event(0, 1, f"e{i}")
        commands.append(launch(f"read {i}", whole, [], 1))
        if i % 8 == 7:
            event(1, 0, f"back{i}")
    return plan_of([DEVICE], values, commands, [Buffer("m", "d", 32, 1)], regions)


def test_reports_grow_with_the_plan_and_its_races() -> None:
    """All races, their causes and the repairs; nothing compares all with all."""
    plans = unsynchronised(160), unsynchronised(640)
    (few, small), (many, large) = (work(partial(diagnose, p)) for p in plans)
    assert few is not None and many is not None
    assert (len(few.causes), len(many.causes)) == (10, 40) and many.fewest.proved
    assert sum(len(c.races) for c in many.causes) == 40 == len(many.fewest.waits)
    assert large.lines < 4 * 1.3 * small.lines
    assert not large.steeper(small, 4 * 1.5)
