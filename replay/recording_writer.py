"""Writing a recording: under another name beside it, and renamed once it is whole and on the disk."""

import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Self

import msgspec

from forebay.core.errors import InvalidInput, MissingExtra, StorageFailed
from forebay.core.files import sync_directory
from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord
from forebay.replay.recording_reader import LeftOutGroup, RecordingMade
from forebay.replay.recording_schema import (
    BATCHES,
    GROUPS,
    MAX_BODY_BYTES,
    META,
    SAMPLES,
    checksum,
    create,
)
from forebay.replay.recording_seal import seal

LEVEL = 3
"""zstd's default: more takes far more time for little."""

_encode = msgspec.json.Encoder().encode


class RecordingWriter:
    """Makes the file ``path``, which is there once the ``with`` block has ended without an error, and not before.

    Raises ``InvalidInput`` where something is there already, or no folder for it; ``StorageFailed`` where the disk
    takes no more; ``MissingExtra`` without ``zstandard``. No more than a sample is in memory.
    """

    def __init__(self, path: Path, run: RunRecord, *, steps: str = "") -> None:
        """``steps`` are those that were asked for, where not all of the run is written."""
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("zstandard", "zstd") from None
        self._compress = zstandard.ZstdCompressor(LEVEL, write_checksum=True, write_content_size=True).compress
        self._path = path
        self._draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        self._run = run
        self._num_grouped = self._grouped_bytes = 0
        self.made = RecordingMade(by=f"forebay {version('forebay')}", at_s=time.time(), steps=steps)

    def __enter__(self) -> Self:
        check_new(self._path)
        with self._disk():
            self._connection = create(self._draft)
        # A file that is not whole is removed: before its end nothing has to be safe.
        self._connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with self._disk():
                    self._finish()
        finally:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._draft.unlink(missing_ok=True)

    def add_sample(self, sample: SampleRecord, body: bytes) -> None:
        """Write a sample with its body, in the order in which they came, before its group."""
        if len(body) > MAX_BODY_BYTES:
            reason = f"sample {sample.uid} has {len(body):,} bytes, and a recording takes {MAX_BODY_BYTES:,}"
            raise StorageFailed(
                reason, what=f"{self._path} cannot be written", hint="export other steps: --steps A-B,C"
            )
        seq = self.made.num_samples + 1
        values = (seq, sample.group_id, sample.slot, sample.fork, sample.uid, len(body), _text(sample, without="place"))
        with self._disk():
            self._connection.execute(SAMPLES.insertion("body"), (*values, checksum(values), self._compress(body)))
        self.made.num_samples = seq
        self.made.num_bytes += len(body)

    def add_group(self, group: GroupRecord, left_out: str = "") -> None:
        """Write a group, which the samples name that came since the one before.

        With ``left_out``, which says why, they are dropped: some of them cannot be read.
        """
        if left_out:
            self._drop_samples()
            self.made.left_out.append(LeftOutGroup(group.group_id, group.instance_id, group.epoch, left_out))
        with self._disk():
            values = (group.number, group.group_id, self.made.num_samples - self._num_grouped, _text(group))
            self._connection.execute(GROUPS.insertion(), (*values, checksum(values)))
        self._num_grouped, self._grouped_bytes = self.made.num_samples, self.made.num_bytes
        self.made.num_groups += 1
        self.made.last_group = max(self.made.last_group, group.number)

    def add_batch(self, batch: BatchRecord) -> None:
        """Write a batch."""
        with self._disk():
            values = (batch.number, batch.step, batch.checkpoint_step, _text(batch))
            self._connection.execute(BATCHES.insertion(), (*values, checksum(values)))
        self.made.num_batches += 1
        self.made.last_batch = max(self.made.last_batch, batch.number)

    def _drop_samples(self) -> None:
        """Those that came since the last group. Their pages are used for others."""
        with self._disk():
            self._connection.execute("DELETE FROM samples WHERE seq > ?", (self._num_grouped,))
        self.made.num_samples, self.made.num_bytes = self._num_grouped, self._grouped_bytes

    def _finish(self) -> None:
        for name, record in (("run", self._run), ("made", self.made)):
            values = (name, _text(record))
            self._connection.execute(META.insertion(), (*values, checksum(values)))
        self._connection.execute("COMMIT")
        self._connection.close()
        seal(self._draft)
        self._publish()
        sync_directory(self._path.absolute().parent)

    def _publish(self) -> None:
        """Give the file its name. Raises ``InvalidInput`` where another has it by now: it took a while."""
        try:
            os.link(self._draft, self._path)
        except OSError:  # it is there; or the file system knows no links
            check_new(self._path)
            self._draft.replace(self._path)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            hint = "the folder must be writable, and have room for the whole recording; nothing is left of it there"
            raise StorageFailed(reason, what=f"{self._path} cannot be written", hint=hint) from error


def check_new(path: Path) -> None:
    """Raise ``InvalidInput`` unless a file may be made at ``path``: nothing is ever overwritten."""
    if os.path.lexists(path):
        raise InvalidInput(f"{path} exists", hint="give another FILE, or remove it", field="file")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"there is no folder {str(path.absolute().parent)!r}", hint="make it first", field="file")


def _text(record: msgspec.Struct, *, without: str = "") -> str:
    fields = {name: getattr(record, name) for name in record.__struct_fields__ if name != without}
    return _encode(fields).decode()
