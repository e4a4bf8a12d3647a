"""What lasted, out of the moments that a server records: parts of a read, states of groups, pauses of engines."""

from collections.abc import Iterator
from typing import NamedTuple

from forebay.telemetry.tracing.records import GroupChange, Read, Record, Weights

LAST_STATES = frozenset({"acked", "discarded"})
"""A group in one of these waits for nothing."""


class ServerInterval(NamedTuple):
    """Something that lasted from ``begin`` to ``end``, both in nanoseconds since the Unix epoch."""

    name: str
    begin: int
    end: int
    group: str = ""
    """Whose state it is; "" for engines that are paused."""
    batch: str = ""
    is_open: bool = False
    """It had not ended when its log did."""


def parts_of_read(read: Read) -> list[ServerInterval]:
    """Its ``wait`` for groups, the ``hooks``, and the ``delivery`` to its last byte: those that the record tells of."""
    ends = {"wait": read.satisfied, "hooks": read.judged, "delivery": read.sent}
    parts, begin = [], read.t
    for name, end in ends.items():
        if end >= begin:
            parts.append(ServerInterval(name, begin, end))
            begin = end
    return parts


class ServerIntervals:
    """Goes over the records of a log in their order."""

    def __init__(self) -> None:
        self._states: dict[str, GroupChange] = {}
        self._paused: Weights | None = None

    def of(self, record: Record) -> ServerInterval | None:
        """What ends with ``record``."""
        if isinstance(record, GroupChange):
            before = self._states.pop(record.group, None)
            if record.state not in LAST_STATES:
                self._states[record.group] = record
            return self._state(before, max(record.t, before.t)) if before else None
        if isinstance(record, Weights) and record.what != "announced":
            before_pause, self._paused = self._paused, record if record.what == "paused" else None
            if before_pause is not None:
                return ServerInterval("engines paused", before_pause.t, max(record.t, before_pause.t))
        return None

    def rest(self, end: int) -> Iterator[ServerInterval]:
        """What had not ended at ``end``, when the log did."""
        for change in self._states.values():
            yield self._state(change, max(end, change.t))._replace(is_open=True)
        if self._paused is not None:
            yield ServerInterval("engines paused", self._paused.t, max(end, self._paused.t), is_open=True)
        self._states.clear()
        self._paused = None

    @staticmethod
    def _state(change: GroupChange, end: int) -> ServerInterval:
        return ServerInterval(change.state, change.t, end, change.group, change.batch)
