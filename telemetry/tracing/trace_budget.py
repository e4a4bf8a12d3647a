"""Limits the disk space of a run's trace: the oldest spans are removed first, then the oldest segments.

Segments that a running process writes are not touched. What was removed is counted in a ``Dropped`` record after the
segment's head, which is kept.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from forebay.core.files import regular_opener
from forebay.telemetry.tracing.records import Dropped
from forebay.telemetry.tracing.trace_file import FOREIGN_BYTES, mark_as_written

WHY = "budget"
"""``why`` in the ``Dropped`` record of a segment whose spans were removed."""
_ALL_WHY = "budget, all of it"
"""``why`` for a segment from which everything was removed."""

_SPANS = (b'{"kind":"span"', b'{"kind":"open"')
_SUMMARY = b'{"kind":"rollout"'


class Removed(NamedTuple):
    """What was removed."""

    spans: int = 0
    """Includes records of open spans."""
    summaries: int = 0
    num_bytes: int = 0

    def plus(self, other: "Removed") -> "Removed":
        """The sum of both."""
        return Removed(self.spans + other.spans, self.summaries + other.summaries, self.num_bytes + other.num_bytes)


def enforce_budget(folder: Path, max_bytes: int) -> Removed:
    """Shrink the trace in ``folder`` to ``max_bytes`` as far as its segments are closed. 0: remove only spans.

    If the trace fits, this only reads the file sizes. Segments with nothing left to remove are not read again. Raises
    ``OSError``, as on a full disk; every segment is then either unchanged or completely rewritten.
    """
    removed = Removed()
    size, segments = _segments(folder)
    for take in (_without_spans, _without_all) if max_bytes else (_without_spans,):
        for path in segments:
            if size - removed.num_bytes <= max_bytes:
                return removed
            removed = removed.plus(_shrink(path, take))
    return removed


def _segments(folder: Path) -> tuple[int, list[Path]]:
    """Total bytes, and the paths, oldest first."""
    found: list[tuple[int, Path]] = []
    size = 0
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            size += stat.st_size
            found.append((stat.st_mtime_ns, path))
    return size, [path for _, path in sorted(found)]


class _Segment(NamedTuple):
    head: bytes
    dropped: Dropped
    """What was removed before; ``why`` is "" for nothing."""
    rest: BinaryIO


def _without_spans(segment: _Segment) -> Iterator[bytes] | None:
    """The lines to keep; None if there is nothing to remove."""
    if segment.dropped.why:
        return None
    return (line for line in segment.rest if not line.startswith(_SPANS))


def _without_all(segment: _Segment) -> Iterator[bytes] | None:
    """Keeps no line; None if there is nothing to remove."""
    return None if segment.dropped.why == _ALL_WHY else iter(())


def _shrink(path: Path, take: Callable[[_Segment], Iterator[bytes] | None]) -> Removed:
    try:
        # Opened for writing, too: some file systems lock nothing else.
        file = os.fdopen(regular_opener(str(path), os.O_RDWR | os.O_CLOEXEC), "r+b")
    except OSError:  # it is gone, or user code has put something else there
        return Removed()
    with file:
        is_free, found = mark_as_written(file.fileno()), os.fstat(file.fileno())
        if not is_free or found.st_ino != path.stat().st_ino:
            return Removed()
        if found.st_size > FOREIGN_BYTES:
            path.unlink()
            return Removed(num_bytes=found.st_size)
        segment = _opened(file)
        stays = take(segment)
        if stays is None:
            return Removed()
        return _rewrite(path, file, segment, list(stays), WHY if take is _without_spans else _ALL_WHY)


def _opened(file: BinaryIO) -> _Segment:
    head, second = file.readline(), file.readline()
    with contextlib.suppress(msgspec.MsgspecError):
        dropped = msgspec.json.decode(second, type=Dropped)
        if dropped.why in (WHY, _ALL_WHY):
            return _Segment(head, dropped, file)
    file.seek(len(head))
    return _Segment(head, Dropped(t=time.time_ns()), file)


def _rewrite(path: Path, file: BinaryIO, segment: _Segment, stays: list[bytes], why: str) -> Removed:
    spans, summaries = _counts(file, len(segment.head))
    taken = Removed(spans, summaries - sum(line.startswith(_SUMMARY) for line in stays))
    dropped = Dropped(
        t=segment.dropped.t,
        spans=segment.dropped.spans + taken.spans,
        summaries=segment.dropped.summaries + taken.summaries,
        why=why,
    )
    before = os.fstat(file.fileno())
    new = path.with_name(f".{path.name}.new")
    try:
        with open(new, "wb", opener=regular_opener) as copy:
            copy.writelines([segment.head, msgspec.json.encode(dropped), b"\n", *stays])
        # Keeps the order by age.
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
        size = new.stat().st_size
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return taken._replace(num_bytes=before.st_size - size)


def _counts(file: BinaryIO, begin: int) -> tuple[int, int]:
    """The number of spans and summaries that follow."""
    file.seek(begin)
    spans = summaries = 0
    for line in file:
        spans += line.startswith(_SPANS)
        summaries += line.startswith(_SUMMARY)
    return spans, summaries
