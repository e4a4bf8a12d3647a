"""From the files of a trace back to records: whoever looks at a trace, or exports one, reads it with this.

Lines that are broken are left out and reported with their file and number, those with times that cannot be as well.
Half a line at the end of a file is a broken one.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from forebay.core.files import regular_opener
from forebay.telemetry.tracing.records import VERSION, Head, LoopStall, Open, Record, RolloutSummary, Span
from forebay.telemetry.tracing.trace_file import MAX_LINE_BYTES

LONGEST_NS = 1 << 63
"""Beyond it no clock goes, and no format that traces are exported to."""

TOO_LONG = b'{"kind":"longer than 1 MiB"}\n'
"""Stands for a line beyond ``MAX_LINE_BYTES``: every reader reports it as one without a record."""
HALF_A_LINE = "no record: half a line"
"""What is wrong with the last line of a file that its process was killed at, or is still writing."""
_LIKELY_NS = LONGEST_NS >> 1
_FILE_NAME = re.compile(r"(run|gateway|server)-(\d+)-(\d+)\.(\d+)\.jsonl")
_decoder = msgspec.json.Decoder(Record)

OnBadLine = Callable[[str, int, str], object]
"""Called with file, line number (from 1) and what is wrong."""


@dataclass(slots=True)
class Problem:
    """A line that was left out."""

    file: str
    line: int
    what: str


class BadLines:
    """Lines that were left out: how many, and the first hundred of them."""

    MAX_KEPT = 100

    def __init__(self) -> None:
        self.number = 0
        self.first: list[Problem] = []

    def add(self, file: str, line: int, what: str) -> None:
        """One more. An ``OnBadLine``."""
        self.number += 1
        if len(self.first) < self.MAX_KEPT:
            self.first.append(Problem(file, line, what))


def is_trace_file(path: Path) -> bool:
    """Whether ``path`` is named like a file of a trace, or begins with a head."""
    if path.suffix != ".jsonl" or not path.is_file():
        return False
    if _FILE_NAME.fullmatch(path.name):
        return True
    with suppress(OSError), open(path, "rb", opener=regular_opener) as file:
        return isinstance(decode_line(file.readline(1 << 16)), Head)
    return False


def trace_files(folder: Path) -> list[Path]:
    """The files of a trace in ``folder``, each process's in the order in which it wrote them."""
    return sorted((path for path in folder.glob("*.jsonl") if is_trace_file(path)), key=_place)


def bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines from where ``file`` stands: how many bytes each has, and itself, or ``TOO_LONG``."""
    while line := file.readline(MAX_LINE_BYTES):
        size = len(line)
        if size < MAX_LINE_BYTES:
            yield size, line
            continue
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
            size += len(line)
        yield size, TOO_LONG


def find_trace(given: Path) -> Path | None:
    """The folder with the files of a trace: ``given`` itself, or a run's ``trace`` in it. None without any."""
    for folder in (given, given / "trace"):
        if folder.is_dir() and trace_files(folder):
            return folder
    return None


def decode_line(line: bytes) -> Record | str:
    """The record in ``line``, or what is wrong with it."""
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, ValueError) as error:  # the second is for bytes that are no UTF-8
        return f"no record: {error}" if line.endswith(b"\n") else HALF_A_LINE
    return _wrong_times(record) or record


def version_text(head: Head) -> str:
    """What is wrong with a file of a version that is not known."""
    return f"version {head.version}, and {VERSION} is the newest that is known here"


def _place(path: Path) -> tuple[str, int, int, int, str]:
    match = _FILE_NAME.fullmatch(path.name)
    if match is None:
        return "", 0, 0, 0, path.name
    process, start, pid, number = match.groups()
    return process, int(start), int(pid), int(number), path.name


def _wrong_times(record: Record) -> str:
    """What is wrong with the record's times; "" for nothing."""
    if record.__class__ is Span and 0 <= record.t < _LIKELY_NS and 0 <= record.d < _LIKELY_NS:
        return "a negative turn" if (record.turn or 0) < 0 else ""  # nearly all records are such
    if isinstance(record, Head):
        return ""
    duration = record.d if isinstance(record, Span | RolloutSummary | LoopStall) else 0
    if record.t < 0 or duration < 0:
        return "a negative time"
    if record.t + duration >= LONGEST_NS:
        return "a time beyond the year 2262"
    if isinstance(record, RolloutSummary):
        if any(ns < 0 for ns in record.phases.values()) or any(turn.t < 0 or turn.d < 0 for turn in record.turns):
            return "a negative time"
    elif isinstance(record, Span | Open) and record.turn is not None and record.turn < 0:
        return "a negative turn"
    return ""
