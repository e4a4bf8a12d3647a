"""Health, metrics and retention."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from forebay.buffer.buffer import Buffer
from forebay.buffer.idle_groups import oldest_age_s
from forebay.core.group import GroupState
from forebay.core.outcome import RolloutOutcome
from forebay.core.run import WORKING
from forebay.server.services import Services, services_of
from forebay.server.tracing.trace_upkeep import TraceUpkeep
from forebay.server.views import alarm_view
from forebay.telemetry.metrics import Snapshot

Server = Annotated[Services, Depends(services_of)]
K = TypeVar("K", bound=Hashable)

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: Server, response: Response) -> dict[str, Any]:
    """Whether samples are accepted; 503 while the disk refuses them. Runs without progress are only listed."""
    # A run without progress concerns its own trainer: a 503 would take the server from all other runs.
    is_ready = services.buffer.is_healthy
    response.status_code = 200 if is_ready else 503
    stalled = [e.run.run_id for e in services.buffer.entries if e.buffer.is_stalled and e.run.state in WORKING]
    return {
        "ready": is_ready,
        "storage": storage_text(services.buffer),
        "retention": retention_text(services.retention.num_bytes_over),
        "stalled_runs": stalled,
        "alarms": [{"run_id": run_id, **alarm} for run_id, alarm in _alarms(services.buffer).items()],
    }


def storage_text(buffer: Buffer) -> str:
    """Whether the journal takes writes: ``ok``, or why not."""
    if buffer.store.is_on_reserve:
        return "the disk is full: what is stored can be read and acknowledged, and nothing new is taken"
    return "ok" if buffer.is_healthy else "the journal cannot be written"


def retention_text(num_bytes_over: int) -> str:
    """Whether the journal keeps to its budget: ``ok``, or by how much it does not."""
    if not num_bytes_over:
        return "ok"
    return f"the journal is {num_bytes_over} bytes over max_journal_bytes; no more can be removed: see `forebay gc`"


@router.post("/v1/gc")
async def collect(services: Server) -> dict[str, Any]:
    """Remove unreachable segments; return what was removed, and what is kept for which reason."""
    return msgspec.to_builtins(await services.retention.collect())  # type: ignore[no-any-return]


def _alarms(buffer: Buffer) -> dict[str, dict[str, Any]]:
    """Alarms of runs that have not ended and that lose group after group."""
    found = {entry.run.run_id: alarm_view(entry) for entry in buffer.entries if not entry.run.has_ended}
    return {run_id: alarm for run_id, alarm in found.items() if alarm is not None}


@router.get("/metrics")
async def metrics(services: Server) -> Response:
    """All metrics in the Prometheus text format."""
    await services.trace_upkeep.read_on()
    return Response(services.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _total(counts: Iterable[Mapping[K, int]]) -> Counter[K]:
    total = Counter[K]()
    for each in filter(None, counts):  # of thousands of runs, most have nothing to add
        total.update(each)
    return total


def snapshot(buffer: Buffer, upkeep: TraceUpkeep) -> Snapshot:
    """Totals over all runs, as declared in ``telemetry.metrics``."""
    # No label per run: Prometheus keeps a series for each label value that it has ever seen.
    entries = buffer.entries
    groups = [entry.buffer.groups for entry in entries]
    counts = _total(entry.buffer.counts for entry in entries)
    tallies = [tally for entry in entries for tally in (entry.run.tally, entry.run.gateway_tally)]
    run_counts = +_total(part for tally in tallies for part in (tally.earlier, tally.current))
    outcomes = _total(entry.buffer.outcomes for entry in entries)
    reasons = _total(entry.buffer.groups.discard_reasons for entry in entries if entry.run.evaluates is None)
    dropped = upkeep.dropped
    stats = buffer.store.stats()
    oldest_s = max((oldest_age_s(entry.buffer) for entry in entries), default=0.0)
    return {
        "forebay_samples": {(o,): counts[o] for o in ("member", "failed", "late", "surplus", "duplicate")},
        "forebay_rollouts": {(outcome.value,): outcomes[outcome] for outcome in RolloutOutcome},
        "forebay_sample_bytes": {(): counts["bytes"]},
        "forebay_run_counts": {(name,): number for name, number in run_counts.items()},
        "forebay_rows_cut": {(): counts["rows_cut"]},
        "forebay_groups_discarded": {(reason,): number for reason, number in reasons.items()},
        "forebay_rollout_seconds": {(phase,): seconds for phase, seconds in upkeep.seconds.items()},
        "forebay_trace_dropped": {(what,): dropped[what] for what in ("spans", "summaries")},
        "forebay_groups": {(state.value,): sum(each.states[state] for each in groups) for state in GroupState},
        "forebay_groups_idle": {(): sum(len(each.idle) for each in groups)},
        "forebay_oldest_open_group_seconds": {(): round(oldest_s, 3)},
        "forebay_buffered_samples": {(): sum(each.num_live_samples for each in groups)},
        "forebay_buffered_bytes": {(): sum(each.num_live_bytes for each in groups)},
        "forebay_runs": {(s,): n for s, n in Counter(entry.run.state.value for entry in entries).items()},
        "forebay_runs_stalled": {(): sum(entry.buffer.is_stalled for entry in entries)},
        "forebay_runs_held": {(): sum(entry.run.is_held and entry.run.is_alive for entry in entries)},
        "forebay_runs_alarmed": {(): len(_alarms(buffer))},
        "forebay_journal_bytes": {(): stats.num_bytes},
        "forebay_journal_segments": {(): stats.num_segments},
        "forebay_journal_quarantined": {(): stats.num_quarantined},
        "forebay_storage_healthy": {(): float(buffer.is_healthy)},
        "forebay_journal_on_reserve": {(): float(buffer.store.is_on_reserve)},
    }
