"""Limits the disk space of a run's trace: the oldest spans are removed first, then the oldest segments.

Segments that a running process writes are not touched. What was removed is counted in a ``Dropped`` record after the
segment's head, which is kept.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from forebay.core.files import regular_opener
from forebay.telemetry.tracing.records import Dropped
from forebay.telemetry.tracing.trace_file import FOREIGN_BYTES, mark_as_written

_WHYS = ("budget", "budget, all of it")
"""``why`` in the ``Dropped`` record of a segment whose spans, or all of whose records, were removed."""
_SPANS = (b'{"kind":"span"', b'{"kind":"open"')
_SUMMARY = b'{"kind":"rollout"'


class Removed(NamedTuple):
    """What was removed."""

    spans: int = 0
    """Includes records of open spans."""
    summaries: int = 0
    num_bytes: int = 0


def enforce_budget(folder: Path, max_bytes: int) -> Removed:
    """Shrink the trace in ``folder`` to ``max_bytes`` as far as its segments are closed. 0: remove only spans.

    If the trace fits, this only reads the file sizes. Segments with nothing left to remove are not read again. Raises
    ``OSError``, as on a full disk; every segment is then either unchanged or completely rewritten.
    """
    total = Removed()
    size, segments = _segments(folder)
    for why in _WHYS if max_bytes else _WHYS[:1]:
        for path in segments:
            if size - total.num_bytes <= max_bytes:
                return total
            removed = _shrink(path, why)
            total = Removed(*map(sum, zip(total, removed, strict=True)))
    return total


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


def _shrink(path: Path, why: str) -> Removed:
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
        head, second = file.readline(), file.readline()
        before = _dropped_before(second)
        if before is not None and _WHYS.index(before.why) >= _WHYS.index(why):
            return Removed()
        lines = [*([] if before else [second]), *file]
        kept = [line for line in lines if not line.startswith(_SPANS)] if why == _WHYS[0] else []
        spans = sum(line.startswith(_SPANS) for line in lines)
        summaries = sum(line.startswith(_SUMMARY) for line in lines) - sum(line.startswith(_SUMMARY) for line in kept)
        dropped = before or Dropped(t=time.time_ns())
        dropped = Dropped(t=dropped.t, spans=dropped.spans + spans, summaries=dropped.summaries + summaries, why=why)
        num_bytes = _replace(path, found, [head, msgspec.json.encode(dropped), b"\n", *kept])
        return Removed(spans, summaries, num_bytes)


def _dropped_before(line: bytes) -> Dropped | None:
    with contextlib.suppress(msgspec.MsgspecError):
        dropped = msgspec.json.decode(line, type=Dropped)
        return dropped if dropped.why in _WHYS else None
    return None


def _replace(path: Path, found: os.stat_result, lines: list[bytes]) -> int:
    """Write ``lines`` in place of a file. Returns by how much it is smaller."""
    new = path.with_name(f".{path.name}.new")
    try:
        with open(new, "wb", opener=regular_opener) as copy:
            copy.writelines(lines)
        # Keeps the order by age.
        os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
        size = new.stat().st_size
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return found.st_size - size
