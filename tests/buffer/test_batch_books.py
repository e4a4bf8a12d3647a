"""The books of batches and checkpoints, and the count of groups that come to nothing. Pure."""

from typing import Any

import pytest

from forebay.buffer.batches import Batches
from forebay.buffer.groups.alarm import AlarmCounts, alarm_text
from forebay.buffer.reads.staleness import marked
from forebay.core.errors import BatchNotFound
from forebay.core.group import BatchState, GroupState
from forebay.core.records.rows import BatchRow, CheckpointRow


def make_row(batches: Batches, state: BatchState = BatchState.LEASED, **changes: Any) -> BatchRow:
    number, batch_id = batches.new_id()
    fields: dict[str, Any] = {"group_ids": [f"g{number}", f"h{number}"], **changes}
    row = BatchRow(run_id="run-1", batch_id=batch_id, number=number, state=state, **fields)
    batches.add(row)
    return row


def make_batches(*states: BatchState) -> tuple[Batches, list[BatchRow]]:
    batches = Batches("run-1")
    return batches, [make_row(batches, state) for state in states]


ACKED, LEASED, EXPIRED, RELEASED, REVOKED = (
    BatchState.ACKED,
    BatchState.LEASED,
    BatchState.EXPIRED,
    BatchState.RELEASED,
    BatchState.REVOKED,
)


def test_ids_count_on_from_what_was_restored() -> None:
    _, rows = make_batches(ACKED, RELEASED)
    again = Batches("run-1")
    again.restore([CheckpointRow(run_id="run-1", step=3, at_s=1.0, is_forgotten=True)])
    for row in rows:
        again.add(row)
    assert again.new_id()[1].startswith("batch-000003-")
    assert again.steps == []
    with pytest.raises(BatchNotFound, match="batch-none"):
        again.get("batch-none")


def test_a_resume_keeps_of_each_batch_what_its_trainer_has() -> None:
    batches, [whole, part, leased, lost, late] = make_batches(ACKED, ACKED, LEASED, LEASED, EXPIRED)
    changed = batches.follow_resume({"h2", "g3", "g4", "h4"}, "resumed")
    assert changed == [part, leased, lost, late]
    assert (whole.group_ids, part.group_ids, leased.group_ids) == (["g1", "h1"], ["g2"], ["h3"])
    assert [row.state for row in (whole, part, leased, lost, late)] == [ACKED, ACKED, ACKED, REVOKED, REVOKED]


def note(alarm: AlarmCounts, *moves: tuple[GroupState, GroupState, str]) -> None:
    for source, target, reason in moves:
        alarm.note(source, target, reason)


OPEN, READY, GONE = GroupState.OPEN, GroupState.READY, GroupState.DISCARDED


def test_groups_that_come_to_nothing_are_counted_until_one_gets_ready() -> None:
    alarm = AlarmCounts()
    note(alarm, (OPEN, GONE, "invalid"), (OPEN, GONE, "invalid"), (OPEN, GONE, "failed"))
    assert alarm.reasons(4) is None
    reasons = alarm.reasons(3)
    assert reasons == {"invalid": 2, "failed": 1}
    assert alarm_text(reasons) == "3 groups in a row ended undelivered: 2 invalid, 1 failed"
    note(alarm, (OPEN, READY, ""))
    assert alarm.reasons(1) is None


def test_groups_that_get_ready_and_then_stale_raise_the_alarm_too() -> None:
    alarm = AlarmCounts()
    note(alarm, *[(OPEN, READY, ""), (READY, GONE, "stale")] * 3)
    assert alarm.reasons(3) == {"stale": 3}
    note(alarm, (READY, GroupState.LEASED, ""))
    assert alarm.reasons(1) is None


@pytest.mark.parametrize("row", [(b'{"a":1}',), (b'{"a":', b"1", b"}\n \t"), (memoryview(b'{"a":1} '),)])
def test_a_stale_row_says_so(row: tuple[bytes, ...]) -> None:
    assert b"".join(marked(row)) == b'{"a":1,"is_stale":true}'
