"""ATIF, Harbor's trajectory format: one JSON file per rollout, with its forks as sub-agents.

Source: ``harbor.models.trajectories`` of Harbor 0.25, which read versions 1.0 to 1.8.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import msgspec

from forebay.core.files import FOLDER_MODE, opener
from forebay.replay.exporters.atif_steps import StepTokens, spans_of, steps_of
from forebay.replay.exporters.exporter import WriteRollout
from forebay.replay.exporters.rollouts import ExportedRollout, Json, RolloutSample
from forebay.replay.recording import Recording

VERSION = "ATIF-v1.7"
LATEST_S = 253_402_300_800
"""The year 10000, whose times have no ISO 8601 form. A file may claim any."""


@contextmanager
def atif(path: Path, recording: Recording) -> Iterator[WriteRollout]:
    """Make a folder with a file ``GROUP-SLOT.json`` for each rollout, or ``GROUP-OUTCOME.json`` without a slot."""
    path.mkdir(FOLDER_MODE)

    def write(rollout: ExportedRollout) -> None:
        content = msgspec.json.encode(trajectory(rollout, recording))
        row = rollout.samples[0].row
        stem = f"{row.group_id}-{row.slot if row.slot >= 0 else row.outcome}"
        names = (f"{stem}{f'-{number}' if number else ''}.json" for number in count())
        free = next(path / name for name in names if not (path / name).exists())
        with open(free, "xb", opener=opener) as file:
            file.write(content)

    yield write


def trajectory(rollout: ExportedRollout, recording: Recording) -> Json:
    """The trajectory of a rollout, as JSON values."""
    main, *forks = [_trajectory(rollout, sample, recording) for sample in rollout.samples]
    if forks:
        main["subagent_trajectories"] = forks
        # Viewers find sub-agents by a reference. Which step began a fork is not recorded, so the last one has them all.
        refs = [{"trajectory_id": fork["trajectory_id"]} for fork in forks]
        observation = main["steps"][-1].setdefault("observation", {"results": []})
        observation["results"].append({"subagent_trajectory_ref": refs})
    return main


def _trajectory(rollout: ExportedRollout, sample: RolloutSample, recording: Recording) -> Json:
    tokens = StepTokens(sample)
    steps, has_tokens = steps_of(sample, tokens)
    row, run = sample.row, recording.run
    if 0 <= row.received_at_s < LATEST_S:
        steps[-1]["timestamp"] = datetime.fromtimestamp(row.received_at_s, UTC).isoformat()
    own = {name: value for name, value in sample.fields.items() if name not in ("messages", "token_spans", "tools")}
    extra = {"run_name": run.name, **rollout.recorded(sample), "sample": own}
    if tokens.ids and not has_tokens:
        extra |= {"token_ids": tokens.ids, "logprobs": tokens.logprobs, "loss_mask": list(tokens.mask)}
    return {
        "schema_version": VERSION,
        "session_id": rollout.samples[0].row.uid,
        "trajectory_id": row.uid,
        "agent": _agent(sample, recording),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.start for turn in tokens.turns),
            "total_completion_tokens": sum(turn.end - turn.start for turn in tokens.turns),
            "total_steps": len(steps),
        },
        "extra": extra,
    }


def _agent(sample: RolloutSample, recording: Recording) -> Json:
    agent: Json = {"name": recording.run.task_type, "version": recording.made.by}
    if models := [span.model for span in spans_of(sample) if span.model]:
        agent["model_name"] = models[-1]
    tools = sample.fields.get("tools")
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        agent["tool_definitions"] = tools
    return agent
