"""A recording on its way from a server: frames, each with its length in front, as 4 bytes, little-endian.

The first is a ``StreamRun``. Then come groups: of each its samples, a ``StreamSample`` and its body as it was stored,
and behind them a ``StreamGroup``; then each ``StreamBatch``, and a ``StreamEnd``. Where the server cannot continue, a
``StreamFailure`` is last. All but the bodies are JSON objects with a ``type``.
"""

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

from forebay.core.errors import ForebayError
from forebay.replay.model import BatchRecord, GroupRecord, RunRecord, SampleRecord
from forebay.replay.recording_reader import RecordingMade
from forebay.replay.recording_writer import RecordingWriter, check_new

RECORDING_TYPE = "application/vnd.forebay.recording"
"""The content type."""

_LENGTH = struct.Struct("<I")


class StreamRun(msgspec.Struct, tag="run"):
    """What it is a recording of; ``steps`` are those that were asked for, "" for all."""

    run: RunRecord
    steps: str = ""


class StreamSample(msgspec.Struct, tag="sample"):
    """A sample. The next frame is its body."""

    sample: SampleRecord


class StreamGroup(msgspec.Struct, tag="group"):
    """The group of the samples before."""

    group: GroupRecord
    left_out: str = ""
    """Why samples of it cannot be read: those that were sent are to be dropped."""


class StreamBatch(msgspec.Struct, tag="batch"):
    """A batch."""

    batch: BatchRecord


class StreamEnd(msgspec.Struct, tag="end"):
    """Everything was sent."""


class StreamFailure(msgspec.Struct, tag="error"):
    """The rest cannot be sent."""

    code: str
    message: str
    hint: str


Message = StreamRun | StreamSample | StreamGroup | StreamBatch | StreamEnd | StreamFailure

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


def frame(content: Message | bytes) -> bytes:
    """A message, or a body, as it is sent."""
    text = content if isinstance(content, bytes) else _encode(content)
    return _LENGTH.pack(len(text)) + text


class RecordingDownload:
    """What is written to it, frame by frame or in any other pieces, becomes the file ``path``, for ``with``.

    Raises as ``RecordingWriter`` does, and ``ForebayError`` for what the server could not send.
    """

    def __init__(self, path: Path) -> None:
        check_new(path)
        self._path = path
        self._stack = ExitStack()
        self._pending = bytearray()
        self._awaited: StreamSample | None = None
        """Whose body the next frame is."""
        self._writer: RecordingWriter | None = None
        self._is_whole = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None and not self._is_whole:
            broken = ForebayError("the server's reply broke off", hint="export once more; nothing was left of this one")
            self._stack.__exit__(ForebayError, broken, None)
            raise broken
        self._stack.__exit__(kind, error, None)

    @property
    def made(self) -> RecordingMade:
        """What has been written so far."""
        assert self._writer is not None, "nothing came yet"
        return self._writer.made

    def write(self, piece: bytes) -> int:
        """Take the next bytes; how many they were."""
        self._pending += piece
        while len(self._pending) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._pending)[0]
            if len(self._pending) < end:
                break
            content = bytes(memoryview(self._pending)[_LENGTH.size : end])
            del self._pending[:end]
            self._take(content)
        return len(piece)

    def _take(self, content: bytes) -> None:
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            self._open.add_sample(awaited.sample, content)
            return
        try:
            message = _decode(content)
        except msgspec.DecodeError as error:
            raise ForebayError(f"the server sent no recording: {error}", hint="is it of this version?") from None
        match message:
            case StreamRun(run, steps):
                self._writer = self._stack.enter_context(RecordingWriter(self._path, run, steps=steps))
            case StreamSample():
                self._awaited = message
            case StreamGroup(group, left_out):
                self._open.add_group(group, left_out)
            case StreamBatch(batch):
                self._open.add_batch(batch)
            case StreamEnd():
                self._is_whole = True
            case StreamFailure():
                raise ForebayError(message.message, hint=message.hint)

    @property
    def _open(self) -> RecordingWriter:
        if self._writer is None:
            raise ForebayError("the server sent no recording: its head is missing", hint="is it of this version?")
        return self._writer
