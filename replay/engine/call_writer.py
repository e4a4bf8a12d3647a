"""Adds calls to a file: what was answered is in it, whatever happens to this process."""

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
    """Which call of the file one is, and when it began: seconds since the Unix epoch."""

    seq: int
    began_s: float


class CallWriter:
    """The calls of ``path``, which is made if it is not there, and added to if it is.

    Raises ``InvalidInput`` for a file that cannot be written, or is being written, ``RecordingDamaged`` for one that is
    no recording, or damaged, ``MissingExtra`` without zstandard. What the disk refuses later is told once in the log,
    and counted in ``num_lost``: calls go on. ``num_written`` are in the file.
    """

    def __init__(self, path: Path) -> None:
        self.num_written = self.num_lost = 0
        self._path = path
        self._compress = compressor()
        self._next_seq = 1
        self._facts: dict[bytes, int] = {}
        """The statuses of what was asked by GET."""
        self._fd = _claimed(path)
        try:
            self._end = self._continued()
        except BaseException:
            os.close(self._fd)
            raise

    def reserve(self) -> CallPosition:
        """The place of a call that begins now."""
        self._next_seq += 1
        return CallPosition(self._next_seq - 1, time.time())

    def is_known_fact(self, request: CallRequest, status: int) -> bool:
        """Whether a request that changes nothing has been recorded with this status; notes it."""
        is_known = self._facts.get(request.digest) == status
        self._facts[request.digest] = status
        return is_known

    def put(self, position: CallPosition, request: CallRequest, reply: CallReply) -> int | None:
        """Write a call; the offset of its record, None where the disk refuses it."""
        offset = self._end
        try:
            record = encode_record(*encode_call(RecordedCall(*position, request, reply), self._compress), offset)
            num_written = 0
            while num_written < len(record):
                num_written += os.write(self._fd, memoryview(record)[num_written:])
        except (OSError, MemoryError) as error:
            if not self.num_lost:
                logger.warning("%s: calls go on, but are not recorded any more: %s", self._path, error)
            self.num_lost += 1
            os.ftruncate(self._fd, offset)
            return None
        self._end += len(record)
        self.num_written += 1
        return offset

    def close(self) -> None:
        """Return when the disk has all of it."""
        with suppress(OSError):  # told of what could not be written
            os.fsync(self._fd)
        os.close(self._fd)
        if self.num_lost:
            logger.warning("%s lacks %d calls", self._path, self.num_lost)

    def _continued(self) -> int:
        """Go on behind the calls that are there; where they end."""
        if not os.fstat(self._fd).st_size:
            return 0
        with Recording.open(self._path) as recording:
            if recording.has_run:
                hint = "record calls into a file of their own"
                raise InvalidInput(f"{self._path} is an exported run, which never changes", hint=hint, field="file")
            for call in recording.calls():
                self._next_seq = call.seq + 1
                if call.request.method == "GET":
                    self._facts[call.request.digest] = call.reply.status
            end = recording.end
        # A recorder that was killed may have left the beginning of a record.
        os.ftruncate(self._fd, end)
        return end


def _claimed(path: Path) -> int:
    """An open file descriptor that keeps other writers away. The file is there afterwards."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error}", field="file") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        hint = "end the other one first, or record into another file"
        raise InvalidInput(f"{path} is being recorded by another process", hint=hint, field="file") from None
    return fd
