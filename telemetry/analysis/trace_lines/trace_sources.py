"""Where the lines of a trace are, so that any of them can be read again: files of a folder, or a stream kept on disk.

The first time, all lines are gone over, with the clock of the process that wrote each; from then on a line is a number.
"""

import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from forebay.telemetry.tracing.read_trace import bounded_lines, decode_line, version_text
from forebay.telemetry.tracing.records import VERSION, Head, Record

_decode = msgspec.json.Decoder(Record).decode
OFFSET_BITS = 32
"""Of the place of a line: what lies further behind in its file counts from another beginning."""
_OFFSETS = (1 << OFFSET_BITS) - 1

_SMALL_BYTES = 32 << 10
"""A file up to this is held in memory: each command of a run may have one, and only so many can be open at once."""

OnBadLine = Callable[[str, int, str], object]
"""Called with file, line number (from 1) and what is wrong."""


@dataclass(slots=True)
class Writer:
    """A process that wrote, in one of its files."""

    number: int
    process: str
    pid: int
    file: int
    """The number of its file among those that are read."""
    base: int = 0
    """Where in the file its offsets count from."""
    shift_ns: int = 0
    """To be added to its times, so that they are on the clock of the first process."""
    last_ns: int = 0
    """Its last sign of life."""
    ended_ns: int = 0
    """When its process had ended, as the server saw it; 0 where nothing says so."""


class TraceSources:
    """All files of a trace, or of several."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self._names: list[str] = []
        self._files: list[BinaryIO] = []
        self._maps: dict[int, mmap.mmap] = {}
        self._clock = _SharedClock()
        # Nobody closes a timeline: its files go when it does.
        self._open_files = ExitStack()
        weakref.finalize(self, self._open_files.close)

    def add_file(self, path: Path) -> None:
        """A file that is there. One that has gone meanwhile is not: the budget took it."""
        try:
            with path.open("rb") as file:
                content = file.read(_SMALL_BYTES + 1)
            if len(content) > _SMALL_BYTES:
                self._files.append(self._open_files.enter_context(path.open("rb")))
            else:
                self._files.append(BytesIO(content))
        except FileNotFoundError:
            return
        self._names.append(str(path))

    def add_lines(self, lines: Iterable[bytes | str]) -> None:
        """A stream, of which a copy is kept on the disk as long as this lives."""
        file: BinaryIO = self._open_files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is a context manager's
        for line in lines:
            encoded = line.encode() if isinstance(line, str) else line
            file.write(encoded if encoded.endswith(b"\n") else encoded + b"\n")
        file.flush()
        self._files.append(file)
        self._names.append("trace")

    def scan(self, on_bad_line: OnBadLine) -> Iterator[tuple[int, Writer, Record]]:
        """Every line: its offset, who wrote it, and its record, whose times are still that process's."""
        self.writers = []
        for number, file in enumerate(self._files):
            yield from self._scan_file(number, file, on_bad_line)

    def _scan_file(self, number: int, file: BinaryIO, on_bad_line: OnBadLine) -> Iterator[tuple[int, Writer, Record]]:
        name = self._names[number]
        writer = self._new_writer("", 0, number)
        base, offset, of_other_version = 0, 0, False
        file.seek(0)
        for count, (size, line) in enumerate(bounded_lines(file), 1):
            record = decode_line(line)
            at, offset = offset, offset + size
            if record.__class__ is str:
                if not line.isspace() and not of_other_version:
                    on_bad_line(name, count, record)
            elif record.__class__ is Head:
                of_other_version = record.version > VERSION
                if of_other_version:
                    on_bad_line(name, count, version_text(record))
                writer = self._new_writer(record.process, record.pid, number, at, self._clock.shift(record))
                base = at
            elif not of_other_version:
                if at - base > _OFFSETS:
                    writer = self._new_writer(writer.process, writer.pid, number, at, writer.shift_ns)
                    base = at
                yield at - base, writer, record  # type: ignore[misc]  # mypy takes no class for a narrowing

    def _new_writer(self, process: str, pid: int, file: int, base: int = 0, shift_ns: int = 0) -> Writer:
        writer = Writer(len(self.writers), process, pid, file, base, shift_ns)
        self.writers.append(writer)
        return writer

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[Writer, Record]]:
        """The records of these lines: each the number of its writer, and in the low bits its offset."""
        for number in numbers:
            writer = self.writers[number >> OFFSET_BITS]
            mapped = self._maps.get(writer.file) or self._mapped(writer.file)
            offset = writer.base + (number & _OFFSETS)
            end = mapped.find(b"\n", offset)
            # It was looked at before: nothing is wrong with its times.
            yield writer, _decode(mapped[offset : end if end >= 0 else len(mapped)])

    def _mapped(self, number: int) -> mmap.mmap | bytes:
        file = self._files[number]
        if isinstance(file, BytesIO):
            return file.getvalue()
        mapped = self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._open_files.enter_context(mapped)

    def forget_pages(self) -> None:
        """Let go of the memory in which what was read lies; it stays readable."""
        for mapped in self._maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


class _SharedClock:
    """The heads of all processes, which have one monotonic clock while the machine is up.

    Each anchored it to the wall by itself. Where the wall's clock was set between two heads, the later process's times
    are off by that much: its monotonic clock says by how much.
    """

    def __init__(self) -> None:
        self._firsts: list[Head] = []
        """Of each time that a machine was up."""

    def shift(self, head: Head) -> int:
        for first in self._firsts:
            if not _is_other_boot(first, head):
                return (first.wall_ns - first.mono_ns) - (head.wall_ns - head.mono_ns)
        self._firsts.append(head)
        return 0


def _is_other_boot(first: Head, head: Head) -> bool:
    """Whether the machine was booted between the two, or each is of another one.

    Where heads do not say: the later one's monotonic clock began after the earlier head.
    """
    if first.boot and head.boot:
        return first.boot != head.boot
    earlier, later = sorted((first, head), key=lambda each: each.wall_ns)
    return later.wall_ns - later.mono_ns > earlier.wall_ns
