"""Many records as few changes: what the index does for a batch."""

from collections.abc import Iterable
from typing import NamedTuple

from forebay.buffer.store.rows import (
    BatchRow,
    CheckpointRow,
    ColumnsRow,
    GroupRow,
    Location,
    Row,
    RunRow,
    SampleRow,
    TickRow,
)
from forebay.core.group import GroupState


def implied_group(row: SampleRow) -> GroupRow:
    """The group that a member opens when it has no row of its own yet."""
    return GroupRow(
        run_id=row.run_id,
        group_id=row.group_id,
        instance_id=row.instance_id,
        epoch=row.epoch,
        state=GroupState.OPEN,
        opened_s=row.at_s,
        number=row.group_number,
    )


class ActiveTime(NamedTuple):
    """A change of a run's active seconds: to ``seconds``, or only up to them."""

    seconds: float
    is_set: bool


class Fold:
    """The changes of several records, each key once, in the order in which the keys came.

    Beside each row stands the segment in which it was found.
    """

    def __init__(self) -> None:
        self.runs: dict[str, tuple[RunRow, int]] = {}
        self.active: dict[str, ActiveTime] = {}
        self.opened: dict[tuple[str, str], tuple[GroupRow, int]] = {}
        """Groups as they were first seen."""
        self.groups: dict[tuple[str, str], tuple[GroupRow, int]] = {}
        """Groups that have a row of their own, as they were last."""
        self.samples: dict[tuple[str, str, int], list[tuple[SampleRow, Location]]] = {}
        """By the group that they name, and the segment."""
        self.columns: dict[tuple[str, str, int], tuple[ColumnsRow, int]] = {}
        self.batches: dict[tuple[str, str], tuple[BatchRow, int]] = {}
        self.checkpoints: dict[tuple[str, int], tuple[CheckpointRow, int]] = {}

    def add(self, rows: Iterable[Row], location: Location | None, segment: int) -> None:
        """Take in one record of ``segment``."""
        for row in rows:
            if isinstance(row, SampleRow):
                assert location is not None
                self._add_sample(row, location)
            elif isinstance(row, GroupRow):
                self.opened.setdefault((row.run_id, row.group_id), (row, segment))
                self.groups[row.run_id, row.group_id] = row, segment
            elif isinstance(row, RunRow):
                self.runs[row.run_id] = row, segment
                self._raise_active(row.run_id, row.active_s)
            elif isinstance(row, TickRow):
                self.active[row.run_id] = ActiveTime(row.active_s, is_set=True)
            elif isinstance(row, BatchRow):
                self.batches[row.run_id, row.batch_id] = row, segment
            elif isinstance(row, CheckpointRow):
                self.checkpoints[row.run_id, row.step] = row, segment
            else:
                self._add_columns(row, segment)

    def _add_sample(self, row: SampleRow, location: Location) -> None:
        key = (row.run_id, row.group_id)
        self.samples.setdefault((*key, location.segment), []).append((row, location))
        self._raise_active(row.run_id, row.at_s)
        if row.outcome == "member" and key not in self.opened:
            self.opened[key] = implied_group(row), location.segment

    def _add_columns(self, row: ColumnsRow, segment: int) -> None:
        key = (row.run_id, row.group_id, row.segment)
        self.samples.pop(key, None)  # they are among its own
        self.columns[key] = row, segment

    def _raise_active(self, run_id: str, seconds: float) -> None:
        known = self.active.get(run_id)
        if known is None:
            self.active[run_id] = ActiveTime(seconds, is_set=False)
        elif seconds > known.seconds:
            self.active[run_id] = ActiveTime(seconds, known.is_set)
