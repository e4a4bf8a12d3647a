"""What ``forebay compare --set FIELD=JSON`` may say: the settings of a run that decide what becomes of its groups."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.run import RunSettings
from forebay.server.cli.start_command import parse_assignment

GROUP_SIZE, ITS_ALIAS = "group_size", "num_repeat_per_sample"
COMPARED = (
    GROUP_SIZE,
    "min_valid_group_size_ratio",
    "min_valid_item_size_ratio",
    "group_timeout_seconds",
    "group_deadline_seconds",
    "min_timeout_group_size_ratio",
    "normaliser",
    "reward_range",
    "contract",
    "hook_time_limit_s",
)
"""The others decide how much is generated, when, and when a trainer gets it: nothing of it is in the samples."""


def read_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """The fields that are set. Raises ``InvalidInput`` for one that is none, or decides nothing here."""
    changes: dict[str, Any] = {}
    for name, value in map(parse_assignment, assignments):
        field = GROUP_SIZE if name == ITS_ALIAS else name
        if field not in COMPARED:
            raise _wrong_name(name)
        changes[field] = value
    return changes


def _wrong_name(name: str) -> InvalidInput:
    hint = f"the fields are {', '.join(COMPARED)}"
    if name.partition(".")[0] in RunSettings.model_fields:
        message = f"--set {name}: it decides nothing that a recording can tell"
        return InvalidInput(message, hint=f"{hint}; `forebay simulate` tries schedulers", field=name)
    nearest = difflib.get_close_matches(name, COMPARED, 1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ""
    return InvalidInput(f"--set {name:.100}: a run has no such setting{meant}", hint=hint, field=name)


def settings_of(run: RecordedRun, changes: Mapping[str, Any] | None = None) -> RunSettings:
    """The settings that a run was recorded with, with ``changes`` in place of some. Raises ``InvalidInput``."""
    payload = dict(run.payload)
    for name, value in (changes or {}).items():
        payload.pop(ITS_ALIAS if name == GROUP_SIZE else name, None)
        payload[name] = value
    return RunSettings.parse(payload, "slime" if run.origin == "slime" else "native")
