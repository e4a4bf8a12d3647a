"""The output of ``forebay recording show``."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from forebay.core.records.recording_rows import EndRow
from forebay.core.records.rows import BatchRow
from forebay.replay.recording import Recording
from forebay.replay.step_filter import ranges_text
from forebay.server.cli.output import counts_text

MOST_SHOWN = 20


def counts(made: EndRow) -> dict[str, Any]:
    """Output of `export` as JSON values: counts of the file, and its groups without samples."""
    found = {name: getattr(made, name) for name in ("num_groups", "num_samples", "num_batches")}
    return found | {"left_out": msgspec.to_builtins(made.left_out)}


def summary(recording: Recording) -> dict[str, Any]:
    """Output of ``show`` as JSON values. Raises ``RecordingDamaged``."""
    found: dict[str, Any] = {"file": str(recording.path), "num_bytes": recording.path.stat().st_size}
    found["num_calls"] = recording.num_calls
    if not recording.has_run:
        return found
    run, made, groups, batches = recording.run, recording.made, recording.groups(), recording.batches()
    return found | {
        "run": {name: getattr(run, name) for name in run.__struct_fields__},
        "exported_by": made.by,
        "exported_at_s": made.at_s,
        "exported_steps": made.steps,
        **counts(made),
        "num_body_bytes": made.num_bytes,
        "states": dict(Counter(group.state.value for group in groups)),
        "reasons": dict(Counter(group.reason for group in groups if group.reason)),
        "num_salvaged": sum(group.is_salvaged for group in groups),
        "steps": _steps(batches, "step"),
        "checkpoints": _steps(batches, "checkpoint_step"),
    }


def facts(found: dict[str, Any]) -> dict[str, Any]:
    """Output of ``show`` as labelled text."""
    shown: dict[str, Any] = {"file": f"{found['file']} ({_size(found['num_bytes'])})"}
    if run := found.get("run"):
        shown |= {
            "run": " ".join(filter(None, (run["run_id"], run["name"]))),
            "task type": run["task_type"],
            "state": f"{run['state']}: {run['reason']}" if run["reason"] else run["state"],
            "started": _time(run["created_at_s"]),
            "exported": f"{_time(found['exported_at_s'])} by {found['exported_by']}",
            "only steps": found["exported_steps"],
            "groups": f"{found['num_groups']:,}: {counts_text(found['states'])}",
            "discarded": counts_text(found["reasons"]) if found["reasons"] else "",
            "salvaged": found["num_salvaged"] or "",
            "samples": f"{found['num_samples']:,} ({_size(found['num_body_bytes'])} before compression)",
            "batches": f"{found['num_batches']:,}",
            "steps": found["steps"],
            "checkpoints": found["checkpoints"],
            "left out": _left_out(found["left_out"]),
        }
    return shown | {"engine calls": f"{found['num_calls']:,}" if found["num_calls"] else ""}


def _left_out(groups: Sequence[dict[str, Any]]) -> str:
    if not groups:
        return ""
    lines = [f"the samples of {len(groups):,} groups, which could not be read:"]
    lines += [
        f"{each['group_id']} of instance {each['instance_id']!r}, epoch {each['epoch']}: {each['reason']}"
        for each in groups[:MOST_SHOWN]
    ]
    return "\n".join(lines) + (f"\n… and {len(groups) - MOST_SHOWN:,} more" if len(groups) > MOST_SHOWN else "")


def _steps(batches: Sequence[BatchRow], field: str) -> str:
    return ranges_text(step for batch in batches if (step := getattr(batch, field)) is not None)


def _time(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):  # no file of ours has such a time
        return f"{at_s:g} s"


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
