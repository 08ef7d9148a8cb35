"""What /metrics tells: requests, tokens, waiting, the cache, drafts."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ggraph.serving.batch import Batch
from ggraph.serving.disk import Disk
from ggraph.serving.encoder import Encoding
from ggraph.serving.memory import Memory

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
COUNTS = {
    "steps": "Steps of the model.",
    "prompt_rows": "Rows of prompts that were computed.",
    "reused": "Tokens of prompts that were in the cache.",
    "restored": "Tokens whose rows were read from the disk.",
    "new_tokens": "Tokens of answers.",
    "drafted": "Tokens that were drafted.",
    "accepted": "Drafted tokens that were kept.",
    "preempted": "Texts that gave their slots back and were computed again.",
}


class BatchCollector(Collector):
    """Reads a batch when it is asked."""

    def __init__(self, batch: Batch | Encoding) -> None:
        self.batch = batch

    def collect(self) -> Iterable[Metric]:
        """Its counters as they are now."""
        b = self.batch
        for name, what in COUNTS.items():
            yield CounterMetricFamily(f"ggraph_{name}", what, value=getattr(b.counters, name))
        yield CounterMetricFamily("ggraph_step_seconds", "Time in steps.", value=b.counters.seconds)
        yield from _gauges(
            {
                "ggraph_running": ("Texts that are running.", len(b.running)),
                "ggraph_waiting": ("Texts that wait.", len(b.waiting)),
            }
        )
        if isinstance(b, Batch):
            yield from _of_cache(b.memory)
            if b.disk is not None:
                yield from _of_disk(b.disk.disk)


def _of_cache(m: Memory) -> Iterator[Metric]:
    """What the cache holds; encoders have none."""
    yield CounterMetricFamily("ggraph_evicted", "Rows forgotten.", value=m.evicted)
    gauges = {
        "ggraph_slots": ("Slots of the cache.", m.pool.count),
        "ggraph_slots_free": ("Slots that hold nothing.", m.pool.free),
        "ggraph_slots_kept": ("Slots kept for later texts.", m.tree.evictable),
    }
    if (states := m.states) is not None:
        gauges["ggraph_states"] = "Slots of recurrent states.", states.pool.count
        gauges["ggraph_states_free"] = "Such slots that hold nothing.", states.pool.free
        gauges["ggraph_states_kept"] = "Such slots kept for later texts.", states.kept
    yield from _gauges(gauges)


def _of_disk(d: Disk) -> Iterator[Metric]:
    """What is kept beside the cache."""
    unwritten = "Blocks that the disk did not take, as a full one does not."
    refused = "Blocks on the disk that were not what their names say."
    yield CounterMetricFamily("ggraph_disk_unwritten", unwritten, value=d.unwritten)
    yield CounterMetricFamily("ggraph_disk_refused", refused, value=d.refused)
    yield from _gauges({"ggraph_disk_bytes": ("Bytes of the disk cache.", d.held)})


def _gauges(gauges: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    for name, (what, value) in gauges.items():
        yield GaugeMetricFamily(name, what, value=value)


class Metrics:
    """The metrics of one server."""

    def __init__(self, batch: Batch | Encoding) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(BatchCollector(batch))
        self.requests = Counter(
            "ggraph_requests", "Requests by path and status.", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.first = Histogram(
            "ggraph_first_token_seconds", "Time to the first token.", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.between = Histogram(
            "ggraph_between_tokens_seconds", "Mean time between an answer's tokens.",
            buckets=BETWEEN, registry=self.registry,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Joined(Collector):
    """Pages of several servers: each sample names its `replica`."""

    pages: Mapping[str, str]

    def collect(self) -> Iterable[Metric]:
        """The families that any of them has."""
        found: dict[str, Metric] = {}
        for replica, page in self.pages.items():
            for family in text_string_to_metric_families(page):
                kept = Metric(family.name, family.documentation, family.type)
                kept = found.setdefault(family.name, kept)
                for s in family.samples:
                    kept.add_sample(s.name, {"replica": replica, **s.labels}, s.value)
        return found.values()


def joined(pages: Mapping[str, str]) -> bytes:
    """Metrics of several servers on one page."""
    registry = CollectorRegistry()
    registry.register(Joined(pages))
    return generate_latest(registry)
