"""How `verify` grows: commands, pairs, milliseconds, growth exponent.

    python bench/verify.py [--json] [--repeats 3] [--million]

The plans look like a decoder's step over several streams and a device's arena: chains of kernels
per stream with views of shared activations, joins by events every few commands, bytes passed on to
later values once their readers are ordered, weights of their own, inputs by copy, an output read by
the host. Each is verified as it stands, steady state included. Bars: 1,000 commands in under
100 ms, 20,000 in under 10 s; a million on eight streams (`--million`, which is all that is measured
then) in 90 s and 1.5 GB, the plan included.
"""

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ggraph.device import HOST, DeviceSpec
from ggraph.graph import Graph
from ggraph.plan import (
    HOST_ACTOR,
    Access,
    Actor,
    Buffer,
    Command,
    Do,
    MemoryMap,
    Placement,
    Plan,
    Region,
    Schedule,
    Splits,
    Value,
)
from ggraph.verify import verify

STREAMS, JOIN = 4, 12  # streams, unless more are asked for; kernels on each between two joins
NBYTES, ALIGN = 4096, 256
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000)
BARS_MS = {1_000: 100.0, 20_000: 10_000.0}
MILLION, MANY_STREAMS, MILLION_S, MILLION_BYTES = 1_000_000, 8, 90.0, 1_500_000_000


class Builder:
    """A plan in the making. Each block forks from one activation and joins into the next one.

    Every stream has two banks of `JOIN` blocks of bytes; blocks of even number use one, of odd
    number the other, so a value's bytes are used again two joins later.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.values: dict[str, Value] = {}
        self.regions: dict[str, Region] = {}
        self.commands: list[Command] = []

    def put(self, name: str, slot: int, buffer: str = "arena", **more: object) -> Access:
        """A value in place number `slot`."""
        home = HOST if buffer == "host" else "d"
        self.values[name] = Value(name, home, NBYTES, **more)  # type: ignore[arg-type]
        self.regions[name] = Region(buffer, (slot * NBYTES,), NBYTES)
        return Access(name, 0, NBYTES)

    def add(self, do: Do, stream: int | None, label: str, **fields: object) -> None:
        """One command; stream None is the host."""
        actor = HOST_ACTOR if stream is None else Actor("d", stream)
        self.commands.append(Command(do, actor, label, **fields))  # type: ignore[arg-type]

    def event(self, name: str, after: int, before: int) -> None:
        """`before` waits for what `after` has done."""
        self.add(Do.RECORD, after, name, event=name)
        self.add(Do.WAIT, before, name, event=name)

    def block(self, number: int, x: Access) -> Access:
        """Fork from `x`, a chain of kernels per stream, a join on stream 0."""
        self.add(Do.RECORD, 0, f"fork.{number}", event=f"fork.{number}")
        ends = []
        for stream in range(self.streams):
            if stream:
                self.add(Do.WAIT, stream, f"fork.{number}", event=f"fork.{number}")
            ends.append(self.chain(number, stream, x))
            if stream:
                self.event(f"join.{number}.{stream}", stream, 0)
        y = self.put(f"y.{number}", number % 2)
        self.add(Do.LAUNCH, 0, y.value, reads=(x, *ends), writes=(y,))
        return y

    def chain(self, number: int, stream: int, x: Access) -> Access:
        """Kernels that read the last result, half of `x` and a weight each."""
        bank = 2 + (2 * stream + number % 2) * JOIN
        last, half = x, Access(x.value, 0, NBYTES // 2)
        for i in range(JOIN):
            v = self.put(f"v.{number}.{stream}.{i}", bank + i)
            weight = Access(f"w.{i}", 0, NBYTES)
            self.add(Do.LAUNCH, stream, v.value, reads=(last, half, weight), writes=(v,))
            last = v
        return last

    def blocks(self, commands: int) -> Iterator[int]:
        """Numbers of blocks until the plan is long enough."""
        number = 0
        while len(self.commands) < commands - 3:
            yield number
            number += 1


def plan_of(commands: int, streams: int = STREAMS) -> Plan:
    """A sound plan of about `commands` commands."""
    b = Builder(streams)
    for i in range(JOIN):
        b.put(f"w.{i}", i, "weights", external=True, initial=True)
    staged, x = b.put("x.host", 0, "host"), b.put("x", 2 + 2 * streams * JOIN)
    b.add(Do.HOST_WRITE, None, "write", writes=(staged,))
    b.add(Do.COPY, 0, "copy", reads=(staged,), writes=(x,))
    for number in b.blocks(commands):
        x = b.block(number, x)
    out = b.put("out.host", 1, "host")
    b.add(Do.COPY, 0, "copy", reads=(x,), writes=(out,))
    b.add(Do.HOST_SYNC, None, "sync")
    b.add(Do.HOST_READ, None, "read", reads=(out,))
    return assembled(b)


def assembled(b: Builder) -> Plan:
    """The builder's nouns as a plan; buffers as large as they must be."""
    ends: dict[str, int] = {}
    for r in b.regions.values():
        ends[r.buffer] = max(ends.get(r.buffer, 0), r.offset + r.nbytes)
    homes = {"host": HOST}
    buffers = {
        name: Buffer(name, homes.get(name, "d"), end, ALIGN, name == "weights")
        for name, end in ends.items()
    }
    device = DeviceSpec("d", "sim", alignment=ALIGN, streams=b.streams)
    splits = Splits(Placement(Graph("none", (), (), {}), (device,), {}), ())
    schedule = Schedule(splits, b.values, tuple(b.commands))
    return Plan(schedule, MemoryMap("hand", buffers, b.regions))


def measure(commands: int, repeats: int) -> dict[str, float]:
    """Best of `repeats` times."""
    plan, best = plan_of(commands), math.inf
    for _ in range(repeats):
        begun = time.perf_counter()
        certificate = verify(plan).certificate
        best = min(best, time.perf_counter() - begun)
    return {
        "commands": certificate.commands,
        "pairs": certificate.pairs_checked,
        "reuses": certificate.reuses,
        "ms": best * 1e3,
    }


def million() -> int:
    """Seconds and the process's peak of a plan of a million commands; 1 if they miss the bar."""
    plan = plan_of(MILLION, MANY_STREAMS)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun = time.perf_counter()
    certificate = verify(plan).certificate
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{certificate.commands} commands on {MANY_STREAMS} streams: {seconds:.1f} s")
    print(f"{certificate.pairs_checked} pairs, {certificate.reuses} reuses")
    print(f"peak {peak / 1e9:.2f} GB, of which before {held / 1e9:.2f} GB")
    return int(seconds > MILLION_S or peak > MILLION_BYTES)


def exponent(rows: list[dict[str, float]]) -> float:
    """Slope of log time over log commands, from the smallest to the largest plan."""
    a, b = rows[0], rows[-1]
    return math.log(b["ms"] / a["ms"]) / math.log(b["commands"] / a["commands"])


def main() -> int:
    """Measure, print, and say whether the bars are met (exit status 1 if not)."""
    parser = argparse.ArgumentParser(description="time verify over growing plans")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--million", action="store_true")
    wanted = parser.parse_args()
    if wanted.million:
        return million()
    rows = [measure(n, wanted.repeats) for n in SIZES]
    if wanted.json:
        print(json.dumps({"rows": rows, "exponent": exponent(rows)}))
    else:
        print(f"{'commands':>10} {'pairs':>10} {'reuses':>10} {'ms':>10}")
        for r in rows:
            print(f"{r['commands']:>10} {r['pairs']:>10} {r['reuses']:>10} {r['ms']:>10.1f}")
        print(f"growth exponent {exponent(rows):.2f}")
    slow = [n for n, row in zip(SIZES, rows, strict=True) if row["ms"] > BARS_MS.get(n, math.inf)]
    for n in slow:
        print(f"too slow at {n} commands: the bar is {BARS_MS[n]:.0f} ms", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
