"""Exports a recording: encodes its records one after another and writes them to a new file."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Self

import msgspec

from forebay.core.errors import ForebayError, InvalidInput, StorageFailed
from forebay.core.files import FILE_MODE, sync_directory
from forebay.core.records.record_file import SEGMENT, encode_record
from forebay.core.records.recording_rows import EndRow, FileRow, LeftOutGroup, RecordedRun
from forebay.core.records.rows import BatchRow, ColumnsRow, GroupRow, Location, StoredSample, to_columns
from forebay.replay.errors import NotRecorded, RecordingDamaged
from forebay.replay.frames import compressor
from forebay.replay.recording import Recording

RECORDING_TYPE = "application/vnd.forebay.recording"
"""The content type."""


class RecordEncoder:
    """Encodes a file record by record: the run, then for each group its samples and its row, then the batches.

    Raises ``MissingExtra`` without zstandard.
    """

    def __init__(self, run: RecordedRun, steps: str = "") -> None:
        """``steps`` is the selection, if only part of the run is exported."""
        self.made = EndRow(by=f"forebay {version('forebay')}", at_s=time.time(), steps=steps)
        self._run = run
        self._compress = compressor()
        self._offset = 0
        self._counted = 0, 0
        """Samples and bytes of the groups encoded so far."""

    def run(self) -> bytes:
        """The first record."""
        return self._record(self._run)

    def samples(self, samples: Sequence[StoredSample], bodies: Sequence[bytes]) -> bytes:
        """Samples of one group, with bodies compressed together: at most ``recording.PART_BYTES``, or a single body."""
        first, columns, offset = samples[0].row, [], 0
        for sample, body in zip(samples, bodies, strict=True):
            columns.append(to_columns(StoredSample(sample.row, Location(SEGMENT, offset, len(body)))))
            offset += len(body)
        row = ColumnsRow(
            run_id=self._run.run_id,
            group_id=first.group_id,
            instance_id=first.instance_id,
            epoch=first.epoch,
            segment=SEGMENT,
            samples=columns,
        )
        self.made.num_samples += len(samples)
        self.made.num_bytes += offset
        return self._record(row, self._compress(b"".join(bodies)))

    def group(self, group: GroupRow, left_out: str = "") -> bytes:
        """A group. ``left_out`` gives the reason if samples cannot be read; then none of its samples count."""
        if left_out:
            self.made.num_samples, self.made.num_bytes = self._counted
            self.made.left_out.append(LeftOutGroup(group.group_id, group.instance_id, group.epoch, left_out))
        self._counted = self.made.num_samples, self.made.num_bytes
        self.made.num_groups += 1
        # A traceback may contain private details.
        return self._record(msgspec.structs.replace(group, detail=""))

    def batch(self, batch: BatchRow) -> bytes:
        """A batch, without the output of hooks."""
        self.made.num_batches += 1
        return self._record(msgspec.structs.replace(batch, meta_info={}))

    def end(self, failure: ForebayError | None = None) -> bytes:
        """The last record. ``failure`` means that the rest cannot be sent."""
        if failure is not None:
            self.made.failure, self.made.failure_hint = failure.message, failure.hint
        return self._record(self.made)

    def _record(self, row: FileRow, body: bytes = b"") -> bytes:
        record = encode_record(row, body, self._offset)
        self._offset += len(record)
        return record


class NewRecording:
    """Writes a new recording, which appears at ``path`` when the ``with`` block ends without an error.

    Raises ``InvalidInput`` if ``path`` exists or has no parent folder; ``StorageFailed`` on a write error;
    ``ForebayError`` if the recording is incomplete.
    """

    def __init__(self, path: Path) -> None:
        check_new(path)
        self._path = path
        self._draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self.made: EndRow
        """The last record of the file; set after the block."""

    def __enter__(self) -> Self:
        with self._disk():
            fd = os.open(self._draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
            self._file = os.fdopen(fd, "wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with suppress(OSError):
                self._file.close()
            self._draft.unlink(missing_ok=True)

    def write(self, piece: bytes) -> int:
        """Append bytes. Returns their number."""
        with self._disk():
            return self._file.write(piece)

    def _finish(self) -> None:
        with self._disk():
            self._file.flush()
            os.fsync(self._file.fileno())
        self.made = _whole(self._draft)
        with self._disk():
            self._publish()
            sync_directory(self._path.absolute().parent)

    def _publish(self) -> None:
        """Give the file its name. Raises ``InvalidInput`` if ``path`` has been created meanwhile."""
        try:
            os.link(self._draft, self._path)
        except OSError:  # it exists, or the file system has no hard links
            check_new(self._path)
            self._draft.replace(self._path)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "the folder must be writable and have room for the whole recording; the partial file was removed"
            raise StorageFailed(
                error.strerror or str(error), what=f"{self._path} cannot be written", hint=hint
            ) from error


def check_new(path: Path) -> None:
    """Raise ``InvalidInput`` unless a file can be created at ``path``. Nothing is ever overwritten."""
    if os.path.lexists(path):
        raise InvalidInput(f"{path} already exists", hint="choose another FILE, or remove it", field="file")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"there is no folder {str(path.absolute().parent)!r}", hint="create it first", field="file")


def _whole(draft: Path) -> EndRow:
    """The last record of a file sent by a server. Raises ``ForebayError`` unless the file is complete."""
    try:
        with Recording.open(draft) as recording:
            made = recording.made
    except (RecordingDamaged, NotRecorded) as error:
        hint = "export again; the incomplete file was removed"
        raise ForebayError(f"the server's reply is not a whole recording: {error.message}", hint=hint) from None
    if made.failure:
        raise ForebayError(made.failure, hint=made.failure_hint)
    return made
