"""The newest recorded rollouts of earlier epochs and runs, read from their traces."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, overload

from forebay.core.files import regular_opener
from forebay.core.scheduling.policy import PastRollout
from forebay.telemetry.tracing.read_trace import bounded_lines, decode_line, trace_files, version_text
from forebay.telemetry.tracing.records import VERSION, Head, RolloutSummary

logger = logging.getLogger(__name__)

MAX_RECORDS = 200_000
MAX_BYTES = 1 << 30
"""Most bytes of trace files that are read. Most of their lines are spans, which are skipped."""
ENDING = "finished"
"""Ending of the rollouts whose length is known."""
SECOND_NS = 1e9

_SUMMARY = b'{"kind":"rollout"'


class RecordedHistory(Sequence[PastRollout]):
    """Finished rollouts, oldest first: those of ``earlier`` runs, then those of the ``own`` run. Read on first use."""

    def __init__(self, own: Path | None, earlier: Sequence[Path], max_records: int = MAX_RECORDS) -> None:
        """Trace folders; ``earlier`` ones newest first. Files that cannot be read are skipped with a warning."""
        self._own, self._earlier, self._max_records = own, earlier, max_records

    @cached_property
    def _found(self) -> list[PastRollout]:
        newest_first: list[list[PastRollout]] = []
        num_left, bytes_left = self._max_records, MAX_BYTES
        for folder, is_own in [*([(self._own, True)] if self._own else []), *((each, False) for each in self._earlier)]:
            for path in _newest_first(folder):
                if num_left <= 0 or bytes_left <= 0:
                    break
                found = _read(path, is_own=is_own)[-num_left:]
                num_left, bytes_left = num_left - len(found), bytes_left - _size(path)
                newest_first.append(found)
        return [past for found in reversed(newest_first) for past in found]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[PastRollout]:
        return iter(self._found)

    @overload
    def __getitem__(self, at: int) -> PastRollout: ...
    @overload
    def __getitem__(self, at: slice) -> list[PastRollout]: ...
    def __getitem__(self, at: int | slice) -> PastRollout | list[PastRollout]:
        return self._found[at]


def _newest_first(folder: Path) -> list[Path]:
    try:
        return sorted(trace_files(folder), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    except OSError as error:
        logger.warning("skipping the recorded rollouts in %s, which cannot be read: %s", folder, error)
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted by the trace's size limit
        return 0


def _read(path: Path, *, is_own: bool) -> list[PastRollout]:
    """Finished rollouts of one file, in the order in which they ended."""
    bad: list[str] = []
    try:
        with open(path, "rb", opener=regular_opener) as file:
            found = [_past(summary, is_own) for summary in _finished(file, bad.append)]
    except (OSError, ValueError) as error:
        logger.warning("skipping the recorded rollouts in %s, which cannot be read: %s", path, error)
        return []
    if bad:
        logger.warning("skipping %d lines of %s, which cannot be read: %s", len(bad), path, bad[0])
    return found


def _finished(file: BinaryIO, on_bad: Callable[[str], None]) -> Iterator[RolloutSummary]:
    lines = bounded_lines(file)
    head = decode_line(next(lines, (0, b""))[1])
    if not isinstance(head, Head):
        raise ValueError("its first line is not a head")
    if head.version > VERSION:
        raise ValueError(version_text(head))
    for _, line in lines:
        if not (line.startswith(_SUMMARY) and line.endswith(b"\n")):  # an incomplete line is still being written
            continue
        summary = decode_line(line)
        if isinstance(summary, str):
            on_bad(summary)
        elif isinstance(summary, RolloutSummary) and summary.ending == ENDING:
            yield summary


def _past(summary: RolloutSummary, is_own: bool) -> PastRollout:
    begun = summary.started or summary.t
    return PastRollout(
        instance_id=summary.instance,
        epoch=summary.epoch,
        number=summary.number,
        tokens=summary.sampled,
        seconds=max(0.0, (summary.t + summary.d - begun) / SECOND_NS),
        prompt_tokens=summary.prompt,
        is_of_this_run=is_own,
    )
