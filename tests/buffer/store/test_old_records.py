"""Records as earlier versions wrote them are read, and mean what they meant then."""

from typing import Any

import msgspec

from forebay.buffer.store.log_records import MSGPACK, decode_rows
from forebay.buffer.store.rows import CheckpointRow, ColumnsRow, GroupRow, SampleRow, from_columns
from forebay.core.run import Run, StepStart
from forebay.core.starts.run_start import RunStart
from tests.buffer.buffer_kit import make_run

SAMPLE: dict[str, Any] = {
    "type": "sample",
    "run_id": "run-1",
    "uid": "u",
    "instance_id": 1,
    "group_id": "g",
    "epoch": 0,
    "slot": 2,
    "outcome": "member",
    "reward": 0.5,
    "at_s": 1.0,
    "received_at_s": 2.0,
}
COLUMNS: dict[str, Any] = {
    "type": "columns",
    "run_id": "run-1",
    "group_id": "g",
    "instance_id": 1,
    "epoch": 0,
    "segment": 1,
    "samples": [["u", 2, "member", 0.5, 1.0, 2.0, "", 3, 6, "r", None, 4, 100, 20]],
}
GROUP: dict[str, Any] = {
    "type": "group",
    "run_id": "run-1",
    "group_id": "g",
    "instance_id": 1,
    "epoch": 0,
    "state": "ready",
    "opened_s": 0.0,
    "num_samples": 4,
}
CHECKPOINT: dict[str, Any] = {"type": "checkpoint", "run_id": "run-1", "step": 3, "at_s": 1.0, "is_forgotten": False}


def test_samples_of_before_there_were_forks_and_outcomes_are_main_samples() -> None:
    sample, columns, group = decode_rows(msgspec.msgpack.encode([SAMPLE, COLUMNS, GROUP]), MSGPACK)
    assert isinstance(sample, SampleRow)
    assert (sample.fork, sample.rollout_outcome) == (0, "")
    assert isinstance(columns, ColumnsRow)
    [stored] = from_columns(columns)
    assert (stored.row.slot, stored.row.fork, stored.row.rollout_outcome) == (2, 0, "")
    assert (stored.location.offset, stored.location.length) == (100, 20)
    assert isinstance(group, GroupRow)
    assert (group.num_samples, group.num_forks) == (4, 0)


def test_checkpoints_and_steps_of_before_they_had_weight_versions() -> None:
    """Which version a checkpoint had is not known; the step began with that of the run, which no rewind had changed."""
    [checkpoint] = decode_rows(msgspec.msgpack.encode([CHECKPOINT]), MSGPACK)
    assert isinstance(checkpoint, CheckpointRow)
    assert (checkpoint.step, checkpoint.weight_version) == (3, None)
    document = make_run().document() | {"weight_version": 7, "step": {"number": 2, "num_closed": 5, "full": ["g"]}}
    run = Run.restore("run-1", "", "task", "running", 1.0, document, make_run().start.document())
    assert run.step == StepStart(2, 5, ["g"], 7)


def test_a_run_of_before_its_start_had_a_row_of_its_own() -> None:
    old = {"payload": {"num_epoch": 2, "skip_instance_ids": [1, "b", 1]}, "start_skip": [1, "b", 1], "base_skip": [1]}
    run = Run.restore("run-1", "", "task", "running", 1.0, make_run().document() | old, None)
    assert run.payload == {"num_epoch": 2}
    assert (run.start.first_listed, run.base_skip) == ([1, "b", 1], [1])
    assert run.start.is_like(RunStart.of(old["payload"], [1, "b", 1]))
    assert not run.start.is_like(RunStart.of(old["payload"], [1, "b"]))
    assert RunStart.restore(run.start.document()) == run.start
