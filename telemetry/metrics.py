"""The content of ``GET /metrics``: latencies recorded as they happen, and counts read at each scrape."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Snapshot = dict[str, dict[tuple[str, ...], float]]
"""Metric name → label values → number."""


class Metrics:
    """One registry per server. ``snapshot`` is called at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Snapshots(snapshot))
        self.write_seconds = Latencies(
            "forebay_write_seconds", "Time from the last byte of a written body to its acknowledgement."
        )
        self.read_seconds = Latencies(
            "forebay_read_seconds", "Time to choose a batch and send it, without waiting for groups."
        )
        self.registry.register(self.write_seconds)
        self.registry.register(self.read_seconds)

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self.registry)


class Latencies(Collector):
    """A histogram of seconds, used from one thread."""

    def __init__(self, name: str, description: str) -> None:
        self._name = name
        self._description = description
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        # No lock: only one thread counts, and the locks of the library's histogram cost 2 µs a write.
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._description, buckets=buckets, sum_value=self._sum_s)


COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forebay_samples": ("Samples accepted, by outcome.", ("outcome",)),
    "forebay_rollouts": ("Rollouts whose main sample was accepted, by outcome.", ("outcome",)),
    "forebay_sample_bytes": ("Bytes of the accepted samples.", ()),
    "forebay_groups_discarded": ("Groups that ended undelivered, by reason.", ("reason",)),
    "forebay_run_counts": ("Counters of run processes, by name; kept over restarts.", ("count",)),
    "forebay_rollout_seconds": ("Seconds of rollouts since the server started, by phase.", ("phase",)),
    "forebay_trace_dropped": ("Records missing from traces for lack of room or time, by kind.", ("what",)),
    "forebay_rows_cut": ("Surplus rows cut from groups on slime routes.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "forebay_groups": ("Groups, by state.", ("state",)),
    "forebay_groups_idle": ("Open groups that do not age, because none of their rollouts is in flight.", ()),
    "forebay_oldest_open_group_seconds": ("Age of the oldest open group, in seconds that count for deadlines.", ()),
    "forebay_buffered_samples": ("Samples of open, ready and leased groups.", ()),
    "forebay_buffered_bytes": ("Bytes of those samples.", ()),
    "forebay_runs": ("Runs, by state.", ("state",)),
    "forebay_runs_stalled": ("Runs that made no progress for their group deadline.", ()),
    "forebay_runs_held": ("Runs that are paused until their trainer's next weight version.", ()),
    "forebay_runs_alarmed": ("Runs with many consecutive undelivered groups, or too many lost groups.", ()),
    "forebay_journal_bytes": ("Bytes of the journal.", ()),
    "forebay_journal_segments": ("Segment files of the journal.", ()),
    "forebay_journal_quarantined": ("Corrupt records set aside since the server started.", ()),
    "forebay_storage_healthy": ("1 while the journal accepts samples.", ()),
    "forebay_journal_on_reserve": ("1 while the disk is full and acknowledgements use the reserved space.", ()),
}


class _Snapshots(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        # Called once for all families, so that the numbers on a page are consistent.
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
    for name, (description, labels) in declared.items():
        family = kind(name, description, labels=labels)
        for values, number in numbers.get(name, {}).items():
            family.add_metric(list(values), number)
        yield family
