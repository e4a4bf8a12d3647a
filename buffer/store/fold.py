"""Many records as few changes: what the index does for a batch."""

from collections.abc import Iterable
from typing import NamedTuple

from forebay.buffer.store.rows import GroupRow, Location, Row, RunRow, SampleRow, TickRow
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
    )


class ActiveTime(NamedTuple):
    """A change of a run's active seconds: to ``seconds``, or only up to them."""

    seconds: float
    is_set: bool

    def raised(self, seconds: float) -> "ActiveTime":
        """This change, then one up to ``seconds``."""
        return ActiveTime(max(self.seconds, seconds), self.is_set)


class Fold:
    """The changes of several records, each key once, in the order in which the keys came."""

    def __init__(self) -> None:
        self.runs: dict[str, RunRow] = {}
        self.active: dict[str, ActiveTime] = {}
        self.opened: dict[tuple[str, str], GroupRow] = {}
        """Groups as they were first seen."""
        self.groups: dict[tuple[str, str], GroupRow] = {}
        """Groups that have a row of their own, as they were last."""
        self.samples: dict[tuple[str, str], list[tuple[SampleRow, Location]]] = {}
        """By the group that they name."""

    def add(self, rows: Iterable[Row], location: Location | None) -> None:
        """Take in one record."""
        for row in rows:
            if isinstance(row, SampleRow):
                assert location is not None
                self._add_sample(row, location)
            elif isinstance(row, GroupRow):
                self.opened.setdefault((row.run_id, row.group_id), row)
                self.groups[row.run_id, row.group_id] = row
            elif isinstance(row, RunRow):
                self.runs[row.run_id] = row
                self._raise_active(row.run_id, row.active_s)
            elif isinstance(row, TickRow):
                self.active[row.run_id] = ActiveTime(row.active_s, is_set=True)

    def _add_sample(self, row: SampleRow, location: Location) -> None:
        key = (row.run_id, row.group_id)
        self.samples.setdefault(key, []).append((row, location))
        self._raise_active(row.run_id, row.at_s)
        if row.outcome == "member" and key not in self.opened:
            self.opened[key] = implied_group(row)

    def _raise_active(self, run_id: str, seconds: float) -> None:
        known = self.active.get(run_id)
        self.active[run_id] = ActiveTime(seconds, is_set=False) if known is None else known.raised(seconds)
