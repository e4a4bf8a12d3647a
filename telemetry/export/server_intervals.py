"""Turns moments recorded by the server into intervals: parts of a read, states of groups, pauses of engines."""

from collections.abc import Iterator
from typing import NamedTuple

from forebay.telemetry.tracing.records import GroupChange, Read, Record, Weights

LAST_STATES = frozenset({"acked", "discarded"})
"""Final states of a group."""


class ServerInterval(NamedTuple):
    """An interval from ``begin`` to ``end``, both in nanoseconds since the Unix epoch."""

    name: str
    begin: int
    end: int
    group: str = ""
    """The group whose state it is; "" for paused engines."""
    batch: str = ""
    is_open: bool = False
    """Whether it had not ended when its log ended."""


def parts_of_read(read: Read) -> list[ServerInterval]:
    """The recorded parts of a read: ``wait`` for groups, ``hooks``, and ``delivery`` until its last byte."""
    ends = {"wait": read.satisfied, "hooks": read.judged, "delivery": read.sent}
    parts, begin = [], read.t
    for name, end in ends.items():
        if end >= begin:
            parts.append(ServerInterval(name, begin, end))
            begin = end
    return parts


class ServerIntervals:
    """Processes the records of a log in order."""

    def __init__(self) -> None:
        self._states: dict[str, GroupChange] = {}
        self._paused: Weights | None = None

    def of(self, record: Record) -> ServerInterval | None:
        """The interval that ends with ``record``."""
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
        """The intervals that had not ended at ``end``, the end of the log."""
        for change in self._states.values():
            yield self._state(change, max(end, change.t))._replace(is_open=True)
        if self._paused is not None:
            yield ServerInterval("engines paused", self._paused.t, max(end, self._paused.t), is_open=True)
        self._states.clear()
        self._paused = None

    @staticmethod
    def _state(change: GroupChange, end: int) -> ServerInterval:
        return ServerInterval(change.state, change.t, end, change.group, change.batch)
