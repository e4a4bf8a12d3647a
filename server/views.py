"""JSON views of runs, groups, batches and samples, for the native routes and the command line."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from forebay.buffer.buffer import LiveRun
from forebay.buffer.groups.alarm import alarm_text
from forebay.buffer.retention import Retention
from forebay.buffer.store.abc import StoreStats
from forebay.core.addresses import engine_urls, is_http_url, without_login
from forebay.core.group import GroupState
from forebay.core.outcome import RolloutOutcome
from forebay.core.records.rows import BatchRow, CheckpointRow, GroupRow, StoredSample
from forebay.core.run import Run, RunState
from forebay.core.scheduling.scheduler import settings_in_use


def run_summary(entry: LiveRun) -> dict[str, Any]:
    """A run's state and counts, as far as they change while the run works."""
    run, buffer, groups = entry.run, entry.buffer, entry.buffer.groups
    return {
        "run_id": run.run_id,
        "name": run.name,
        "task_type": run.task_type,
        "evaluates": run.evaluates and asdict(run.evaluates),
        "state": run.state.value,
        "reason": run.reason,
        "has_ended": run.has_ended,
        "is_waiting_for_engine": run.is_waiting_for_engine or run.is_gateway_waiting,
        # A run may end while its engines are paused: then it is no longer paused.
        "is_held": run.is_held and run.is_alive,
        "is_paused": run.is_paused and run.is_alive,
        "is_stalled": buffer.is_stalled,
        "alarm": alarm_view(entry),
        "weight_version": run.weight_version,
        "started_at_s": run.started_at_s,
        "active_s": round(buffer.active.now_s(), 3),
        "engine_urls": [without_login(url) for url in engine_urls(run.payload) if is_http_url(url)],
        "num_groups_total": run.num_groups_total,
        "groups": {state.value: groups.states[state] for state in GroupState},
        "num_groups_full": groups.num_full,
        "num_groups_idle": len(groups.idle),
        "discarded": dict(groups.discard_reasons),
        "samples": {"buffered": groups.num_live_samples, "buffered_bytes": groups.num_live_bytes, **buffer.counts},
        "rewards": buffer.rewards.as_json(),
        "reward_parts": {name: tally.as_json() for name, tally in run.reward_parts.items()},
        "outcomes": {outcome.value: buffer.outcomes[outcome] for outcome in RolloutOutcome},
    }


def run_view(entry: LiveRun) -> dict[str, Any]:
    """A run with its counts, without its key."""
    run, buffer = entry.run, entry.buffer
    return {
        **run_summary(entry),
        "origin": run.origin,
        "warnings": run.warnings,
        "created_at_s": run.created_at_s,
        "process_ended_s": run.process_ended_s,
        "generator": run.generator_path,
        "input_file": run.payload.get("input_file"),
        "input_sha256": run.input_sha256 or None,
        "checkpoints": buffer.batches.steps,
        "counts": dict(run.counts),
        "tokens": tokens_view(run.counts),
        "hooks": buffer.hooks.implementations(),
        "scheduler": scheduler_view(run),
        # What an ended process reported about its workers no longer holds.
        "workers": buffer.workers if run.state is RunState.RUNNING else [],
        "replay": run.replay,
        "settings": run.settings.model_dump(),
        "sampling_params": params if isinstance(params := run.payload.get("sampling_params"), dict) else {},
        "run_defaults": run.defaults,
    }


def scheduler_view(run: Run) -> dict[str, Any] | None:
    """The policy with the settings it uses; None for a generator that starts its rollouts itself."""
    oversampling = run.settings.oversampling
    per_step = (oversampling.begun_per_step or oversampling.groups_per_step) if oversampling is not None else None
    return settings_in_use(run.settings.scheduler, per_step) if run.is_native_generator else None


def tokens_view(counts: Counter[str]) -> dict[str, Any]:
    """Token counts of a run: how many are trained on, and whether its longer rollouts are lost.

    Means are tokens per rollout, null without a rollout. An aborted rollout counts up to where it was aborted.
    """
    return {
        "kept": counts["tokens_finished"],
        "wasted": counts["tokens_aborted"] + counts["tokens_failed"] + counts["tokens_broken"] + counts["tokens_lost"],
        "mean_finished": _mean(counts, "finished"),
        "mean_aborted": _mean(counts, "aborted"),
    }


def _mean(counts: Counter[str], ending: str) -> float | None:
    num_rollouts = counts[f"rollouts_{ending}"]
    return round(counts[f"tokens_{ending}"] / num_rollouts, 1) if num_rollouts else None


def alarm_view(entry: LiveRun) -> dict[str, Any] | None:
    """Why a run yields no groups, or too few; None without an alarm."""
    groups, settings = entry.buffer.groups, entry.run.settings
    texts, reasons = list[str](), dict[str, int]()
    if in_a_row := groups.alarm.reasons(settings.alarm_after_groups):
        texts.append(alarm_text(in_a_row))
        reasons |= in_a_row
    if groups.losses.are_too_many(groups.num_closed, settings):
        texts.append(groups.losses.text(groups.num_closed))
        reasons |= groups.losses.counts
    if text := groups.losses.samples_text(groups.num_closed, settings):
        texts.append(text)
        reasons["out_of_range"] = groups.losses.num_outside
    return {"message": ". ".join(texts), "reasons": reasons} if texts else None


def batch_view(row: BatchRow) -> dict[str, Any]:
    """A batch without its groups; ``GET …/groups`` lists them by ``batch_id``."""
    return {
        "batch_id": row.batch_id,
        "state": row.state.value,
        "step": row.step,
        "checkpoint_step": row.checkpoint_step,
        "request_id": row.request_id or None,
        "num_groups": len(row.group_ids),
        "num_rows": row.num_rows,
        "leased_at_s": row.leased_at_s,
        "lease_s": None if row.is_self_acking else row.lease_s,
    }


def checkpoint_views(checkpoints: Iterable[CheckpointRow], acked: Iterable[BatchRow]) -> list[dict[str, Any]]:
    """Every checkpoint with its acknowledged batches."""
    fixed: dict[int | None, list[BatchRow]] = defaultdict(list)
    for row in acked:
        fixed[row.checkpoint_step].append(row)
    return [
        {
            "step": checkpoint.step,
            "batch_ids": [row.batch_id for row in fixed[checkpoint.step]],
            "num_groups": sum(len(row.group_ids) for row in fixed[checkpoint.step]),
            "at_s": checkpoint.at_s,
        }
        for checkpoint in checkpoints
    ]


def storage_view(stats: StoreStats, retention: Retention) -> dict[str, Any]:
    """Sizes of the store; ``num_bytes_over`` is the excess over a budget that cannot be met."""
    return {
        "num_bytes": stats.num_bytes,
        "num_segments": stats.num_segments,
        "num_bytes_over": retention.num_bytes_over,
        "num_replayable_bytes": retention.num_replayable_bytes,
        "location": stats.location,
    }


def group_view(row: GroupRow) -> dict[str, Any]:
    """A group's own columns."""
    return {
        "group_id": row.group_id,
        "instance_id": row.instance_id,
        "epoch": row.epoch,
        "state": row.state.value,
        "reason": row.reason,
        "detail": row.detail,
        "is_salvaged": row.is_salvaged,
        "opened_s": row.opened_s,
        "last_sample_s": row.last_sample_s,
        "idle_since_s": row.idle_since_s,
        "idle_s": row.idle_s,
        "closed_s": row.closed_s,
        "num_samples": row.num_samples,
        "num_failed": row.num_failed,
        "num_forks": row.num_forks,
        "num_deliveries": row.num_deliveries,
        "batch_id": row.batch_id,
        "weight_version": row.weight_version,
    }


async def closed_since(entry: LiveRun, after: int) -> dict[str, Any]:
    """The feed of closed groups numbered above ``after``."""
    groups = [_closed_view(row) for row in await entry.buffer.gone.closed_since(after)]
    last = groups[-1]["seq"] if groups else max(after, entry.buffer.groups.num_closed)
    return {"groups": groups, "last": last, "run_state": entry.run.state.value}


def _closed_view(row: GroupRow) -> dict[str, Any]:
    return {
        "seq": row.closed_seq,
        "group_id": row.group_id,
        "instance_id": row.instance_id,
        "epoch": row.epoch,
        "state": row.state.value,
        "reason": row.reason,
        "is_salvaged": row.is_salvaged,
    }


def sample_view(stored: StoredSample, *, has_body: bool) -> dict[str, Any]:
    """A stored sample without its body; ``has_body`` says whether retention has kept the body."""
    row = stored.row
    return {
        "uid": row.uid,
        "slot": row.slot,
        "fork": row.fork,
        "outcome": row.outcome,
        "rollout_outcome": row.rollout_outcome or None,
        "is_foreign": row.is_foreign,
        "status": "failed" if row.reward is None else "completed",
        "reward": row.reward,
        "reward_parts": row.reward_parts,
        "error": row.error,
        "oldest_version": row.oldest_version,
        "at_s": row.at_s,
        "received_at_s": row.received_at_s,
        "num_tokens": row.num_tokens or None,
        "num_bytes": stored.location.length,
        "has_body": has_body,
    }
