"""A recording of a run or of engine calls, in a file ``*.fbr``: ``with Recording.open(path) as recording: …``."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from forebay.core.binary_sample import as_json
from forebay.core.errors import StorageFailed
from forebay.core.records.record_file import DamagedRecord, FileRecord, RecordFile
from forebay.core.records.recording_rows import CallRow, EndRow, FileRow, LeftOutGroup, RecordedRun
from forebay.core.records.rows import (
    BatchRow,
    ColumnsRow,
    GroupRow,
    Location,
    SampleRow,
    StoredSample,
    from_columns,
)
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.frames import Frames
from forebay.replay.options import parse_steps
from forebay.replay.recorded_calls import RecordedCall, decode_call
from forebay.replay.recorded_sample import check_group, check_payload, check_sample
from forebay.replay.step_filter import chosen_groups

RowT = TypeVar("RowT", RecordedRun, EndRow)
FileRowT = TypeVar("FileRowT", ColumnsRow, CallRow)

MAX_BODY_BYTES = 1 << 30
"""The largest body of a sample. A small file may claim any size, so this is checked before memory is allocated."""
PART_BYTES = 1 << 20
"""The size up to which bodies are compressed together; a larger body is compressed alone."""
WHAT_MAKES_ONE = "forebay recording export RUN FILE and forebay engine record create recordings"
AGAIN = "export the run again, or copy the file again from an intact copy"
OTHER_VERSION = "export or record it again, or read it with the version of Forebay that wrote it"
OLD_FORMAT = b"SQLite format 3\0"
_SAMPLE_FIELDS = ("uid", "instance_id", "group_id", "epoch", "slot", "fork", "reward", "error")


class Damage(NamedTuple):
    """A part of a recording that cannot be read."""

    place: str
    """``group 4f0c…`` or ``byte 4096``, for example."""
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"

    @classmethod
    def of(cls, error: RecordingDamaged) -> Self:
        """The damage described by an error."""
        return cls(error.place, error.detail)


class Recording:
    """A file that never changes; safe for several threads.

    Opening it reads every row and verifies its checksum. Bodies are verified when they are read.
    """

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The recording in the file ``path``, for ``with``. Raises as the constructor does."""
        return cls(path)

    def __init__(self, path: Path | str, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """Raises ``FileNotFoundError``; ``RecordingDamaged`` if the file is damaged or of another kind or format."""
        self.path = Path(path)
        self._max_body_bytes = max_body_bytes
        self._run: RecordedRun | None = None
        self._end: EndRow | None = None
        self._groups: dict[str, GroupRow] = {}
        self._parts: dict[str, list[int]] = {}
        """By group, the offsets of the records with its samples."""
        self._batches: list[BatchRow] = []
        self._calls: list[tuple[int, int]] = []
        """Numbers and record offsets of the calls."""
        self._frames = Frames()
        self._file = open_file(self.path)
        try:
            self._load()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def has_run(self) -> bool:
        """Whether it records a run, not engine calls."""
        return self._run is not None

    @property
    def run(self) -> RecordedRun:
        """The recorded run. Raises ``NotRecorded`` if the file has engine calls."""
        return self._of_a_run(self._run)

    @property
    def made(self) -> EndRow:
        """Facts about the export. Raises as ``run`` does."""
        return self._of_a_run(self._end)

    @cached_property
    def left_out(self) -> dict[str, LeftOutGroup]:
        """By id, the groups that were exported without their samples."""
        return {each.group_id: each for each in self._end.left_out} if self._end is not None else {}

    @property
    def num_calls(self) -> int:
        """The number of engine calls."""
        return len(self._calls)

    @property
    def end(self) -> int:
        """The offset at which the last whole record ends."""
        return self._file.end

    def groups(self, steps: str | Sequence[tuple[int, int]] | None = None) -> list[GroupRow]:
        """Every group, in the order in which they opened.

        ``steps``, such as ``"50-60,70"``, selects the groups in the batches of these steps, in order of delivery.
        Raises ``NotRecorded``, or ``InvalidInput`` if ``steps`` cannot be parsed.
        """
        groups = list(self._groups.values())
        if steps is None:
            return groups
        return chosen_groups(groups, self.batches(), parse_steps(steps) if isinstance(steps, str) else steps)

    def batches(self) -> list[BatchRow]:
        """Every batch, by its number."""
        return list(self._batches)

    def samples(self, group_id: str) -> list[StoredSample]:
        """Every sample that names the group, including late and surplus ones, in order of arrival.

        Raises ``NotRecorded``; ``RecordingDamaged`` for a group in ``left_out``.
        """
        if group_id not in self._groups:
            raise NotRecorded(f"{self.path.name} has no group {group_id!r}", hint="groups() lists the recorded groups")
        if (left_out := self.left_out.get(group_id)) is not None:
            reason = f"its samples were skipped by the export: {left_out.reason}"
            hint = "forebay recording show FILE lists such groups; export again from a server with intact bodies"
            raise self._damaged(f"group {group_id}", reason, hint)
        return [sample for offset in self._parts.get(group_id, ()) for sample in self._samples_of(offset)]

    def body(self, sample: StoredSample) -> bytes:
        """The body of a sample, unchanged. Raises ``RecordingDamaged``, also if a write would reject the body."""
        return self.bodies([sample])[0]

    def bodies(self, samples: Sequence[StoredSample]) -> list[bytes]:
        """The bodies of samples, in this order; neighbours are decompressed together. Raises ``RecordingDamaged``."""
        found = list[bytes]()
        for offset, some in groupby(samples, lambda sample: sample.location.segment):
            content = self._content(offset)
            found += [self._checked(sample.row, _piece(content, sample.location)) for sample in some]
        return found

    def rows(self, steps: str | Sequence[tuple[int, int]] | None = None) -> Iterator[dict[str, Any]]:
        """Each sample as a dict, group by group. Groups in ``left_out`` have none.

        A row has the fields of the sample's body, then ``group_id``, ``epoch``, ``slot``, ``fork``, ``became``,
        ``reward`` and ``error`` as recorded, and its group's ``group_state`` and ``group_reason``. ``steps`` and the
        errors raised are as in ``groups`` and ``samples``.
        """
        for group in self.groups(steps):
            samples = [] if group.group_id in self.left_out else self.samples(group.group_id)
            of_group = {"group_state": group.state.value, "group_reason": group.reason}
            for sample, body in zip(samples, self.bodies(samples), strict=True):
                fields = {name: getattr(sample.row, name) for name in _SAMPLE_FIELDS} | {"became": sample.row.outcome}
                yield json.loads(as_json(body)) | fields | of_group  # msgspec rejects unpaired surrogates

    def calls(self) -> Iterator[RecordedCall]:
        """The engine calls, in the order of their requests. Raises ``RecordingDamaged``."""
        return (call for _, call in self.placed_calls())

    def placed_calls(self) -> Iterator[tuple[int, RecordedCall]]:
        """Each call with the offset of its record. Raises ``RecordingDamaged``."""
        return ((offset, self.call(offset)) for _, offset in self._calls)

    def call(self, offset: int) -> RecordedCall:
        """The call whose record is at ``offset``. Raises ``RecordingDamaged``."""
        row, record = self._read(offset, CallRow)
        try:
            return decode_call(row, self._file.body(record), self._frames)
        except (DamagedRecord, ValueError) as error:
            reason = error.reason if isinstance(error, DamagedRecord) else str(error)
        raise self._damaged(f"byte {offset}", f"the call there cannot be read: {reason}")

    def verify(self) -> list[Damage]:
        """Read all bodies. Returns the damaged groups and calls."""
        found = list[Damage]()
        for group_id, offsets in self._parts.items():
            for offset in offsets if group_id not in self.left_out else ():
                try:
                    self.bodies(self._samples_of(offset))
                except RecordingDamaged as error:
                    found.append(Damage.of(error))
        for _, offset in self._calls:
            try:
                self.call(offset)
            except RecordingDamaged as error:
                found.append(Damage.of(error))
        return found

    # --- the file

    def _load(self) -> None:
        try:
            for record in self._file.records():
                if self._end is not None:
                    raise DamagedRecord(record.offset, "data follows the end of the recording")
                self._take(record.row, record.offset)
        except DamagedRecord as error:
            if not error.offset:
                is_old = self._file.starts_with(OLD_FORMAT)
                reason = "it has an earlier format" if is_old else "it does not start with a record"
                raise RecordingDamaged(f"{self.path.name} is not a recording: {reason}", hint=WHAT_MAKES_ONE) from None
            raise self._damaged(f"byte {error.offset}", error.reason, AGAIN) from None
        except StorageFailed as error:
            raise RecordingDamaged(f"{self.path.name}: {error.message}", hint=OTHER_VERSION) from None
        self._calls.sort()
        self._check_end()

    def _take(self, row: FileRow, offset: int) -> None:
        try:
            match row:
                case RecordedRun() if self._run is None and not offset:
                    check_payload(row.payload)
                    self._run = row
                case ColumnsRow() if self._run is not None:
                    check_group(row)
                    self._parts.setdefault(row.group_id, []).append(offset)
                case GroupRow() if self._run is not None and row.group_id not in self._groups:
                    check_group(row)
                    self._groups[row.group_id] = row
                case BatchRow() if self._run is not None:
                    self._batches.append(row)
                case EndRow() if self._run is not None:
                    self._end = row
                case CallRow() if self._run is None:
                    self._calls.append((row.seq, offset))
                case _:
                    raise ValueError(f"{type(row).__name__} is not allowed here")
        except ValueError as error:
            raise DamagedRecord(offset, str(error)) from None

    def _check_end(self) -> None:
        size = self._file.size()
        if self._run is None and (self._calls or not size):
            return  # engine calls, which may be appended to: a killed recorder leaves an unfinished record
        if self._end is None or self._file.end != size:
            reason = f"its last record is missing after {self._file.end:,} bytes"
            message = f"{self.path.name} is cut off: {reason}"
            raise RecordingDamaged(message, hint=AGAIN, place="the file", detail=reason)
        found = len(self._groups), len(self._batches)
        if found != (self._end.num_groups, self._end.num_batches):
            raise self._damaged("the file", f"it has {found[0]} groups and {found[1]} batches, but its end differs")

    def _samples_of(self, offset: int) -> list[StoredSample]:
        """The samples of a record. Their location is the record's offset and their range in its decompressed body."""
        columns = self._read(offset, ColumnsRow)[0]
        samples = from_columns(columns)
        for sample in samples:
            sample.location = Location(offset, sample.location.offset, sample.location.length)
        return samples

    def _content(self, offset: int) -> bytes:
        """The concatenated bodies of a record. Raises ``RecordingDamaged``."""
        columns, record = self._read(offset, ColumnsRow)
        num_bytes = sum(sample.length for sample in columns.samples)
        most = self._max_body_bytes if len(columns.samples) == 1 else PART_BYTES
        try:
            return self._frames.content(self._file.body(record), num_bytes, most=most)
        except DamagedRecord as error:
            reason = error.reason
        except ValueError as error:
            reason = str(error)
        raise self._damaged(f"group {columns.group_id}", f"its bodies at byte {offset} cannot be read: {reason}")

    def _checked(self, sample: SampleRow, body: bytes) -> bytes:
        try:
            if len(body) > self._max_body_bytes:
                raise ValueError(f"it has {len(body):,} bytes: more than {self._max_body_bytes:,} are never written")
            check_sample(sample, body)
        except ValueError as error:
            place = f"group {sample.group_id}"
            raise self._damaged(place, f"the body of sample {sample.uid}: {error}") from None
        return body

    def _read(self, offset: int, kind: type[FileRowT]) -> tuple[FileRowT, FileRecord]:
        try:
            record = self._file.read(offset)
        except (DamagedRecord, OSError) as error:  # changed since it was opened
            raise self._damaged(f"byte {offset}", str(error)) from None
        assert isinstance(record.row, kind), "checked when the file was opened"
        return record.row, record

    def _of_a_run(self, found: RowT | None) -> RowT:
        if found is None:
            hint = "export a run with `forebay recording export RUN FILE`"
            raise NotRecorded(f"{self.path.name} has no run; it may hold engine calls", hint=hint)
        return found

    def _damaged(self, place: str, reason: str, hint: str = "") -> RecordingDamaged:
        return RecordingDamaged(f"{self.path.name}: {place}: {reason}", hint=hint, place=place, detail=reason)


def open_file(path: Path) -> RecordFile:
    """The file of a recording, before anything is read. Raises ``FileNotFoundError``, ``RecordingDamaged``."""
    try:
        if path.is_file():
            return RecordFile(path)
        reason = ""
    except PermissionError as error:
        raise RecordingDamaged(f"{path.name}: {error.strerror}") from None
    except OSError as error:  # the name is too long, for example
        reason = f": {error.strerror}"
    raise FileNotFoundError(f"there is no recording {str(path)!r:.200}{reason}")


def _piece(content: bytes, location: Location) -> bytes:
    return content[location.offset : location.offset + location.length]
