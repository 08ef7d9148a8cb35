"""What concurrency costs in memory, as a table: bytes against waits and time.

The pipeline adds orderings where memory does not fit; this report shows the same exchange the
other way round, for every number of streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggraph.alloc import ordering_offers, peak_bytes
from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.order import critical_path
from ggraph.orderings import wait_count, with_orderings
from ggraph.pipeline import Options, begin, ordered, run_passes_until


@dataclass(frozen=True)
class Trade:
    """One way to run a graph: with how much concurrency, at what price.

    `added` of the `waits` were bought to save memory; `lost_bytes` is what this much concurrency
    takes beyond one stream.
    """

    streams: int
    added: int
    waits: int
    nbytes: int
    lost_bytes: int
    critical_path_s: float


def trade_table(
    graph: Graph, devices: Sequence[DeviceSpec], options: Options | None = None, *, most: int = 4
) -> tuple[Trade, ...]:
    """Bytes of all arenas against waits and time, per number of streams, in `hb` mode.

    For each number of streams up to the devices' largest: the schedule as ordered, then with up to
    `most` (and `spare_waits`) further orderings, each the one that saves most. Raises as
    `make_plan` does for graphs that cannot be placed; no limit of memory is applied.
    """
    start = run_passes_until(begin(graph, devices, options), "order")
    assert start.split is not None, "the passes before order make the splits"
    found: list[Trade] = []
    for streams in range(1, max(d.streams for d in devices) + 1):
        schedule = ordered(start.split, replace(start.options, streams=streams))
        for added in range(1 + min(most, start.options.spare_waits)):
            nbytes = sum(peak_bytes(schedule).values())
            lost = max(0, nbytes - found[0].nbytes) if found else 0
            path, _ = critical_path(schedule)
            found.append(Trade(streams, added, wait_count(schedule), nbytes, lost, path))
            best = next(iter(ordering_offers(schedule)), None)
            if best is None or best.bytes_saved <= 0:
                break
            schedule = with_orderings(schedule, [(best.before, best.after)])
    return tuple(found)
