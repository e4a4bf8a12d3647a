"""Reads records from trace files. Everything that shows or exports traces uses it.

Broken lines, and lines with impossible times, are skipped and reported with file and line number. An incomplete line
at the end of a file is a broken line.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from forebay.core.files import regular_opener
from forebay.telemetry.tracing.records import VERSION, Head, Record
from forebay.telemetry.tracing.trace_file import MAX_LINE_BYTES

LONGEST_NS = 1 << 63
"""The limit of clocks, and of the formats to which traces are exported."""

TOO_LONG = b'{"kind":"longer than 1 MiB"}\n'
"""Replaces a line longer than ``MAX_LINE_BYTES``; every reader reports it as invalid."""
HALF_A_LINE = "not a record: an incomplete line"
"""The problem with the last line of a file whose process was killed, or is still writing it."""
_FILE_NAME = re.compile(r"(run|gateway|server)-(\d+)-(\d+)\.(\d+)\.jsonl")
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)

OnBadLine = Callable[[str, int, str], object]
"""Called with file, line number (from 1) and what is wrong."""


@dataclass(slots=True)
class Problem:
    """A line that was skipped."""

    file: str
    line: int
    what: str


class BadLines:
    """Skipped lines: their number, and the first hundred."""

    MAX_KEPT = 100

    def __init__(self) -> None:
        self.number = 0
        self.first: list[Problem] = []

    def add(self, file: str, line: int, what: str) -> None:
        """Add a line. An ``OnBadLine``."""
        self.number += 1
        if len(self.first) < self.MAX_KEPT:
            self.first.append(Problem(file, line, what))


def is_trace_file(path: Path) -> bool:
    """Whether ``path`` has the name of a trace file, or starts with a head."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    if _FILE_NAME.fullmatch(path.name):
        return True
    with suppress(OSError), open(path, "rb", opener=regular_opener) as file:
        return isinstance(decode_line(file.readline(1 << 16)), Head)
    return False


def trace_files(folder: Path) -> list[Path]:
    """The trace files in ``folder``, ordered by process and then as written."""
    return sorted((path for path in folder.glob("*.jsonl") if is_trace_file(path)), key=_place)


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The remaining lines of ``file``: the number of bytes of each, and the line or ``TOO_LONG``."""
    while line := file.readline(MAX_LINE_BYTES):
        size = len(line)
        if size < MAX_LINE_BYTES:
            yield size, line
            continue
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            size += len(line)
        yield size, TOO_LONG


def find_trace(given: Path) -> Path | None:
    """The folder with trace files: ``given``, or its subfolder ``trace``. None without any."""
    for folder in (given, given / "trace"):
        if folder.is_dir() and trace_files(folder):
            return folder
    return None


def decode_line(line: bytes) -> Record | str:
    """The record in ``line``, or a description of the problem."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, ValueError) as error:  # the second is for invalid UTF-8
        return f"not a record: {error}" if line.endswith(b"\n") else HALF_A_LINE


def version_text(head: Head) -> str:
    """The problem with a file of an unknown version."""
    return f"version {head.version} is not supported (the newest supported is {VERSION})"


def _place(path: Path) -> tuple[str, int, int, int, str]:
    match = _FILE_NAME.fullmatch(path.name)
    if match is None:
        return "", 0, 0, 0, path.name
    process, start, pid, number = match.groups()
    return process, int(start), int(pid), int(number), path.name
