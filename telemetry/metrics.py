"""What ``GET /metrics`` shows: latencies as they happen, and counts read when somebody asks."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Snapshot = dict[str, dict[tuple[str, ...], float]]
"""Metric name → label values → number."""


class Metrics:
    """One registry, handed around. ``snapshot`` is asked at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Snapshots(snapshot))
        self.write_seconds = Histogram(
            "forebay_write_seconds",
            "Time from the last byte of a written body to its acknowledgement.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.read_seconds = Histogram(
            "forebay_read_seconds",
            "Time to choose a batch and send it, without waiting for groups.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)


COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forebay_samples": ("Samples accepted since the server started, by what became of them.", ("outcome",)),
    "forebay_sample_bytes": ("Bytes of the accepted samples.", ()),
    "forebay_groups_discarded": ("Groups that ended undelivered, by reason.", ("reason",)),
    "forebay_rows_cut": ("Surplus rows that were cut from groups on slime routes.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "forebay_groups": ("Groups, by state.", ("state",)),
    "forebay_buffered_samples": ("Samples of open, ready and leased groups.", ()),
    "forebay_buffered_bytes": ("Bytes of those samples.", ()),
    "forebay_runs": ("Runs, by state.", ("state",)),
    "forebay_runs_stalled": ("Runs that made no progress for their group deadline.", ()),
    "forebay_journal_bytes": ("Bytes of the journal.", ()),
    "forebay_journal_quarantined": ("Corrupt records set aside since the server started.", ()),
    "forebay_storage_healthy": ("1 while the journal takes writes.", ()),
}


class _Snapshots(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        numbers = self._snapshot()
        yield from _families(CounterMetricFamily, COUNTERS, numbers)
        yield from _families(GaugeMetricFamily, GAUGES, numbers)

    def describe(self) -> Iterable[Metric]:
        return ()


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    declared: dict[str, tuple[str, tuple[str, ...]]],
    numbers: Snapshot,
) -> Iterator[Metric]:
    for name, (told, labels) in declared.items():
        family = kind(name, told, labels=labels)
        for values, number in numbers.get(name, {}).items():
            family.add_metric(list(values), number)
        yield family
