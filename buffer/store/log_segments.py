"""The append-only log: numbered segment files of consecutive records."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from forebay.core.files import FOLDER_MODE, write_durably
from forebay.core.records.disk_files import AppendFile, BytesLike, Files
from forebay.core.records.log_records import LogEntry, Position, Record, encode_start
from forebay.core.records.log_scan import LogDamage, SegmentScan
from forebay.core.records.rows import Location, SampleRow

SEGMENT_BYTES = 256 * 1024 * 1024
PROBE_NAME = "probe.tmp"
SEGMENT_NAME = re.compile(r"(?!9{9})([0-9]{8}|[1-9][0-9]{8})\.log")
"""Names that ``segment_path`` makes; other files in the folder are ignored."""

logger = logging.getLogger(__name__)


def segment_path(directory: Path, segment: int) -> Path:
    """The file of a segment. Raises ``OSError`` for a number that a later start would not recognise as a segment."""
    name = f"{segment:08d}.log"
    if not SEGMENT_NAME.fullmatch(name):
        raise OSError(0, f"no segment can be called {name}; stop the server and move files that do not belong to it")
    return directory / name


class SegmentLog:
    """Records in ``directory``; damaged ones are copied to ``quarantine``. Everything raises ``OSError``.

    Used from one thread. ``end`` is the position after the last record that the disk has confirmed.
    """

    def __init__(self, directory: Path, quarantine: Path, files: Files, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.end = Position(1, 0)
        self.num_torn_bytes = 0
        self._directory = directory
        self._quarantine = quarantine
        self._files = files
        self._segment_bytes = segment_bytes
        self._active: AppendFile | None = None
        self._sizes: dict[int, int] = {}
        self._quarantined: set[tuple[int, int]] = set()
        self._tail_is_confirmed = False

    @property
    def num_bytes(self) -> int:
        """Total length of all segments."""
        return sum(self._sizes.values())

    @property
    def num_quarantined(self) -> int:
        """Number of damaged places found since the log was opened."""
        return len(self._quarantined)

    @property
    def num_segments(self) -> int:
        """Number of segment files."""
        return len(self._sizes)

    @property
    def closed(self) -> dict[int, int]:
        """Lengths of all segments except the last, by number, ascending. Callable from any thread."""
        last = self.end.segment
        return {number: size for number, size in sorted(self._sizes.copy().items()) if number < last}

    def has(self, segment: int) -> bool:
        """Whether the segment exists. Callable from any thread."""
        return segment in self._sizes

    def open(self) -> None:
        """Find the segments and open the last one, or start a new log; must be followed by a ``scan``."""
        self._sizes = {number: self._size_on_disk(number) for number in self._numbers()}
        last = max(self._sizes, default=1)
        self._active = self._files.open_append(segment_path(self._directory, last))
        # A killed process may have left data and a file name that are not yet on disk; what is read must be durable.
        self._active.sync()
        self._files.sync_directory(self._directory)
        self._sizes.setdefault(last, 0)
        self.end = Position(last, self._sizes[last])
        self.num_torn_bytes = 0
        self._quarantined.clear()
        self._tail_is_confirmed = False

    def holds(self, position: Position) -> bool:
        """Whether ``position`` is within the log."""
        return position.segment in self._sizes and position.offset <= self._sizes[position.segment]

    def scan(self, start: Position) -> Iterator[Record]:
        """Yield every record from ``start`` to the end; damaged ones are set aside.

        The first scan after ``open`` cuts a torn tail. Later, everything up to ``end`` was confirmed.
        """
        for segment in sorted(number for number in self._sizes if number >= start.segment):
            offset = start.offset if segment == start.segment else 0
            if offset < self._sizes[segment]:
                yield from self._scan_segment(segment, offset)
        self._tail_is_confirmed = True

    def _scan_segment(self, segment: int, offset: int) -> Iterator[Record]:
        size = self._sizes[segment]
        file = self._files.open_read(segment_path(self._directory, segment))
        try:
            for part in SegmentScan(file, segment, size).parts(offset):
                if isinstance(part, Record):
                    yield part
                # At the very end after a kill, this was never acknowledged; anywhere else it was.
                elif part.end == size and segment == self.end.segment and not self._tail_is_confirmed:
                    self._cut_tail(part)
                else:
                    self._set_aside(segment, part, file.read(part.start, part.end - part.start))
                    # Kept without its body, the sample costs only its group, when that is requested; dropped, it would
                    # leave an unexplained gap.
                    yield from part.records
        finally:
            file.close()

    def _cut_tail(self, damage: LogDamage) -> None:
        self.num_torn_bytes += damage.end - damage.start
        logger.warning("cut an unfinished write of %d bytes off the log", damage.end - damage.start)
        self.end = Position(self.end.segment, damage.start)
        self.cut()

    def _set_aside(self, segment: int, damage: LogDamage, data: bytes) -> None:
        self._quarantined.add((segment, damage.start))
        path = self._quarantine / f"{segment:08d}-{damage.start:012d}.bin"
        logger.error("bytes %d to %d of segment %d are damaged; copied to %s", *damage[:2], segment, path)
        for sample in (row for record in damage.records for row in record.rows if isinstance(row, SampleRow)):
            place = (sample.uid, sample.group_id, sample.run_id)
            logger.error("they include the body of sample %r, of group %s of run %s: the group cannot be read", *place)
        # Copied for a human. The log itself is unchanged, because the index has its offsets.
        try:
            self._quarantine.mkdir(FOLDER_MODE, exist_ok=True)
            write_durably(path, data)
        except OSError as error:  # a full disk must not prevent reading the intact records
            logger.warning("the damaged bytes could not be copied: %s", error)

    def write(self, entries: Sequence[LogEntry]) -> list[Location | None]:
        """Append ``entries`` with one write and wait for the disk. After an ``OSError`` call ``cut``."""
        # Before a write, never within one: the entries of one commit must be in one segment.
        if self.end.offset >= self._segment_bytes:
            self._roll()
        buffers, locations, end = self._lay_out(entries)
        active = self._require_active()
        active.write(buffers)
        # One `fdatasync` for all entries; it also writes the new length of the file.
        active.sync()
        # Only now: data after `end` does not count, and is cut after a failure.
        self.end = end
        self._sizes[end.segment] = end.offset
        return locations

    def _lay_out(self, entries: Sequence[LogEntry]) -> tuple[list[BytesLike], list[Location | None], Position]:
        segment, offset = self.end
        buffers: list[BytesLike] = []
        locations: list[Location | None] = []
        for entry in entries:
            buffers.append(encode_start(entry, segment, offset))
            body, length = entry.body, entry.body_length
            offset += entry.num_bytes
            if body is None:
                locations.append(None)
                continue
            locations.append(Location(segment, offset - length, length))
            if length:
                buffers.append(body)
        return buffers, locations, Position(segment, offset)

    def _roll(self) -> None:
        """Start the next segment; its name is on disk before anything is written to it."""
        segment = self.end.segment + 1
        active = self._files.open_append(segment_path(self._directory, segment))
        try:
            active.sync()
            self._files.sync_directory(self._directory)
        except OSError:
            active.close()
            raise
        self._require_active().close()
        self._active = active
        self.end = Position(segment, 0)
        self._sizes[segment] = 0

    def cut(self) -> None:
        """Cut everything after ``end`` off the log, and wait for the disk."""
        # Starting a segment may have failed between the new name and its first record.
        for segment in self._numbers():
            if segment > self.end.segment:
                self._files.remove(segment_path(self._directory, segment))
        self._files.sync_directory(self._directory)
        # A descriptor that has reported an error may not report the next one.
        self.close()
        self._active = self._files.open_append(segment_path(self._directory, self.end.segment))
        # Half-written or unconfirmed data must not be found intact by the next scan.
        self._active.truncate(self.end.offset)
        self._active.sync()
        self._sizes[self.end.segment] = self.end.offset

    def remove(self, segment: int) -> None:
        """Delete a segment other than the last one, whose number must not be reused."""
        if segment >= self.end.segment:
            raise ValueError(f"segment {segment} is being written to")
        self._files.remove(segment_path(self._directory, segment))
        # Only after the file is deleted, because readers may ask for it until then.
        del self._sizes[segment]
        self._files.sync_directory(self._directory)

    def parts_of(self, segment: int) -> Iterator[Record | LogDamage]:
        """Yield every record and damage of a closed segment, without setting it aside. Callable from any thread."""
        file = self._files.open_read(segment_path(self._directory, segment))
        try:
            yield from SegmentScan(file, segment, self._sizes[segment]).parts(0)
        finally:
            file.close()

    def probe(self, num_bytes: int) -> None:
        """Raise ``OSError`` unless the disk accepts ``num_bytes`` more."""
        path = self._directory / PROBE_NAME
        file = self._files.open_append(path)
        try:
            # A killed probe may have left a file.
            file.truncate(0)
            file.write([b"\x55" * num_bytes])
            file.sync()
        finally:
            file.close()
            self._files.remove(path)

    def close(self) -> None:
        """Close the descriptor."""
        active, self._active = self._active, None
        if active is not None:
            with suppress(OSError):  # everything that matters is synced already
                active.close()

    def _require_active(self) -> AppendFile:
        if self._active is None:
            raise OSError("the log has no open segment")
        return self._active

    def _numbers(self) -> list[int]:
        names = map(SEGMENT_NAME.fullmatch, self._files.list(self._directory))
        return sorted(int(name[1]) for name in names if name is not None)

    def _size_on_disk(self, segment: int) -> int:
        file = self._files.open_read(segment_path(self._directory, segment))
        try:
            return file.size()
        finally:
            file.close()
