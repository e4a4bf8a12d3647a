"""Runs of agents on a real server, and what they have left in its store."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.kit import NativeRun, ServerProcess, poll_until

Json = dict[str, Any]
Samples = dict[str, list[Json]]
"""Bodies by the instance that they are of."""
LIMIT_S = 240.0
"""For what takes some seconds on an idle machine."""


def start(
    server: ServerProcess, folder: Path, task_type: str, engine_url: str, rows: list[Json], **payload: Any
) -> NativeRun:
    """A run of one rollout for each row. A row's id is what it does, if it has no other; so is its prompt."""
    file = folder / f"{task_type}-{len(rows)}.jsonl"
    told = [{"instance_id": row["do"], "prompt": f"Do {row['do']}.", **row} for row in rows]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in told))
    params = {"max_tokens": 64, "temperature": 0.5}
    payload = {"group_size": 1, "num_process": 16, "sampling_params": params, **payload}
    return server.start_run(task_type, input_file=str(file), remote_engine_url=engine_url, **payload)


def stored(run: NativeRun) -> Samples:
    """All samples of a run that has come to its end."""
    poll_until(lambda: run.view()["state"] not in ("validating", "running"), LIMIT_S)
    view = run.view()
    assert view["state"] == "finished", view
    found: dict[str, list[Json]] = defaultdict(list)
    for group in run.groups():
        samples = run.client.get(f"{run.path}/groups/{group['group_id']}", params={"bodies": True}).json()["samples"]
        found[group["instance_id"]] += [sample["body"] for sample in samples]
    return found
