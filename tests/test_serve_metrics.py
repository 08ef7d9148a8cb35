"""Pages of metrics, joined."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from models.serve.metrics import joined


def page(path: str) -> str:
    registry = CollectorRegistry()
    Counter("asked", "How often.", ["path"], registry=registry).labels(path).inc(3)
    Gauge("open", "How many.", registry=registry).set(2)
    Histogram("wait", "How long.", buckets=(1, 2), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_a_joined_page_has_every_sample_with_its_replica_and_its_kind() -> None:
    pages = {"a": page('/"quoted"\n\\'), 'b"': page("/plain")}
    together = joined(pages).decode()
    found = [
        (f.name, f.type, f.documentation, s.name, tuple(sorted(s.labels.items())), s.value)
        for f in text_string_to_metric_families(together)
        for s in f.samples
    ]
    wanted = [
        (f.name, f.type, f.documentation, s.name,
         tuple(sorted({"replica": replica, **s.labels}.items())), s.value)
        for replica, text in pages.items()
        for f in text_string_to_metric_families(text)
        for s in f.samples
    ]  # fmt: skip
    assert sorted(found) == sorted(wanted) and {f[1] for f in found} == {
        "counter", "gauge", "histogram",
    }  # fmt: skip
    # A page says once what a name means: readers refuse or ignore a second time.
    told = [line for line in together.splitlines() if line.startswith("# TYPE ")]
    assert len(told) == len(set(told)) == len({line.split()[2] for line in told})
    assert "# TYPE asked_total counter" in told
