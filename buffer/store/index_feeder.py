"""Keeps the index in step with the log, off the path of the commits."""

import logging
import sqlite3
from collections import deque
from collections.abc import Sequence

import msgspec

from forebay.buffer.store.index import START, Index, batches, is_corrupt
from forebay.buffer.store.log_records import LogEntry, Position
from forebay.buffer.store.log_segments import SegmentLog
from forebay.buffer.store.rows import Location, Row

BACKLOG_ENTRIES = 4096
"""With so many entries waiting, a commit waits for the index."""
SLICE_ENTRIES = 512
CATCH_UP_ENTRIES = 4096

logger = logging.getLogger(__name__)


class _Waiting(msgspec.Struct, frozen=True, gc=False):
    rows: Sequence[Row]
    location: Location | None
    end: Position


class Feeder:
    """Durable entries on their way into the index. Used from the writer's thread; raises ``sqlite3.Error``."""

    def __init__(self, log: SegmentLog, index: Index) -> None:
        self._log = log
        self._index = index
        self._backlog: deque[_Waiting] = deque()

    @property
    def has_backlog(self) -> bool:
        """Whether the index is behind the log."""
        return bool(self._backlog)

    @property
    def is_pressing(self) -> bool:
        """Whether so much waits that feeding cannot be put off."""
        return len(self._backlog) >= BACKLOG_ENTRIES

    def open(self) -> None:
        """Open the index and bring it up to date from the log."""
        self._index.open()
        if self._index.position != START and not self._log.holds(self._index.position):
            logger.warning("the index is ahead of the log; building it anew")
            self._index.clear()
        try:
            self._catch_up()
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.rebuild()

    def rebuild(self) -> None:
        """Throw the index away and read the whole log."""
        logger.warning("building the index anew from the log")
        self._index.clear()
        self._catch_up()

    def _catch_up(self) -> None:
        self._backlog.clear()
        for records in batches(self._log.scan(self._index.position), CATCH_UP_ENTRIES):
            self._index.apply(
                [(record.rows, record.location, record.end.segment) for record in records], records[-1].end
            )
        if self._index.position != self._log.end:
            self._index.apply([], self._log.end)

    def add(self, entries: Sequence[LogEntry], locations: Sequence[Location | None]) -> None:
        """Take in entries that the log has confirmed."""
        end = self._log.end
        self._backlog.extend(
            _Waiting(entry.rows, location, end) for entry, location in zip(entries, locations, strict=True)
        )

    def feed(self) -> None:
        """Bring one slice into the index; whole commits only, so that its position is exact."""
        if not self._backlog:
            return
        taken: list[_Waiting] = []
        while self._backlog and (len(taken) < SLICE_ENTRIES or self._backlog[0].end == taken[-1].end):
            taken.append(self._backlog.popleft())
        try:
            self._index.apply([(each.rows, each.location, each.end.segment) for each in taken], taken[-1].end)
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            self.rebuild()

    def flush(self) -> None:
        """Bring everything into the index."""
        while self._backlog:
            self.feed()

    def forget(self) -> None:
        """Drop what waits; ``open`` will read it from the log again."""
        self._backlog.clear()

    def close(self) -> None:
        """Close the index."""
        self._index.close()
