"""What of a segment must be written again before it is removed. Used in any thread, by one caller at a time."""

import logging
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from forebay.buffer.store import clearing_queries, queries
from forebay.buffer.store.bodies import BodyReader
from forebay.buffer.store.clearing_queries import GroupKey
from forebay.buffer.store.index import batches
from forebay.buffer.store.known import Known
from forebay.buffer.store.records import Record
from forebay.buffer.store.rows import ColumnsRow, Location, Row, StoredSample, to_columns
from forebay.buffer.store.segments import SegmentLog
from forebay.core.errors import StorageFailed

GROUPS_PER_ENTRY = 16

logger = logging.getLogger(__name__)


class Addition(NamedTuple):
    """An append to make."""

    rows: Sequence[Row]
    body: bytes | None


class Clearing:
    """The samples of one segment: moved are those of the groups in ``moved``, of the others the columns are kept."""

    def __init__(self, log: SegmentLog, bodies: BodyReader, segment: int, moved: Collection[GroupKey]) -> None:
        self._log = log
        self._bodies = bodies
        self._segment = segment
        self._moved = moved
        self._whole: set[Location] = set()
        """Where the bodies of undamaged records lie."""
        self._told: dict[GroupKey, set[int]] = {}
        """By group, the segments with bodies of which this one tells: itself, and those whose columns it has."""

    def verify(self, connection: sqlite3.Connection) -> None:
        """Read the whole segment, and compare it with the index: what that lacks would be lost.

        Raises ``StorageFailed`` if it lacks something.
        """
        self._whole.clear()
        known = Known(connection)
        for part in self._log.parts_of(self._segment):
            if not isinstance(part, Record):
                logger.warning("bytes %d to %d of segment %d are damaged", *part, self._segment)
                continue
            for row in part.rows:
                if not known.has(row):
                    raise StorageFailed(
                        f"the index lacks a {type(row).__name__} that is in it",
                        what=f"segment {self._segment} cannot be removed",
                        hint="stop the server, delete index.sqlite*, and start it again",
                    )
            if part.location is not None:
                self._whole.add(part.location)

    def keys(self, connection: sqlite3.Connection) -> list[GroupKey]:
        """The groups for which there may be something to write."""
        for key in clearing_queries.groups(connection, self._segment):
            self._told[key] = {self._segment}
        for run_id, group_id, segment in clearing_queries.foreign_columns(connection, self._segment):
            self._told.setdefault((run_id, group_id), set()).add(segment)
        return list(self._told)

    def additions(self, connection: sqlite3.Connection, keys: Sequence[GroupKey]) -> list[Addition]:
        """What to append for these groups, in order. Raises ``StorageFailed`` if a body to move is damaged."""
        made: list[Addition] = []
        columns: list[ColumnsRow] = []
        for key in keys:
            samples = queries.group_samples(connection, *key)
            if key in self._moved:
                made += self._moves(samples)
            columns += self._columns(key, samples)
        return made + [Addition(part, None) for part in batches(columns, GROUPS_PER_ENTRY)]

    def _moves(self, samples: Sequence[StoredSample]) -> Iterator[Addition]:
        moving = [sample for sample in samples if sample.location.segment == self._segment]
        locations = [sample.location for sample in moving]
        if not self._whole.issuperset(locations):
            raise StorageFailed(
                "a body that is still needed is damaged",
                what=f"segment {self._segment} cannot be removed",
                hint="it stays until its group is delivered or discarded",
            )
        for sample, body in zip(moving, self._bodies.read(locations), strict=True):
            yield Addition([sample.row], body)

    def _columns(self, key: GroupKey, samples: Sequence[StoredSample]) -> Iterator[ColumnsRow]:
        row = samples[0].row
        for segment in sorted(self._told[key]):
            is_moved = segment == self._segment and key in self._moved
            left = [] if is_moved else [sample for sample in samples if sample.location.segment == segment]
            yield ColumnsRow(
                run_id=row.run_id,
                group_id=row.group_id,
                instance_id=row.instance_id,
                epoch=row.epoch,
                segment=segment,
                samples=[to_columns(sample) for sample in left],
            )
