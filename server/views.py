"""Runs and groups as JSON, as the native routes and the command line show them."""

from typing import Any

from forebay.buffer.buffer import Entry
from forebay.buffer.store.rows import GroupRow, StoredSample
from forebay.core.group import GroupState


def run_view(entry: Entry) -> dict[str, Any]:
    """A run with its numbers. Its key is not shown."""
    run, buffer, groups = entry.run, entry.buffer, entry.buffer.groups
    return {
        "run_id": run.run_id,
        "name": run.name,
        "task_type": run.task_type,
        "origin": run.origin,
        "state": run.state.value,
        "reason": run.reason,
        "has_ended": run.has_ended,
        "is_waiting_for_engine": run.is_waiting_for_engine,
        "is_stalled": buffer.is_stalled,
        "created_at_s": run.created_at_s,
        "started_at_s": run.started_at_s,
        "active_s": round(buffer.active.now_s(), 3),
        "generator": run.generator_path,
        "input_file": run.payload.get("input_file"),
        "num_groups_total": run.num_groups_total,
        "groups": {state.value: groups.states[state] for state in GroupState},
        "discarded": dict(groups.discard_reasons),
        "samples": {"buffered": groups.num_live_samples, "buffered_bytes": groups.num_live_bytes, **buffer.counts},
        "hooks": buffer.hooks.implementations(),
        "settings": run.settings.model_dump(),
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
        "closed_s": row.closed_s,
        "num_samples": row.num_samples,
        "num_failed": row.num_failed,
        "num_deliveries": row.num_deliveries,
        "batch_id": row.batch_id,
    }


def closed_view(row: GroupRow) -> dict[str, Any]:
    """A line of the feed of closed groups."""
    return {
        "seq": row.closed_seq,
        "group_id": row.group_id,
        "instance_id": row.instance_id,
        "epoch": row.epoch,
        "state": row.state.value,
        "reason": row.reason,
    }


def sample_view(stored: StoredSample) -> dict[str, Any]:
    """A stored sample without its body."""
    row = stored.row
    return {
        "uid": row.uid,
        "slot": row.slot,
        "outcome": row.outcome,
        "status": "failed" if row.reward is None else "completed",
        "reward": row.reward,
        "error": row.error,
        "received_at_s": row.received_at_s,
        "num_bytes": stored.location.length,
    }
