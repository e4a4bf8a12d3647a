"""What a run's buffer tells its trace, and what it remembers of that."""

from forebay.buffer.change_records import MAX_SEEN, ChangeRecords
from forebay.core.group import BatchState
from forebay.core.records.rows import BatchRow
from forebay.telemetry.tracing.records import BatchChange, Record, Span


class KeptRecords:
    """A sink that keeps what it is given."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self.records: list[Record] = []

    def at(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9)

    def write(self, record: Record) -> None:
        self.records.append(record)


def batch(number: int, state: BatchState, checkpoint: int | None = None) -> BatchRow:
    return BatchRow(
        run_id="run-1",
        batch_id=f"batch-{number}",
        number=number,
        state=state,
        group_ids=[],
        checkpoint_step=checkpoint,
    )


def test_a_run_of_many_batches_remembers_the_newest_and_tells_each_change_once() -> None:
    sink = KeptRecords()
    changes = ChangeRecords(sink)
    for number in range(2 * MAX_SEEN):
        changes.rows_changed([batch(number, BatchState.LEASED)])
        for _ in range(2):
            changes.rows_changed([batch(number, BatchState.ACKED)])
    assert len(sink.records) == 2 * MAX_SEEN
    changes.rows_changed([batch(0, BatchState.ACKED)])  # long forgotten
    assert len(sink.records) == 2 * MAX_SEEN + 1
    last = 2 * MAX_SEEN - 1
    changes.rows_changed([batch(last, BatchState.ACKED, checkpoint=5)])
    told = [record for record in sink.records[2 * MAX_SEEN + 1 :] if isinstance(record, BatchChange)]
    assert [(each.batch, each.state, each.checkpoint) for each in told] == [(f"batch-{last}", "checkpoint", 5)]


def test_hooks_that_are_asked_for_a_whole_batch_belong_to_no_share_of_groups() -> None:
    for rate in (0.0, 0.01, 0.5):
        sink = KeptRecords(rate)
        ChangeRecords(sink).hooks_asked("meta_info", 0.0)
        assert [type(record) for record in sink.records] == [Span] * (rate > 0)
