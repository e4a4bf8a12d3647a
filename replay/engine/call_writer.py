"""Appends calls to a file, so that answers survive a crash of this process."""

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from forebay.core.errors import InvalidInput
from forebay.core.files import FILE_MODE
from forebay.core.records.record_file import encode_record
from forebay.replay.call_request import CallRequest
from forebay.replay.frames import compressor
from forebay.replay.recorded_calls import CallReply, RecordedCall, encode_call
from forebay.replay.recording import Recording

logger = logging.getLogger(__name__)


class CallPosition(NamedTuple):
    """The number of a call in the file, and when it began: seconds since the Unix epoch."""

    seq: int
    began_s: float


class CallWriter:
    """Appends calls to the file ``path``, which is created if it does not exist.

    Raises ``InvalidInput`` if the file cannot be written or another process writes to it, ``RecordingDamaged`` if it is
    not a recording or is damaged, ``MissingExtra`` without zstandard. Later write errors do not fail calls: they are
    counted in ``num_lost``, and the first one is logged. ``num_written`` counts the calls in the file.
    """

    def __init__(self, path: Path) -> None:
        self.num_written = self.num_lost = 0
        self._path = path
        self._compress = compressor()
        self._next_seq = 1
        self._facts: dict[bytes, int] = {}
        """The last recorded status of each GET request, by digest."""
        self._fd = _claimed(path)
        try:
            self._end = self._continued()
        except BaseException:
            os.close(self._fd)
            raise

    def reserve(self) -> CallPosition:
        """The position for a call that begins now."""
        self._next_seq += 1
        return CallPosition(self._next_seq - 1, time.time())

    def is_known_fact(self, request: CallRequest, status: int) -> bool:
        """Whether a GET request has been recorded with this status. Remembers the status."""
        is_known = self._facts.get(request.digest) == status
        self._facts[request.digest] = status
        return is_known

    def put(self, position: CallPosition, request: CallRequest, reply: CallReply) -> int | None:
        """Write a call. Returns the offset of its record, or None if the disk refuses it."""
        offset = self._end
        try:
            record = encode_record(*encode_call(RecordedCall(*position, request, reply), self._compress), offset)
            num_written = 0
            while num_written < len(record):
                num_written += os.write(self._fd, memoryview(record)[num_written:])
        except (OSError, MemoryError) as error:
            if not self.num_lost:
                logger.warning("%s: calls are no longer recorded, but still answered: %s", self._path, error)
            self.num_lost += 1
            os.ftruncate(self._fd, offset)
            return None
        self._end += len(record)
        self.num_written += 1
        return offset

    def close(self) -> None:
        """Return when everything is on disk."""
        with suppress(OSError):  # the warning below reports what was not written
            os.fsync(self._fd)
        os.close(self._fd)
        if self.num_lost:
            logger.warning("%s: %d calls were not recorded", self._path, self.num_lost)

    def _continued(self) -> int:
        """Prepare to append after the calls in the file. Returns the offset of their end."""
        if not os.fstat(self._fd).st_size:
            return 0
        with Recording.open(self._path) as recording:
            if recording.has_run:
                hint = "record calls into a separate file"
                raise InvalidInput(f"{self._path} is an exported run, which cannot be changed", hint=hint, field="file")
            for call in recording.calls():
                self._next_seq = call.seq + 1
                if call.request.method == "GET":
                    self._facts[call.request.digest] = call.reply.status
            end = recording.end
        # A killed recorder may have left part of a record.
        os.ftruncate(self._fd, end)
        return end


def _claimed(path: Path) -> int:
    """An open file descriptor with a lock against other writers. Creates the file if it does not exist."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error}", field="file") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        hint = "stop the other recorder first, or record into another file"
        raise InvalidInput(f"{path} is being recorded by another process", hint=hint, field="file") from None
    return fd
